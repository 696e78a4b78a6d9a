"""Overlap of a MatMul with the reduction of its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllReduce, ReduceScatter
from omnireduce.programs.expressions import Expression
from omnireduce.programs.operations import MatMul
from omnireduce.programs.rewrites.parts import called, check_single, compound_of, stage_list
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped, Reducer

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline

MOST_CHUNKS = 1024


def overlap(pipeline: Pipeline, stages: Sequence[Handle], *, chunks: int = 4) -> Pipeline:
    """Compute a MatMul in `chunks` of rows, and reduce each while the next one is computed.

    `stages`: the MatMul, and the AllReduce or ReduceScatter of its result, also one that is part of a fused AllReduce.
    Raises UsageError for other stages: those do not depend on one another chunk by chunk.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not 2 <= chunks <= MOST_CHUNKS:
        raise UsageError(f"chunks is {chunks!r}: expected an int from 2 to {MOST_CHUNKS}")
    nodes = stage_list(pipeline, stages, "overlap")
    products = [node for node in nodes if isinstance(node, MatMul)]
    reducers = [node for node in nodes if isinstance(node, AllReduce | ReduceScatter)]
    if len(products) != 1 or len(reducers) != 1 or len(nodes) != 2:
        said = " and ".join(called(pipeline, node) for node in nodes)
        raise UsageError(
            f"cannot overlap {said}: expected a MatMul and the AllReduce or ReduceScatter of its result, which follow "
            "one another chunk by chunk"
        )
    [product], [reduction] = products, reducers
    if reduction.operands[0] is not product:
        raise UsageError(
            f"cannot overlap {called(pipeline, product)} and {called(pipeline, reduction)}: a chunk of the one is not "
            "made of a chunk of the other"
        )
    check_single(pipeline, [product], "overlap")
    others = [user for user in pipeline.users[product] if user is not reduction]
    if others or product in pipeline.outputs:
        why = f"{called(pipeline, others[0])} needs all of it" if others else "it is an output"
        raise UsageError(f"cannot overlap {called(pipeline, product)}: {why}")
    return _with(pipeline, product, reduction, chunks)


def _with(pipeline: Pipeline, product: MatMul, reduction: Expression, chunks: int) -> Pipeline:
    around = compound_of(pipeline, reduction)
    if isinstance(around, Fused | Overlapped):
        check_single(pipeline, [reduction], "overlap")
    reducer: Reducer
    if isinstance(around, FusedAllReduce):
        reducer = around
    else:
        assert isinstance(reduction, AllReduce | ReduceScatter)
        reducer = reduction
    rest = [compound for compound in pipeline.compounds if compound is not around]
    return pipeline.changed({}, compounds=[*rest, Overlapped(product, reducer, chunks)])
