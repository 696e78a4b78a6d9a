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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np

from omnireduce.core.dtypes import BOOL, ELEMENT_TYPES, Array
from omnireduce.errors import UsageError, a_type
from omnireduce.programs.layouts import Layout
from omnireduce.programs.source_lines import SourceLine, line_of_user, wrong

DType = np.dtype[Any]

Bool = BOOL.dtype
Float16, Float32, Float64 = (ELEMENT_TYPES[name].dtype for name in ("float16", "float32", "float64"))
BFloat16 = ELEMENT_TYPES["bfloat16"].dtype
Int8, Int16, Int32, Int64 = (ELEMENT_TYPES[f"int{bits}"].dtype for bits in (8, 16, 32, 64))
UInt8, UInt16, UInt32, UInt64 = (ELEMENT_TYPES[f"uint{bits}"].dtype for bits in (8, 16, 32, 64))

FLOATS = frozenset({Float16, BFloat16, Float32, Float64})
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
    """A value of a program. `operands`: what it is made from; `type`; `place`: where the user wrote it."""

    operands: tuple[Expression, ...]
    type: Type
    place: SourceLine
    is_under_way = False  # sent, and not yet received
    takes_what_is_under_way = False
    precedence = 9  # how tightly its text holds together
    __array_ufunc__ = None  # numbers of NumPy leave operators to this class

    def __init__(self, *operands: Expression) -> None:
        self._form(operands, line_of_user())

    def _form(self, operands: Sequence[Expression], place: SourceLine) -> None:
        self.__dict__.update(operands=tuple(operands), place=place)
        if not self.takes_what_is_under_way and any(operand.is_under_way for operand in operands):
            raise self.refuse("an operand is under way between two groups: Recv it first")
        self.__dict__.update(type=self.derive())

    def __repr__(self) -> str:
        return f"<{formula(self, {})}: {self.type}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an expression does not change; {name} cannot be set")

    @abstractmethod
    def derive(self) -> Type:
        """The type, from those of the operands. Raises UsageError where they do not go together."""

    def with_operands(self, operands: Sequence[Expression], place: SourceLine | None = None) -> Self:
        """The same operation on other operands. Raises UsageError where these do not go together."""
        if place is None and all(one is other for one, other in zip(operands, self.operands, strict=True)):
            return self
        made = copy.copy(self)
        made._form(operands, place or self.place)
        return made

    def text(self, operands: Sequence[str]) -> str:
        """The expression as a user would write it, from the texts of its operands."""
        return f"{type(self).__name__}({', '.join(operands)})"

    def least_precedence(self, at: int) -> int:
        """The precedence below which the text of operand `at` needs brackets."""
        return 0

    def refuse(self, message: str) -> UsageError:
        """An error about this expression, at its place."""
        what = formula(self, {})
        if len(what) > LONGEST_FORMULA:
            what = self.text([short(operand) for operand in self.operands])
        return wrong(self.place, f"{what}: {message}")

    def __bool__(self) -> bool:
        raise wrong(line_of_user(), "a value is not known while a program is written: use Ite(condition, a, b)")

    def __add__(self, other: Expression | Number) -> Expression:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Number) -> Expression:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Expression | Number) -> Expression:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Number) -> Expression:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Expression | Number) -> Expression:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Number) -> Expression:
        return _arithmetic("*", other, self)

    def __truediv__(self, other: Expression | Number) -> Expression:
        return _arithmetic("/", self, other)

    def __rtruediv__(self, other: Number) -> Expression:
        return _arithmetic("/", other, self)

    def __pow__(self, other: Expression | Number) -> Expression:
        return _arithmetic("**", self, other)

    def __rpow__(self, other: Number) -> Expression:
        return _arithmetic("**", other, self)

    def __gt__(self, other: Expression | Number) -> Expression:
        return _arithmetic(">", self, other)

    def __ge__(self, other: Expression | Number) -> Expression:
        return _arithmetic(">=", self, other)

    def __lt__(self, other: Expression | Number) -> Expression:
        return _arithmetic("<", self, other)

    def __le__(self, other: Expression | Number) -> Expression:
        return _arithmetic("<=", self, other)

    def __neg__(self) -> Expression:
        return _arithmetic("-", 0, self)


def _arithmetic(symbol: str, one: Expression | Number, other: Expression | Number) -> Expression:
    from omnireduce.programs.pointwise import Arithmetic  # it is made of expressions

    return Arithmetic(symbol, one, other)


class Input(Expression):
    """What a program is given by name when it runs."""

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
            raise wrong(self.place, f"layout {declared.layout!r}: expected Local, Replicated, Sliced or Sliced_2")
        for dimension in declared.shape:
            if isinstance(dimension, bool) or not isinstance(dimension, Variable | int):
                raise wrong(self.place, f"a dimension of {self.name} is {dimension!r}: expected an int or a Variable")
            if isinstance(dimension, Variable) and dimension.type.dtype.kind not in "iu":
                raise wrong(
                    self.place, f"dimension {dimension.name} is {dimension.type.dtype}: expected an integer type, Int32"
                )
            if isinstance(dimension, int) and dimension < 1:
                raise wrong(self.place, f"a dimension of {self.name} is {dimension}: expected at least 1")
        if declared.layout.is_sliced and not declared.shape:
            raise wrong(self.place, f"{self.name} has no dimension along which it could be {declared.layout.value}")
        if isinstance(declared.group, bool) or not isinstance(declared.group, int) or declared.group < 0:
            raise wrong(self.place, f"group {declared.group!r}: expected an int from 0 on")
        return declared

    def with_layout(self, layout: Layout) -> Tensor:
        """The same tensor in another layout."""
        made = copy.copy(self)
        made.__dict__.update(declared=self.type._replace(layout=layout))
        made._form((), self.place)
        return made


class Constant(Expression):
    """A number that stands in the program; it has the type of what it meets there."""

    def __init__(self, value: Number, dtype: DType) -> None:
        self.__dict__.update(value=value, dtype=dtype)
        super().__init__()

    def derive(self) -> Type:
        value, dtype = self.__dict__["value"], self.__dict__["dtype"]
        if dtype.kind in "iu" and isinstance(value, float):
            raise wrong(self.place, f"{value} meets {dtype}: expected an integer; Cast the other one to a float type")
        if (dtype == Bool) != isinstance(value, bool | np.bool_):
            raise wrong(self.place, f"{value} meets {dtype}: Cast one of them")
        try:
            self.__dict__.update(array=number_array(value, dtype))
        except OverflowError:
            raise wrong(self.place, f"{value} is out of the range of {dtype}") from None
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


def _formula(node: Expression, names: Mapping[Expression, str], known: dict[Expression, str], depth: int) -> str:
    """`known`: what was written already; an expression that is used twice in each step would take for ever."""
    if node in known:
        return known[node]
    shown = []
    for at, operand in enumerate(node.operands):
        text = operand.text(()) if isinstance(operand, Input | Constant) else names.get(operand)
        if text is None:
            text = _formula(operand, names, known, depth - 1) if depth else CUT
            if operand.precedence < node.least_precedence(at):
                text = f"({text})"
        shown.append(text)
    text = node.text(shown)
    known[node] = text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}{CUT}"
    return known[node]


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
    raise wrong(line_of_user(), f"got {value!r}, {a_type(value)}; expected {expected}")


def number_array(value: Number | np.generic, dtype: DType) -> Array:
    """A number as an array without dimensions. Raises OverflowError where the type has no place for it."""
    plain = value.item() if isinstance(value, np.generic) else value
    plain = float(plain) if dtype in FLOATS else plain
    with np.errstate(over="ignore"):
        array = np.asarray(dtype.type(plain))
    if dtype in FLOATS and math.isfinite(plain) and not np.isfinite(array):
        raise OverflowError(plain)
    return array


def is_half(dtype: DType) -> bool:
    """Whether it is a float of 16 bits: sums of such are kept in float32."""
    return dtype in FLOATS and dtype.itemsize == 2


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
        raise wrong(line_of_user(), f"type {dtype!r}: expected one such as Float32, Float16 or Int32")
    return dtype


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 40:
        raise wrong(line_of_user(), f"name {name!r}: expected a word of letters, digits and _, at most 40 long")
    if (read := unicodedata.normalize("NFKC", name)) != name:
        raise wrong(line_of_user(), f"name {name!r}: Python reads it as {read!r}; expected that")
    return name
