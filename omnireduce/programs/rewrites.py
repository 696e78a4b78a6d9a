"""Rewrites: the same program, done another way. Each checks that it may be done, and otherwise says why not.

split      AllReduce           ->  ReduceScatter, AllGather
reorder    AllGather, compute  ->  compute on the parts, AllGather of what others need whole
as_slice   a Replicated tensor ->  a Sliced one, of which each rank keeps a part
fuse       element-wise stages ->  one pass; ReduceScatter, compute, AllGather -> one AllReduce
overlap    MatMul, reduction   ->  both at the same time, chunk by chunk

Why they are right. A Replicated and a Sliced value are the same tensor: they differ in where its elements lie. An
operation gives the same tensor whichever of the two its operands are, if the layout tables have a result for these at
all. So to replace one by the other changes nothing, wherever the rebuilt expression passes the checker; and `rebuilt`
has it checked. A Local value is another matter: no rewrite replaces one, but an AllReduce by its two halves. The last
two rewrites change no expression at all, only when it is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NoReturn

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather, AllReduce, ReduceScatter
from omnireduce.programs.drawing import title
from omnireduce.programs.expressions import Expression, Pointwise, Tensor, formula
from omnireduce.programs.layouts import Layout, Sliced
from omnireduce.programs.stages import Compound, Fused, FusedAllReduce, Overlapped, Reducer, between, reachable, rebuilt
from omnireduce.programs.whole_tensor_operations import MatMul, Update, WholeReduction

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def describe(pipeline: Pipeline, node: Expression) -> str:
    """An expression, for a message: its name, its formula, and its file and line."""
    name = pipeline.names.get(node)
    text = formula(node, pipeline.names)
    prefix = f"{name} = " if name and name != text else ""
    return f"{prefix}{text} ({node.source_line.file}:{node.source_line.line})"


def reason(error: UsageError) -> str:
    """The message of an error of the checker, without the place and the source line."""
    return str(error).split("\n")[0].split(": ", 1)[1]


def compound_of(pipeline: Pipeline, node: Expression) -> Compound | None:
    """The compound stage that contains this expression, or None."""
    return next((compound for compound in pipeline.compounds if node in compound.nodes), None)


def check_single(pipeline: Pipeline, nodes: Iterable[Expression], action: str) -> None:
    """Raises UsageError if one of `nodes` is part of a compound stage: how it runs is decided already."""
    for node in nodes:
        compound = compound_of(pipeline, node)
        if compound is not None:
            raise UsageError(
                f"cannot {action} {describe(pipeline, node)}: it is {title(compound)} already; do this before"
            )


def stage_list(pipeline: Pipeline, stages: Sequence[Handle], action: str) -> list[Expression]:
    """The expressions that `stages` name. Raises UsageError unless it is a list of stages."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise UsageError(f"cannot {action} {stages!r}: expected a list of stages, or of their names")
    return [pipeline[stage] for stage in stages]


def as_slice(pipeline: Pipeline, tensors: Sequence[Handle]) -> Pipeline:
    """Keep these Replicated tensors Sliced: rank i has the i-th part of each. Their Updates need no AllGather then.

    Callers of `run` give, and get, a part of each from now on. Raises UsageError for what is no Replicated tensor, and
    where something needs one of them whole: reorder that before the AllGather first.
    """
    chosen = stage_list(pipeline, tensors, "slice")
    changes: dict[Expression, Expression] = {}
    for expression in chosen:
        if not isinstance(expression, Tensor) or expression.type.layout is not Layout.REPLICATED:
            kind = "" if not isinstance(expression, Tensor) else f" is {expression.type.layout.value}"
            raise UsageError(f"cannot slice {describe(pipeline, expression)}{kind}: expected a Replicated tensor")
        try:
            changes[expression] = expression.with_layout(Sliced)
        except UsageError as error:
            raise UsageError(f"cannot slice {expression.name}: {reason(error)}") from None
    for node in pipeline.nodes:
        if node not in changes:
            changes[node] = _rebuilt(pipeline, node, changes)
    changed = [node for node in pipeline.nodes if changes[node].type != node.type]
    dropped = [node.value for node in pipeline.nodes if isinstance(node, Update) and node.tensor in chosen]
    check_single(pipeline, [*changed, *dropped], "slice what gives")
    for expression in pipeline.outputs:
        if changes[expression].type.layout is not expression.type.layout and not _is_update_of(expression, chosen):
            names = ", ".join(tensor.text(()) for tensor in chosen)
            raise UsageError(f"cannot slice {names}: the output {describe(pipeline, expression)} would come in parts")
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
            f"cannot slice {', '.join(names)}: {describe(pipeline, node)} needs the whole: {reason(error)}"
        ) from None


def split(pipeline: Pipeline, stage: Handle) -> Pipeline:
    """Do the AllReduce `stage` as an AllGather, which has its name, of a ReduceScatter, which has its name and `_rs`.

    Raises UsageError for another stage, and for one of a number: it has no dimension to cut.
    """
    node = pipeline[stage]
    if not isinstance(node, AllReduce):
        raise UsageError(f"cannot split {describe(pipeline, node)}: expected an AllReduce")
    check_single(pipeline, [node], "split")
    try:
        scattered = ReduceScatter(node.reduction, node.operands[0]).with_operands(node.operands, node.source_line)
    except UsageError as error:
        raise UsageError(f"cannot split {describe(pipeline, node)}: {reason(error)}") from None
    gathered = AllGather(scattered).with_operands([scattered], node.source_line)
    changes = rebuilt(pipeline.nodes, {node: gathered})
    return pipeline.changed(changes, names={scattered: f"{pipeline.names[node]}_rs"})


MAX_CHUNKS = 1024


def overlap(pipeline: Pipeline, stages: Sequence[Handle], *, chunks: int = 4) -> Pipeline:
    """Compute a MatMul in `chunks` of rows, and reduce each while the next one is computed.

    `stages`: the MatMul, and the AllReduce or ReduceScatter of its result, also one that is part of a fused AllReduce.
    Raises UsageError for other stages: those do not depend on one another chunk by chunk.
    """
    if isinstance(chunks, bool) or not isinstance(chunks, int) or not 2 <= chunks <= MAX_CHUNKS:
        raise UsageError(f"chunks is {chunks!r}: expected an int from 2 to {MAX_CHUNKS}")
    nodes = stage_list(pipeline, stages, "overlap")
    products = [node for node in nodes if isinstance(node, MatMul)]
    reducers = [node for node in nodes if isinstance(node, AllReduce | ReduceScatter)]
    if len(products) != 1 or len(reducers) != 1 or len(nodes) != 2:
        names = " and ".join(describe(pipeline, node) for node in nodes)
        raise UsageError(
            f"cannot overlap {names}: expected a MatMul and the AllReduce or ReduceScatter of its result, which follow "
            "one another chunk by chunk"
        )
    [product], [reduction] = products, reducers
    if reduction.operands[0] is not product:
        raise UsageError(
            f"cannot overlap {describe(pipeline, product)} and {describe(pipeline, reduction)}: a chunk of the one is "
            "not made of a chunk of the other"
        )
    check_single(pipeline, [product], "overlap")
    other_users = [user for user in pipeline.users[product] if user is not reduction]
    if other_users or product in pipeline.outputs:
        cause = f"{describe(pipeline, other_users[0])} needs all of it" if other_users else "it is an output"
        raise UsageError(f"cannot overlap {describe(pipeline, product)}: {cause}")
    return _overlapped(pipeline, product, reduction, chunks)


def _overlapped(pipeline: Pipeline, product: MatMul, reduction: Expression, chunks: int) -> Pipeline:
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


def reorder(pipeline: Pipeline, stages: Sequence[Handle], gather: Handle) -> Pipeline:
    """Compute `stages`, which depend on the AllGather `gather`, and all that lies between, on the parts before it.

    The results that other stages need whole are gathered then, under their names with `_ag`. `gather` itself stays
    where something else needs it. An Update among the stages takes its new value gathered, if its tensor is Replicated.

    Raises UsageError where a stage does not depend on `gather`, or cannot be computed part by part.
    """
    node = pipeline[gather]
    if not isinstance(node, AllGather):
        raise UsageError(f"cannot reorder over {describe(pipeline, node)}: expected an AllGather")
    chosen = stage_list(pipeline, stages, "reorder")
    depending = reachable([node], pipeline.users)
    for stage in chosen:
        if stage not in depending:
            raise UsageError(f"cannot reorder {describe(pipeline, stage)}: it does not need {describe(pipeline, node)}")
    moved = between(pipeline.nodes, [node, *chosen]) - {node}
    check_single(pipeline, [node, *moved], "reorder")
    return _Reordering(pipeline, node, moved).result()


class _Reordering:
    """The program, expression by expression: `whole` is what each has become for those that are not moved, `parts`
    what it is before the AllGather."""

    def __init__(self, pipeline: Pipeline, gather: AllGather, moved: set[Expression]) -> None:
        self._pipeline, self._gather, self._moved = pipeline, gather, moved
        self._whole: dict[Expression, Expression] = {}
        self._parts: dict[Expression, Expression] = {}
        self._gathered: dict[Expression, Expression] = {}  # by the part
        self._names: dict[Expression, str] = {}

    def result(self) -> Pipeline:
        for node in self._pipeline.nodes:
            if node is self._gather:
                self._parts[node] = self._take(node.operands[0])
                self._gathered[self._parts[node]] = node.with_operands([self._parts[node]])
            elif node in self._moved:
                self._move(node)
            else:
                self._whole[node] = node.with_operands([self._take(operand) for operand in node.operands])
        outputs = [self._take(output) for output in self._pipeline.outputs]
        stay = {node: self._whole.get(node, self._parts.get(node)) for node in self._pipeline.nodes}
        changes = {node: new for node, new in stay.items() if new is not None}
        changes[self._gather] = self._gathered[self._parts[self._gather]]
        return self._pipeline.changed(changes, outputs=outputs, names=self._names)

    def _take(self, node: Expression) -> Expression:
        """`node` for one that is not moved: gathered, if it is there in parts only."""
        if node in self._whole:
            return self._whole[node]
        return self._gather_part(self._parts[node], node)

    def _gather_part(self, part: Expression, node: Expression) -> Expression:
        """All of `part`, which `node` has become."""
        if part not in self._gathered:
            gathered = AllGather(part).with_operands([part], node.source_line)
            self._gathered[part] = gathered
            name = self._pipeline.names.get(node)
            if name is not None:
                self._names[gathered] = f"{name}_ag"
        return self._gathered[part]

    def _move(self, node: Expression) -> None:
        operands = [
            self._parts[operand] if operand in self._parts else self._whole[operand] for operand in node.operands
        ]
        if isinstance(node, Update):
            self._move_update(node, operands[1])
            return
        try:
            new_node = node.with_operands(operands)
        except UsageError as error:
            self._refuse(node, reason(error))
        if new_node.type.layout.is_sliced:
            self._parts[node] = new_node
        elif new_node.type.layout is node.type.layout:
            self._whole[node] = new_node
        else:
            self._refuse(node, f"it would be {new_node.type.layout.value}, another one on each rank")

    def _move_update(self, node: Update, value: Expression) -> None:
        """Others that are moved take the new value in parts; the tensor takes it as it is kept."""
        tensor = self._whole[node.tensor]
        if value.type.layout.is_sliced:
            self._parts[node] = value
            if not tensor.type.layout.is_sliced:
                value = self._gather_part(value, node)
        try:
            self._whole[node] = node.with_operands([tensor, value])
        except UsageError as error:
            self._refuse(node, reason(error))

    def _refuse(self, node: Expression, cause: str) -> NoReturn:
        gather_text = describe(self._pipeline, self._gather)
        raise UsageError(f"cannot reorder {describe(self._pipeline, node)} over {gather_text}: on parts, {cause}")


def fuse(pipeline: Pipeline, stages: Sequence[Handle]) -> Pipeline:
    """Evaluate element-wise `stages` in one pass: what only they need is never stored whole.

    Raises UsageError for stages that are not element-wise, differ in shape or layout, or would form a cycle together:
    where one needs what another stage makes of the result of a third.
    """
    nodes = _members(pipeline, stages, "fuse")
    for node in nodes:
        if not isinstance(node, Pointwise | Update):
            raise UsageError(f"cannot fuse {describe(pipeline, node)}: it is not done element by element")
    shaped = [node for node in nodes if node.type.shape]
    computed = [node for node in shaped if isinstance(node, Pointwise)]
    if len(shaped) < 2 or not computed:
        raise UsageError(f"cannot fuse {describe(pipeline, nodes[-1])}: expected two operations on tensors at least")
    first = next((node for node in computed if node.type.layout is not Layout.REPLICATED), computed[0])
    members = set(nodes)
    for node in shaped:
        kind = node.value.type if isinstance(node, Update) else node.type
        if first.type.layout.is_sliced and _is_used_in_parts(pipeline, node, members):
            kind = kind._replace(layout=first.type.layout)
        if (kind.shape, kind.layout, kind.group) != (first.type.shape, first.type.layout, first.type.group):
            raise UsageError(
                f"cannot fuse {describe(pipeline, first)} and {describe(pipeline, node)}: one is {first.type}, the "
                f"other {kind}; expected one shape and layout"
            )
    return _add_compound(pipeline, Fused(tuple(nodes)), "fuse")


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
    return _add_compound(pipeline, FusedAllReduce(tuple(nodes)), "fuse")


def _check_member(pipeline: Pipeline, node: Expression, members: set[Expression]) -> None:
    """Raises UsageError for what is not part of an AllReduce with computations inside."""
    leaves = node in pipeline.outputs or any(user not in members for user in pipeline.users[node])
    if leaves and node.type.shape and not isinstance(node, AllGather | Update):
        raise UsageError(
            f"cannot fuse {describe(pipeline, node)} into an AllReduce: it is needed outside, and not gathered"
        )
    if isinstance(node, ReduceScatter):
        return
    if not isinstance(node, Pointwise | Update | AllGather | WholeReduction):
        raise UsageError(f"cannot fuse {describe(pipeline, node)} into an AllReduce: expected element-wise stages")
    if isinstance(node, AllGather | Update) and node.operands[-1] not in members:
        raise UsageError(
            f"cannot fuse {describe(pipeline, node)} into an AllReduce: what it takes is not computed there"
        )
    is_cut = node.type.layout is Layout.SLICED or _is_used_in_parts(pipeline, node, members)
    if isinstance(node, Pointwise) and node.type.shape and not is_cut:
        raise UsageError(
            f"cannot fuse {describe(pipeline, node)} into an AllReduce: it is {node.type.layout.value}; expected what "
            "is computed on the parts of the ReduceScatter"
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


def _members(pipeline: Pipeline, stages: Sequence[Handle], action: str) -> list[Expression]:
    """The expressions of these stages, in order."""
    chosen = stage_list(pipeline, stages, action)
    members = {node for stage in chosen for node in pipeline.belonging_to(stage)}
    nodes = [node for node in pipeline.nodes if node in members]
    check_single(pipeline, nodes, action)
    return nodes


def _add_compound(pipeline: Pipeline, compound: Fused | FusedAllReduce, action: str) -> Pipeline:
    try:
        return pipeline.changed({}, compounds=[*pipeline.compounds, compound])
    except UsageError as error:
        raise UsageError(f"cannot {action} {', '.join(_names(pipeline, compound.nodes))}: {error}") from None


def _names(pipeline: Pipeline, nodes: Sequence[Expression]) -> list[str]:
    return [pipeline.names[node] for node in nodes if node in pipeline.names]
