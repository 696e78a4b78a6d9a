"""Expressions, the values that programs consist of: each knows its type and where the user wrote it.

An expression never changes. Its operands are expressions, so a program is a graph without cycles. The type is derived
when an expression is made, and again when a rewrite makes it anew from other operands. So no rewrite can make a program
that the checker would refuse.
"""

from __future__ import annotations

import copy
import math
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from omnireduce.core.dtypes import BOOL, ELEMENT_TYPES, Array
from omnireduce.errors import UsageError, a_type
from omnireduce.kernels.codecs.draws import block_keys, fill_uniform, stream_key
from omnireduce.programs.layouts import POINTWISE, Layout, folded
from omnireduce.programs.source_lines import SourceLine, error_at, user_line

DType = np.dtype[Any]

Bool = BOOL.dtype
Float16, Float32, Float64 = (ELEMENT_TYPES[name].dtype for name in ("float16", "float32", "float64"))
BFloat16 = ELEMENT_TYPES["bfloat16"].dtype
Int8, Int16, Int32, Int64 = (ELEMENT_TYPES[f"int{bits}"].dtype for bits in (8, 16, 32, 64))
UInt8, UInt16, UInt32, UInt64 = (ELEMENT_TYPES[f"uint{bits}"].dtype for bits in (8, 16, 32, 64))

FLOATS = frozenset(element.dtype for element in ELEMENT_TYPES.values() if element.is_float)
DTYPES = frozenset({Bool, *(element_type.dtype for element_type in ELEMENT_TYPES.values())})
Number = int | float | bool
LONGEST_FORMULA = 80  # characters, in a message
LONGEST_TEXT, DEEPEST_TEXT, CUT = 2000, 100, "..."  # of what a program prints


class Region(NamedTuple):
    """The elements of a tensor that an array has: those from `starts` on, in a tensor of the shape `whole`. `stream`
    tells ranks with different tensors apart; it is 0 where all ranks have the same tensor."""

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    stream: int = 0


class Type(NamedTuple):
    """The type of a value, as the checker knows it. `shape` is that of the whole tensor, even if it is sliced. `group`:
    the number of the group of ranks that has it; None: every group that needs it."""

    dtype: DType
    shape: tuple[Dimension, ...]
    layout: Layout
    group: int | None = None

    def __str__(self) -> str:
        sizes = ", ".join(str(dimension) if isinstance(dimension, int) else dimension.name for dimension in self.shape)
        where = f" group {self.group}" if self.group else ""
        return f"{self.dtype}[{sizes}] {self.layout.value}{where}"


class Expression(ABC):
    """A value of a program. `operands`: what it is made from; `type`; `source_line`: where the user wrote it."""

    operands: tuple[Expression, ...]
    type: Type
    source_line: SourceLine
    is_under_way = False  # sent, and not yet received
    takes_sent_values = False
    precedence = 9  # how tightly its text holds together
    __array_ufunc__ = None  # numbers of NumPy leave operators to this class

    def __init__(self, *operands: Expression) -> None:
        self._set_operands(operands, user_line())

    def _set_operands(self, operands: Sequence[Expression], source_line: SourceLine) -> None:
        self.__dict__.update(operands=tuple(operands), source_line=source_line)
        if not self.takes_sent_values and any(operand.is_under_way for operand in operands):
            raise self.refuse("an operand is under way between two groups: Recv it first")
        self.__dict__.update(type=self.derive())

    def __repr__(self) -> str:
        return f"<{formula(self, {})}: {self.type}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an expression does not change; {name} cannot be set")

    @abstractmethod
    def derive(self) -> Type:
        """The type, from those of the operands. Raises UsageError where they do not go together."""

    def with_operands(self, operands: Sequence[Expression], source_line: SourceLine | None = None) -> Self:
        """The same operation on other operands. Raises UsageError where these do not go together."""
        if source_line is None and all(new is old for new, old in zip(operands, self.operands, strict=True)):
            return self
        clone = copy.copy(self)
        clone._set_operands(operands, source_line or self.source_line)
        return clone

    def text(self, operands: Sequence[str]) -> str:
        """The expression as a user would write it, from the texts of its operands."""
        return f"{type(self).__name__}({', '.join(operands)})"

    def least_precedence(self, at: int) -> int:
        """The precedence below which the text of operand `at` needs brackets."""
        return 0

    def refuse(self, message: str) -> UsageError:
        """An error about this expression, with its line of source."""
        text = formula(self, {})
        if len(text) > LONGEST_FORMULA:
            text = self.text([short(operand) for operand in self.operands])
        return error_at(self.source_line, f"{text}: {message}")

    def __bool__(self) -> bool:
        raise error_at(user_line(), "a value is not known while a program is written: use Ite(condition, a, b)")

    def __add__(self, other: Expression | Number) -> Expression:
        return Arithmetic("+", self, other)

    def __radd__(self, other: Number) -> Expression:
        return Arithmetic("+", other, self)

    def __sub__(self, other: Expression | Number) -> Expression:
        return Arithmetic("-", self, other)

    def __rsub__(self, other: Number) -> Expression:
        return Arithmetic("-", other, self)

    def __mul__(self, other: Expression | Number) -> Expression:
        return Arithmetic("*", self, other)

    def __rmul__(self, other: Number) -> Expression:
        return Arithmetic("*", other, self)

    def __truediv__(self, other: Expression | Number) -> Expression:
        return Arithmetic("/", self, other)

    def __rtruediv__(self, other: Number) -> Expression:
        return Arithmetic("/", other, self)

    def __pow__(self, other: Expression | Number) -> Expression:
        return Arithmetic("**", self, other)

    def __rpow__(self, other: Number) -> Expression:
        return Arithmetic("**", other, self)

    def __gt__(self, other: Expression | Number) -> Expression:
        return Arithmetic(">", self, other)

    def __ge__(self, other: Expression | Number) -> Expression:
        return Arithmetic(">=", self, other)

    def __lt__(self, other: Expression | Number) -> Expression:
        return Arithmetic("<", self, other)

    def __le__(self, other: Expression | Number) -> Expression:
        return Arithmetic("<=", self, other)

    def __neg__(self) -> Expression:
        return Arithmetic("-", 0, self)


class Input(Expression):
    """A value that a program is given by name when it runs."""

    name: str

    def text(self, operands: Sequence[str]) -> str:
        return self.name


class Variable(Input):
    """A number that is known when a program runs: the size of a dimension, or a factor. `dtype` such as Float32."""

    def __init__(self, dtype: DType, name: str) -> None:
        self.__dict__.update(dtype=check_dtype(dtype), name=_check_name(name))
        super().__init__()

    def derive(self) -> Type:
        return Type(self.__dict__["dtype"], (), Layout.REPLICATED)


Dimension = Variable | int
"""The size of a dimension: a number, or a Variable of an integer type."""


class Tensor(Input):
    """An array that a program is given when it runs.

    `dtype`: such as Float32; `shape`: a dimension, or a tuple of them, of the whole tensor; `layout`: Local,
    Replicated, Sliced or Sliced_2; `group`: which group of ranks has it, where a program is for several.
    """

    def __init__(
        self, dtype: DType, shape: Dimension | Sequence[Dimension], layout: Layout, name: str, *, group: int = 0
    ) -> None:
        sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
        self.__dict__.update(name=_check_name(name))
        self.__dict__.update(declared=Type(check_dtype(dtype), sizes, layout, group))
        super().__init__()

    def derive(self) -> Type:
        declared: Type = self.__dict__["declared"]
        if not isinstance(declared.layout, Layout):
            raise error_at(
                self.source_line, f"layout {declared.layout!r}: expected Local, Replicated, Sliced or Sliced_2"
            )
        for dimension in declared.shape:
            if isinstance(dimension, bool) or not isinstance(dimension, Variable | int):
                raise error_at(
                    self.source_line, f"a dimension of {self.name} is {dimension!r}: expected an int or a Variable"
                )
            if isinstance(dimension, Variable) and dimension.type.dtype.kind not in "iu":
                raise error_at(
                    self.source_line,
                    f"dimension {dimension.name} is {dimension.type.dtype}: expected an integer type, Int32",
                )
            if isinstance(dimension, int) and dimension < 1:
                raise error_at(self.source_line, f"a dimension of {self.name} is {dimension}: expected at least 1")
        if declared.layout.is_sliced and not declared.shape:
            raise error_at(
                self.source_line, f"{self.name} has no dimension along which it could be {declared.layout.value}"
            )
        if isinstance(declared.group, bool) or not isinstance(declared.group, int) or declared.group < 0:
            raise error_at(self.source_line, f"group {declared.group!r}: expected an int from 0 on")
        return declared

    def with_layout(self, layout: Layout) -> Tensor:
        """The same tensor in another layout."""
        tensor = copy.copy(self)
        tensor.__dict__.update(declared=self.type._replace(layout=layout))
        tensor._set_operands((), self.source_line)
        return tensor


class Constant(Expression):
    """A number that stands in the program; it has the type of what it meets there."""

    def __init__(self, value: Number, dtype: DType) -> None:
        self.__dict__.update(value=value, dtype=dtype)
        super().__init__()

    def derive(self) -> Type:
        value, dtype = self.__dict__["value"], self.__dict__["dtype"]
        if dtype.kind in "iu" and isinstance(value, float):
            raise error_at(
                self.source_line, f"{value} meets {dtype}: expected an integer; Cast the other one to a float type"
            )
        if (dtype == Bool) != isinstance(value, bool | np.bool_):
            raise error_at(self.source_line, f"{value} meets {dtype}: Cast one of them")
        try:
            self.__dict__.update(array=number_array(value, dtype))
        except OverflowError:
            raise error_at(self.source_line, f"{value} is out of the range of {dtype}") from None
        return Type(dtype, (), Layout.REPLICATED)

    @property
    def array(self) -> Array:
        """The number as an array without dimensions."""
        array: Array = self.__dict__["array"]
        return array

    def text(self, operands: Sequence[str]) -> str:
        return repr(self.__dict__["value"])


def formula(node: Expression, names: Mapping[Expression, str]) -> str:
    """The text of an expression. Operands that have a name are called by it. The others are written out, up to a limit
    of depth and length."""
    return _formula(node, names, {}, DEEPEST_TEXT)


def _formula(node: Expression, names: Mapping[Expression, str], written: dict[Expression, str], depth: int) -> str:
    """`written`: what was written already; an expression that is used twice in each step would take for ever."""
    if node in written:
        return written[node]
    texts = []
    for at, operand in enumerate(node.operands):
        text = operand.text(()) if isinstance(operand, Input | Constant) else names.get(operand)
        if text is None:
            text = _formula(operand, names, written, depth - 1) if depth else CUT
            if operand.precedence < node.least_precedence(at):
                text = f"({text})"
        texts.append(text)
    text = node.text(texts)
    written[node] = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}{CUT}"
    return written[node]


def short(expression: Expression) -> str:
    """A few words for an operand: its name, or what it is."""
    if isinstance(expression, Input | Constant):
        return expression.text(())
    text = formula(expression, {})
    return text if len(text) <= LONGEST_FORMULA // 2 else f"{text[: LONGEST_FORMULA // 2]}..."


def as_expression(value: object, like: DType | None = None) -> Expression:
    """`value` itself, or a number as a constant of the type that it meets. Raises UsageError for anything else."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if like is not None and isinstance(value, int | float):
        return Constant(value, like)
    expected = "an expression" if like is None else "an expression or a number"
    raise error_at(user_line(), f"got {value!r}, {a_type(value)}; expected {expected}")


def number_array(value: Number | np.generic, dtype: DType) -> Array:
    """A number as an array without dimensions. Raises OverflowError where the type has no place for it."""
    plain = value.item() if isinstance(value, np.generic) else value
    plain = float(plain) if dtype in FLOATS else plain
    with np.errstate(over="ignore"):
        array = np.asarray(dtype.type(plain))
    if dtype in FLOATS and math.isfinite(plain) and not np.isfinite(array):
        raise OverflowError(plain)
    return array


def is_narrow(dtype: DType) -> bool:
    """Whether it is a float of fewer than 32 bits: sums of such are kept in float32."""
    return dtype in FLOATS and dtype.itemsize < 4


def common_group(expression: Expression) -> int | None:
    """The group of ranks that has all operands. Raises UsageError where no group does."""
    group: int | None = None
    for operand in expression.operands:
        if group is not None and operand.type.group not in (None, group):
            raise expression.refuse(
                f"{short(operand)} is in group {operand.type.group}, other operands in group {group}: Send it there"
            )
        group = operand.type.group if group is None else group
    return group


def check_dtype(dtype: object) -> DType:
    """`dtype` itself. Raises UsageError for what is no element type of the service."""
    if not isinstance(dtype, np.dtype) or dtype not in DTYPES:
        raise error_at(user_line(), f"type {dtype!r}: expected one such as Float32, Float16 or Int32")
    return dtype


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 40:
        raise error_at(user_line(), f"name {name!r}: expected a word of letters, digits and _, at most 40 long")
    if (read := unicodedata.normalize("NFKC", name)) != name:
        raise error_at(user_line(), f"name {name!r}: Python reads it as {read!r}; expected that")
    return name


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
        row_indices = np.indices(shape[:-1]).reshape(len(shape) - 1, -1)
        firsts, runs = origin + np.array(strides[:-1], np.int64) @ row_indices, out.reshape(-1, shape[-1])
    for run, block_key in zip(runs, block_keys(key, firsts), strict=True):
        fill_uniform(block_key, run)
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
            if operand.type.layout.is_sliced and not _spans_cut_dimension(
                operand.type.shape, shape, operand.type.layout
            ):
                raise self.refuse(
                    f"{short(operand)}, {operand.type}, is repeated along the dimension in which it is cut: "
                    "AllGather it first"
                )
        return Type(dtype, shape, layout, common_group(self))

    def _broadcast(self, first: tuple[Dimension, ...], second: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
        longer, shorter = (first, second) if len(first) >= len(second) else (second, first)
        broadcast = list(longer)
        for at in range(1, len(shorter) + 1):
            sizes = {longer[-at], shorter[-at]}
            if len(sizes) > 1:
                rest = sizes - {1}
                if len(rest) > 1:
                    raise self.refuse(
                        f"shapes {' and '.join(str(_names(shape)) for shape in (first, second))} do not fit"
                    )
                broadcast[-at] = rest.pop()
        return tuple(broadcast)

    def _one_dtype(self, operands: Sequence[Expression]) -> DType:
        dtypes = {operand.type.dtype for operand in operands}
        if len(dtypes) > 1:
            texts = " and ".join(f"{short(operand)} is {operand.type.dtype}" for operand in operands)
            raise self.refuse(f"{texts}: Cast one of them")
        return dtypes.pop()


class Arithmetic(Pointwise):
    """`one symbol other`, such as a + b or a > b."""

    symbol: str

    def __init__(self, symbol: str, left: Expression | Number, right: Expression | Number) -> None:
        self.__dict__.update(symbol=symbol, precedence=PRECEDENCE[symbol])
        super().__init__(*_with_numbers(left, right))

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
    """A choice for each element: that of `if_true` if `condition` holds, otherwise that of `if_false`."""

    def __init__(self, condition: Expression, if_true: Expression | Number, if_false: Expression | Number) -> None:
        if not isinstance(if_true, Expression) and not isinstance(if_false, Expression):
            raise error_at(
                user_line(), f"{if_true!r} or {if_false!r}: expected an expression as one of them, for the type"
            )
        super().__init__(as_expression(condition), *_with_numbers(if_true, if_false))

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

    `seed`, `step` and the index of an element in the whole tensor decide whether it is dropped. So a sliced tensor
    loses the same elements as a replicated one. A Local tensor loses other elements on each rank. `step` is an int, or
    a Variable or scalar of an integer type: another one in each step of a training. Two Dropouts of one program want
    two seeds.
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


def _with_numbers(left: object, right: object) -> tuple[Expression, Expression]:
    """Both as expressions: a number gets the type of the other one."""
    if not isinstance(left, Expression):
        right = as_expression(right)
        return as_expression(left, right.type.dtype), right
    return left, as_expression(right, left.type.dtype)


def _spans_cut_dimension(shape: tuple[Dimension, ...], whole: tuple[Dimension, ...], layout: Layout) -> bool:
    """Whether an operand of this shape has all of the result's dimension along which both are cut."""
    if layout is Layout.SLICED and len(shape) != len(whole):
        return False
    return shape[layout.axis(len(shape))] == whole[layout.axis(len(whole))]


def _layouts(operands: Sequence[Expression]) -> str:
    varying = [operand for operand in operands if not isinstance(operand, Constant)]
    return ", ".join(f"{short(operand)} is {operand.type.layout.value}" for operand in varying)


def _names(shape: Sequence[Dimension]) -> list[str]:
    return [str(dimension) if isinstance(dimension, int) else dimension.name for dimension in shape]
