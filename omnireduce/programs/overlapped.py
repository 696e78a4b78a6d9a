"""A MatMul in chunks of rows: the service reduces one while the next one is computed.

A chunk is reduced in place in the array of the whole product, so nothing is copied. The part of a ReduceScatter is then
cut out of that: over this service a ReduceScatter moves as much as an AllReduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from omnireduce.core.block_program import MAX_INSTRUCTIONS, MAX_SCALARS, MAX_TOTALS, Operation
from omnireduce.core.dtypes import Array
from omnireduce.programs.execution import Execution
from omnireduce.programs.expressions import Constant, Expression
from omnireduce.programs.layouts import bounds
from omnireduce.programs.operations import WholeReduction
from omnireduce.programs.stages import FusedAllReduce, Overlapped


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


def run_fused_all_reduce(stage: FusedAllReduce, run: Execution, reduced: Array | None = None) -> None:
    """ReduceScatter, compute on the parts, AllGather. All results become values of `run`.

    `reduced`: this rank's part of the sum, if that is known already.
    """
    for node in stage.nodes:
        if node is stage.reduce_scatter and reduced is not None:
            run.put(node, reduced)
        else:
            run.evaluate(node)


def run_overlapped(stage: Overlapped, run: Execution) -> None:
    """Evaluate the product and what reduces it, chunk by chunk."""
    matmul, reduction = stage.matmul, stage.reduction
    if not run.is_here(matmul):
        return
    left, right = (run.value(operand) for operand in matmul.operands)
    product = run.room(reduction, (*left.shape[:-1], right.shape[-1]))
    handles = []
    for chunk in range(stage.chunks):
        start, stop = bounds(len(left), chunk, stage.chunks)
        if start == stop:
            continue
        rows = product[start:stop]
        with run.shown(matmul, "MATMUL"):
            matmul.compute([left[start:stop], right], out=rows)
        handles.append(run.ranks.allreduce_async(rows, reduction.reduction, f"{run.name(reduction)}.chunk{chunk}"))
    for handle in handles:
        handle.wait()
    if isinstance(stage.reducer, FusedAllReduce):
        run_fused_all_reduce(stage.reducer, run, run.placement.part(product, reduction.type.layout))
    else:
        is_part = reduction.type.layout.is_sliced
        run.put(reduction, run.placement.part(product, reduction.type.layout) if is_part else product)
