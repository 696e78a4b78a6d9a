"""Collectives of tensors of torch, by name, in Horovod's words.

All functions take `name`, which says what belongs together; ranks may call them in any order. Without names all ranks
call them in one order. `process_set`: the ranks that take part. A function whose name ends with `_` works in place. A
function with `async` in its name returns a handle: see `poll` and `synchronize`. They raise UsageError for wrong
arguments, and the errors of `omnireduce.Queue`.

Gradients are as in Horovod 0.28.1. Those of `allgather` and `broadcast` are means over the ranks. The gradient of a
`reducescatter` consists of the parts of all ranks, one behind the other; that of a sum is multiplied by the number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.dispatcher import Task
from omnireduce.data_parallel.horovod_names import Compression
from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.scaling import Adasum, Average, Max, Min, Product, Scaling, Sum, make_scaling, root_of
from omnireduce.data_parallel.session import (
    ProcessSet,
    global_process_set,
    name_of,
    names_of,
    queue,
    submit_each,
    submit_named,
)
from omnireduce.errors import UsageError
from omnireduce.torch.sparse_rows import rows_of, sparse_of
from omnireduce.torch.tensors import (
    Handle,
    array_of,
    detached,
    first,
    handle_of,
    join_handles,
    on_device_of,
    put_back,
    staged,
    synchronize,
)

Tensors = Callable[[list[Tensor]], Sequence[Tensor]]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Tensors, backward: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run_backward = backward
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.run_backward(list(grads))


def differentiable(run: Tensors, backward: Tensors, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Call `run`, which makes new tensors of these, and return its results. In a backward pass, which all ranks make,
    `backward` makes the gradients of the tensors of the gradients of the results."""
    return list(_Differentiable.apply(run, backward, *tensors))


FLAG_OPS: dict[QueueOp, QueueOp] = {Max: "any", Min: "all", Product: "all"}


def start_reduction(
    tensors: Sequence[Tensor], outs: Sequence[Tensor], scaling: Scaling, name: str, process_set: ProcessSet
) -> Handle:
    """Combine tensors into `outs`, which may be the tensors themselves. The result is a list of the outs. Complex ones
    are pairs of numbers."""

    def begin() -> Handle:
        op, prescale, postscale = scaling._replace(op=_op_for(tensors, scaling.op))
        copies = [staged(tensor) for tensor in tensors]
        in_place = all(out is tensor for out, tensor in zip(outs, tensors, strict=True))
        targets = copies if in_place else [staged(out) for out in outs]
        task = queue(process_set).grouped_allreduce_async(
            [array_of(copy) for copy in copies], outs=None if in_place else [array_of(target) for target in targets],
            name=name, op=op, prescale=prescale, postscale=postscale,
        )  # fmt: skip
        return handle_of(task, lambda _: put_back(outs, targets))

    return submit_named([name], process_set, begin)


def start_sum_of_rows(tensor: Tensor, op: QueueOp, name: str, process_set: ProcessSet) -> Handle:
    """Add a sparse tensor to those of other ranks. The result is coalesced."""

    def begin() -> Handle:
        numbers, rows, n_rows = rows_of(tensor)
        task = queue(process_set).allreduce_rows_async(numbers, rows, n_rows, name=name, op=cast(Any, op))
        return handle_of(task, lambda summed: sparse_of(summed, tensor))

    return submit_named([name], process_set, begin)


def _op_for(tensors: Sequence[Tensor], op: QueueOp) -> QueueOp:
    """The name of the operation in the service. Raises UsageError if it does not work on these tensors."""
    kinds = {tensor.dtype for tensor in tensors}
    if op not in (Average, Sum) and any(kind.is_complex for kind in kinds):
        raise UsageError(f"op {op!r} of complex numbers: expected Average or Sum")
    if torch.bool not in kinds:
        return op
    if len(kinds) > 1 or op not in FLAG_OPS:
        raise UsageError(f"op {op!r} of bool: expected Max, which is any, or Min or Product, which are all")
    return FLAG_OPS[op]


def _start_in_place(tensors: Sequence[Tensor], scaling: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of the tensors."""
    plain = submit_named([name], process_set, lambda: [detached(tensor) for tensor in tensors])
    handle = start_reduction(plain, plain, scaling, name, process_set)
    return handle.then(lambda _: list(tensors))


def _start_into_new(tensors: Sequence[Tensor], scaling: Scaling, name: str, process_set: ProcessSet) -> Handle:
    """The result is a list of new tensors."""

    def begin() -> Handle:
        plain = [detached(tensor) for tensor in tensors]
        return start_reduction(plain, [torch.empty_like(tensor) for tensor in plain], scaling, name, process_set)

    return submit_named([name], process_set, begin)


def _scaling_of(
    name: str, process_set: ProcessSet, average: bool | None, op: QueueOp | None, prescale: float, postscale: float
) -> Scaling:
    """The operation of the collective with this name. If the arguments cannot be, other ranks are told."""
    return submit_named([name], process_set, lambda: make_scaling(average, op, prescale, postscale))


def allreduce_tensors(tensors: Sequence[Tensor], scaling: Scaling, name: str, process_set: ProcessSet) -> list[Tensor]:
    """Combine the tensors of all ranks; return new tensors. Gradients go through sums and means."""

    def run(inputs: list[Tensor]) -> list[Tensor]:
        return cast(list[Tensor], synchronize(_start_into_new(inputs, scaling, name, process_set)))

    def backward(grads: list[Tensor]) -> list[Tensor]:
        check_differentiable("allreduce", scaling.op)
        return allreduce_tensors(grads, scaling, f"gradient of {name}", process_set)

    return differentiable(run, backward, tensors)


def check_differentiable(collective: str, op: QueueOp) -> None:
    """Raises UsageError where no gradient goes through."""
    if op not in (Average, Sum):
        raise UsageError(f"no gradients go through {collective} of op {op!r}; expected Average or Sum")


def sum_of(tensor: Tensor, name: str, process_set: ProcessSet) -> Tensor:
    """The sum of a tensor over all ranks. Gradients go through it."""
    return first(allreduce_tensors([tensor], Scaling(Sum), name, process_set))


class Compressed(NamedTuple):
    """Compressed tensors, and the contexts from which `compression` restores them."""

    compression: type[Any]
    tensors: list[Tensor]
    contexts: list[Any]

    def restore(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors in their own types, from those that have come back."""
        return [self.compression.decompress(*pair) for pair in zip(tensors, self.contexts, strict=True)]


def compress(
    compression: type[Any], tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet
) -> Compressed:
    """Compress tensors for the collectives of these names."""
    pairs = submit_named(names, process_set, lambda: [compression.compress(tensor) for tensor in tensors])
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
    scaling = _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor)
    return _start_into_new([tensor], scaling, name, process_set).then(first)


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
    scaling = _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor)
    return _start_in_place([tensor], scaling, name, process_set).then(first)


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
    scaling = _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor)
    small = compress(compression, [tensor], [name], process_set)
    return first(small.restore(allreduce_tensors(small.tensors, scaling, name, process_set)))


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
    return _start_into_new(
        tensors, _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor), name, process_set
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
    return _start_in_place(
        tensors, _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor), name, process_set
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
    scaling = _scaling_of(name, process_set, average, op, prescale_factor, postscale_factor)
    small = compress(compression, tensors, [name], process_set)
    return small.restore(allreduce_tensors(small.tensors, scaling, name, process_set))


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


MEAN = Scaling(Average)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an `allgather`."""
    return first(_start_gathering([tensor], [name_of("allgather", name, process_set)], process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one behind the other. The first dimension may differ. Gradients go through it."""
    return first(allgather_tensors([tensor], [name_of("allgather", name, process_set)], process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `grouped_allgather`."""
    return join_handles(
        _start_gathering(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set)
    )


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors: a list. Gradients go through it."""
    return allgather_tensors(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set)


def _start_gathering(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Handle]:
    def begin(at: int) -> Task:
        return queue(process_set).allgather_async(array_of(staged(tensors[at])), name=names[at])

    tasks = submit_each(names, process_set, begin)
    return [handle_of(task, partial(on_device_of, tensor)) for task, tensor in zip(tasks, tensors, strict=True)]


def allgather_tensors(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Tensor]:
    """The tensors of all ranks, one behind the other. Gradients go through it."""

    lengths: list[int] = []

    def run(inputs: list[Tensor]) -> list[Tensor]:
        handles = _start_gathering(inputs, names, process_set)
        lengths[:] = map(len, inputs)
        return [synchronize(handle) for handle in handles]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        means, lengths_name = (
            allreduce_tensors(grads, MEAN, f"gradient of {names[0]}", process_set),
            f"lengths of {names[0]}",
        )
        all_lengths = synchronize(first(_start_gathering([torch.tensor([lengths])], [lengths_name], process_set)))
        starts = all_lengths[: queue(process_set).rank].sum(0).tolist()
        return [grad[at : at + length] for grad, at, length in zip(means, starts, lengths, strict=True)]

    return differentiable(run, backward, tensors)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast_`. `root_rank`: a number of the job, also in a smaller set."""
    return _start_broadcast(tensor, root_rank, name_of("broadcast", name, process_set), process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast`."""
    name = name_of("broadcast", name, process_set)
    copy = submit_named([name], process_set, lambda: detached(tensor).clone())
    return _start_broadcast(copy, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace a tensor by that of the root."""
    return cast(Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of the root. Gradients go through it."""
    name = name_of("broadcast", name, process_set)
    root = submit_named([name], process_set, lambda: root_of(root_rank, process_set))
    is_root = root == queue(process_set).rank

    def run(inputs: list[Tensor]) -> list[Tensor]:
        copy = submit_named([name], process_set, lambda: detached(inputs[0]).clone())
        return [synchronize(_start_broadcast(copy, root_rank, name, process_set))]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        means = allreduce_tensors(grads, MEAN, f"gradient of {name}", process_set)
        return means if is_root else [torch.zeros_like(means[0])]

    return first(differentiable(run, backward, [tensor]))


def _start_broadcast(tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Handle:
    def begin() -> Handle:
        plain = detached(tensor)
        copy = staged(plain)
        task = queue(process_set).broadcast_async(array_of(copy), root_of(root_rank, process_set), name=name)
        return handle_of(task, lambda _: put_back([plain], [copy])).then(lambda _: tensor)

    return submit_named([name], process_set, begin)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`. The result also has, without `splits`, how much has come from each."""
    return _start_exchange(tensor, splits, name_of("alltoall", name, process_set), process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first `splits[0]` rows to rank 0, and so on (None: as many to each); return what has come, and where
    `splits` are given also how much from each. Gradients go through it."""
    rows, counts = _alltoall_tensor(tensor, splits, name_of("alltoall", name, process_set), process_set)
    return rows if splits is None else (rows, counts)


def _alltoall_tensor(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    counts: list[Tensor] = []

    def run(inputs: list[Tensor]) -> list[Tensor]:
        rows, received = synchronize(_start_exchange(inputs[0], splits, name, process_set))
        counts.append(received)
        return [rows]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        return [_alltoall_tensor(grads[0], counts[0], f"gradient of {name}", process_set)[0]]

    return first(differentiable(run, backward, [tensor])), counts[0]


def _start_exchange(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet
) -> Handle:
    def begin() -> Handle:
        lengths: Array | None = None
        kind = splits.dtype if isinstance(splits, Tensor) else torch.int32
        if splits is not None:
            lengths = staged(splits if isinstance(splits, Tensor) else torch.tensor(splits)).numpy()
        task = queue(process_set).alltoall_async(array_of(staged(tensor)), lengths, name=name)
        return handle_of(task, lambda pair: (on_device_of(tensor, pair[0]), torch.from_numpy(pair[1]).to(kind)))

    return submit_named([name], process_set, begin)


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
    return first(
        _start_rows(
            [tensor], names, _row_scaling(names, process_set, op, prescale_factor, postscale_factor), process_set
        )
    )


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
    scaling = _row_scaling(names, process_set, op, prescale_factor, postscale_factor)
    small = compress(compression, [tensor], names, process_set)
    return first(small.restore(_reducescatter_tensors(small.tensors, names, scaling, process_set)))


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
    return join_handles(
        _start_rows(
            tensors, names, _row_scaling(names, process_set, op, prescale_factor, postscale_factor), process_set
        )
    )


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
    scaling = _row_scaling(names, process_set, op, prescale_factor, postscale_factor)
    small = compress(compression, tensors, names, process_set)
    return small.restore(_reducescatter_tensors(small.tensors, names, scaling, process_set))


def _row_scaling(
    names: Sequence[str], process_set: ProcessSet, op: QueueOp, prescale: float, postscale: float
) -> Scaling:
    def make() -> Scaling:
        scaling = make_scaling(None, op, prescale, postscale)
        if scaling.op == Adasum:
            raise UsageError("reducescatter has no Adasum; expected Average, Sum, Min, Max or Product")
        return scaling

    return submit_named(names, process_set, make)


def _start_rows(
    tensors: Sequence[Tensor], names: Sequence[str], scaling: Scaling, process_set: ProcessSet
) -> list[Handle]:
    def begin(at: int) -> Task:
        array, (op, prescale, postscale) = array_of(staged(tensors[at])), scaling
        return queue(process_set).reducescatter_async(
            array, name=names[at], op=cast(Any, op), prescale=prescale, postscale=postscale
        )

    tasks = submit_each(names, process_set, begin)
    return [handle_of(task, partial(on_device_of, tensor)) for task, tensor in zip(tasks, tensors, strict=True)]


def _reducescatter_tensors(
    tensors: Sequence[Tensor], names: Sequence[str], scaling: Scaling, process_set: ProcessSet
) -> list[Tensor]:
    def run(inputs: list[Tensor]) -> list[Tensor]:
        return [synchronize(handle) for handle in _start_rows(inputs, names, scaling, process_set)]

    def backward(grads: list[Tensor]) -> list[Tensor]:
        check_differentiable("reducescatter", scaling.op)
        factor = scaling.prescale * scaling.postscale * (process_set.size() if scaling.op == Sum else 1)
        scaled = [grad * factor for grad in grads]
        return allgather_tensors(scaled, [f"gradient of {name}" for name in names], process_set)

    return differentiable(run, backward, tensors)
