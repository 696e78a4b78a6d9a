"""Operations that move values between ranks. Nothing else in a program communicates, except Norm and ReduceTensor of a
sliced tensor."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.programs.expressions import Expression, Type, as_expression, short
from omnireduce.programs.whole_tensor_operations import Reduction, check_reduction, moved_layout


class Communication(Expression):
    """An operation that ranks of a group do together."""

    def derive(self) -> Type:
        x = self.operands[0].type
        return Type(x.dtype, x.shape, moved_layout(self), x.group)


class Reducing(Communication):
    """A communication that combines the values of the ranks."""

    reduction: Reduction

    def __init__(self, reduction: Reduction, x: Expression) -> None:
        self.__dict__.update(reduction=reduction)
        super().__init__(as_expression(x))

    def derive(self) -> Type:
        check_reduction(self, self.reduction)
        return super().derive()

    def text(self, operands: Sequence[str]) -> str:
        return f"{type(self).__name__}({self.reduction!r}, {operands[0]})"


class AllReduce(Reducing):
    """The Local values of all ranks combined, element by element, in the order of ranks: Replicated."""


class ReduceScatter(Reducing):
    """A reduction of which rank i gets the i-th part: Sliced."""

    def derive(self) -> Type:
        result_type = super().derive()
        if not result_type.shape:
            raise self.refuse("the operand has no dimension along which it could be cut")
        return result_type


class AllGather(Communication):
    """All parts of a Sliced or Sliced_2 value, on every rank: Replicated."""

    def __init__(self, x: Expression) -> None:
        super().__init__(as_expression(x))


class Broadcast(Communication):
    """The Local value of rank `root` of the group, on every rank: Replicated."""

    root: int

    def __init__(self, x: Expression, root: int = 0) -> None:
        self.__dict__.update(root=root)
        super().__init__(as_expression(x))

    def derive(self) -> Type:
        if isinstance(self.root, bool) or not isinstance(self.root, int) or self.root < 0:
            raise self.refuse(f"root is {self.root!r}: expected a rank, from 0 on")
        return super().derive()

    def text(self, operands: Sequence[str]) -> str:
        return f"Broadcast({operands[0]}, root={self.root})"


class Send(Communication):
    """`x` on its way to the group `to`: rank i of one group sends what it has to rank i of the other. Recv takes it."""

    to: int
    is_under_way = True

    def __init__(self, x: Expression, to: int) -> None:
        self.__dict__.update(to=to)
        super().__init__(as_expression(x))

    @property
    def source(self) -> int:
        """The group that sends."""
        return self.operands[0].type.group or 0

    def derive(self) -> Type:
        if isinstance(self.to, bool) or not isinstance(self.to, int) or self.to < 0:
            raise self.refuse(f"to is {self.to!r}: expected a group of ranks, an int from 0 on")
        if self.operands[0].type.group is None:
            raise self.refuse(f"{short(self.operands[0])} is on all ranks already")
        if self.to == self.source:
            raise self.refuse(f"{short(self.operands[0])} is in group {self.to} already")
        return super().derive()

    def text(self, operands: Sequence[str]) -> str:
        return f"Send({operands[0]}, to={self.to})"


class Recv(Communication):
    """The value that a Send has sent, in the group that receives it, in the same layout."""

    takes_sent_values = True

    def __init__(self, sent: Send) -> None:
        super().__init__(as_expression(sent))

    def derive(self) -> Type:
        sent = self.operands[0]
        if not isinstance(sent, Send):
            raise self.refuse(f"{short(sent)} has not been sent: expected Recv(Send(x, to=1))")
        return super().derive()._replace(group=sent.to)
