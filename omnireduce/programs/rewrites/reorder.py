"""Computations before an AllGather instead of behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllGather
from omnireduce.programs.expressions import Expression
from omnireduce.programs.operations import Update
from omnireduce.programs.rewrites.overlap import called, check_single, reason, stage_list
from omnireduce.programs.stages import between, reachable

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def reorder(pipeline: Pipeline, stages: Sequence[Handle], gather: Handle) -> Pipeline:
    """Compute `stages`, which depend on the AllGather `gather`, and all that lies between, on the parts before it.

    What others need whole of them is gathered then, under their names and `_ag`. `gather` itself stays where something
    else needs it. An Update among the stages takes its new value gathered, if its tensor is Replicated.

    Raises UsageError where a stage does not depend on `gather`, or cannot be computed part by part.
    """
    node = pipeline[gather]
    if not isinstance(node, AllGather):
        raise UsageError(f"cannot reorder over {called(pipeline, node)}: expected an AllGather")
    wanted = stage_list(pipeline, stages, "reorder")
    depending = reachable([node], pipeline.users)
    for stage in wanted:
        if stage not in depending:
            raise UsageError(f"cannot reorder {called(pipeline, stage)}: it does not need {called(pipeline, node)}")
    moved = between(pipeline.nodes, [node, *wanted]) - {node}
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
            made = AllGather(part).with_operands([part], node.place)
            self._gathered[part] = made
            name = self._pipeline.names.get(node)
            if name is not None:
                self._names[made] = f"{name}_ag"
        return self._gathered[part]

    def _move(self, node: Expression) -> None:
        operands = [
            self._parts[operand] if operand in self._parts else self._whole[operand] for operand in node.operands
        ]
        if isinstance(node, Update):
            self._move_update(node, operands[1])
            return
        try:
            made = node.with_operands(operands)
        except UsageError as error:
            self._refuse(node, reason(error))
        if made.type.layout.is_sliced:
            self._parts[node] = made
        elif made.type.layout is node.type.layout:
            self._whole[node] = made
        else:
            self._refuse(node, f"it would be {made.type.layout.value}, another one on each rank")

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

    def _refuse(self, node: Expression, why: str) -> NoReturn:
        where = called(self._pipeline, self._gather)
        raise UsageError(f"cannot reorder {called(self._pipeline, node)} over {where}: on parts, {why}")
