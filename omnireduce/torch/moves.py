"""Tensors of torch that are gathered, broadcast or exchanged, by name, in Horovod's words: see `reductions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue
from omnireduce.data_parallel.words import root_of
from omnireduce.torch.handles import Handle, on_device_of, synchronize
from omnireduce.torch.reductions import sum_of
from omnireduce.torch.tensors import array_of, put_back, staged


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Start an `allgather`."""
    array = array_of(staged(tensor))
    task = queue(process_set).allgather_async(array, name=name_of("allgather", name, process_set))
    return Handle(task, lambda found: on_device_of(tensor, found))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The tensors of all ranks, one behind the other. The first dimension may differ. Gradients go through it."""
    return cast(Tensor, _AllGather.apply(tensor, name_of("allgather", name, process_set), process_set))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str, process_set: ProcessSet) -> Tensor:
        task = queue(process_set).allgather_async(array_of(staged(tensor)), name=name)
        lengths = queue(process_set).allgather_async(array_of(torch.tensor([len(tensor)])), name=f"length of {name}")
        before = lengths.wait()[: queue(process_set).rank].sum()
        ctx.process_set, ctx.name, ctx.own = process_set, name, slice(int(before), int(before) + len(tensor))
        return on_device_of(tensor, task.wait())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return sum_of(grads[0], f"gradient of {ctx.name}", ctx.process_set)[ctx.own], None, None


def grouped_allgather(tensors: Sequence[Tensor], name: str | None = None, **named: Any) -> list[Tensor]:
    """`allgather` of several tensors: a list."""
    handles = [allgather_async(each, f"{name}.{i}" if name else None, **named) for i, each in enumerate(tensors)]
    return [synchronize(each) for each in handles]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast_`. `root_rank`: a number of the job, also in a smaller set."""
    plain = tensor.detach()
    copy = staged(plain)
    root = root_of(root_rank, process_set)
    task = queue(process_set).broadcast_async(array_of(copy), root, name=name_of("broadcast", name, process_set))
    return Handle(task, lambda _: put_back([plain], [copy])).then(lambda _: tensor)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replace a tensor by that of the root."""
    return cast(Tensor, synchronize(broadcast_async_(tensor, root_rank, name, process_set)))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The tensor of the root. Gradients go through it."""
    return cast(Tensor, _Broadcast.apply(tensor, root_rank, name_of("broadcast", name, process_set), process_set))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str, process_set: ProcessSet) -> Tensor:
        root, copy = root_of(root_rank, process_set), staged(tensor).clone()
        ctx.process_set, ctx.name, ctx.is_root = process_set, name, queue(process_set).rank == root
        queue(process_set).broadcast_async(array_of(copy), root, name=name).wait()
        return copy.to(tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = sum_of(grads[0], f"gradient of {ctx.name}", ctx.process_set)
        return found if ctx.is_root else torch.zeros_like(grads[0]), None, None, None


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall`."""
    lengths = None if splits is None else staged(splits).numpy()
    name = name_of("alltoall", name, process_set)
    task = queue(process_set).alltoall_async(array_of(staged(tensor)), lengths, name=name)

    def finish(found: Any) -> Any:
        rows = on_device_of(tensor, found[0])
        return rows if splits is None else (rows, torch.from_numpy(found[1]).to(splits.dtype))

    return Handle(task, finish)


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send the first `splits[0]` rows to rank 0, and so on (None: as many to each); return what has come, and where
    `splits` are given also how much from each. Gradients go through it."""
    name = name_of("alltoall", name, process_set)
    rows, counts = _AllToAll.apply(tensor, splits, name, process_set)
    return rows if splits is None else (rows, counts)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Tensor | None, name: str, process_set: ProcessSet) -> Any:
        lengths = None if splits is None else staged(splits).numpy()
        rows, counts = queue(process_set).alltoall_async(array_of(staged(tensor)), lengths, name=name).wait()
        ctx.process_set, ctx.name = process_set, name
        received = torch.from_numpy(counts)
        ctx.received = received
        found = received if splits is None else received.to(splits.dtype)
        ctx.mark_non_differentiable(found)
        return on_device_of(tensor, rows), found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        rows, _ = _AllToAll.apply(grads[0].contiguous(), ctx.received, f"gradient of {ctx.name}", ctx.process_set)
        return rows, None, None, None
