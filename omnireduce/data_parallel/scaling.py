"""Operations that combine tensors, and factors before and after them, by Horovod's names."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.data_parallel.queue import QueueOp
from omnireduce.data_parallel.session import ProcessSet
from omnireduce.errors import UsageError

Average: QueueOp = "mean"
Sum: QueueOp = "sum"
Adasum: QueueOp = "adasum"
Min: QueueOp = "min"
Max: QueueOp = "max"
Product: QueueOp = "prod"
OPS = {"Average": Average, "Sum": Sum, "Adasum": Adasum, "Min": Min, "Max": Max, "Product": Product}


class Scaling(NamedTuple):
    """An operation that combines tensors. They are multiplied by `prescale` before it, the result by `postscale` after
    it."""

    op: QueueOp = Average
    prescale: float = 1.0
    postscale: float = 1.0

    def predivided(self, factor: float, size: int) -> Scaling:
        """For a mean over `size` ranks: divide by `factor` before the sum, and by the rest of `size` after it. Raises
        UsageError for a factor that cannot be, and for another op."""
        if factor <= 0:
            raise UsageError(f"gradient_predivide_factor is {factor}: expected more than 0")
        if factor == 1:
            return self
        if self.op != Average:
            raise UsageError(f"gradient_predivide_factor with op {self.op!r}: expected op=Average")
        return Scaling(Sum, 1 / factor, factor / size)


def make_scaling(average: bool | None, op: QueueOp | None, prescale: float = 1.0, postscale: float = 1.0) -> Scaling:
    """The operation that a caller asks for. Older programs say `average`. Raises UsageError if both are given, and for
    an unknown op."""
    if average is not None and op is not None:
        raise UsageError("average and op are both given; expected one of them: op=Average or op=Sum")
    if op is None:
        op = Sum if average is False else Average
    if op not in OPS.values():
        raise UsageError(f"op {op!r}: expected {', '.join(OPS)}")
    return Scaling(op, prescale, postscale)


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """The number in its set of a rank of the job. Raises UsageError where the set has none."""
    members = process_set.members()
    if root_rank not in members:
        raise UsageError(f"root_rank {root_rank}: expected one of the ranks {members}")
    return members.index(root_rank)
