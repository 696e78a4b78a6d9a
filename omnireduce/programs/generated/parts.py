"""One rank's side of a program: a function for each pass over memory, and a step, which is a row of timed blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from omnireduce.programs.communication import AllGather, AllReduce, Broadcast, Recv, ReduceScatter, Send
from omnireduce.programs.expressions import Constant, Expression, Input, Type, is_half
from omnireduce.programs.generated.passes import Pass
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
from omnireduce.programs.pointwise import Dropout, Pointwise
from omnireduce.programs.stages import Fused, FusedAllReduce, Overlapped, Stage

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
        """How it calls a way to combine values."""
        return f"MPI.{reduction.op.upper()}" if self.name == "mpi4py" else f'"{reduction.op}"'


class Block(NamedTuple):
    """Lines that are timed as one. `kind`: what they do; `name`: the last of what they make; `group`: the ranks that do
    it, None for all."""

    kind: str
    name: str
    group: int | None
    lines: list[str]


class Parts(Statements):
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
        """Of an operand what belongs to this rank's part of the result."""
        axis, text = axis_to_cut(node.type, result), self.value(node)
        return text if axis is None else Text(self._part(text.text, axis))

    def _part(self, text: str, axis: int) -> str:
        self.used.add("part")
        return f"job.part({text}, {axis})" if axis else f"job.part({text})"

    def place(self, node: Dropout) -> str:
        return self.place_of(node.type)

    def place_of(self, kind: Type) -> str:
        """Which elements of a whole tensor a value of this type has here."""
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
        """What a reduction of a tensor, or a communication, is made of."""
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
        if is_half(node.type.dtype):
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
        if is_half(matmul.type.dtype):
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
        """What each block is called in the line of a run: what it does, and its name where several do that."""
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
