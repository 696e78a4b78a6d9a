"""`omnireduce train`: word embeddings of the standard library's source files, trained data-parallel and verified."""

from worker.train.elastic import run_elastic_train
from worker.train.run import load_local_corpus, run_train

__all__ = ["load_local_corpus", "run_elastic_train", "run_train"]
