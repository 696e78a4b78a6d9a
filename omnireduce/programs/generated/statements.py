"""Expressions as Python: what stands to the right of an `=`, and statements that are short enough to be read."""

from __future__ import annotations

import builtins
import keyword
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.programs.expressions import (
    FLOATS,
    Arithmetic,
    Bool,
    Cast,
    Constant,
    Dropout,
    DType,
    Expression,
    Float32,
    Input,
    Ite,
    Sqrt,
    Type,
    is_narrow,
)
from omnireduce.programs.whole_tensor_operations import MatMul, Norm, ReduceTensor, Reduction, WholeReduction

DEEPEST = 40  # operations in one another without a name
WIDTH = 88  # characters of a line: the width of formatters that nobody has told another one
MARGIN = "    "
WHOLE = 9  # the precedence of a name or a call
CHOICE, SUM = 0, 1  # the precedences of `a if b else c`, and of what may be an operand of it
TAKEN = {  # names that a file uses beside those of a program, and Python's own: a program's names must differ
    *("MPI", "chunks", "combined", "dropout", "i", "job", "norm", "np", "outputs", "part", "pieces", "pipeline"),
    *("program", "rank", "ranks", "reduce", "run_step"),
    *dir(builtins),
}
LANGUAGE = frozenset(
    {
        *("AllGather", "AllReduce", "Cast", "Dropout", "Ite", "Local", "Norm", "Pipeline", "ReduceScatter"),
        *("ReduceTensor", "Replicated", "Sliced", "Sqrt", "Summation", "Tensor", "Update", "Variable"),
        *("Float32", "Float64", "Int32", "Int64"),
    }
)


class Names:
    """Names of the values of a program in a file: those of the program, except for words that Python or the file
    needs. `dtypes`: the element types that the file names."""

    def __init__(self, names: Mapping[Expression, str], nodes: Iterable[Expression]) -> None:
        self.dtypes: set[str] = set()
        self._taken = {*TAKEN, *LANGUAGE}
        self._names = {node: self.new(name) for node, name in names.items()}
        self._name_deep(nodes)

    def _name_deep(self, nodes: Iterable[Expression]) -> None:
        """Name what would stand too deep in an expression: Python nests so far only. `nodes` are in order."""
        depths: dict[Expression, int] = {}
        for node in nodes:
            depths[node] = 0 if node in self else 1 + max((depths[operand] for operand in node.operands), default=0)
            if depths[node] == DEEPEST:
                self._names[node], depths[node] = self.new(f"inner{len(self._names)}"), 0

    def __contains__(self, node: object) -> bool:
        return node in self._names

    def __getitem__(self, node: Expression) -> str:
        return self._names[node]

    def new(self, name: str) -> str:
        """A name that nothing else has."""
        while self.is_taken(name):
            name = f"{name}_"
        self._taken.add(name)
        return name

    def is_taken(self, name: str) -> bool:
        """Whether something has this name."""
        return name in self._taken or keyword.iskeyword(name) or name in self.dtype_words

    @property
    def dtype_words(self) -> frozenset[str]:
        """The names of element types."""
        return frozenset({"bool_", *ELEMENT_TYPES})

    def dtype(self, dtype: DType) -> str:
        """An element type."""
        name = "bool_" if dtype == Bool else dtype.name
        self.dtypes.add(name)
        return name


class Text(NamedTuple):
    """Python, and how tightly it holds together."""

    text: str
    precedence: int = WHOLE

    def within(self, minimum: int) -> str:
        """The text as an operand: in brackets if its precedence is below `minimum`."""
        return self.text if self.precedence >= minimum else f"({self.text})"


class Statements:
    """Writes expressions. Those that have a name are called by it.

    A subclass says where the elements of an operand are: `operand`, and `region` for what draws random numbers.
    """

    names: Names

    def __init__(self, names: Names) -> None:
        self.names = names
        self._short: dict[Expression, str] = {}
        self._new_names: set[str] = set()

    def operand(self, user: Expression, node: Expression) -> Text:
        """An operand of `user`."""
        return self.value(node)

    def region(self, node: Dropout) -> str:
        """The elements of the whole tensor that are here."""
        raise NotImplementedError

    def value(self, node: Expression) -> Text:
        """A value: its name, or what it is made of."""
        if isinstance(node, Constant):
            return Text(self._constant(node))
        if node in self._short:
            return Text(self._short[node])
        return Text(self.names[node]) if node in self.names else self.render(node)

    def render(self, node: Expression) -> Text:
        """The text that makes a value."""
        if isinstance(node, Arithmetic):
            return self._arithmetic(node)
        operands = [self.operand(node, operand) for operand in node.operands]
        if isinstance(node, Sqrt):
            return Text(f"np.sqrt({operands[0].text})")
        if isinstance(node, Cast):
            return self._cast(node, operands[0])
        if isinstance(node, Ite):
            return self.choice(node, operands)
        if isinstance(node, Dropout):
            x, step = (operand.text for operand in operands)
            return Text(f"dropout({x}, {self.region(node)}, {node.p}, seed={node.seed}, step={step})")
        if isinstance(node, MatMul):
            return self._product(node, *operands)
        raise AssertionError(node)

    def choice(self, node: Ite, operands: list[Text]) -> Text:
        """The text of a choice between two values, by a condition."""
        condition, if_true, if_false = operands
        if node.type.shape:
            return Text(f"np.where({condition.text}, {if_true.text}, {if_false.text})")
        return Text(f"{if_true.within(SUM)} if {condition.within(SUM)} else {if_false.within(SUM)}", CHOICE)

    def _constant(self, node: Constant) -> str:
        number = node.array.item()
        if node.type.dtype == Bool:
            return repr(bool(number))
        written = node.text(())
        if isinstance(number, float) and not math.isfinite(number):
            written = "np.nan" if math.isnan(number) else f"{'-' if number < 0 else ''}np.inf"
        return f"{self.names.dtype(node.type.dtype)}({written})"

    def _arithmetic(self, node: Arithmetic) -> Text:
        operands = [self.operand(node, operand) for operand in node.operands]
        if node.symbol == "**":
            return Text(f"np.power({operands[0].text}, {operands[1].text})")
        left, right = (operand.within(node.precedence + at) for at, operand in enumerate(operands))
        return Text(f"{left} {node.symbol} {right}", node.precedence)

    def _cast(self, node: Cast, x: Text) -> Text:
        dtype = self.names.dtype(node.dtype)
        return Text(f"{x.within(WHOLE)}.astype({dtype})" if node.type.shape else f"{dtype}({x.text})")

    def _product(self, node: MatMul, left: Text, right: Text) -> Text:
        if not is_narrow(node.type.dtype):
            return Text(f"{left.within(WHOLE)} @ {right.within(WHOLE)}", 3)
        wide, dtype = self.names.dtype(Float32), self.names.dtype(node.type.dtype)
        factors = " @ ".join(f"{factor.within(WHOLE)}.astype({wide})" for factor in (left, right))
        return Text(f"({factors}).astype({dtype})")

    def partial(self, node: WholeReduction, x: Text) -> str:
        """The contribution of a part to a reduction of a whole tensor, as a number."""
        assert isinstance(node, ReduceTensor)
        kind, op = self.names.dtype(node.partial_dtype), node.reduction.op
        empty = "0" if op == "sum" else "1"
        if op in ("max", "min"):
            limit = f"np.iinfo({kind}).{'min' if op == 'max' else 'max'}"
            empty = f"{'-' * (op == 'max')}np.inf" if node.partial_dtype in FLOATS else limit
        return f"combined({x.text}, {ufunc(node.reduction)}, {kind}, {empty})"

    def reduced(self, node: WholeReduction, x: Text) -> Text:
        """A reduction of a tensor that is whole here."""
        dtype = self.names.dtype(node.type.dtype)
        return Text(f"{dtype}({f'norm({x.text})' if isinstance(node, Norm) else self.partial(node, x)})")

    def assigned(self, name: str, node: Expression, depth: int = 1) -> list[str]:
        """`name = ...`, with parts of a long expression before it, under names of their own."""
        lines: list[str] = []
        while len(line := f"{MARGIN * depth}{name} = {self.render(node).text}") > WIDTH:
            inner = self._longest(node, depth, name)
            if inner is None:
                return [*lines, *break_line(line.strip(), depth)]
            short = self._new_name(f"{name}_part")
            lines.append(f"{MARGIN * depth}{short} = {self.render(inner).text}")
            self._short[inner] = short
        return [*lines, line]

    def _new_name(self, name: str) -> str:
        """A name for a part of an expression."""
        fresh, count = name, 1
        while fresh in self._new_names or self.names.is_taken(fresh):
            count += 1
            fresh = f"{name}{count}"
        self._new_names.add(fresh)
        return fresh

    def _longest(self, node: Expression, depth: int, name: str) -> Expression | None:
        """The longest thing without a name of which `node` is made and that fits into a line."""
        width_left = WIDTH - len(MARGIN) * depth - len(f"{name}_part9 = ")
        texts = {part: len(self.render(part).text) for part in self._unnamed(node)}
        candidates = [part for part, length in texts.items() if len(name) + 8 < length <= width_left]
        return max(candidates, key=texts.__getitem__, default=None)

    def _unnamed(self, node: Expression) -> Iterator[Expression]:
        for operand in node.operands:
            if operand not in self.names and operand not in self._short and not isinstance(operand, Constant | Input):
                yield operand
                yield from self._unnamed(operand)


def break_line(line: str, depth: int) -> list[str]:
    """A line with its last call or brackets broken up, one part on each line, if it is too long."""
    margin = MARGIN * depth
    if len(margin) + len(line) <= WIDTH:
        return [f"{margin}{line}"]
    start, stop = _last_brackets(line)
    inner = line[start + 1 : stop].rstrip(",")
    parts = [f"{part}," for part in _split(inner)] if inner else []
    if not parts:
        return [f"{margin}{line}"]
    lines = [broken_line for part in parts for broken_line in _broken_part(part, depth + 1)]
    return [f"{margin}{line[: start + 1]}", *lines, f"{margin}{line[stop:]}"]


def _broken_part(part: str, depth: int) -> list[str]:
    is_call = part.endswith("),") and len(MARGIN) * depth + len(part) > WIDTH
    return break_line(part, depth) if is_call else [f"{MARGIN * depth}{part}"]


def _last_brackets(line: str) -> tuple[int, int]:
    """Start and end of the outermost brackets that end last."""
    stop = max(line.rfind(")"), line.rfind("]"), line.rfind("}"))
    depth = 0
    for at in range(stop, -1, -1):
        depth += (line[at] in ")]}") - (line[at] in "([{")
        if depth == 0:
            return at, stop
    raise AssertionError(line)


def _split(inner: str) -> list[str]:
    """The parts between commas that no brackets enclose."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(inner):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(inner[start:at].strip())
            start = at + 1
    return [*parts, inner[start:].strip()]


def ufunc(reduction: Reduction) -> str:
    """The function that combines two arrays."""
    return f"np.{reduction.ufunc.__name__}"


def shape_text(shape: Iterable[object], names: Names) -> str:
    """The sizes of dimensions, as a tuple."""
    return tuple_text(
        str(dimension) if isinstance(dimension, int) else names[_as_node(dimension)] for dimension in shape
    )


def _as_node(value: object) -> Expression:
    assert isinstance(value, Expression)
    return value


def tuple_text(parts: Iterable[str]) -> str:
    """A tuple."""
    listed = list(parts)
    return f"({listed[0]},)" if len(listed) == 1 else f"({', '.join(listed)})"


def axis_of(kind: Type) -> int | None:
    """Along which dimension a value is cut."""
    return None if not kind.layout.is_sliced else kind.layout.axis(len(kind.shape))


def quoted(text: str) -> str:
    """A text as a literal."""
    mark = "'" if text.count('"') > text.count("'") else '"'  # as a formatter has it
    escaped = text.replace("\\", "\\\\").replace(mark, f"\\{mark}")
    return f"{mark}{escaped}{mark}"
