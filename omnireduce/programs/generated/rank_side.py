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
    break_line,
    shape_text,
)
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import axis_to_cut
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped, Stage, kind_of
from omnireduce.programs.whole_tensor_operations import MatMul, Norm, Reduction, Update, WholeReduction

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

    def region(self, node: Dropout) -> str:
        return self.region_of(node.type)

    def region_of(self, kind: Type) -> str:
        """The elements of a whole tensor that a value of this type has here."""
        self.used.add("region")
        axis = "" if axis_of(kind) is None else f", {axis_of(kind)}"
        is_local = kind.layout.value == "Local"
        return f"job.region({self.shape(kind)}{axis}{', is_own=True' if is_local else ''})"

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
            self._add_fused(stage)
        elif isinstance(stage, FusedAllReduce):
            for node in stage.nodes:
                self._add_single(node)
        elif isinstance(stage, Overlapped):
            self._add_overlapped(stage)
        else:
            self._add_single(stage)

    def _add_single(self, node: Expression) -> None:
        """A stage of one expression, unless it belongs to the one that uses it."""
        if node not in self.names or isinstance(node, Input):
            return
        if isinstance(node, Send):
            self._add_send(node)
            return
        name, depth = self.names[node], self._depth(node.type.group)
        if isinstance(node, Update):
            if self._is_kept(node):
                self._add("Compute", node, self._new_value(node, depth))
        elif isinstance(node, Pointwise | MatMul):
            self._add("Compute" if isinstance(node, Pointwise) else "MatMul", node, self.assigned(name, node, depth))
        else:
            lines = self._lines_with_parts(
                lambda: f"{name} = {self._render_collective(node)}", node.operands, name, depth
            )
            self._add(type(node).__name__, node, lines)

    def _lines_with_parts(
        self, make: Callable[[], str], operands: Iterable[Expression], name: str, depth: int
    ) -> list[str]:
        """The line that `make` gives. If it is long, operands that have no name get lines of their own before it."""
        lines: list[str] = []
        for x in operands:
            if len(MARGIN) * depth + len(make()) > WIDTH and x not in self.names and not isinstance(x, Constant):
                short = self._new_name(f"{name}_part")
                lines += self.assigned(short, x, depth)
                self._short[x] = short
        return [*lines, *break_line(make(), depth)]

    def _render_collective(self, node: Expression) -> str:
        """The text of a reduction of a tensor, or of a communication."""
        if isinstance(node, WholeReduction):
            return self._reduced(node)
        x = node.operands[0]
        if isinstance(node, Recv):
            return f"{self.names[x]}()"
        text = self.value(x).text
        if isinstance(node, AllReduce | ReduceScatter):
            method = "all_reduce" if isinstance(node, AllReduce) else "reduce_scatter"
            self._mark_half_used(node)
            return self._call(method, [text, self._target.reduction(node.reduction)], node)
        if isinstance(node, AllGather):
            axis = axis_of(x.type)
            return self._call("all_gather", [text, self.shape(x.type)], node, *([f"axis={axis}"] if axis else []))
        assert isinstance(node, Broadcast)
        return self._call("broadcast", [text, str(node.root)], node)

    def _mark_half_used(self, node: Expression) -> None:
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

    def _add_send(self, node: Send) -> None:
        x = node.operands[0]
        axis = "" if axis_of(x.type) is None else f", {axis_of(x.type)}"
        shape = f"job.shape({self.shape(x.type)}{axis})"
        kind = self.names.dtype(node.type.dtype)
        receiving = self._call("receive", [shape, kind, str(node.source)], node)
        self.used.add("shape")
        depth, name = self._depth(node.source), self.names[node]
        sending = self._lines_with_parts(
            lambda: self._call("send", [self.value(x).text, str(node.to)], node), [x], name, depth
        )
        self.blocks.append(Block("Send", name, node.source, sending))
        self.blocks.append(Block("Recv", name, node.to, break_line(f"{name} = {receiving}", depth)))

    def _new_value(self, update: Update, depth: int) -> list[str]:
        """The new value of a tensor, under the name of the update."""
        name, value = self.names[update], update.value
        text = self._fitting(value, update.type).text
        copied = ".copy()" if isinstance(value, Input) else ""
        line = f"{name} = {text}{copied}"
        is_short = value in self.names or text != self.value(value).text
        return break_line(line, depth) if is_short else self.assigned(name, value, depth)

    def _is_kept(self, update: Update) -> bool:
        """Whether the new value has a name of its own: for others that use it, or because no stage has it as it is."""
        value = update.value
        is_plain = value in self.names and not isinstance(value, Input) and axis_to_cut(value.type, update.type) is None
        return not is_plain or bool(self._pipeline.users[update])

    def _add_fused(self, stage: Fused) -> None:
        inside = [node for node in stage.nodes if node in self.names]
        for node in inside:
            if not node.type.shape:
                self._add_single(node)
        shaped = [node for node in inside if node.type.shape]
        pass_ = Pass(self, stage, shaped, self._pipeline, self._target.has_numba)
        self.functions.append(pass_.function())
        depth = self._depth(pass_.kind.group)
        arguments = [self._fitting(parameter, pass_.kind).text for parameter in pass_.parameters]
        call_arguments = [
            *(["job"] if pass_.needs_job else []),
            *arguments,
            *(self.names[size] for size in pass_.sizes),
        ]
        results = [self.names[node] for node in pass_.results]
        if pass_.is_plain:
            self.used.add("room")
            shaped_like = next(
                argument
                for argument, parameter in zip(arguments, pass_.parameters, strict=True)
                if parameter.type.shape
            )
            rooms = (
                f'job.room("{self.names[node]}", {shaped_like}.shape, {self.names.dtype(node.type.dtype)})'
                for node in pass_.results
            )
            lines = [
                line
                for name, room in zip(results, rooms, strict=True)
                for line in break_line(f"{name} = {room}", depth)
            ]
            lines += break_line(f"{pass_.name}({', '.join([*call_arguments, *results])})", depth)
        else:
            lines = break_line(f"{', '.join(results)} = {pass_.name}({', '.join(call_arguments)})", depth)
        for output in pass_.results:
            if isinstance(output, Update) and (axis := axis_to_cut(output.value.type, output.type)) is not None:
                lines.append(f"{MARGIN * depth}{self.names[output]} = {self._part(self.names[output], axis)}")
        self._add("Compute", shaped[-1], lines)

    def _add_overlapped(self, stage: Overlapped) -> None:
        matmul, reduction = stage.matmul, stage.reduction
        left, right = matmul.operands
        name, depth = self.names[matmul], self._depth(matmul.type.group)
        self._mark_half_used(reduction)
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
        self.functions.append("\n".join([*lines[:7], *break_line(f"waits.append({started})", 2), *lines[7:]]))
        axis = axis_of(reduction.type)

        def render_call() -> str:
            product = f"{function}(job, {self.value(left).text}, {self.value(right).text})"
            return f"{self.names[reduction]} = {product if axis is None else self._part(product, axis)}"

        self._add("Overlapped", reduction, self._lines_with_parts(render_call, matmul.operands, name, depth))
        if isinstance(stage.reducer, FusedAllReduce):
            for node in stage.reducer.nodes:
                if node is not reduction:
                    self._add_single(node)

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
                block_group = node.type.group if self._pipeline.groups > 1 else None
                block = Block("Update", self.names[node], block_group, break_line(line, self._depth(block_group)))
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
            block_group = block.group
            if block_group != group and block_group is not None:
                lines.append(f"{MARGIN}if job.group == {block_group}:")
            group = block_group
            lines.append(f'{MARGIN * (1 + (block_group is not None))}with job.timed("{label}"):')
            lines += block.lines
        return lines


class Owner(Protocol):
    """The writer of the rest, which knows where a rank's elements are."""

    names: Names
    used: set[str]

    def region_of(self, kind: Type) -> str:
        """The elements of a whole tensor that a value of this type has here."""


class Pass(Statements):
    """Writes one pass. Its values are all of one shape, this rank's part of it: nothing is cut inside.

    If all operations are one-dimensional arithmetic, there are two functions: one says what is done with an element, in
    the words of the program, the other one does it for all. numba compiles both; without it NumPy takes a piece that
    fits into the processor's cache for an element. Results go into arrays that are given, and used again in the next
    step: a new one costs more than what is computed, because its memory is not there yet.
    """

    def __init__(
        self, owner: Owner, stage: Fused, shaped: Sequence[Expression], pipeline: Pipeline, has_numba: bool
    ) -> None:
        super().__init__(owner.names)
        self._owner, self._stage, self._shaped = owner, stage, shaped
        self._pipeline = pipeline
        self.kind = kind_of(stage)
        self.parameters = list(dict.fromkeys(operand for node in shaped for operand in self._outer_operands(node)))
        self.results = [node for node in shaped if self._is_result(node)]
        self.is_plain = self._is_all_plain()
        self._is_compiled = has_numba and self.is_plain
        draws = any(isinstance(node, Dropout) for node in stage.nodes)
        self.needs_job = draws
        sizes = dict.fromkeys(dimension for dimension in self.kind.shape if isinstance(dimension, Variable) and draws)
        self.sizes = [size for size in sizes if size not in self.parameters]
        self._last = self.names[self.results[-1]]
        self.name, self._element_name = (
            self.names.new(f"{prefix}_{self._last}") for prefix in ("compute", "element_of")
        )

    def _outer_operands(self, node: Expression) -> Iterator[Expression]:
        """The operands of `node` that come from outside of the pass."""
        operands = node.operands[1:] if isinstance(node, Update) else node.operands
        for operand in operands:
            if operand in self._shaped or isinstance(operand, Constant):
                continue
            if operand in self.names:
                yield operand
            else:
                yield from self._outer_operands(operand)

    def _is_result(self, node: Expression) -> bool:
        users = self._pipeline.users[node]
        outside = [user for user in users if user not in self._stage.nodes]
        return isinstance(node, Update) or node in self._pipeline.outputs or bool(outside)

    def _is_all_plain(self) -> bool:
        kinds = [node.type for node in [*self._stage.nodes, *self.parameters]]
        is_arithmetic = all(
            isinstance(node, Update | Sqrt | Ite | Cast) or (isinstance(node, Arithmetic) and node.symbol != "**")
            for node in self._stage.nodes
            if node.type.shape or node not in self.names
        )
        is_float = all((kind.dtype in FLOATS and not is_narrow(kind.dtype)) or kind.dtype == Bool for kind in kinds)
        return is_arithmetic and is_float and all(kind.shape in ((), self.kind.shape[:1]) for kind in kinds)

    def region(self, node: Dropout) -> str:
        return self._owner.region_of(self.kind)

    def render(self, node: Expression) -> Text:
        if isinstance(node, Update):
            is_view = isinstance(node.value, Input) and not self.is_plain
            return Text(f"{self.value(node.value).text}.copy()") if is_view else self.value(node.value)
        if isinstance(node, Cast) and self._is_compiled:
            return Text(f"{self.names.dtype(node.dtype)}({self.value(node.operands[0]).text})")
        return super().render(node)

    def choice(self, node: Ite, operands: list[Text]) -> Text:
        if self._is_compiled:
            condition, if_true, if_false = operands
            return Text(f"{if_true.within(1)} if {condition.within(1)} else {if_false.within(1)}", 0)
        return super().choice(node, operands)

    def function(self) -> str:
        """The whole function, or both of them."""
        parameter_names = [self.names[parameter] for parameter in self.parameters]
        lines = [line for node in self._shaped for line in self.assigned(self.names[node], node)]
        returned = ", ".join(self.names[node] for node in self.results)
        description = (
            f"{self.kind.dtype} of this rank's part" if axis_of(self.kind) is not None else f"{self.kind.dtype}"
        )
        lines += break_line(f"return {returned}", 1)
        if self.is_plain:
            return self._element(parameter_names, lines) + "\n\n\n" + self._all_elements(parameter_names)
        all_parameters = [
            *(["job"] if self.needs_job else []),
            *parameter_names,
            *(self.names[size] for size in self.sizes),
        ]
        head = break_line(f"def {self.name}({', '.join(all_parameters)}):", 0)
        return "\n".join([*head, f'{MARGIN}"""{returned}: {description}."""', *lines])

    def _element(self, parameter_names: list[str], lines: list[str]) -> str:
        head = break_line(f"def {self._element_name}({', '.join(parameter_names)}):", 0)
        elements = "one element" if self._is_compiled else "some elements"
        return "\n".join([*self._decorator(), *head, f'{MARGIN}"""The results for {elements}."""', *lines])

    def _all_elements(self, parameter_names: list[str]) -> str:
        first = next(self.names[parameter] for parameter in self.parameters if parameter.type.shape)
        rooms = [self.names[node] for node in self.results]
        head = break_line(f"def {self.name}({', '.join([*parameter_names, *rooms])}):", 0)
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
        lines += break_line(f"{results} = {self._element_name}({', '.join(arguments)})", 2)
        return "\n".join([*self._decorator(), *head, *lines])

    def _decorator(self) -> list[str]:
        return ['@njit(error_model="numpy")'] if self._is_compiled else []
