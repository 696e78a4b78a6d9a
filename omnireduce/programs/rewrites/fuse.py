"""Fusion of several stages into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, ReduceScatter
from omnireduce.programs.expressions import Expression
from omnireduce.programs.layouts import Layout
from omnireduce.programs.operations import Update, WholeReduction
from omnireduce.programs.pointwise import Pointwise
from omnireduce.programs.rewrites.overlap import called, check_single, stage_list
from omnireduce.programs.stages import Fused, FusedAllReduce, between

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def fuse(pipeline: Pipeline, stages: Sequence[Handle]) -> Pipeline:
    """Evaluate element-wise `stages` in one pass: what only they need is never stored whole.

    Raises UsageError for stages that are not element-wise, differ in shape or layout, or would form a cycle together:
    where one needs what another stage makes of the result of a third.
    """
    nodes = _members(pipeline, stages, "fuse")
    for node in nodes:
        if not isinstance(node, Pointwise | Update):
            raise UsageError(f"cannot fuse {called(pipeline, node)}: it is not done element by element")
    shaped = [node for node in nodes if node.type.shape]
    computed = [node for node in shaped if isinstance(node, Pointwise)]
    if len(shaped) < 2 or not computed:
        raise UsageError(f"cannot fuse {called(pipeline, nodes[-1])}: expected two operations on tensors at least")
    first = next((node for node in computed if node.type.layout is not Layout.REPLICATED), computed[0])
    members = set(nodes)
    for node in shaped:
        kept = node.value.type if isinstance(node, Update) else node.type
        if first.type.layout.is_sliced and _is_used_in_parts(pipeline, node, members):
            kept = kept._replace(layout=first.type.layout)
        if (kept.shape, kept.layout, kept.group) != (first.type.shape, first.type.layout, first.type.group):
            raise UsageError(
                f"cannot fuse {called(pipeline, first)} and {called(pipeline, node)}: one is {first.type}, the other "
                f"{kept}; expected one shape and layout"
            )
    return _with(pipeline, Fused(tuple(nodes)), "fuse")


def fuse_into(pipeline: Pipeline, stages: Sequence[Handle], operation: type[AllReduce] = AllReduce) -> Pipeline:
    """Put a ReduceScatter, what is computed on its parts, and the AllGathers of that into one AllReduce.

    `stages`: the first and the last ones; what lies between belongs to it, too. Updates of tensors may be among them.
    Raises UsageError for anything else than an AllReduce, for stages that are not of these kinds, and for results that
    others need in parts.
    """
    if operation is not AllReduce:
        raise UsageError(f"cannot fuse into {getattr(operation, '__name__', operation)}: expected AllReduce")
    inside = between(pipeline.nodes, _members(pipeline, stages, "fuse"))
    members = {node for stage in inside for node in pipeline.belonging_to(stage)}
    nodes = [node for node in pipeline.nodes if node in members]
    check_single(pipeline, nodes, "fuse")
    scatters = [node for node in nodes if isinstance(node, ReduceScatter)]
    if len(scatters) != 1:
        raise UsageError(f"cannot fuse {len(scatters)} ReduceScatters into an AllReduce: expected one")
    for node in nodes:
        _check_member(pipeline, node, members)
    if not any(isinstance(node, AllGather) for node in nodes):
        raise UsageError("cannot fuse into an AllReduce without an AllGather: nothing would come back whole")
    return _with(pipeline, FusedAllReduce(tuple(nodes)), "fuse")


def _check_member(pipeline: Pipeline, node: Expression, members: set[Expression]) -> None:
    """Raises UsageError for what is not part of an AllReduce with computations inside."""
    leaves = node in pipeline.outputs or any(user not in members for user in pipeline.users[node])
    if leaves and node.type.shape and not isinstance(node, AllGather | Update):
        raise UsageError(
            f"cannot fuse {called(pipeline, node)} into an AllReduce: it is needed outside, and not gathered"
        )
    if isinstance(node, ReduceScatter):
        return
    if not isinstance(node, Pointwise | Update | AllGather | WholeReduction):
        raise UsageError(f"cannot fuse {called(pipeline, node)} into an AllReduce: expected element-wise stages")
    if isinstance(node, AllGather | Update) and node.operands[-1] not in members:
        raise UsageError(f"cannot fuse {called(pipeline, node)} into an AllReduce: what it takes is not computed there")
    is_cut = node.type.layout is Layout.SLICED or _is_used_in_parts(pipeline, node, members)
    if isinstance(node, Pointwise) and node.type.shape and not is_cut:
        raise UsageError(
            f"cannot fuse {called(pipeline, node)} into an AllReduce: it is {node.type.layout.value}; expected what is "
            "computed on the parts of the ReduceScatter"
        )


def _is_used_in_parts(pipeline: Pipeline, node: Expression, members: set[Expression]) -> bool:
    """Whether a Replicated operation on elements is only for others of `members`, and made of nothing that is gathered
    there: then each rank can compute a part of it."""
    if not isinstance(node, Pointwise) or node.type.layout is not Layout.REPLICATED or node in pipeline.outputs:
        return False
    inside = [operand for operand in node.operands if operand in members and operand.type.shape]
    return all(isinstance(operand, Pointwise) for operand in inside) and all(
        isinstance(user, Pointwise) and user in members for user in pipeline.users[node]
    )


def _members(pipeline: Pipeline, stages: Sequence[Handle], what: str) -> list[Expression]:
    """The expressions of these stages, in order."""
    wanted = stage_list(pipeline, stages, what)
    members = {node for stage in wanted for node in pipeline.belonging_to(stage)}
    nodes = [node for node in pipeline.nodes if node in members]
    check_single(pipeline, nodes, what)
    return nodes


def _with(pipeline: Pipeline, compound: Fused | FusedAllReduce, what: str) -> Pipeline:
    try:
        return pipeline.changed({}, compounds=[*pipeline.compounds, compound])
    except UsageError as error:
        raise UsageError(f"cannot {what} {', '.join(_names(pipeline, compound.nodes))}: {error}") from None


def _names(pipeline: Pipeline, nodes: Sequence[Expression]) -> list[str]:
    return [pipeline.names[node] for node in nodes if node in pipeline.names]
