"""Replicated tensors as Sliced ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather
from omnireduce.programs.expressions import Expression, Tensor
from omnireduce.programs.layouts import Layout, Sliced
from omnireduce.programs.operations import Update
from omnireduce.programs.rewrites.parts import called, check_single, reason, stage_list

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


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
