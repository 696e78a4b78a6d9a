"""One run of a program on one rank: the values that it has so far, and how one expression is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import Constant, Expression, Input
from omnireduce.programs.operations import Update, WholeReduction
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, compute
from omnireduce.programs.ranks import Ranks, Rooms
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Iterator


class Execution:
    """`seat`: this rank in its group; `ranks`: the group; `pair`: gives the communicator of this rank and its partner
    in another group, of the sender's group and the receiver's; `rooms`: arrays of earlier runs."""

    def __init__(
        self, pipeline: Pipeline, placement: RankPlacement, ranks: Ranks, group: int,
        pair: Callable[[int, int], Communicator],
        *, rooms: Rooms,
    ) -> None:  # fmt: skip
        self.pipeline, self.placement, self.ranks, self.group = pipeline, placement, ranks, group
        self._pair, self._rooms = pair, rooms
        self._values: dict[Expression, Array] = {}
        self._under_way: dict[Expression, Handle[Array]] = {}

    def value(self, node: Expression) -> Array:
        """This rank's value of an expression that has been evaluated."""
        return node.array if isinstance(node, Constant) else self._values[node]

    @property
    def inputs(self) -> list[tuple[Input, Array]]:
        """The arrays that this rank has been given, before anything is evaluated."""
        return [(node, array) for node, array in self._values.items() if isinstance(node, Input)]

    def put(self, node: Expression, array: Array) -> None:
        """`node` has been evaluated."""
        self._values[node] = array

    def drop(self, node: Expression) -> None:
        """Nothing needs `node` any more."""
        self._values.pop(node, None)

    def room(self, node: Expression, shape: tuple[int, ...]) -> Array:
        """An array for what this rank has of `node`: the same one in each run, unless the caller of `run` gets it."""
        if node in self.pipeline.outputs and not isinstance(node, Update):  # an Update is copied to its tensor
            return np.empty(shape, node.type.dtype)
        array = self._rooms.get(node)
        if array is None or array.shape != shape:
            array = self._rooms[node] = np.empty(shape, node.type.dtype)
        return array

    def name(self, node: Expression) -> str:
        """The name of `node` in the names of collectives and in timelines."""
        return self.pipeline.names.get(node, type(node).__name__)

    def is_here(self, node: Expression) -> bool:
        """Whether this rank's group has `node`."""
        return node.type.group in (None, self.group)

    @contextmanager
    def shown(self, node: Expression, activity: str) -> Iterator[None]:
        """Show what happens inside in the timeline, if one is recorded."""
        timeline, row = self.ranks.comm.timeline, self.ranks.named(self.name(node))
        if timeline.is_on:
            timeline.begin(row, activity)
        try:
            yield
        finally:
            if timeline.is_on:
                timeline.end(row, activity)

    def evaluate(self, node: Expression) -> None:
        """Evaluate an expression by itself; all ranks of its group do."""
        if isinstance(node, Constant):
            return
        if isinstance(node, Send):
            self._send(node)
        elif self.is_here(node):
            self.put(node, self._result(node))

    def _result(self, node: Expression) -> Array:
        if isinstance(node, Recv):
            return self._under_way[node.operands[0]].wait()
        arrays = [self.value(operand) for operand in node.operands]
        if isinstance(node, AllReduce):
            return self.ranks.allreduce(
                arrays[0], node.reduction, self.name(node), out=self.room(node, arrays[0].shape)
            )
        if isinstance(node, ReduceScatter):
            return self.ranks.reduce_scatter(arrays[0], node.reduction, self.name(node))
        if isinstance(node, AllGather):
            whole = self.placement.shape(node.type.shape)
            return self.ranks.allgather(arrays[0], node.operands[0].type.layout, whole, self.name(node))
        if isinstance(node, Broadcast):
            return self.ranks.broadcast(arrays[0], node.root, self.name(node))
        if isinstance(node, Update):
            return self.placement.fitting(arrays[1], node.value.type, node.tensor.type)
        if isinstance(node, WholeReduction):
            return self._reduced(node, arrays[0])
        with self.shown(node, type(node).__name__.upper()):
            return compute(node, arrays, self.placement)

    def _reduced(self, node: WholeReduction, array: Array) -> Array:
        partial = node.partial(array)
        if node.operands[0].type.layout.is_sliced:
            partial = self.ranks.allreduce(partial, node.reduction, self.name(node))
        return node.finish(partial).reshape(())

    def _send(self, node: Send) -> None:
        """Start to send here and to receive there, both at this place in the program: so all ranks start the same
        transfers in the same order, and none waits for another one before it must."""
        if self.group not in (node.source, node.to):
            return
        comm = self._pair(node.source, node.to)
        if self.group == node.source:
            array = np.array(self.value(node.operands[0]), order="C")
        else:
            array = np.empty(self.placement.own_shape(node.type), node.type.dtype)
        self._under_way[node] = comm.broadcast_async(array, 0, name=self.ranks.named(self.name(node)))

    def finish(self) -> None:
        """Wait until everything that was sent has been taken."""
        for handle in self._under_way.values():
            handle.wait()
        self._under_way.clear()
