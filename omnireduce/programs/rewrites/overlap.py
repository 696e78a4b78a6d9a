"""Overlap of a MatMul with the reduction of its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, ReduceScatter
from omnireduce.programs.drawing import title
from omnireduce.programs.expressions import Expression, Tensor, formula
from omnireduce.programs.layouts import Layout, Sliced
from omnireduce.programs.operations import MatMul, Update
from omnireduce.programs.stages import Compound, Fused, FusedAllReduce, Overlapped, Reducer, rebuilt

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline
if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline
if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline
if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def called(pipeline: Pipeline, node: Expression) -> str:
    """An expression, for a message: its name, its formula, and its file and line."""
    name = pipeline.names.get(node)
    what = formula(node, pipeline.names)
    return f"{f'{name} = ' if name and name != what else ''}{what} ({node.place.file}:{node.place.line})"


def reason(error: UsageError) -> str:
    """The message of an error of the checker, without the place and the source line."""
    return str(error).split("\n")[0].split(": ", 1)[1]


def compound_of(pipeline: Pipeline, node: Expression) -> Compound | None:
    """The compound stage that contains this expression, or None."""
    return next((compound for compound in pipeline.compounds if node in compound.nodes), None)


def check_single(pipeline: Pipeline, nodes: Iterable[Expression], what: str) -> None:
    """Raises UsageError if one of `nodes` is part of a compound stage: how it runs is decided already."""
    for node in nodes:
        compound = compound_of(pipeline, node)
        if compound is not None:
            raise UsageError(f"cannot {what} {called(pipeline, node)}: it is {title(compound)} already; do this before")


def stage_list(pipeline: Pipeline, stages: Sequence[Handle], what: str) -> list[Expression]:
    """The expressions that `stages` name. Raises UsageError unless it is a list of stages."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise UsageError(f"cannot {what} {stages!r}: expected a list of stages, or of their names")
    return [pipeline[stage] for stage in stages]


def as_slice(pipeline: Pipeline, tensors: Sequence[Handle]) -> Pipeline:
    """Keep these Replicated tensors Sliced: rank i has the i-th part of each. Their Updates need no AllGather then.

    Callers of `run` give, and get, a part of each from now on. Raises UsageError for what is no Replicated tensor, and
    where something needs one of them whole: reorder that before the AllGather first.
    """
    wanted = stage_list(pipeline, tensors, "slice")
    changes: dict[Expression, Expression] = {}
    for expression in wanted:
        if not isinstance(expression, Tensor) or expression.type.layout is not Layout.REPLICATED:
            kind = "" if not isinstance(expression, Tensor) else f" is {expression.type.layout.value}"
            raise UsageError(f"cannot slice {called(pipeline, expression)}{kind}: expected a Replicated tensor")
        try:
            changes[expression] = expression.with_layout(Sliced)
        except UsageError as error:
            raise UsageError(f"cannot slice {expression.name}: {reason(error)}") from None
    for node in pipeline.nodes:
        if node not in changes:
            changes[node] = _rebuilt(pipeline, node, changes)
    other = [node for node in pipeline.nodes if changes[node].type != node.type]
    dropped = [node.value for node in pipeline.nodes if isinstance(node, Update) and node.tensor in wanted]
    check_single(pipeline, [*other, *dropped], "slice what gives")
    for expression in pipeline.outputs:
        if changes[expression].type.layout is not expression.type.layout and not _is_update_of(expression, wanted):
            names = ", ".join(tensor.text(()) for tensor in wanted)
            raise UsageError(f"cannot slice {names}: the output {called(pipeline, expression)} would come in parts")
    return pipeline.changed(changes)


def _is_update_of(node: Expression, tensors: Sequence[Expression]) -> bool:
    return isinstance(node, Update) and node.tensor in tensors


def _rebuilt(pipeline: Pipeline, node: Expression, changes: dict[Expression, Expression]) -> Expression:
    operands = [changes[operand] for operand in node.operands]
    if isinstance(node, Update) and operands[0] is not node.tensor:
        value = operands[1]
        if isinstance(value, AllGather) and value.operands[0].type.layout is Sliced:
            operands[1] = value.operands[0]
    try:
        return node.with_operands(operands)
    except UsageError as error:
        names = [
            input_node.text(())
            for input_node in pipeline.inputs
            if changes.get(input_node, input_node) is not input_node
        ]
        raise UsageError(
            f"cannot slice {', '.join(names)}: {called(pipeline, node)} needs the whole: {reason(error)}"
        ) from None


def split(pipeline: Pipeline, stage: Handle) -> Pipeline:
    """Do the AllReduce `stage` as an AllGather, which has its name, of a ReduceScatter, which has its name and `_rs`.

    Raises UsageError for another stage, and for one of a number: it has no dimension to cut.
    """
    node = pipeline[stage]
    if not isinstance(node, AllReduce):
        raise UsageError(f"cannot split {called(pipeline, node)}: expected an AllReduce")
    check_single(pipeline, [node], "split")
    try:
        scattered = ReduceScatter(node.reduction, node.operands[0]).with_operands(node.operands, node.place)
    except UsageError as error:
        raise UsageError(f"cannot split {called(pipeline, node)}: {reason(error)}") from None
    gathered = AllGather(scattered).with_operands([scattered], node.place)
    changes = rebuilt(pipeline.nodes, {node: gathered})
    return pipeline.changed(changes, names={scattered: f"{pipeline.names[node]}_rs"})


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
