"""Operations that make each element of their result from the elements at the same place of their operands.

Operands are broadcast by NumPy's rule: a dimension of 1, or one that is missing in front, is repeated.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.draws import block_keys, fill_uniform, stream_key
from omnireduce.programs.expressions import (
    FLOATS,
    Bool,
    Constant,
    Dimension,
    DType,
    Expression,
    Number,
    Region,
    Type,
    as_expression,
    check_dtype,
    common_group,
    short,
)
from omnireduce.programs.layouts import POINTWISE, Layout, folded
from omnireduce.programs.source_lines import line_of_user, wrong


def uniforms(seed: int, step: int, region: Region, shape: tuple[int, ...]) -> Array:
    """Numbers from 0 up to but not including 1, float32, for the elements of `region`, which has this shape."""
    out = np.empty(shape, np.float32)
    if not out.size:
        return out
    key = stream_key(seed, step, region.stream)
    strides = [math.prod(region.whole[at + 1 :]) for at in range(len(region.whole))]
    origin = sum(start * stride for start, stride in zip(region.starts, strides, strict=True))
    if len(shape) < 2 or shape[-1] == region.whole[-1]:  # rows lie behind one another
        firsts, runs = np.array([origin]), out.reshape(1, -1)
    else:
        within = np.indices(shape[:-1]).reshape(len(shape) - 1, -1)
        firsts, runs = origin + np.array(strides[:-1], np.int64) @ within, out.reshape(-1, shape[-1])
    for run, own in zip(runs, block_keys(key, firsts), strict=True):
        fill_uniform(own, run)
    return out


COMPARISONS: dict[str, Callable[..., Any]] = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
}
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.true_divide,
    "**": np.power,
    **COMPARISONS,
}
PRECEDENCE = {**dict.fromkeys(COMPARISONS, 1), "+": 2, "-": 2, "*": 3, "/": 3, "**": 4}


class Pointwise(Expression):
    """An operation on each element."""

    @abstractmethod
    def result_dtype(self) -> DType:
        """The element type of the result. Raises UsageError for operands that the operation is not for."""

    @abstractmethod
    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        """The elements of the result that lie in `region`, from those of the operands that belong to them. An operation
        that can write its result to `out` does so, and returns that."""

    def derive(self) -> Type:
        dtype = self.result_dtype()
        shape: tuple[Dimension, ...] = ()
        for operand in self.operands:
            shape = self._broadcast(shape, operand.type.shape)
        layout = folded(POINTWISE, [operand.type.layout for operand in self.operands])
        if not isinstance(layout, Layout):
            raise self.refuse(f"{_layouts(self.operands)}: {layout}")
        for operand in self.operands:
            if operand.type.layout.is_sliced and not _is_whole_along(operand.type.shape, shape, operand.type.layout):
                raise self.refuse(
                    f"{short(operand)}, {operand.type}, is repeated along the dimension in which it is cut: "
                    "AllGather it first"
                )
        return Type(dtype, shape, layout, common_group(self))

    def _broadcast(self, one: tuple[Dimension, ...], other: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
        longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
        broadcast = list(longer)
        for at in range(1, len(shorter) + 1):
            sizes = {longer[-at], shorter[-at]}
            if len(sizes) > 1:
                rest = sizes - {1}
                if len(rest) > 1:
                    raise self.refuse(f"shapes {' and '.join(str(_names(shape)) for shape in (one, other))} do not fit")
                broadcast[-at] = rest.pop()
        return tuple(broadcast)

    def _one_dtype(self, operands: Sequence[Expression]) -> DType:
        dtypes = {operand.type.dtype for operand in operands}
        if len(dtypes) > 1:
            met = " and ".join(f"{short(operand)} is {operand.type.dtype}" for operand in operands)
            raise self.refuse(f"{met}: Cast one of them")
        return dtypes.pop()


class Arithmetic(Pointwise):
    """`one symbol other`, such as a + b or a > b."""

    symbol: str

    def __init__(self, symbol: str, one: Expression | Number, other: Expression | Number) -> None:
        self.__dict__.update(symbol=symbol, precedence=PRECEDENCE[symbol])
        super().__init__(*_with_numbers(one, other))

    def result_dtype(self) -> DType:
        dtype = self._one_dtype(self.operands)
        if self.symbol in ("/", "**") and dtype not in FLOATS:
            raise self.refuse(f"the operands are {dtype}: expected a float type; Cast them")
        if dtype == Bool:
            raise self.refuse("the operands are bool: expected numbers; Ite chooses by a condition")
        return Bool if self.symbol in COMPARISONS else dtype

    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        return ARITHMETIC[self.symbol](*arrays, out=out)

    def text(self, operands: Sequence[str]) -> str:
        return f"{operands[0]} {self.symbol} {operands[1]}"

    def least_precedence(self, at: int) -> int:
        return self.precedence + (at == (0 if self.symbol == "**" else 1))  # a - (b - c), (a ** b) ** c


class Sqrt(Pointwise):
    """The square root of each element of `x`, of a float type."""

    def __init__(self, x: Expression) -> None:
        super().__init__(as_expression(x))

    def result_dtype(self) -> DType:
        dtype = self.operands[0].type.dtype
        if dtype not in FLOATS:
            raise self.refuse(f"the operand is {dtype}: expected a float type; Cast it")
        return dtype

    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        return np.sqrt(arrays[0], out=out)


class Ite(Pointwise):
    """If, then, else: each element of `one` where `condition` holds, of `other` elsewhere."""

    def __init__(self, condition: Expression, one: Expression | Number, other: Expression | Number) -> None:
        if not isinstance(one, Expression) and not isinstance(other, Expression):
            raise wrong(line_of_user(), f"{one!r} or {other!r}: expected an expression as one of them, for the type")
        super().__init__(as_expression(condition), *_with_numbers(one, other))

    def result_dtype(self) -> DType:
        condition, *rest = self.operands
        if condition.type.dtype != Bool:
            raise self.refuse(f"the condition is {condition.type.dtype}: expected a comparison, such as a > b")
        return self._one_dtype(rest)

    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        return np.where(*arrays)


class Cast(Pointwise):
    """Each element of `x` as a `dtype`, such as Float32."""

    dtype: DType

    def __init__(self, dtype: DType, x: Expression) -> None:
        self.__dict__.update(dtype=check_dtype(dtype))
        super().__init__(as_expression(x))

    def result_dtype(self) -> DType:
        return self.dtype

    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        return arrays[0].astype(self.dtype)

    def text(self, operands: Sequence[str]) -> str:
        return f"Cast({self.dtype}, {operands[0]})"


class Dropout(Pointwise):
    """Each element of `x` with probability `1 - p`, divided by that; zero otherwise.

    What is dropped follows from `seed`, `step` and the place of the element in the whole tensor. So a sliced tensor
    loses the same elements as a replicated one. Of Local tensors each rank's loses others. `step` is an int, or a
    Variable or scalar of an integer type: another one in each step of a training. Two Dropouts of one program want two
    seeds.
    """

    p: float
    seed: int

    def __init__(self, x: Expression, p: float, *, seed: int, step: Expression | int = 0) -> None:
        self.__dict__.update(p=p, seed=seed)
        super().__init__(as_expression(x), as_expression(step, np.dtype(np.int64)))

    def result_dtype(self) -> DType:
        x, step = (operand.type for operand in self.operands)
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0 <= self.p < 1:
            raise self.refuse(f"p is {self.p!r}: expected from 0 up to but not including 1")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 63:
            raise self.refuse(f"seed is {self.seed!r}: expected an int from 0 up to 2**63 - 1")
        if x.dtype not in FLOATS:
            raise self.refuse(f"the operand is {x.dtype}: expected a float type; Cast it")
        if step.shape or step.dtype.kind not in "iu" or step.layout is not Layout.REPLICATED:
            raise self.refuse(f"step is {step}: expected one integer, the same on all ranks")
        return x.dtype

    def compute(self, arrays: Sequence[Array], region: Region, out: Array | None = None) -> Any:
        x, step = arrays
        stays = uniforms(self.seed, int(step), region, x.shape) >= self.p
        scale = x.dtype.type(1 / (1 - self.p))
        return np.where(stays, x * scale, np.zeros((), x.dtype))

    def text(self, operands: Sequence[str]) -> str:
        return f"Dropout({operands[0]}, {self.p}, seed={self.seed}, step={operands[1]})"


def _with_numbers(one: object, other: object) -> tuple[Expression, Expression]:
    """Both as expressions: a number gets the type of the other one."""
    if not isinstance(one, Expression):
        other = as_expression(other)
        return as_expression(one, other.type.dtype), other
    return one, as_expression(other, one.type.dtype)


def _is_whole_along(own: tuple[Dimension, ...], whole: tuple[Dimension, ...], layout: Layout) -> bool:
    """Whether an operand of this shape has all of the result's dimension along which both are cut."""
    if layout is Layout.SLICED and len(own) != len(whole):
        return False
    return own[layout.axis(len(own))] == whole[layout.axis(len(whole))]


def _layouts(operands: Sequence[Expression]) -> str:
    varying = [operand for operand in operands if not isinstance(operand, Constant)]
    return ", ".join(f"{short(operand)} is {operand.type.layout.value}" for operand in varying)


def _names(shape: Sequence[Dimension]) -> list[str]:
    return [str(dimension) if isinstance(dimension, int) else dimension.name for dimension in shape]
