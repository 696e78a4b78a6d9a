"""`worker train`: word embeddings of the standard library's source files, trained data-parallel and verified."""

from worker.train.run import run_train

__all__ = ["run_train"]
