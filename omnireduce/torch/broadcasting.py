"""Parameters and states of optimizers of one rank, given to all, in Horovod's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from omnireduce.data_parallel.horovod_names import broadcast_object
from omnireduce.data_parallel.scaling import root_of
from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue, submit_named
from omnireduce.errors import UsageError
from omnireduce.torch.collectives import broadcast_async_
from omnireduce.torch.gradient_hooks import Named
from omnireduce.torch.sharded import ShardedOptimizer
from omnireduce.torch.tensors import synchronize

MAX_AT_ONCE = 512


@torch.no_grad()
def broadcast_parameters(
    params: Named | Iterable[Tensor], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors by those of the root: `model.state_dict()`, `model.named_parameters()`, or tensors without names,
    in one order on all ranks. A value that is no tensor stays as it is. Raises what `omnireduce.Queue` raises."""
    pairs = params.items() if isinstance(params, Mapping) else params
    named = [(str(at), entry) if isinstance(entry, Tensor) else entry for at, entry in enumerate(pairs)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor)]
    _broadcast_all([(f"parameter.{name}", tensor) for name, tensor in tensors], root_rank, process_set)


def _broadcast_all(named: Sequence[tuple[str, Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast `MAX_AT_ONCE` tensors at a time: a queue takes a limited number."""
    for at in range(0, len(named), MAX_AT_ONCE):
        batch = named[at : at + MAX_AT_ONCE]
        for handle in [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in batch]:
            synchronize(handle)


@torch.no_grad()
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace the state of the optimizer by that of the root: its options and what it has kept for each parameter.

    The others need not have made a step. `model` is not needed. Raises UsageError where the optimizers have other
    parameters, for LBFGS, whose state is a history of calls, and for a `ShardedOptimizer`, whose state no rank has;
    otherwise what `omnireduce.Queue` raises.
    """
    own_tensors: list[Tensor] = []
    name = name_of("broadcast_object", "optimizer", process_set)
    state, plain = submit_named([name], process_set, lambda: _state_to_send(optimizer, own_tensors))
    description = broadcast_object(plain, root_rank, "optimizer", process_set=process_set)
    is_root = queue(process_set).rank == root_of(root_rank, process_set)
    tensors = own_tensors if is_root else []
    if not is_root:
        state = _restore_tensors(description, tensors)
    _broadcast_all([(f"optimizer.{at}", tensor) for at, tensor in enumerate(tensors)], root_rank, process_set)
    if is_root:
        return
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise UsageError(f"the optimizer of rank {root_rank} is another one than this: {error}") from error


def _state_to_send(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> tuple[dict[str, Any], Any]:
    """The state, and what `_describe_tensors` makes of it. Raises UsageError for one that cannot be sent."""
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError(
            "the state of a ShardedOptimizer is on the shards, for all ranks; after load_state_dict call its restore()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("the state of LBFGS cannot be broadcast; expected another optimizer")
    state = optimizer.state_dict()
    return state, _describe_tensors(state, tensors)


def _describe_tensors(x: Any, tensors: list[Tensor]) -> Any:
    """`x` as plain data: a description of each tensor is in its place. The tensors are appended to `tensors`."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return {"tensor": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    if isinstance(x, dict):
        return {"pairs": [[key, _describe_tensors(value, tensors)] for key, value in x.items()]}
    if isinstance(x, list | tuple):
        return {"list": [_describe_tensors(value, tensors) for value in x], "is_tuple": isinstance(x, tuple)}
    return x


def _restore_tensors(x: Any, tensors: list[Tensor]) -> Any:
    """The reverse. The tensors are new and uninitialized; they are appended to `tensors`."""
    if not isinstance(x, dict):
        return x
    if "pairs" in x:
        return {key: _restore_tensors(value, tensors) for key, value in x["pairs"]}
    if "list" in x:
        values = [_restore_tensors(value, tensors) for value in x["list"]]
        return tuple(values) if x["is_tuple"] else values
    tensors.append(torch.empty(x["shape"], dtype=getattr(torch, x["tensor"])))
    return tensors[-1]
