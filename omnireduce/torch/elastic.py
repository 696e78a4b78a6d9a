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
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import Sampler

from omnireduce.data_parallel import session
from omnireduce.data_parallel.sampling import Sampling
from omnireduce.elastic import ObjectState, run
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.errors import NewcomersError as HostsUpdatedInterrupt
from omnireduce.torch.broadcasting import broadcast_optimizer_state, broadcast_parameters
from omnireduce.torch.sharded import ShardedOptimizer

__all__ = ["ElasticSampler", "HorovodInternalError", "HostsUpdatedInterrupt", "ObjectState", "TorchState", "run"]


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
        """Tell all ranks which samples this rank has recorded since the last exchange. All ranks call it:
        `TorchState.commit` does. A rank that has joined tells nothing."""
        unreported = self._sampling.unreported()
        self._sampling.take_reported(
            session.queue().allreduce_async(unreported, name=f"sampler.{name}", op="any").wait()
        )

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


class TorchState(ObjectState):
    """State of a training: a model, an optimizer, samplers by any name, and values that are plain data."""

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None, **values: Any) -> None:
        self._samplers = {name: value for name, value in values.items() if isinstance(value, ElasticSampler)}
        self.__dict__.update(self._samplers)
        self.model, self.optimizer = model, optimizer
        self._saved_states: list[Any] = []
        super().__init__(**{name: value for name, value in values.items() if name not in self._samplers})

    def _stateful(self) -> list[Any]:
        return [stateful for stateful in (self.model, self.optimizer, *self._samplers.values()) if stateful is not None]

    def commit(self) -> None:
        """Tell all ranks which samples are done, then keep the state as it is now. All ranks call this after the same
        step.

        Raises NewcomersError, after that, when workers wait to join; AbortedError when the job failed.
        """
        self._exchange_samples()
        super().commit()

    def _exchange_samples(self) -> None:
        for name, sampler in self._samplers.items():
            sampler.exchange(name)

    def collect(self) -> None:
        """Fetch what an optimizer keeps on the aggregators."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.load_state_dict(self.optimizer.state_dict())

    def save(self) -> None:
        """Keep everything as it is now, on this rank, or nothing: to fetch the state of an optimizer may fail."""
        states = [copy.deepcopy(stateful.state_dict()) for stateful in self._stateful()]
        super().save()
        self._saved_states = states

    def restore(self) -> None:
        """Go back to the state of the last `save`."""
        super().restore()
        for stateful, saved in zip(self._stateful(), self._saved_states, strict=True):
            stateful.load_state_dict(copy.deepcopy(saved))
        if self.model is not None:
            self.model.zero_grad()  # gradients of the step that failed

    def sync(self) -> None:
        """Give all ranks the state of the one that has committed most often, and keep it."""
        self._exchange_samples()  # done since the last commit, if nothing was lost
        root = self.root()
        with torch.no_grad():
            if self.model is not None:
                broadcast_parameters(self.model.state_dict(), root)
            if isinstance(self.optimizer, ShardedOptimizer):
                self.optimizer.restore(root)
            elif self.optimizer is not None:
                broadcast_optimizer_state(self.optimizer, root)
        for name, sampler in self._samplers.items():
            own_state = sampler.state_dict()
            sampler.load_state_dict(
                session.queue().broadcast_object_async(own_state, root, name=f"sampler.{name}").wait()
            )
        super().sync()

    def on_reset(self) -> None:
        """The job was formed anew: deal out the samples again."""
        for sampler in self._samplers.values():
            sampler.reset()
        super().on_reset()
