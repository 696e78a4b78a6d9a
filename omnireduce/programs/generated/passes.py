"""A function for several element-wise stages in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from omnireduce.programs.expressions import FLOATS, Bool, Constant, Expression, Input, Type, Variable, is_half
from omnireduce.programs.generated.statements import MARGIN, Names, Statements, Text, axis_of, broken
from omnireduce.programs.operations import Update
from omnireduce.programs.passes import kind_of
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.pointwise import Arithmetic, Cast, Dropout, Ite, Sqrt
from omnireduce.programs.stages import Fused


class Owner(Protocol):
    """Who writes the rest: it knows where a rank's elements are."""

    names: Names
    used: set[str]

    def place_of(self, kind: Type) -> str:
        """Which elements of a whole tensor a value of this type has here."""


class Pass(Statements):
    """Writes one pass. Its values are all of one shape, this rank's part of it: nothing is cut inside.

    Where all is one-dimensional arithmetic there are two functions: one says what is done with an element, in the words
    of the program, the other one does it for all. numba compiles both; without it NumPy takes a piece that fits into
    the processor's cache for an element. Results go into arrays that are given, and used again
    in the next step: a new one costs more than what is computed, because its memory is not there yet.
    """

    def __init__(
        self, owner: Owner, stage: Fused, shaped: Sequence[Expression], pipeline: Pipeline, has_numba: bool
    ) -> None:
        super().__init__(owner.names)
        self._owner, self._stage, self._shaped = owner, stage, shaped
        self._pipeline = pipeline
        self.kind = kind_of(stage)
        self.parameters = list(dict.fromkeys(operand for node in shaped for operand in self._outside(node)))
        self.results = [node for node in shaped if self._is_result(node)]
        self.is_plain = self._all_plain()
        self._is_compiled = has_numba and self.is_plain
        draws = any(isinstance(node, Dropout) for node in stage.nodes)
        self.needs_job = draws
        sizes = dict.fromkeys(dimension for dimension in self.kind.shape if isinstance(dimension, Variable) and draws)
        self.sizes = [size for size in sizes if size not in self.parameters]
        self._last = self.names[self.results[-1]]
        self.name, self._element_name = (self.names.new(f"{what}_{self._last}") for what in ("compute", "element_of"))

    def _outside(self, node: Expression) -> Iterator[Expression]:
        """What comes from outside of what `node` is made from."""
        operands = node.operands[1:] if isinstance(node, Update) else node.operands
        for operand in operands:
            if operand in self._shaped or isinstance(operand, Constant):
                continue
            if operand in self.names:
                yield operand
            else:
                yield from self._outside(operand)

    def _is_result(self, node: Expression) -> bool:
        users = self._pipeline.users[node]
        outside = [user for user in users if user not in self._stage.nodes]
        return isinstance(node, Update) or node in self._pipeline.outputs or bool(outside)

    def _all_plain(self) -> bool:
        kinds = [node.type for node in [*self._stage.nodes, *self.parameters]]
        is_arithmetic = all(
            isinstance(node, Update | Sqrt | Ite | Cast) or (isinstance(node, Arithmetic) and node.symbol != "**")
            for node in self._stage.nodes
            if node.type.shape or node not in self.names
        )
        is_float = all((kind.dtype in FLOATS and not is_half(kind.dtype)) or kind.dtype == Bool for kind in kinds)
        return is_arithmetic and is_float and all(kind.shape in ((), self.kind.shape[:1]) for kind in kinds)

    def place(self, node: Dropout) -> str:
        return self._owner.place_of(self.kind)

    def made(self, node: Expression) -> Text:
        if isinstance(node, Update):
            is_view = isinstance(node.value, Input) and not self.is_plain
            return Text(f"{self.value(node.value).text}.copy()") if is_view else self.value(node.value)
        if isinstance(node, Cast) and self._is_compiled:
            return Text(f"{self.names.dtype(node.dtype)}({self.value(node.operands[0]).text})")
        return super().made(node)

    def choice(self, node: Ite, operands: list[Text]) -> Text:
        if self._is_compiled:
            condition, one, other = operands
            return Text(f"{one.within(1)} if {condition.within(1)} else {other.within(1)}", 0)
        return super().choice(node, operands)

    def function(self) -> str:
        """The whole function, or both of them."""
        given = [self.names[parameter] for parameter in self.parameters]
        lines = [line for node in self._shaped for line in self.assigned(self.names[node], node)]
        returned = ", ".join(self.names[node] for node in self.results)
        what = f"{self.kind.dtype} of this rank's part" if axis_of(self.kind) is not None else f"{self.kind.dtype}"
        lines += broken(f"return {returned}", 1)
        if self.is_plain:
            return self._element(given, lines) + "\n\n\n" + self._all_elements(given)
        taken = [*(["job"] if self.needs_job else []), *given, *(self.names[size] for size in self.sizes)]
        head = broken(f"def {self.name}({', '.join(taken)}):", 0)
        return "\n".join([*head, f'{MARGIN}"""{returned}: {what}."""', *lines])

    def _element(self, given: list[str], lines: list[str]) -> str:
        head = broken(f"def {self._element_name}({', '.join(given)}):", 0)
        what = "one element" if self._is_compiled else "some elements"
        return "\n".join([*self._decorator(), *head, f'{MARGIN}"""What is computed of {what}."""', *lines])

    def _all_elements(self, given: list[str]) -> str:
        first = next(self.names[parameter] for parameter in self.parameters if parameter.type.shape)
        rooms = [self.names[node] for node in self.results]
        head = broken(f"def {self.name}({', '.join([*given, *rooms])}):", 0)
        lines = [f'{MARGIN}"""All elements, in one pass over memory."""']
        if not self._is_compiled:
            self._owner.used.add("pieces")
        loop = f"range({first}.size)" if self._is_compiled else f"pieces({first}.size)"
        arguments = [
            f"{self.names[parameter]}[i]" if parameter.type.shape else self.names[parameter]
            for parameter in self.parameters
        ]
        results = ", ".join(f"{self.names[node]}[i]" for node in self.results)
        lines.append(f"{MARGIN}for i in {loop}:")
        lines += broken(f"{results} = {self._element_name}({', '.join(arguments)})", 2)
        return "\n".join([*self._decorator(), *head, *lines])

    def _decorator(self) -> list[str]:
        return ['@njit(error_model="numpy")'] if self._is_compiled else []
