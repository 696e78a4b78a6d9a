"""A program on the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.checksum import checksum
from omnireduce.programs.communication import Send
from omnireduce.programs.execution import Execution
from omnireduce.programs.expressions import Expression, Input
from omnireduce.programs.layouts import Layout
from omnireduce.programs.operations import Update
from omnireduce.programs.overlapped import run_fused_all_reduce, run_overlapped
from omnireduce.programs.passes import run_fused
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, Sizes, bound_sizes, check_names, input_value, sizes_in
from omnireduce.programs.ranks import Ranks, Waiting, meeting_of, ranks_of_a_group
from omnireduce.programs.stages import Fused, FusedAllReduce, Stage, nodes_of
from omnireduce.protocol.collective.operands import as_writable
from omnireduce.runtime.rank.agreement import Comparison
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.refusals import told_to_others


def given_alike(pipeline: Pipeline, sizes: Sizes, given: Iterable[tuple[Input, Array]]) -> list[tuple[str, str]]:
    """Names and values for `check_alike`: the program, its sizes, numbers and Replicated tensors."""
    inputs = [
        (input_node.name, _said(array)) for input_node, array in given if input_node.type.layout is Layout.REPLICATED
    ]
    return [
        ("the program", pipeline.digest),
        *((variable.name, str(size)) for variable, size in sizes.items()),
        *inputs,
    ]


def _said(array: Array) -> str:
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
    meeting = meeting_of(comm)
    with told_to_others(comm if pipeline.groups == 1 else Waiting(meeting, comm, pipeline)):
        size = ranks_of_a_group(comm, pipeline.groups, pipeline.least_ranks)
        own = Ranks(meeting.group(comm, pipeline.groups), pipeline.name)
        execution, arrays = _begun(pipeline, comm, own, size, values)
        comparison = None
        if compare and size > 1:
            alike = given_alike(pipeline, execution.placement.sizes, execution.inputs)
            comparison = Comparison(own.comm, alike, own.named("inputs"))
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


def _begun(
    pipeline: Pipeline, comm: Communicator, own: Ranks, size: int, values: Mapping[str, Any]
) -> tuple[Execution, dict[Update, Array]]:
    """A run before its first stage, and the arrays that get new values in the end. Raises UsageError."""
    group, rank = divmod(comm.rank, size)
    inputs = [input_node for input_node in pipeline.inputs if input_node.type.group in (None, group)]
    check_names(values, pipeline.known_values, pipeline.name)
    here = [node for node in pipeline.nodes if node.type.group in (None, group) or _is_sent_to(node, group)]
    placement, meeting = RankPlacement(rank, size, bound_sizes(sizes_in(here), inputs, values)), meeting_of(comm)

    def pair(source: int, target: int) -> Communicator:
        return meeting.pair(comm, pipeline.groups, source, target)

    execution = Execution(pipeline, placement, own, group, pair, rooms=meeting.rooms(pipeline))
    for input_node in inputs:
        execution.put(input_node, input_value(input_node, values, placement))
    arrays = {update: execution.value(update.tensor) for update in here if isinstance(update, Update)}
    for update, array in arrays.items():
        if not array.flags.writeable:
            raise UsageError(f"{update.tensor.name} is read-only, and the program updates it: pass a copy")
    for (one, array), (two, another) in combinations(arrays.items(), 2):
        if np.shares_memory(array, another):
            names = f"{one.tensor.name} and {two.tensor.name}"
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
    kept = {*run.pipeline.outputs, *(node for node in run.pipeline.nodes if isinstance(node, Update))}
    for at, stage in enumerate(stages):
        _run_stage(stage, run)
        for node in {used for member in nodes_of(stage) for used in (member, *member.operands)}:
            if last[node] == at and node not in kept:
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
    """Write all new values. One that lies in an array which is written is copied first."""
    safe = {
        update: result.copy() if any(np.may_share_memory(result, target) for target in arrays.values()) else result
        for update, result in results.items()
    }
    for update, result in safe.items():
        arrays[update][...] = result
