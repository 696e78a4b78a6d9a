"""All-reduces of tensors of torch, by name, in Horovod's words.

All functions take `name`, which says what belongs together; ranks may call them in any order. Without names all ranks
call them in one order. `process_set`: the ranks that take part. What ends with `_` works in place, what has `async` in
its name returns a handle: see `poll` and `synchronize`. They raise UsageError for what cannot be, and what
`omnireduce.Queue` raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.scaling import Average, Max, Min, Product, Scaling, Sum, scaling
from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue, told_by_name
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls import Rows
from omnireduce.torch.compression import Compression
from omnireduce.torch.tensors import (
    Handle,
    array_of,
    detached,
    first,
    handle_of,
    put_back,
    settle,
    staged,
    synchronize,
    tensor_of,
)


def rows_of(tensor: Tensor) -> tuple[Array, Array, int]:
    """The numbers of the rows of a sparse tensor, int64 (n,), which may repeat; the rows, (n, width); how many rows the
    matrix has in all.

    The sparse dimensions of the tensor number the rows; the dense ones make one row. A row without elements travels as
    one zero.
    """
    shape = tuple(tensor.shape[: tensor.sparse_dim()])
    indices, values = array_of(staged(tensor._indices())), staged(tensor._values())
    numbers = np.ravel_multi_index(tuple(indices), shape) if indices.size else np.zeros(0, np.int64)
    rows = array_of(values)
    rows = rows.reshape(len(numbers), width_of(tensor)) if width_of(tensor) else np.zeros((len(numbers), 1), rows.dtype)
    return numbers, rows, math.prod(shape)


def width_of(tensor: Tensor) -> int:
    """How many numbers of the service's types a row of a sparse tensor has."""
    dense: Sequence[int] = tensor.shape[tensor.sparse_dim() :]
    return math.prod(dense) * (2 if tensor.is_complex() else 1)


def stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """The stream of this thread for a tensor on a GPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


@torch.no_grad()
def replace(tensor: Tensor, rows: Rows[Any], stream: torch.cuda.Stream | None) -> None:
    """Replace a sparse tensor by the coalesced one of these rows. The tensor gets new memory, which belongs to
    `stream`."""
    with torch.cuda.stream(stream), torch.inference_mode(tensor.is_inference()):
        tensor.copy_(sparse_of(rows, tensor))  # not a detached one: that has numbers of rows of its own
        settle([tensor])


def sparse_of(rows: Rows[Any], like: Tensor) -> Tensor:
    """The coalesced sparse tensor of these rows, of the shape, type and device of `like`."""
    numbers, values = rows
    sparse, dense = like.shape[: like.sparse_dim()], like.shape[like.sparse_dim() :]
    pair = (2,) if like.is_complex() else ()
    indices = torch.from_numpy(np.stack(np.unravel_index(numbers, tuple(sparse))).astype(np.int64, copy=False))
    row_values = tensor_of(values[:, : width_of(like)].reshape(len(numbers), *dense, *pair), like.dtype)
    return torch.sparse_coo_tensor(
        indices, row_values, like.shape, device=like.device, is_coalesced=True, check_invariants=False
    )


Tensors = Callable[[list[Tensor]], Sequence[Tensor]]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Tensors, back: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(list(grads))


def differentiable(run: Tensors, back: Tensors, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `run` makes of the tensors: other ones. `back` makes their gradients of those of the results, in a backward
    pass, which all ranks make."""
    return list(_Differentiable.apply(run, back, *tensors))


OF_FLAGS: dict[QueueOp, QueueOp] = {Max: "any", Min: "all", Product: "all"}


def start_reduction(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet
) -> Handle:
    """Combine tensors into `outs`, which may be the tensors themselves. The result is a list of the outs. Complex ones
    are pairs of numbers."""

    def begin() -> Handle:
        op, before, after = how._replace(op=_op_for(tensors, how.op))
        copies = [staged(tensor) for tensor in tensors]
        in_place = all(out is tensor for out, tensor in zip(outs, tensors, strict=True))
        targets = copies if in_place else [staged(out) for out in outs]
        task = queue(process_set).grouped_allreduce_async(
            [array_of(copy) for copy in copies], outs=None if in_place else [array_of(target) for target in targets],
            name=name, op=op, prescale=before, postscale=after,
        )  # fmt: skip
        return handle_of(task, lambda _: put_back(outs, targets))

    return told_by_name([name], process_set, begin)


def start_sum_of_rows(tensor: Tensor, op: QueueOp, name: str, process_set: ProcessSet) -> Handle:
    """Add a sparse tensor to those of other ranks. The result is coalesced."""

    def begin() -> Handle:
        numbers, rows, n_rows = rows_of(tensor)
        task = queue(process_set).allreduce_rows_async(numbers, rows, n_rows, name=name, op=cast(Any, op))
        return handle_of(task, lambda summed: sparse_of(summed, tensor))

    return told_by_name([name], process_set, begin)


def _op_for(tensors: Sequence[Tensor], op: QueueOp) -> QueueOp:
    """What the service calls it. Raises UsageError where it does not go with these tensors."""
    kinds = {tensor.dtype for tensor in tensors}
    if op not in (Average, Sum) and any(kind.is_complex for kind in kinds):
        raise UsageError(f"op {op!r} of complex numbers: expected Average or Sum")
    if torch.bool not in kinds:
        return op
    if len(kinds) > 1 or op not in OF_FLAGS:
        raise UsageError(f"op {op!r} of bool: expected Max, which is any, or Min or Product, which are all")
    return OF_FLAGS[op]


def _in_place(tensors: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of the tensors."""
    plain = told_by_name([name], process_set, lambda: [detached(tensor) for tensor in tensors])
    handle = start_reduction(plain, plain, how, name, process_set)
    return handle.then(lambda _: list(tensors))


def _into_others(tensors: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of new tensors."""

    def begin() -> Handle:
        plain = [detached(tensor) for tensor in tensors]
        return start_reduction(plain, [torch.empty_like(tensor) for tensor in plain], how, name, process_set)

    return told_by_name([name], process_set, begin)


def _how(
    name: str, process_set: ProcessSet, average: bool | None, op: QueueOp | None, before: float, after: float
) -> Scaling:
    """How what has this name is combined."""
    return told_by_name([name], process_set, lambda: scaling(average, op, before, after))


def reduced(tensors: Sequence[Tensor], how: Scaling, name: str, process_set: ProcessSet) -> list[Tensor]:
    """New tensors: what all ranks have, combined. Gradients go through sums and means."""

    def run(own: list[Tensor]) -> list[Tensor]:
        return cast(list[Tensor], synchronize(_into_others(own, how, name, process_set)))

    def back(grads: list[Tensor]) -> list[Tensor]:
        check_differentiable("allreduce", how.op)
        return reduced(grads, how, f"gradient of {name}", process_set)

    return differentiable(run, back, tensors)


def check_differentiable(what: str, op: QueueOp) -> None:
    """Raises UsageError where no gradient goes through."""
    if op not in (Average, Sum):
        raise UsageError(f"no gradients go through {what} of op {op!r}; expected Average or Sum")


def sum_of(tensor: Tensor, name: str, process_set: ProcessSet) -> Tensor:
    """The sum of a tensor over all ranks. Gradients go through it."""
    return first(reduced([tensor], Scaling(Sum), name, process_set))


class Compressed(NamedTuple):
    """Tensors as they travel, and what `compression` needs to make of them what they were."""

    compression: type[Any]
    tensors: list[Tensor]
    contexts: list[Any]

    def restored(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What came of those that have travelled."""
        return [self.compression.decompress(*pair) for pair in zip(tensors, self.contexts, strict=True)]


def compressed(
    compression: type[Any], tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet
) -> Compressed:
    """What travels of tensors by these names."""
    pairs = told_by_name(names, process_set, lambda: [compression.compress(tensor) for tensor in tensors])
    return Compressed(compression, [tensor for tensor, _ in pairs], [context for _, context in pairs])


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
    name = name_of("allreduce", name, process_set)
    how = _how(name, process_set, average, op, prescale_factor, postscale_factor)
    return _into_others([tensor], how, name, process_set).then(first)


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
    name = name_of("allreduce", name, process_set)
    how = _how(name, process_set, average, op, prescale_factor, postscale_factor)
    return _in_place([tensor], how, name, process_set).then(first)


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
    rounded towards zero. Gradients go through sums and means. `compression`: how it travels.
    """
    name = name_of("allreduce", name, process_set)
    how = _how(name, process_set, average, op, prescale_factor, postscale_factor)
    small = compressed(compression, [tensor], [name], process_set)
    return first(small.restored(reduced(small.tensors, how, name, process_set)))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`allreduce`, in place."""
    handle = allreduce_async_(
        tensor, average, name, op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip
    return cast(Tensor, synchronize(handle))


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
    name = name_of("grouped_allreduce", name, process_set)
    return _into_others(
        tensors, _how(name, process_set, average, op, prescale_factor, postscale_factor), name, process_set
    )


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
    name = name_of("grouped_allreduce", name, process_set)
    return _in_place(
        tensors, _how(name, process_set, average, op, prescale_factor, postscale_factor), name, process_set
    )


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Any] = Compression.none,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of several tensors, which are done together: a list. Gradients go through sums and means."""
    name = name_of("grouped_allreduce", name, process_set)
    how = _how(name, process_set, average, op, prescale_factor, postscale_factor)
    small = compressed(compression, tensors, [name], process_set)
    return small.restored(reduced(small.tensors, how, name, process_set))


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: QueueOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`grouped_allreduce`, in place."""
    handle = grouped_allreduce_async_(
        tensors, average, name, op,
        prescale_factor=prescale_factor, postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip
    return cast(list[Tensor], synchronize(handle))


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: QueueOp = Average, process_set: ProcessSet = global_process_set
) -> Handle:
    """Add a sparse tensor (COO) to those of other ranks by its indices: nothing becomes dense. Op is Sum or Average.
    The result is coalesced."""
    return start_sum_of_rows(tensor, op, name_of("sparse_allreduce", name, process_set), process_set)
