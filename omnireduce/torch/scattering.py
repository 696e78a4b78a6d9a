"""Tensors of torch that are combined, of which each rank gets some rows, by name, in Horovod's words: see `reductions`.

As in Horovod 0.28.1, the gradient of a `reducescatter` is what ranks have of it, one behind the other; of a sum it is
multiplied by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor

from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.scaling import Adasum, Average, Scaling, Sum, scaling
from omnireduce.data_parallel.session import (
    ProcessSet,
    begun_by_name,
    global_process_set,
    name_of,
    names_of,
    queue,
    told_by_name,
)
from omnireduce.errors import UsageError
from omnireduce.torch.compression import Compression
from omnireduce.torch.movements import gathered
from omnireduce.torch.reductions import check_differentiable, compressed, differentiable
from omnireduce.torch.tensors import Handle, array_of, first, handle_of, joined, on_device_of, staged, synchronize


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`."""
    names = [name_of("reducescatter", name, process_set)]
    return first(_start([tensor], names, _how(names, process_set, op, prescale_factor, postscale_factor), process_set))


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
    names = [name_of("reducescatter", name, process_set)]
    how = _how(names, process_set, op, prescale_factor, postscale_factor)
    small = compressed(compression, [tensor], names, process_set)
    return first(small.restored(_scattered(small.tensors, names, how, process_set)))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter`."""
    names = names_of("grouped_reducescatter", name, tensors, process_set)
    return joined(_start(tensors, names, _how(names, process_set, op, prescale_factor, postscale_factor), process_set))


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
    names = names_of("grouped_reducescatter", name, tensors, process_set)
    how = _how(names, process_set, op, prescale_factor, postscale_factor)
    small = compressed(compression, tensors, names, process_set)
    return small.restored(_scattered(small.tensors, names, how, process_set))


def _how(names: Sequence[str], process_set: ProcessSet, op: QueueOp, before: float, after: float) -> Scaling:
    def made() -> Scaling:
        how = scaling(None, op, before, after)
        if how.op == Adasum:
            raise UsageError("reducescatter has no Adasum; expected Average, Sum, Min, Max or Product")
        return how

    return told_by_name(names, process_set, made)


def _start(tensors: Sequence[Tensor], names: Sequence[str], how: Scaling, process_set: ProcessSet) -> list[Handle]:
    def begin(at: int) -> Task:
        array, (op, before, after) = array_of(staged(tensors[at])), how
        return queue(process_set).reducescatter_async(
            array, name=names[at], op=cast(Any, op), prescale=before, postscale=after
        )

    tasks = begun_by_name(names, process_set, begin)
    return [handle_of(task, partial(on_device_of, tensor)) for task, tensor in zip(tasks, tensors, strict=True)]


def _scattered(tensors: Sequence[Tensor], names: Sequence[str], how: Scaling, process_set: ProcessSet) -> list[Tensor]:
    def run(own: list[Tensor]) -> list[Tensor]:
        return [synchronize(handle) for handle in _start(own, names, how, process_set)]

    def back(grads: list[Tensor]) -> list[Tensor]:
        check_differentiable("reducescatter", how.op)
        factor = how.prescale * how.postscale * (process_set.size() if how.op == Sum else 1)
        own = [grad * factor for grad in grads]
        return gathered(own, [f"gradient of {name}" for name in names], process_set)

    return differentiable(run, back, tensors)
