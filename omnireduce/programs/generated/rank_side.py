"""One rank's side of a program: a function for each pass over memory, and a step, which is a row of timed blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import (
    FLOATS,
    Arithmetic,
    Bool,
    Cast,
    Constant,
    Dropout,
    Expression,
    Input,
    Ite,
    Pointwise,
    Sqrt,
    Type,
    Variable,
    is_narrow,
)
from omnireduce.programs.generated.statements import (
    MARGIN,
    WIDTH,
    Names,
    Statements,
    Text,
    axis_of,
    broken,
    shape_text,
)
from omnireduce.programs.operations import MatMul, Norm, Reduction, Update, WholeReduction
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import axis_to_cut
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped, Stage, kind_of

KEEPING = {"all_gather", "all_reduce", "norm"}  # methods that have room for their results
IN_CHUNKS = [
    "def {name}(job, left, right):",
    '    """left @ right of all ranks. Rows are reduced while the next ones are computed."""',
    "    shape = (*left.shape[:-1], right.shape[-1])",
    '    product = job.room("{name}", shape, {dtype})',
    "    waits = []",
    "    for rows in chunks(len(left), {chunks}):",
    "        {product}",
    "    for wait in waits:",
    "        wait()",
    "    return product",
]


class Target(NamedTuple):
    """Over what a file communicates. `has_numba`: whether numba compiles its passes."""

    name: str
    has_numba: bool

    def reduction(self, reduction: Reduction) -> str:
        """The name of a reduction in the file."""
        return f"MPI.{reduction.op.upper()}" if self.name == "mpi4py" else f'"{reduction.op}"'


class Block(NamedTuple):
    """Lines that are timed as one. `kind`: what they do; `name`: the last of what they make; `group`: the ranks that do
    it, None for all."""

    kind: str
    name: str
    group: int | None
    lines: list[str]


class RankWriter(Statements):
    """Writes what a rank does. `used`: the methods of the job that it calls."""

    def __init__(self, pipeline: Pipeline, names: Names, target: Target) -> None:
        super().__init__(names)
        self._pipeline, self._target = pipeline, target
        self.used: set[str] = set()
        self.functions: list[str] = []
        self.blocks: list[Block] = []
        for stage in pipeline.stages:
            self._stage(stage)
        self._finish()

    def operand(self, user: Expression, node: Expression) -> Text:
        return self._fitting(node, user.type) if isinstance(user, Pointwise | Update) else self.value(node)

    def _fitting(self, node: Expression, result: Type) -> Text:
        """The piece of an operand that belongs to this rank's part of the result."""
        axis, text = axis_to_cut(node.type, result), self.value(node)
        return text if axis is None else Text(self._part(text.text, axis))

    def _part(self, text: str, axis: int) -> str:
        self.used.add("part")
        return f"job.part({text}, {axis})" if axis else f"job.part({text})"

    def place(self, node: Dropout) -> str:
        return self.place_of(node.type)

    def place_of(self, kind: Type) -> str:
        """The elements of a whole tensor that a value of this type has here."""
        self.used.add("place")
        axis = "" if axis_of(kind) is None else f", {axis_of(kind)}"
        is_local = kind.layout.value == "Local"
        return f"job.place({self.shape(kind)}{axis}{', is_own=True' if is_local else ''})"

    def shape(self, kind: Type) -> str:
        """The shape of a whole tensor."""
        return shape_text(kind.shape, self.names)

    def _call(self, method: str, arguments: Iterable[str], node: Expression, *options: str) -> str:
        """A call of the job that other ranks make, too."""
        self.used.add(method)
        is_named = self._target.name != "mpi4py" or method in KEEPING
        named = [f'"{self.names[node]}"'] if is_named else []
        return f"job.{method}({', '.join([*arguments, *named, *options])})"

    # stages

    def _stage(self, stage: Stage) -> None:
        if isinstance(stage, Fused):
            self._fused(stage)
        elif isinstance(stage, FusedAllReduce):
            for node in stage.nodes:
                self._single(node)
        elif isinstance(stage, Overlapped):
            self._overlapped(stage)
        else:
            self._single(stage)

    def _single(self, node: Expression) -> None:
        """A stage of one expression, unless it belongs to the one that uses it."""
        if node not in self.names or isinstance(node, Input):
            return
        if isinstance(node, Send):
            self._send(node)
            return
        name, depth = self.names[node], self._depth(node.type.group)
        if isinstance(node, Update):
            if self._is_kept(node):
                self._add("Compute", node, self._new_value(node, depth))
        elif isinstance(node, Pointwise | MatMul):
            self._add("Compute" if isinstance(node, Pointwise) else "MatMul", node, self.assigned(name, node, depth))
        else:
            lines = self._line(lambda: f"{name} = {self._made_together(node)}", node.operands, name, depth)
            self._add(type(node).__name__, node, lines)

    def _line(self, make: Callable[[], str], operands: Iterable[Expression], name: str, depth: int) -> list[str]:
        """The line that `make` gives. If it is long, operands that have no name get lines of their own before it."""
        lines: list[str] = []
        for x in operands:
            if len(MARGIN) * depth + len(make()) > WIDTH and x not in self.names and not isinstance(x, Constant):
                short = self._fresh(f"{name}_part")
                lines += self.assigned(short, x, depth)
                self._short[x] = short
        return [*lines, *broken(make(), depth)]

    def _made_together(self, node: Expression) -> str:
        """The text of a reduction of a tensor, or of a communication."""
        if isinstance(node, WholeReduction):
            return self._reduced(node)
        x = node.operands[0]
        if isinstance(node, Recv):
            return f"{self.names[x]}()"
        text = self.value(x).text
        if isinstance(node, AllReduce | ReduceScatter):
            method = "all_reduce" if isinstance(node, AllReduce) else "reduce_scatter"
            self._note_half(node)
            return self._call(method, [text, self._target.reduction(node.reduction)], node)
        if isinstance(node, AllGather):
            axis = axis_of(x.type)
            return self._call("all_gather", [text, self.shape(x.type)], node, *([f"axis={axis}"] if axis else []))
        assert isinstance(node, Broadcast)
        return self._call("broadcast", [text, str(node.root)], node)

    def _note_half(self, node: Expression) -> None:
        if is_narrow(node.type.dtype):
            self.used.add("half")

    def _reduced(self, node: WholeReduction) -> str:
        x = node.operands[0]
        if not x.type.layout.is_sliced:
            return self.reduced(node, self.value(x)).text
        dtype = self.names.dtype(node.type.dtype)
        if isinstance(node, Norm):
            return f"{dtype}({self._call('norm', [self.value(x).text], node)})"
        operation = self._target.reduction(node.reduction)
        return f"{dtype}({self._call('all_reduce', [self.partial(node, self.value(x)), operation], node)})"

    def reduced(self, node: WholeReduction, x: Text) -> Text:
        self.used |= {"norm function"} if isinstance(node, Norm) else set()
        return super().reduced(node, x)

    def partial(self, node: WholeReduction, x: Text) -> str:
        self.used.add("combined")
        return super().partial(node, x)

    def _send(self, node: Send) -> None:
        x = node.operands[0]
        axis = "" if axis_of(x.type) is None else f", {axis_of(x.type)}"
        shape = f"job.shape({self.shape(x.type)}{axis})"
        kind = self.names.dtype(node.type.dtype)
        receiving = self._call("receive", [shape, kind, str(node.source)], node)
        self.used.add("shape")
        depth, name = self._depth(node.source), self.names[node]
        sending = self._line(lambda: self._call("send", [self.value(x).text, str(node.to)], node), [x], name, depth)
        self.blocks.append(Block("Send", name, node.source, sending))
        self.blocks.append(Block("Recv", name, node.to, broken(f"{name} = {receiving}", depth)))

    def _new_value(self, update: Update, depth: int) -> list[str]:
        """The new value of a tensor, under the name of the update."""
        name, value = self.names[update], update.value
        text = self._fitting(value, update.type).text
        copied = ".copy()" if isinstance(value, Input) else ""
        line = f"{name} = {text}{copied}"
        is_short = value in self.names or text != self.value(value).text
        return broken(line, depth) if is_short else self.assigned(name, value, depth)

    def _is_kept(self, update: Update) -> bool:
        """Whether the new value has a name of its own: for others that use it, or because no stage has it as it is."""
        value = update.value
        is_plain = value in self.names and not isinstance(value, Input) and axis_to_cut(value.type, update.type) is None
        return not is_plain or bool(self._pipeline.users[update])

    def _fused(self, stage: Fused) -> None:
        inside = [node for node in stage.nodes if node in self.names]
        for node in inside:
            if not node.type.shape:
                self._single(node)
        shaped = [node for node in inside if node.type.shape]
        made = Pass(self, stage, shaped, self._pipeline, self._target.has_numba)
        self.functions.append(made.function())
        depth = self._depth(made.kind.group)
        arguments = [self._fitting(parameter, made.kind).text for parameter in made.parameters]
        given = [*(["job"] if made.needs_job else []), *arguments, *(self.names[size] for size in made.sizes)]
        results = [self.names[node] for node in made.results]
        if made.is_plain:
            self.used.add("room")
            shaped_like = next(
                argument for argument, parameter in zip(arguments, made.parameters, strict=True) if parameter.type.shape
            )
            rooms = (
                f'job.room("{self.names[node]}", {shaped_like}.shape, {self.names.dtype(node.type.dtype)})'
                for node in made.results
            )
            lines = [
                line for name, room in zip(results, rooms, strict=True) for line in broken(f"{name} = {room}", depth)
            ]
            lines += broken(f"{made.name}({', '.join([*given, *results])})", depth)
        else:
            lines = broken(f"{', '.join(results)} = {made.name}({', '.join(given)})", depth)
        for output in made.results:
            if isinstance(output, Update) and (axis := axis_to_cut(output.value.type, output.type)) is not None:
                lines.append(f"{MARGIN * depth}{self.names[output]} = {self._part(self.names[output], axis)}")
        self._add("Compute", shaped[-1], lines)

    def _overlapped(self, stage: Overlapped) -> None:
        matmul, reduction = stage.matmul, stage.reduction
        left, right = matmul.operands
        name, depth = self.names[matmul], self._depth(matmul.type.group)
        self._note_half(reduction)
        self.used |= {"chunks", "room"}
        dtype = self.names.dtype(matmul.type.dtype)
        product = "np.matmul(left[rows], right, out=product[rows])"
        if is_narrow(matmul.type.dtype):
            product = f"product[rows] = {self._product(matmul, Text('left[rows]'), Text('right')).text}"
        started = self._call(
            "start_all_reduce", ["product[rows]", self._target.reduction(reduction.reduction)], reduction
        )
        started = re.sub(r'"([^"]*)"\)$', r'f"\1.{rows.start}")', started)  # each chunk has a name of its own
        function = self.names.new(f"{name}_in_chunks")
        lines = [line.format(name=function, chunks=stage.chunks, dtype=dtype, product=product) for line in IN_CHUNKS]
        self.functions.append("\n".join([*lines[:7], *broken(f"waits.append({started})", 2), *lines[7:]]))
        axis = axis_of(reduction.type)

        def made() -> str:
            product = f"{function}(job, {self.value(left).text}, {self.value(right).text})"
            return f"{self.names[reduction]} = {product if axis is None else self._part(product, axis)}"

        self._add("Overlapped", reduction, self._line(made, matmul.operands, name, depth))
        if isinstance(stage.reducer, FusedAllReduce):
            for node in stage.reducer.nodes:
                if node is not reduction:
                    self._single(node)

    # the step

    def _depth(self, group: int | None) -> int:
        return 2 + (self._pipeline.groups > 1 and group is not None)

    def _add(self, kind: str, node: Expression, lines: Sequence[str]) -> None:
        """Lines that make `node`: of one block with those before, if both compute, in the same ranks."""
        group, name = node.type.group if self._pipeline.groups > 1 else None, self.names[node]
        if self.blocks and kind == "Compute" and self.blocks[-1][::2] == (kind, group):
            last = self.blocks.pop()
            lines = [*last.lines, *lines]
        self.blocks.append(Block(kind, name, group, [*lines]))

    def _finish(self) -> None:
        """Wait for what was sent, then write what is updated."""
        if sends := [node for node in self._pipeline.nodes if isinstance(node, Send)]:
            self.used.add("finish")
            for group in sorted({send.source for send in sends}):
                self.blocks.append(Block("Send", "finish", group, [f"{MARGIN * self._depth(group)}job.finish()"]))
        for node in self._pipeline.nodes:
            if isinstance(node, Update):
                value = node if self._is_kept(node) or self._is_in_pass(node) else node.value
                line = f"{self.names[node.tensor]}[...] = {self.names[value]}"
                here = node.type.group if self._pipeline.groups > 1 else None
                block = Block("Update", self.names[node], here, broken(line, self._depth(here)))
                if self.blocks[-1][::2] == ("Update", block.group):
                    block = block._replace(lines=[*self.blocks.pop().lines, *block.lines])
                self.blocks.append(block)

    def _is_in_pass(self, update: Update) -> bool:
        return any(isinstance(compound, Fused) and update in compound.nodes for compound in self._pipeline.compounds)

    def labels(self) -> list[str]:
        """The label of each block in the line of a run: its kind, and its name if several are of that kind."""
        kinds = [block.kind for block in self.blocks]
        of_sends = {"Send", "Recv"}
        return [
            block.kind if block.kind in of_sends or kinds.count(block.kind) == 1 else f"{block.kind}_{block.name}"
            for block in self.blocks
        ]

    def body(self) -> list[str]:
        """The lines of a step."""
        lines: list[str] = []
        group: int | None = None
        for block, label in zip(self.blocks, self.labels(), strict=True):
            here = block.group
            if here != group and here is not None:
                lines.append(f"{MARGIN}if job.group == {here}:")
            group = here
            lines.append(f'{MARGIN * (1 + (here is not None))}with job.timed("{label}"):')
            lines += block.lines
        return lines


class Owner(Protocol):
    """The writer of the rest, which knows where a rank's elements are."""

    names: Names
    used: set[str]

    def place_of(self, kind: Type) -> str:
        """The elements of a whole tensor that a value of this type has here."""


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
        """The operands of `node` that come from outside of the pass."""
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
        is_float = all((kind.dtype in FLOATS and not is_narrow(kind.dtype)) or kind.dtype == Bool for kind in kinds)
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
