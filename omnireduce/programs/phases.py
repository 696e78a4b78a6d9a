"""The instructions of one exchange, before the numbers in them are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from omnireduce.block_program import Operation
from omnireduce.programs.expressions import Expression
from omnireduce.programs.operations import WholeReduction


class Scalar(NamedTuple):
    """A number of an instruction: that of a node without dimensions, or its negative."""

    node: Expression
    negated: bool = False


@dataclass
class Phase:
    """The instructions of one exchange: the code without its scalars, these, and the totals that it gives."""

    code: list[tuple[Operation, int, int, int]] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    totals: list[WholeReduction] = field(default_factory=list)

    def add(self, operation: Operation, target: int, operand: int = 0, *scalars: Scalar, third: int = 0) -> None:
        place = len(self.scalars) if scalars else third
        self.scalars += scalars
        self.code.append((operation, target, operand, place))
