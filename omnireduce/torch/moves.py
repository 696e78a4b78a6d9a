"""Tensors of torch that are gathered, broadcast or exchanged, by name, in Horovod's words: see `reductions`.

As in Horovod 0.28.1, the gradients of what was gathered or broadcast are means over the ranks. So a loss that all ranks
compute alike has the gradients of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from omnireduce.data_parallel.scaling import Average, Scaling, root_of
from omnireduce.data_parallel.session import (
    ProcessSet,
    begun_by_name,
    global_process_set,
    name_of,
    names_of,
    queue,
    told_by_name,
)
from omnireduce.data_parallel.tasks import Task
from omnireduce.dtypes import Array
from omnireduce.torch.differentiable import differentiable
from omnireduce.torch.handles import Handle, first, handle_of, joined, on_device_of, synchronize
from omnireduce.torch.reductions import reduced
from omnireduce.torch.tensors import array_of, detached, put_back, staged

MEAN = Scaling(Average)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an `allgather`."""
    return first(_start_gathering([tensor], [name_of("allgather", name, process_set)], process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one behind the other. The first dimension may differ. Gradients go through it."""
    return first(gathered([tensor], [name_of("allgather", name, process_set)], process_set))


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `grouped_allgather`."""
    return joined(_start_gathering(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of several tensors: a list. Gradients go through it."""
    return gathered(tensors, names_of("grouped_allgather", name, tensors, process_set), process_set)


def _start_gathering(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Handle]:
    def begin(at: int) -> Task:
        return queue(process_set).allgather_async(array_of(staged(tensors[at])), name=names[at])

    tasks = begun_by_name(names, process_set, begin)
    return [handle_of(task, partial(on_device_of, tensor)) for task, tensor in zip(tasks, tensors, strict=True)]


def gathered(tensors: Sequence[Tensor], names: Sequence[str], process_set: ProcessSet) -> list[Tensor]:
    """Those of all ranks, one behind the other. Gradients go through it."""

    lengths: list[int] = []

    def run(own: list[Tensor]) -> list[Tensor]:
        handles = _start_gathering(own, names, process_set)
        lengths[:] = map(len, own)
        return [synchronize(handle) for handle in handles]

    def back(grads: list[Tensor]) -> list[Tensor]:
        everyones, of_lengths = reduced(grads, MEAN, f"gradient of {names[0]}", process_set), f"lengths of {names[0]}"
        before = synchronize(first(_start_gathering([torch.tensor([lengths])], [of_lengths], process_set)))
        starts = before[: queue(process_set).rank].sum(0).tolist()
        return [grad[at : at + length] for grad, at, length in zip(everyones, starts, lengths, strict=True)]

    return differentiable(run, back, tensors)


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
    copy = told_by_name([name], process_set, lambda: detached(tensor).clone())
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
    root = told_by_name([name], process_set, lambda: root_of(root_rank, process_set))
    is_root = root == queue(process_set).rank

    def run(own: list[Tensor]) -> list[Tensor]:
        copy = told_by_name([name], process_set, lambda: detached(own[0]).clone())
        return [synchronize(_start_broadcast(copy, root_rank, name, process_set))]

    def back(grads: list[Tensor]) -> list[Tensor]:
        means = reduced(grads, MEAN, f"gradient of {name}", process_set)
        return means if is_root else [torch.zeros_like(means[0])]

    return first(differentiable(run, back, [tensor]))


def _start_broadcast(tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Handle:
    def begin() -> Handle:
        plain = detached(tensor)
        copy = staged(plain)
        task = queue(process_set).broadcast_async(array_of(copy), root_of(root_rank, process_set), name=name)
        return handle_of(task, lambda _: put_back([plain], [copy])).then(lambda _: tensor)

    return told_by_name([name], process_set, begin)


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
    rows, counts = _exchanged(tensor, splits, name_of("alltoall", name, process_set), process_set)
    return rows if splits is None else (rows, counts)


def _exchanged(
    tensor: Tensor, splits: Tensor | Sequence[int] | None, name: str, process_set: ProcessSet
) -> tuple[Tensor, Tensor]:
    counts: list[Tensor] = []

    def run(own: list[Tensor]) -> list[Tensor]:
        rows, received = synchronize(_start_exchange(own[0], splits, name, process_set))
        counts.append(received)
        return [rows]

    def back(grads: list[Tensor]) -> list[Tensor]:
        return [_exchanged(grads[0], counts[0], f"gradient of {name}", process_set)[0]]

    return first(differentiable(run, back, [tensor])), counts[0]


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

    return told_by_name([name], process_set, begin)
