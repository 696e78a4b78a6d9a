"""The instructions of one exchange, before the numbers in them are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from omnireduce.block_program import MAX_INSTRUCTIONS, MAX_SCALARS, MAX_TOTALS, Operation
from omnireduce.programs.expressions import Constant, Expression
from omnireduce.programs.operations import WholeReduction


class Scalar(NamedTuple):
    """A number of an instruction: that of a node without dimensions, or its negative."""

    node: Expression
    negated: bool = False

    @property
    def key(self) -> tuple[object, bool]:
        """The same for equal ones."""
        return (self.node.array.tobytes() if isinstance(self.node, Constant) else self.node), self.negated


@dataclass
class Phase:
    """The instructions of one exchange: the code without its scalars, these, and the totals that it gives."""

    code: list[tuple[Operation, int, int, int]] = field(default_factory=list)
    scalars: list[Scalar] = field(default_factory=list)
    totals: list[WholeReduction] = field(default_factory=list)

    def add(self, operation: Operation, target: int, operand: int = 0, *scalars: Scalar, third: int = 0) -> None:
        place = self._place_of(list(scalars)) if scalars else third
        self.code.append((operation, target, operand, place))

    def _place_of(self, wanted: list[Scalar]) -> int:
        """Where these scalars stand, one behind the other."""
        for at in range(len(self.scalars) - len(wanted) + 1):
            if [scalar.key for scalar in self.scalars[at : at + len(wanted)]] == [scalar.key for scalar in wanted]:
                return at
        self.scalars += wanted
        return len(self.scalars) - len(wanted)

    @property
    def sizes(self) -> list[tuple[str, int, int]]:
        """What has a limit: what it is, how many there are, and how many there may be."""
        return [
            ("instructions", len(self.code), MAX_INSTRUCTIONS),
            ("numbers", len(self.scalars), MAX_SCALARS),
            ("norms and sums", len(self.totals), MAX_TOTALS),
        ]
