"""The ranks of one group of a program, from one of them: what the language calls communication, over a communicator."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.programs.communication import Send
from omnireduce.programs.expressions import Expression
from omnireduce.programs.layouts import Layout, bounds
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.whole_tensor_operations import Reduction
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle


class Ranks(NamedTuple):
    """A group of ranks: those of `comm`. `names`: how the names of their collectives begin."""

    comm: Communicator
    names: str

    def named(self, stage: str) -> str:
        """The name of a collective."""
        return f"{self.names}.{stage}"

    def allreduce(self, x: Array, reduction: Reduction, stage: str, out: Array | None = None) -> Array:
        """The sum, or another reduction, of all ranks' `x`, in `out` if that is given."""
        x = np.asarray(x, order="C")
        return self.comm.allreduce(
            x, out=np.empty_like(x) if out is None else out, op=reduction.op, name=self.named(stage)
        )

    def allreduce_async(self, x: Array, reduction: Reduction, stage: str) -> Handle[Array]:
        """Start to combine `x` of all ranks in place. `x` is contiguous."""
        return self.comm.allreduce_async(x, op=reduction.op, name=self.named(stage))

    def reduce_scatter(self, x: Array, reduction: Reduction, stage: str) -> Array:
        """This rank's part of that."""
        return self.comm.reduce_scatter(np.asarray(x, order="C"), op=reduction.op, name=self.named(stage))

    def allgather(self, part: Array, layout: Layout, whole: tuple[int, ...], stage: str) -> Array:
        """All parts of an array of the shape `whole`."""
        axis, size = layout.axis(len(whole)), self.comm.size
        part = np.asarray(part, order="C")
        if axis == 0 and whole[0] % size == 0:
            return self.comm.allgather(part, name=self.named(stage)).reshape(whole)
        parts = self.comm.allgather_ragged(part.reshape(-1), name=self.named(stage))
        shaped = []
        for rank, flat in enumerate(parts):
            start, stop = bounds(whole[axis], rank, size)
            shape = (*whole[:axis], stop - start, *whole[axis + 1 :])
            shaped.append(flat.reshape(shape))
        return np.concatenate(shaped, axis=axis)

    def broadcast(self, x: Array, root: int, stage: str) -> Array:
        """The root's `x`."""
        return self.comm.broadcast(np.array(x, order="C"), root, name=self.named(stage))


Rooms = dict[Expression, Array]
"""Arrays for what a run computes, by expression. A new array costs more than what is put into it, because its memory is
not there yet: so the next run uses them again."""


class JobResources:
    """Resources that the programs of a job make once: communicators of the groups of ranks into which they divide it,
    and rooms.

    Group g of `groups` has the ranks from `g * size` on. Two ranks that send have a communicator of their own, in which
    the sender is rank 0: so what is sent goes to no other rank.
    """

    def __init__(self, comm: Communicator) -> None:
        self._formation = comm.formation
        self._communicators: dict[str, Communicator] = {}
        self._rooms: weakref.WeakKeyDictionary[Pipeline, Rooms] = weakref.WeakKeyDictionary()

    def is_for(self, comm: Communicator) -> bool:
        """Whether the job is still the one for which these were made."""
        return comm.formation is self._formation

    @property
    def communicators(self) -> list[Communicator]:
        """The communicators that were made so far."""
        return list(self._communicators.values())

    def rooms(self, pipeline: Pipeline) -> Rooms:
        """The rooms of a program, as long as it lives."""
        return self._rooms.setdefault(pipeline, {})

    def group(self, comm: Communicator, groups: int) -> Communicator:
        """The communicator of this rank's group. All ranks of the group call this together."""
        if groups == 1:
            return comm
        size = comm.size // groups
        number = comm.rank // size
        return self._create(comm, range(number * size, (number + 1) * size), f"programs-{groups}-{number}")

    def pair(self, comm: Communicator, groups: int, source: int, target: int) -> Communicator:
        """The communicator of this rank and its partner, of the groups `source` and `target`. Both call this."""
        size = comm.size // groups
        at = comm.rank % size
        ranks = [source * size + at, target * size + at]
        return self._create(comm, ranks, _name_of_pair(groups, source, target, at))

    def has(self, name: str) -> bool:
        """Whether there is a communicator of this name already."""
        return name in self._communicators

    def _create(self, comm: Communicator, ranks: range | list[int], name: str) -> Communicator:
        if name not in self._communicators:
            self._communicators[name] = comm.create_group(ranks, name=name)
        return self._communicators[name]


def _name_of_pair(groups: int, source: int, target: int, at: int) -> str:
    return f"programs-{groups}-{source}-{target}-{at}"


class WaitingRanks(NamedTuple):
    """The ranks that wait, or will wait, for this rank of `comm` when it runs a program for several groups."""

    resources: JobResources
    comm: Communicator
    pipeline: Pipeline

    def refuse(self, error: Exception) -> None:
        """Let them know that this rank does not run the program: in the groups that there are, see
        `Communicator.refuse`, and in those that the program would have made with this rank."""
        for communicator in self.resources.communicators:
            communicator.refuse(UsageError(str(error)))  # each is told of one of its own
        groups = self.pipeline.groups
        group, at = divmod(self.comm.rank, self.comm.size // groups) if self.comm.size >= groups else (groups, 0)
        pairs = {(node.source, node.to) for node in self.pipeline.nodes if isinstance(node, Send)}
        for pair in sorted(pairs):
            name = _name_of_pair(groups, *pair, at)
            if group in pair and not self.resources.has(name):
                self.comm.refuse_group(error, name=name, size=2)


_resources: weakref.WeakKeyDictionary[Communicator, JobResources] = weakref.WeakKeyDictionary()


def resources_of(comm: Communicator) -> JobResources:
    """The one of this communicator."""
    resources = _resources.get(comm)
    if resources is None or not resources.is_for(comm):
        resources = _resources[comm] = JobResources(comm)
    return resources


def ranks_of_a_group(comm: Communicator, groups: int, minimum: int) -> int:
    """The number of ranks of a group. Raises UsageError where the job cannot be divided so."""
    size, rest = divmod(comm.size, groups)
    if rest or size < minimum:
        expected = f"a multiple of {groups}" if groups > 1 else "more"
        raise UsageError(f"{comm.size} ranks for {groups} groups of at least {minimum}: expected {expected}")
    return size
