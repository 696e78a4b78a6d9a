"""A program on the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.array_checksum import checksum
from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import Constant, Expression, Input, Pointwise, Region, Type
from omnireduce.programs.layouts import Layout, bounds
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, Sizes, bound_sizes, check_names, compute, input_value, sizes_in
from omnireduce.programs.rank_groups import Ranks, Rooms, WaitingRanks, ranks_of_a_group, resources_of
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped, Stage, kind_of, nodes_of
from omnireduce.programs.whole_tensor_operations import Update, WholeReduction
from omnireduce.protocol.collective.dense_operands import as_writable
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import Comparison
from omnireduce.runtime.rank.handles import Handle
from omnireduce.runtime.rank.reported_errors import report_errors_to

if TYPE_CHECKING:
    from collections.abc import Iterator


def agreement_terms(pipeline: Pipeline, sizes: Sizes, inputs: Iterable[tuple[Input, Array]]) -> list[tuple[str, str]]:
    """Names and values for `check_agreement`: the program, its sizes, numbers and Replicated tensors."""
    replicated = [
        (input_node.name, _describe(array))
        for input_node, array in inputs
        if input_node.type.layout is Layout.REPLICATED
    ]
    return [
        ("the program", pipeline.digest),
        *((variable.name, str(size)) for variable, size in sizes.items()),
        *replicated,
    ]


def _describe(array: Array) -> str:
    """A number as text, or the dtype, shape and checksum of a tensor."""
    if not array.shape:
        return str(array[()])
    return f"{array.dtype}{list(array.shape)}, checksum {checksum(as_writable(array)).hex()}"


def run(pipeline: Pipeline, comm: Communicator, values: Mapping[str, Any], *, compare: bool = True) -> dict[str, Array]:
    """Run `pipeline` on this rank, as all ranks of `comm` do.

    `values`: for each input by its name a number or this rank's array, of a Sliced tensor its part; also the sizes that
    follow from no whole array. Returns the outputs by name. Tensors that the program updates get their new values in
    the arrays that were given, which are what is returned for them. They get them all at the end: where this raises,
    all of them are as before.

    `compare`: ranks compare what all must have alike: the program, sizes, numbers and Replicated tensors. That costs a
    read of these tensors, and 8 bytes beside the first exchange. All ranks say the same.

    A program for several groups of ranks divides the job into so many of equal size, in the order of ranks. A rank
    gives, and gets, what is in its group.

    Raises UsageError for values that do not fit, on all ranks for those that differ and should not, and for a job that
    cannot be divided so; otherwise what the collectives raise.
    """
    resources = resources_of(comm)
    with report_errors_to(comm if pipeline.groups == 1 else WaitingRanks(resources, comm, pipeline)):
        size = ranks_of_a_group(comm, pipeline.groups, pipeline.least_ranks)
        ranks = Ranks(resources.group(comm, pipeline.groups), pipeline.name)
        execution, arrays = _begin_run(pipeline, comm, ranks, size, values)
        comparison = None
        if compare and size > 1:
            terms = agreement_terms(pipeline, execution.placement.sizes, execution.inputs)
            comparison = Comparison(ranks.comm, terms, ranks.named("inputs"))
        _run_stages(execution)
    execution.finish()
    if comparison is not None:
        comparison.settle()
    _commit(arrays, {update: execution.value(update) for update in arrays})
    return {
        name: arrays[output] if isinstance(output, Update) else execution.value(output)
        for name, output in zip(pipeline.output_names, pipeline.outputs, strict=True)
        if execution.is_here(output)
    }


def _begin_run(
    pipeline: Pipeline, comm: Communicator, ranks: Ranks, size: int, values: Mapping[str, Any]
) -> tuple[Execution, dict[Update, Array]]:
    """A run before its first stage, and the arrays that get new values in the end. Raises UsageError."""
    group, rank = divmod(comm.rank, size)
    inputs = [input_node for input_node in pipeline.inputs if input_node.type.group in (None, group)]
    check_names(values, pipeline.known_values, pipeline.name)
    local_nodes = [node for node in pipeline.nodes if node.type.group in (None, group) or _is_sent_to(node, group)]
    placement, resources = (
        RankPlacement(rank, size, bound_sizes(sizes_in(local_nodes), inputs, values)),
        resources_of(comm),
    )

    def pair(source: int, target: int) -> Communicator:
        return resources.pair(comm, pipeline.groups, source, target)

    execution = Execution(pipeline, placement, ranks, group, pair, rooms=resources.rooms(pipeline))
    for input_node in inputs:
        execution.put(input_node, input_value(input_node, values, placement))
    arrays = {update: execution.value(update.tensor) for update in local_nodes if isinstance(update, Update)}
    for update, array in arrays.items():
        if not array.flags.writeable:
            raise UsageError(f"{update.tensor.name} is read-only, and the program updates it: pass a copy")
    for (first, array), (second, other_array) in combinations(arrays.items(), 2):
        if np.shares_memory(array, other_array):
            names = f"{first.tensor.name} and {second.tensor.name}"
            raise UsageError(f"{names} share memory, and the program updates both: pass a copy")
    return execution, arrays


def _is_sent_to(node: Expression, group: int) -> bool:
    return isinstance(node, Send) and node.to == group


def _run_stages(run: Execution) -> None:
    """Evaluate all stages in their order, and forget what no later one needs."""
    stages = run.pipeline.stages
    last: dict[Expression, int] = {}
    for at, stage in enumerate(stages):
        for node in nodes_of(stage):
            last.update(dict.fromkeys((node, *node.operands), at))
    needed_after = {*run.pipeline.outputs, *(node for node in run.pipeline.nodes if isinstance(node, Update))}
    for at, stage in enumerate(stages):
        _run_stage(stage, run)
        for node in {used for member in nodes_of(stage) for used in (member, *member.operands)}:
            if last[node] == at and node not in needed_after:
                run.drop(node)


def _run_stage(stage: Stage, run: Execution) -> None:
    if isinstance(stage, Expression):
        run.evaluate(stage)
    elif isinstance(stage, Fused):
        if run.is_here(next(node for node in stage.nodes if node.type.shape)):
            run_fused(stage, run)
    elif isinstance(stage, FusedAllReduce):
        if run.is_here(stage.reduce_scatter):
            run_fused_all_reduce(stage, run)
    else:
        run_overlapped(stage, run)


def _commit(arrays: Mapping[Update, Array], results: Mapping[Update, Array]) -> None:
    """Write all new values. A value that lies in an array which is written is copied first."""
    safe = {
        update: result.copy() if any(np.may_share_memory(result, target) for target in arrays.values()) else result
        for update, result in results.items()
    }
    for update, result in safe.items():
        arrays[update][...] = result


class Execution:
    """One run of a program. `placement`: this rank in its group; `ranks`: the group; `group`: its number; `pair`: gives
    the communicator of this rank and its partner in another group, of the sender's group and the receiver's; `rooms`:
    arrays of earlier runs."""

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
    def recorded(self, node: Expression, activity: str) -> Iterator[None]:
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
        with self.recorded(node, type(node).__name__.upper()):
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


PIECE_BYTES = 1 << 18  # of one operand: several of them fit into a second-level cache


class _Piece(NamedTuple):
    """Rows of the first dimension."""

    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def run_fused(stage: Fused, run: Execution) -> None:
    """Evaluate the expressions of `stage`, and keep those that others need."""
    shaped = [node for node in stage.nodes if node.type.shape]
    for node in stage.nodes:
        if not node.type.shape:
            run.evaluate(node)  # once, not for each piece
    kind = kind_of(stage)
    region, shape = run.placement.region(kind)
    stored = [node for node in shaped if _is_needed_outside(node, stage, run)]
    results = {node: run.room(node, shape) for node in stored}
    outside = _operands(shaped, kind, run)
    pieces = _pieces(shape, max(node.type.dtype.itemsize for node in shaped))
    scratch = {node: np.empty((pieces[0].rows if pieces else 0, *shape[1:]), node.type.dtype) for node in shaped}
    for piece in pieces:
        starts = (region.starts[0] + piece.start, *region.starts[1:])
        rooms = {
            node: results[node][piece.start : piece.stop] if node in results else scratch[node][: piece.rows]
            for node in shaped
        }
        _evaluate(shaped, outside, piece, region._replace(starts=starts), rooms)
    for output, result in results.items():
        is_update = isinstance(output, Update)
        run.put(output, run.placement.fitting(result, output.operands[1].type, output.type) if is_update else result)


def _is_needed_outside(node: Expression, stage: Fused, run: Execution) -> bool:
    users = run.pipeline.users[node]
    return isinstance(node, Update) or node in run.pipeline.outputs or any(user not in stage.nodes for user in users)


def _operands(shaped: Collection[Expression], kind: Type, run: Execution) -> Mapping[Expression, tuple[Array, bool]]:
    """Operands from outside: this rank's part, and whether it has rows, of which each piece takes some."""
    outside: dict[Expression, tuple[Array, bool]] = {}
    for node in shaped:
        operands = node.operands[1:] if isinstance(node, Update) else node.operands
        for operand in operands:
            if operand not in shaped and operand not in outside:
                has_rows = len(operand.type.shape) == len(kind.shape) and operand.type.shape[0] == kind.shape[0]
                outside[operand] = run.placement.fitting(run.value(operand), operand.type, kind), has_rows
    return outside


def _pieces(shape: tuple[int, ...], itemsize: int) -> list[_Piece]:
    row_bytes = int(np.prod(shape[1:], dtype=np.int64)) * itemsize
    rows = max(1, PIECE_BYTES // max(row_bytes, 1))
    return [_Piece(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def _evaluate(
    shaped: Collection[Expression],
    outside: Mapping[Expression, tuple[Array, bool]],
    piece: _Piece,
    region: Region,
    rooms: Mapping[Expression, Array],
) -> None:
    """One piece of each expression, in its room."""
    arrays: dict[Expression, Array] = dict(rooms)
    for operand, (array, has_rows) in outside.items():
        arrays[operand] = array[piece.start : piece.stop] if has_rows else array
    with np.errstate(all="ignore"):  # as in `compute`
        for node in shaped:
            room = rooms[node]
            if isinstance(node, Update):
                room[...] = arrays[node.value]
            elif isinstance(node, Pointwise):
                computed = node.compute([arrays[operand] for operand in node.operands], region, room)
                if computed is not room:
                    room[...] = computed


def run_fused_all_reduce(stage: FusedAllReduce, run: Execution, reduced: Array | None = None) -> None:
    """ReduceScatter, compute on the parts, AllGather. All results become values of `run`.

    `reduced`: this rank's part of the sum, if that is known already.
    """
    for node in stage.nodes:
        if node is stage.reduce_scatter and reduced is not None:
            run.put(node, reduced)
        else:
            run.evaluate(node)


def run_overlapped(stage: Overlapped, run: Execution) -> None:
    """Evaluate the product and what reduces it, chunk by chunk."""
    matmul, reduction = stage.matmul, stage.reduction
    if not run.is_here(matmul):
        return
    left, right = (run.value(operand) for operand in matmul.operands)
    product = run.room(reduction, (*left.shape[:-1], right.shape[-1]))
    handles = []
    for chunk in range(stage.chunks):
        start, stop = bounds(len(left), chunk, stage.chunks)
        if start == stop:
            continue
        rows = product[start:stop]
        with run.recorded(matmul, "MATMUL"):
            matmul.compute([left[start:stop], right], out=rows)
        handles.append(run.ranks.allreduce_async(rows, reduction.reduction, f"{run.name(reduction)}.chunk{chunk}"))
    for handle in handles:
        handle.wait()
    if isinstance(stage.reducer, FusedAllReduce):
        run_fused_all_reduce(stage.reducer, run, run.placement.part(product, reduction.type.layout))
    else:
        is_part = reduction.type.layout.is_sliced
        run.put(reduction, run.placement.part(product, reduction.type.layout) if is_part else product)
