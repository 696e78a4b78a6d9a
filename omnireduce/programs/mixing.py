"""Operations of which shards do several with one instruction: products of a number and a tensor that are added."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from omnireduce.core.block_program import Operation
from omnireduce.programs.expressions import Expression
from omnireduce.programs.operations import Update
from omnireduce.programs.overlapped import Scalar
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.pointwise import Arithmetic


class Scaled(NamedTuple):
    """A product of a number and a tensor."""

    product: Expression
    number: Expression
    tensor: Expression


class Mix(NamedTuple):
    """An instruction for several operations, of which those in `absorbed` are no work of their own."""

    operation: Operation
    first: Expression
    second: Expression
    scalars: tuple[Scalar, ...]
    absorbed: list[Expression]


class Mixing:
    """The mixes of a program. `phase_of`: when each expression is computed; `updated`: which value is for what.

    `mixes`: by the last operation of each; `absorbed`: the others, which are no work of their own.
    """

    def __init__(
        self, pipeline: Pipeline, phase_of: Mapping[Expression, int], updated: Mapping[Expression, Update]
    ) -> None:
        self._pipeline, self._phase_of, self._updated = pipeline, phase_of, updated
        self.mixes, self.absorbed = dict[Expression, Mix](), set[Expression]()
        for node in reversed(pipeline.nodes):
            if node not in self.absorbed and (mix := self._combined(node)) is not None:
                self.mixes[node] = mix
                self.absorbed.update(mix.absorbed)

    def _combined(self, node: Expression) -> Mix | None:
        """`a * x + b * y`, `a * x + b * (y * y)`, `x + b * y` or `x - b * y` as one instruction, if `node` is that."""
        if not isinstance(node, Arithmetic) or node.symbol not in "+-" or not all(x.type.shape for x in node.operands):
            return None
        one, other = node.operands
        if one is other:
            return None
        first, second = self._scaled(one, node), self._scaled(other, node)
        if node.symbol == "+" and first and second:
            if self._updates(node, second.tensor):
                first, second, one, other = second, first, other, one
            square = self._squared(second.tensor, second.product)
            absorbed = [first.product, second.product, *([second.tensor] if square is not None else [])]
            operation = Operation.MIX if square is None else Operation.MIX_SQUARE
            operand = second.tensor if square is None else square
            if operand is first.tensor:
                return None
            return Mix(operation, first.tensor, operand, (Scalar(first.number), Scalar(second.number)), absorbed)
        if node.symbol == "+" and first and not second:
            one, second = other, first
        if second is None or second.tensor is one:
            return None
        number = Scalar(second.number, negated=node.symbol == "-")
        return Mix(Operation.ADD_SCALED, one, second.tensor, (number,), [second.product])

    def _updates(self, node: Expression, tensor: Expression) -> bool:
        return node in self._updated and self._updated[node].tensor is tensor

    def _is_inner(self, node: Expression, user: Expression) -> bool:
        """Whether only `user` needs it, in the same phase."""
        same = self._phase_of[node] == self._phase_of[user]
        others = [other for other in self._pipeline.users[node] if other is not user]
        return same and not others and node not in self._updated and node not in self._pipeline.outputs

    def _scaled(self, node: Expression, user: Expression) -> Scaled | None:
        """Of `number * tensor` its parts."""
        if not isinstance(node, Arithmetic) or node.symbol != "*" or not self._is_inner(node, user):
            return None
        one, other = node.operands
        if bool(one.type.shape) == bool(other.type.shape):
            return None
        return Scaled(node, other, one) if one.type.shape else Scaled(node, one, other)

    def _squared(self, node: Expression, user: Expression) -> Expression | None:
        """Of `tensor * tensor` the tensor."""
        is_square = isinstance(node, Arithmetic) and node.symbol == "*" and node.operands[0] is node.operands[1]
        return node.operands[0] if is_square and self._is_inner(node, user) else None
