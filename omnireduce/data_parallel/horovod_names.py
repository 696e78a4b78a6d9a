"""Names of Horovod that are the same in all fronts: ways to compress, objects, and questions about its build.

A gradient is an array of NumPy, or a tensor with the methods of torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omnireduce.data_parallel.scaling import Adasum, Average, Max, Min, Product, Sum, root_of
from omnireduce.data_parallel.session import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    name_of,
    queue,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    submit_named,
)


class NoneCompressor:
    """Sends gradients as they are."""

    @staticmethod
    def compress(gradient: Any) -> tuple[Any, Any]:
        """The gradient that is sent, and what `decompress` needs."""
        return gradient, None

    @staticmethod
    def decompress(gradient: Any, context: Any) -> Any:
        """The result in its own type, from the gradient that came."""
        return gradient


class FP16Compressor(NoneCompressor):
    """Sends floats as float16, and combines them in it: sums of more than 65,504 are infinite. Other numbers are sent
    as they are."""

    @staticmethod
    def compress(gradient: Any) -> tuple[Any, Any]:
        if not isinstance(gradient, np.ndarray):
            return (gradient.half(), gradient.dtype) if gradient.is_floating_point() else (gradient, None)
        if gradient.dtype not in (np.float32, np.float64):
            return gradient, None
        with np.errstate(over="ignore"):
            return gradient.astype(np.float16), gradient.dtype

    @staticmethod
    def decompress(gradient: Any, context: Any) -> Any:
        if context is None:
            return gradient
        return gradient.astype(context) if isinstance(gradient, np.ndarray) else gradient.to(context)


class Compression:
    """The choices for `compression`: `Compression.none` or `Compression.fp16`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    trust: bool = False,
) -> Any:
    """The object of rank `root_rank` (its number in the job) on all ranks. It is plain data, in PyTorch with tensors in
    it, or, with `trust` on all ranks, anything that can be pickled: see `omnireduce.broadcast_object`, and
    `omnireduce.torch.tensor_objects`."""
    name = name_of("broadcast_object", name, process_set)
    root = submit_named([name], process_set, lambda: root_of(root_rank, process_set))
    return queue(process_set).broadcast_object_async(obj, root, name=name, trust=trust).wait()


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set, *, trust: bool = False
) -> list[Any]:
    """The objects of all ranks, by rank. See `broadcast_object`."""
    name = name_of("allgather_object", name, process_set)
    objects: list[Any] = queue(process_set).allgather_object_async(obj, name=name, trust=trust).wait()
    return objects


def mpi_threads_supported() -> bool:
    """Say no: nobody knows whether MPI may be used in several threads beside the service."""
    return False


def check_extension(*_: object) -> None:
    """Horovod raises ImportError here where it was built without a framework. Here nothing is built."""


def _is_not_built() -> bool:
    """No: the service does its work."""
    return False


mpi_built = mpi_enabled = gloo_built = gloo_enabled = _is_not_built
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _is_not_built

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather_object",
    "broadcast_object",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
