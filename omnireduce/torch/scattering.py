"""Tensors of torch that are combined, of which each rank gets some rows, by name, in Horovod's words: see `reductions`.

As in Horovod 0.28.1, the gradient of a `reducescatter` is what ranks have of it, one behind the other; of a sum it is
multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue
from omnireduce.data_parallel.words import Adasum, Average, Scaling, Sum, scaling
from omnireduce.errors import UsageError
from omnireduce.torch.compression import Compression
from omnireduce.torch.differentiable import differentiable
from omnireduce.torch.handles import Handle, first, handle_of, joined, on_device_of, synchronize
from omnireduce.torch.moves import gathered
from omnireduce.torch.reductions import check_differentiable, compressed
from omnireduce.torch.tensors import array_of, staged


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`."""
    how = _scaling(op, prescale_factor, postscale_factor)
    return _start(tensor, how, name_of("reducescatter", name, process_set), process_set)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of `allreduce`; the first ranks have one more where they differ. Gradients go through sums and
    means."""
    how, name = _scaling(op, prescale_factor, postscale_factor), name_of("reducescatter", name, process_set)
    return first(compressed(compression, [tensor], lambda small: _scattered(small, [name], how, process_set)))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`."""
    how, name = _scaling(op, prescale_factor, postscale_factor), name_of("grouped_reducescatter", name, process_set)
    return joined([_start(each, how, f"{name}.{at}", process_set) for at, each in enumerate(tensors)])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of several tensors: a list. Gradients go through sums and means."""
    how, name = _scaling(op, prescale_factor, postscale_factor), name_of("grouped_reducescatter", name, process_set)
    names = [f"{name}.{at}" for at in range(len(tensors))]
    return compressed(compression, tensors, lambda small: _scattered(small, names, how, process_set))


def _scaling(op: QueueOp, prescale_factor: float, postscale_factor: float) -> Scaling:
    how = scaling(None, op, prescale_factor, postscale_factor)
    if how.op == Adasum:
        raise UsageError("reducescatter has no Adasum; expected Average, Sum, Min, Max or Product")
    return how


def _start(tensor: Tensor, how: Scaling, name: str, process_set: ProcessSet) -> Handle:
    task = queue(process_set).reducescatter_async(
        array_of(staged(tensor)), name=name, op=cast(Any, how.op), prescale=how.prescale, postscale=how.postscale
    )
    return handle_of(task, lambda found: on_device_of(tensor, found))


def _scattered(tensors: Sequence[Tensor], names: Sequence[str], how: Scaling, process_set: ProcessSet) -> list[Tensor]:
    def run(own: list[Tensor]) -> list[Tensor]:
        handles = [_start(each, how, name, process_set) for each, name in zip(own, names, strict=True)]
        return [synchronize(each) for each in handles]

    def back(grads: list[Tensor]) -> list[Tensor]:
        check_differentiable("reducescatter", how.op)
        factor = how.prescale * how.postscale * (process_set.size() if how.op == Sum else 1)
        own = [each * factor for each in grads]
        return gathered(own, [f"gradient of {name}" for name in names], process_set)

    return differentiable(run, back, tensors)
