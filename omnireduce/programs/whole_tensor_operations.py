"""Operations that are not done element by element: matrices, norms, sums, and the new value of a tensor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np

from omnireduce.core.descriptor import Op, neutral_element
from omnireduce.core.dtypes import Array
from omnireduce.programs.expressions import (
    FLOATS,
    Bool,
    Expression,
    Float64,
    Tensor,
    Type,
    as_expression,
    common_group,
    is_narrow,
    short,
)
from omnireduce.programs.layouts import MATMUL, MOVES, UPDATE, Layout


class Reduction(Enum):
    """A reduction: how values are combined."""

    SUMMATION = "Summation"
    MULTIPLICATION = "Multiplication"
    MAXIMUM = "Maximum"
    MINIMUM = "Minimum"

    def __repr__(self) -> str:
        return self.value

    @property
    def op(self) -> Op:
        """The service's name of the reduction."""
        ops: dict[Reduction, Op] = {
            Summation: "sum",
            Multiplication: "prod",
            Maximum: "max",
            Minimum: "min",
        }
        return ops[self]

    @property
    def ufunc(self) -> np.ufunc:
        """The NumPy function that combines two arrays."""
        return {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[self.op]


Summation, Multiplication = Reduction.SUMMATION, Reduction.MULTIPLICATION
Maximum, Minimum = Reduction.MAXIMUM, Reduction.MINIMUM


def check_reduction(node: Expression, reduction: object) -> Reduction:
    """`reduction` itself. Raises UsageError unless it is one, and `node` has numbers to reduce."""
    if not isinstance(reduction, Reduction):
        raise node.refuse(f"{reduction!r}: expected Summation, Multiplication, Maximum or Minimum")
    if node.operands[0].type.dtype == Bool:
        raise node.refuse("the operand is bool: expected numbers; Cast it")
    return reduction


def moved_layout(node: Expression) -> Layout:
    """The layout of an operation of one operand. Raises UsageError where there is none."""
    x = node.operands[0]
    rule = MOVES[type(node).__name__][x.type.layout]
    if not isinstance(rule, Layout):
        raise node.refuse(f"{short(x)} is {x.type.layout.value}: {rule}")
    return rule


class Update(Expression):
    """The new value of `tensor`, which is written in place when the program has run. Its value is `value`.

    In the rest of the program the tensor itself stands for what it was at the start.
    """

    def __init__(self, tensor: Tensor, value: Expression) -> None:
        super().__init__(as_expression(tensor), as_expression(value))

    @property
    def tensor(self) -> Tensor:
        tensor = self.operands[0]
        if not isinstance(tensor, Tensor):
            raise self.refuse(f"{short(tensor)} is no Tensor: only those can be updated")
        return tensor

    @property
    def value(self) -> Expression:
        return self.operands[1]

    def derive(self) -> Type:
        tensor, value = self.tensor.type, self.value.type
        if tensor.dtype != value.dtype or tensor.shape != value.shape:
            raise self.refuse(f"the tensor is {tensor}, its new value {value}: expected the same type and shape")
        rule = UPDATE[tensor.layout, value.layout]
        if not isinstance(rule, Layout):
            layouts = f"the tensor is {tensor.layout.value}, its new value {value.layout.value}"
            raise self.refuse(f"{layouts}: {rule}")
        common_group(self)
        return tensor


class MatMul(Expression):
    """The matrix product of `left`, (..., K), and `right`, (K, M). Sums of 16-bit floats are kept in float32."""

    def __init__(self, left: Expression, right: Expression) -> None:
        super().__init__(as_expression(left), as_expression(right))

    def derive(self) -> Type:
        left, right = (operand.type for operand in self.operands)
        if len(left.shape) < 2 or len(right.shape) != 2 or left.shape[-1] != right.shape[0]:
            raise self.refuse(f"the factors are {left} and {right}: expected shapes (..., K) and (K, M)")
        if left.dtype != right.dtype or left.dtype == Bool:
            raise self.refuse(f"the factors are {left} and {right}: expected numbers of one type; Cast one of them")
        rule = MATMUL[left.layout, right.layout]
        if not isinstance(rule, Layout):
            raise self.refuse(f"{left.layout.value} times {right.layout.value}: {rule}")
        return Type(left.dtype, (*left.shape[:-1], right.shape[1]), rule, common_group(self))

    def compute(self, arrays: Sequence[Array], out: Array | None = None) -> Array:
        """The product of what a rank has of both, in `out` if that is given."""
        left, right = arrays
        with np.errstate(all="ignore"):  # as in `placement.compute`
            if not is_narrow(self.type.dtype):
                array: Array = np.matmul(left, right, out=out)
                return array
            product = np.matmul(left.astype(np.float32), right.astype(np.float32))
            out = np.empty(product.shape, self.type.dtype) if out is None else out
            out[...] = product
            return out


class WholeReduction(Expression):
    """One number of all elements of a tensor. If the tensor is sliced, the ranks combine the results of their parts, so
    that all have the number. Sums of floats are kept in float64 and rounded once."""

    reduction: Reduction

    @property
    def partial_dtype(self) -> np.dtype[Any]:
        """The type of a part's contribution."""
        dtype = self.operands[0].type.dtype
        return Float64 if dtype in FLOATS else dtype

    @abstractmethod
    def partial(self, array: Array) -> Array:
        """The contribution of a part: an array of one element."""

    def finish(self, combined: Array) -> Array:
        """The result, from what all parts give together."""
        converted: Array = combined.astype(self.type.dtype)
        return converted


class Norm(WholeReduction):
    """The Euclidean norm of all elements of `x`, of a float type."""

    reduction = Summation

    def __init__(self, x: Expression) -> None:
        super().__init__(as_expression(x))

    def derive(self) -> Type:
        x = self.operands[0].type
        if x.dtype not in FLOATS:
            raise self.refuse(f"the operand is {x.dtype}: expected a float type; Cast it")
        return Type(x.dtype, (), moved_layout(self), x.group)

    def partial(self, array: Array) -> Array:
        flat = array.astype(np.float64).reshape(-1)
        return np.asarray(flat @ flat).reshape(1)

    def finish(self, combined: Array) -> Array:
        return super().finish(np.sqrt(combined))


class ReduceTensor(WholeReduction):
    """All elements of `x` combined to one number by `reduction`."""

    def __init__(self, reduction: Reduction, x: Expression) -> None:
        self.__dict__.update(reduction=reduction)
        super().__init__(as_expression(x))

    def derive(self) -> Type:
        check_reduction(self, self.reduction)
        x = self.operands[0].type
        return Type(x.dtype, (), moved_layout(self), x.group)

    def partial(self, array: Array) -> Array:
        flat = array.astype(self.partial_dtype).reshape(-1)
        if not flat.size:
            return np.full(1, neutral_element(self.reduction.op, self.partial_dtype), self.partial_dtype)
        return np.asarray(self.reduction.ufunc.reduce(flat, dtype=self.partial_dtype)).reshape(1)

    def text(self, operands: Sequence[str]) -> str:
        return f"ReduceTensor({self.reduction!r}, {operands[0]})"
