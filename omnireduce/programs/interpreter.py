"""Interpreter of programs: evaluates each expression by its definition, for all ranks in one process, with NumPy.

It is slow, and as obvious as it can be: the oracle for every other way to run a program. It ignores compound stages.
Values of ranks are combined in rank order, as the service does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import Constant, Expression, Input, Tensor, is_narrow
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, bound_sizes, check_names, compute, input_value, sizes_in
from omnireduce.programs.whole_tensor_operations import Reduction, Update, WholeReduction

PerRank = list[Array]
MAX_RANKS = 4096  # their arrays are all in this process


def interpret(pipeline: Pipeline, values: Mapping[str, Any], ranks: int) -> dict[str, PerRank]:
    """Run `pipeline` on `ranks` ranks of each group, all of them in this process.

    `values`, by name: a number for a Variable; for a Tensor a list of one array for each rank, or one array if it is
    Replicated. Sizes that follow from no whole array are given by name too. Returns, for each output, the arrays that
    a run returns on the ranks, in their order. `values` are not changed. Raises UsageError if they do not fit.
    """
    minimum = pipeline.least_ranks
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not minimum <= ranks <= MAX_RANKS:
        raise UsageError(f"ranks is {ranks!r}: expected an int from {minimum} to {MAX_RANKS}")
    check_names(values, pipeline.known_values, pipeline.name)
    rank_values = [
        {name: _value_for_rank(values, name, rank, ranks, pipeline) for name in values} for rank in range(ranks)
    ]
    placements = [
        RankPlacement(rank, ranks, bound_sizes(sizes_in(pipeline.nodes), pipeline.inputs, rank_values[rank]))
        for rank in range(ranks)
    ]
    results: dict[Expression, PerRank] = {}
    for node in pipeline.nodes:
        if isinstance(node, Input):
            results[node] = [input_value(node, rank_values[placement.rank], placement) for placement in placements]
        else:
            results[node] = _evaluate(node, [results[operand] for operand in node.operands], placements)
    outputs = zip(pipeline.output_names, pipeline.outputs, strict=True)
    return {name: [array.copy() for array in results[output]] for name, output in outputs}


def _value_for_rank(values: Mapping[str, Any], name: str, rank: int, ranks: int, pipeline: Pipeline) -> Any:
    """The value of an input for one rank."""
    value = values[name]
    if isinstance(value, list | tuple):
        if len(value) != ranks:
            raise UsageError(f"{name} has {len(value)} arrays; expected one for each of the {ranks} ranks")
        return value[rank]
    tensor = next((input_node for input_node in pipeline.inputs if input_node.name == name), None)
    if isinstance(tensor, Tensor) and tensor.type.layout.value != "Replicated":
        raise UsageError(f"{name} is {tensor.type.layout.value}: expected a list of {ranks} arrays, one for each rank")
    return value


def _evaluate(node: Expression, operands: Sequence[PerRank], placements: Sequence[RankPlacement]) -> PerRank:
    """The value of `node` on each rank."""
    ranks = len(placements)
    if isinstance(node, Constant):
        return [node.array] * ranks
    if isinstance(node, AllReduce):
        return [combined(node.reduction, operands[0])] * ranks
    if isinstance(node, ReduceScatter):
        whole = combined(node.reduction, operands[0])
        return [placement.part(whole, node.type.layout) for placement in placements]
    if isinstance(node, AllGather):
        layout = node.operands[0].type.layout
        return [np.concatenate(operands[0], axis=layout.axis(operands[0][0].ndim))] * ranks
    if isinstance(node, Broadcast):
        return [operands[0][node.root]] * ranks
    if isinstance(node, Send | Recv):
        return operands[0]
    if isinstance(node, Update):
        tensor, value = node.tensor.type, node.value.type
        return [
            placement.fitting(array, value, tensor) for placement, array in zip(placements, operands[1], strict=True)
        ]
    if isinstance(node, WholeReduction):
        return _reduced(node, operands[0])
    return [compute(node, [per_rank[placement.rank] for per_rank in operands], placement) for placement in placements]


def _reduced(node: WholeReduction, parts: PerRank) -> PerRank:
    partial = [node.partial(part) for part in parts]
    if node.operands[0].type.layout.is_sliced:
        partial = [combined(node.reduction, partial)] * len(parts)
    return [node.finish(array).reshape(()) for array in partial]


def combined(reduction: Reduction, parts: PerRank) -> Array:
    """The parts, combined in their order. 16-bit floats are combined in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = [part.astype(np.float32) if is_narrow(dtype) else part for part in parts]
    with np.errstate(all="ignore"):
        return np.asarray(reduce(reduction.ufunc, wide)).astype(dtype)
