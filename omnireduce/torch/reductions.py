"""All-reduces of tensors of torch, by name, in Horovod's words.

All functions take `name`, which says what belongs together; ranks may call them in any order. Without names all ranks
call them in one order. `process_set`: the ranks that take part. What ends with `_` works in place, what has `async` in
its name returns a handle: see `poll` and `synchronize`. They raise UsageError for what cannot be, and what
`omnireduce.Queue` raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue
from omnireduce.data_parallel.words import Adasum, Average, Max, Min, Product, Scaling, Sum, scaling
from omnireduce.errors import UsageError
from omnireduce.torch.compression import Compression
from omnireduce.torch.handles import Handle, first, on_device_of, synchronize
from omnireduce.torch.rows import rows_of, sparse_of
from omnireduce.torch.tensors import array_of, put_back, staged

OF_FLAGS: dict[QueueOp, QueueOp] = {Max: "any", Min: "all", Product: "all"}


def start_reduction(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet
) -> Handle:
    """Combine tensors into `outs`, which may be the tensors themselves. The result is a list of the outs. Complex ones
    are pairs of numbers."""
    how = how._replace(op=_op_for(tensors, how.op))
    copies = [staged(each) for each in tensors]
    in_place = all(out is each for out, each in zip(outs, tensors, strict=True))
    targets = copies if in_place else [staged(each) for each in outs]
    op, before, after = how
    task = queue(process_set).grouped_allreduce_async(
        [array_of(each) for each in copies], outs=None if in_place else [array_of(each) for each in targets],
        name=name, op=op, prescale=before, postscale=after,
    )  # fmt: skip
    return Handle(task, lambda _: put_back(outs, targets))


def start_sum_of_rows(tensor: Tensor, op: QueueOp, name: str, process_set: ProcessSet) -> Handle:
    """Add a sparse tensor to those of other ranks. The result is coalesced."""
    numbers, rows, n_rows = rows_of(tensor)
    task = queue(process_set).allreduce_rows_async(numbers, rows, n_rows, name=name, op=cast(Any, op))
    return Handle(task, lambda found: sparse_of(found, tensor))


def _op_for(tensors: Sequence[Tensor], op: QueueOp) -> QueueOp:
    """What the service calls it. Raises UsageError where it does not go with these tensors."""
    kinds = {each.dtype for each in tensors}
    if op not in (Average, Sum) and any(each.is_complex for each in kinds):
        raise UsageError(f"op {op!r} of complex numbers: expected Average or Sum")
    if torch.bool not in kinds:
        return op
    if len(kinds) > 1 or op not in OF_FLAGS:
        raise UsageError(f"op {op!r} of bool: expected Max, which is any, or Min or Product, which are all")
    return OF_FLAGS[op]


def _in_place(tensors: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of the tensors."""
    plain = [each.detach() for each in tensors]
    handle = start_reduction(plain, plain, how, name, process_set)
    return handle.then(lambda _: list(tensors))


def _into_others(tensors: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of new tensors."""
    plain = [each.detach() for each in tensors]
    return start_reduction(plain, [torch.empty_like(each) for each in plain], how, name, process_set)


def sum_of(tensor: Tensor, name: str, process_set: ProcessSet) -> Tensor:
    """The sum of a tensor over all ranks. Gradients go through it."""
    return cast(Tensor, _AllReduce.apply(tensor, Scaling(Sum), name, process_set))


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce`."""
    how = scaling(average, op, prescale_factor, postscale_factor)
    return _into_others([tensor], how, name_of("allreduce", name, process_set), process_set).then(first)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce_`."""
    how = scaling(average, op, prescale_factor, postscale_factor)
    return _in_place([tensor], how, name_of("allreduce", name, process_set), process_set).then(first)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The mean of `tensor` over all ranks, or what `op` says (Sum, Min, Max, Product, Adasum): a tensor like it.

    It is multiplied by `prescale_factor` before, the result by `postscale_factor` after that. Means of integers are
    rounded down. Gradients go through sums and means. `compression`: how it travels.
    """
    how = scaling(average, op, prescale_factor, postscale_factor)
    small, ctx = compression.compress(tensor)
    found = cast(Tensor, _AllReduce.apply(small, how, name_of("allreduce", name, process_set), process_set))
    return cast(Tensor, compression.decompress(found, ctx))


def allreduce_(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
    """`allreduce`, in place. Takes what `allreduce_async_` takes."""
    return cast(Tensor, synchronize(allreduce_async_(tensor, *args, **named)))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, how: Scaling, name: str, process_set: ProcessSet) -> Tensor:
        ctx.how, ctx.process_set, ctx.name = how, process_set, name
        if how.op not in (Average, Sum):
            ctx.set_materialize_grads(False)
        return cast(Tensor, synchronize(_into_others([tensor], how, name, process_set).then(first)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.how.op not in (Average, Sum):
            raise UsageError(f"gradients do not go through an allreduce of op {ctx.how.op!r}; expected Average or Sum")
        return _AllReduce.apply(grads[0], ctx.how, f"gradient of {ctx.name}", ctx.process_set), None, None, None


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce`."""
    how = scaling(average, op, prescale_factor, postscale_factor)
    return _into_others(tensors, how, name_of("grouped_allreduce", name, process_set), process_set)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce_`."""
    how = scaling(average, op, prescale_factor, postscale_factor)
    return _in_place(tensors, how, name_of("grouped_allreduce", name, process_set), process_set)


def grouped_allreduce(tensors: Sequence[Tensor], *args: Any, **named: Any) -> list[Tensor]:
    """`allreduce` of several tensors, which are done together: a list. Gradients do not go through it."""
    return cast(list[Tensor], synchronize(grouped_allreduce_async(tensors, *args, **named)))


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **named: Any) -> list[Tensor]:
    """`grouped_allreduce`, in place."""
    return cast(list[Tensor], synchronize(grouped_allreduce_async_(tensors, *args, **named)))


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: QueueOp = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Add a sparse tensor (COO) to those of other ranks by its indices: nothing becomes dense. Op is Sum or Average.
    The result is coalesced."""
    return start_sum_of_rows(tensor, op, name_of("sparse_allreduce", name, process_set), process_set)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: QueueOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter`."""
    how = scaling(None, op, prescale_factor, postscale_factor)
    if how.op == Adasum:
        raise UsageError("reducescatter has no Adasum; expected Average, Sum, Min, Max or Product")
    task = queue(process_set).reducescatter_async(
        array_of(staged(tensor)), name=name_of("reducescatter", name, process_set),
        op=cast(Any, how.op), prescale=prescale_factor, postscale=postscale_factor,
    )  # fmt: skip
    return Handle(task, lambda found: on_device_of(tensor, found))


def reducescatter(tensor: Tensor, *args: Any, **named: Any) -> Tensor:
    """This rank's rows of `allreduce`; the first ranks have one more where they differ. Takes what
    `reducescatter_async` takes. Gradients do not go through it."""
    return cast(Tensor, synchronize(reducescatter_async(tensor, *args, **named)))


def grouped_reducescatter(tensors: Sequence[Tensor], name: str | None = None, **named: Any) -> list[Tensor]:
    """`reducescatter` of several tensors: a list."""
    handles = [reducescatter_async(each, f"{name}.{i}" if name else None, **named) for i, each in enumerate(tensors)]
    return [synchronize(each) for each in handles]
