"""Answers to Horovod's questions about its build, for scripts that ask: none of these libraries carries data here."""

from __future__ import annotations


def mpi_threads_supported() -> bool:
    """Whether MPI may be used in several threads beside the service. Nobody knows, so: no."""
    return False


def check_extension(*_: object) -> None:
    """Horovod raises ImportError here where it was built without a framework. Here nothing is built."""


def _not_here() -> bool:
    """No: the service does its work."""
    return False


mpi_built = mpi_enabled = gloo_built = gloo_enabled = _not_here
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _not_here
