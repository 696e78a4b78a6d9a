"""Training in torch that goes on when ranks fail or come, in Horovod's words.

@hvd.elastic.run
def train(state):
    for state.epoch in range(state.epoch, epochs):
        ...
        state.commit()

train(hvd.elastic.TorchState(model, optimizer, epoch=0))
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from omnireduce.data_parallel import session
from omnireduce.data_parallel.elastic import State, run
from omnireduce.data_parallel.sampling import Sampling
from omnireduce.data_parallel.scaling import root_of
from omnireduce.data_parallel.session import ProcessSet, global_process_set, name_of, queue, told_by_name
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.errors import NewcomersError as HostsUpdatedInterrupt
from omnireduce.errors import UsageError
from omnireduce.torch.gradients import Named
from omnireduce.torch.movements import broadcast_async_
from omnireduce.torch.sharded import ShardedOptimizer
from omnireduce.torch.tensors import synchronize

AT_ONCE = 512


@torch.no_grad()
def broadcast_parameters(
    params: Named | Iterable[Tensor], root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Replace tensors by those of the root: `model.state_dict()`, `model.named_parameters()`, or tensors without names,
    in one order on all ranks. What is no tensor stays as it is. Raises what `omnireduce.Queue` raises."""
    pairs = params.items() if isinstance(params, Mapping) else params
    named = [(str(at), entry) if isinstance(entry, Tensor) else entry for at, entry in enumerate(pairs)]
    tensors = [(name, tensor) for name, tensor in named if isinstance(tensor, Tensor)]
    _broadcast_all([(f"parameter.{name}", tensor) for name, tensor in tensors], root_rank, process_set)


def _broadcast_all(named: Sequence[tuple[str, Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    """Broadcast `AT_ONCE` tensors at a time: a queue takes a limited number."""
    for at in range(0, len(named), AT_ONCE):
        some = named[at : at + AT_ONCE]
        for handle in [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in some]:
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
    own: list[Tensor] = []
    name = name_of("broadcast_object", "optimizer", process_set)
    state, plain = told_by_name([name], process_set, lambda: _state_to_send(optimizer, own))
    told = broadcast_object(plain, root_rank, "optimizer", process_set=process_set)
    is_root = queue(process_set).rank == root_of(root_rank, process_set)
    tensors = own if is_root else []
    if not is_root:
        state = _with_tensors(told, tensors)
    _broadcast_all([(f"optimizer.{at}", tensor) for at, tensor in enumerate(tensors)], root_rank, process_set)
    if is_root:
        return
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise UsageError(f"the optimizer of rank {root_rank} is another one than this: {error}") from error


def _state_to_send(optimizer: torch.optim.Optimizer, tensors: list[Tensor]) -> tuple[dict[str, Any], Any]:
    """The state, and what `_without_tensors` makes of it. Raises UsageError for one that cannot be sent."""
    if isinstance(optimizer, ShardedOptimizer):
        raise UsageError(
            "the state of a ShardedOptimizer is on the shards, for all ranks; after load_state_dict call its restore()"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError("the state of LBFGS cannot be broadcast; expected another optimizer")
    state = optimizer.state_dict()
    return state, _without_tensors(state, tensors)


def _without_tensors(x: Any, tensors: list[Tensor]) -> Any:
    """`x` as plain data: a description of each tensor is in its place. The tensors are appended to `tensors`."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return {"tensor": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)}
    if isinstance(x, dict):
        return {"pairs": [[key, _without_tensors(value, tensors)] for key, value in x.items()]}
    if isinstance(x, list | tuple):
        return {"list": [_without_tensors(value, tensors) for value in x], "is_tuple": isinstance(x, tuple)}
    return x


def _with_tensors(x: Any, tensors: list[Tensor]) -> Any:
    """The reverse. The tensors are new and uninitialized; they are appended to `tensors`."""
    if not isinstance(x, dict):
        return x
    if "pairs" in x:
        return {key: _with_tensors(value, tensors) for key, value in x["pairs"]}
    if "list" in x:
        values = [_with_tensors(value, tensors) for value in x["list"]]
        return tuple(values) if x["is_tuple"] else values
    tensors.append(torch.empty(x["shape"], dtype=getattr(torch, x["tensor"])))
    return tensors[-1]


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    *,
    process_set: ProcessSet = global_process_set,
    trust: bool = False,
) -> Any:
    """The object of the root. It is plain data with tensors in it, or, with `trust` on all ranks, anything that can be
    pickled: see `omnireduce.broadcast_object`, and `omnireduce.torch.objects`."""
    name = name_of("broadcast_object", name, process_set)
    root = told_by_name([name], process_set, lambda: root_of(root_rank, process_set))
    return queue(process_set).broadcast_object_async(obj, root, name=name, trust=trust).wait()


def allgather_object(
    obj: Any, name: str | None = None, *, process_set: ProcessSet = global_process_set, trust: bool = False
) -> list[Any]:
    """A list of the objects of all ranks. See `broadcast_object`."""
    name = name_of("allgather_object", name, process_set)
    objects: list[Any] = queue(process_set).allgather_object_async(obj, name=name, trust=trust).wait()
    return objects


__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "TorchState", "run"]

ObjectState = State


class ElasticSampler(Sampler[int]):
    """Deals out the samples of `dataset` to all ranks; those that were recorded are not dealt out again in this epoch.

    Call `record_batch` after each batch, `set_epoch` after each epoch, and give the sampler to the `TorchState`: it is
    dealt anew when ranks fail or come. `shuffle`, `seed`, `pad`: see `omnireduce.data_parallel.sampling`.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, pad: bool = True) -> None:
        self._sampling = Sampling(len(dataset), shuffle=shuffle, seed=seed, pads=pad)
        self.reset()

    @property
    def epoch(self) -> int:
        """The epoch."""
        return self._sampling.epoch

    @property
    def indices(self) -> list[int]:
        """The numbers of the samples that this rank takes."""
        return self._sampling.indices

    @property
    def processed_indices(self) -> set[int]:
        """The numbers that were recorded in this epoch."""
        return self._sampling.processed

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: nothing is done."""
        self._sampling.begin(epoch)
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """This batch, by its number since the samples were dealt out, is done."""
        self.record_indices(self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size])

    def record_indices(self, indices: list[int]) -> None:
        """These samples are done."""
        self._sampling.record(indices)

    def reset(self) -> None:
        """Deal out what is left to the ranks that there are now."""
        self._sampling.deal(session.rank(), session.size())

    def exchange(self, name: str) -> None:
        """Tell all ranks what was recorded since they were told last. All ranks call it: `TorchState.commit` does. One
        that has joined tells nothing."""
        done = self._sampling.untold()
        self._sampling.told(session.queue().allreduce_async(done, name=f"sampler.{name}", op="any").wait())

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and what is done of it."""
        return self._sampling.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._sampling.load_state_dict(state_dict)
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.indices))

    def __len__(self) -> int:
        return len(self.indices)


class TorchState(State):
    """The state of a training: a model, an optimizer, samplers by any name, and values that are plain data."""

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **values: Any) -> None:
        self._samplers = {name: value for name, value in values.items() if isinstance(value, ElasticSampler)}
        self.__dict__.update(self._samplers)
        self.model, self.optimizer = model, optimizer
        self._kept_states: list[Any] = []
        super().__init__(**{name: value for name, value in values.items() if name not in self._samplers})

    def _stateful(self) -> list[Any]:
        return [stateful for stateful in (self.model, self.optimizer, *self._samplers.values()) if stateful is not None]

    def exchange(self) -> None:
        """Samplers tell each other what is done."""
        for name, sampler in self._samplers.items():
            sampler.exchange(name)

    def collect(self) -> None:
        """Fetch what an optimizer keeps on the aggregators."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def save(self) -> None:
        """Keep everything as it is now, on this rank, or nothing: to fetch the state of an optimizer may fail."""
        kept = [copy.deepcopy(stateful.state_dict()) for stateful in self._stateful()]
        super().save()
        self._kept_states = kept

    def restore(self) -> None:
        """Go back to what was kept."""
        super().restore()
        for stateful, kept in zip(self._stateful(), self._kept_states, strict=True):
            stateful.load_state_dict(copy.deepcopy(kept))
        if self.model is not None:
            self.model.zero_grad()  # gradients of the step that failed

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        self.exchange()  # what was done since the last commit, where nothing was lost
        root = self.root()
        with torch.no_grad():
            if self.model is not None:
                broadcast_parameters(self.model.state_dict(), root)
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.restore(root)
            elif self.optimizer is not None:
                broadcast_optimizer_state(self.optimizer, root)
        for name, sampler in self._samplers.items():
            own = sampler.state_dict()
            sampler.load_state_dict(session.queue().broadcast_object_async(own, root, name=f"sampler.{name}").wait())
        super().sync()

    def on_reset(self) -> None:
        """The job was formed anew: deal out the samples again."""
        for sampler in self._samplers.values():
            sampler.reset()
        super().on_reset()
