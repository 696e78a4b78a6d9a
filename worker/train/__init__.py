"""`omnireduce train`: word embeddings of the standard library's source files, trained data-parallel and verified."""

from omnireduce.worker.train.methods import check_plot, named_methods, run_methods
from omnireduce.worker.train.run import load_local_corpus, run_elastic_train, run_train

__all__ = ["check_plot", "load_local_corpus", "named_methods", "run_elastic_train", "run_methods", "run_train"]
