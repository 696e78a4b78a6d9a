"""A program: its inputs, its outputs, and what lies between them, as it was written or as rewrites have changed it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.programs.communication import AllReduce, Broadcast, Send
from omnireduce.programs.drawing import program_text
from omnireduce.programs.expressions import Constant, Expression, Input, Pointwise, Tensor, short
from omnireduce.programs.placement import sizes_in
from omnireduce.programs.source_lines import error_at, names_of_user, user_line
from omnireduce.programs.stages import Compound, Stage, in_order, in_stages, users_of
from omnireduce.programs.whole_tensor_operations import Update

if TYPE_CHECKING:
    from omnireduce.programs.shard_runner import OnShards
    from omnireduce.runtime.rank.communicator import Communicator

LONGEST_NAME = 40  # characters of a program's name: it begins the names of its collectives
Handle = Expression | str
"""A stage, as the user wrote it or by its name."""


class Pipeline:
    """A program on the ranks of a job.

    `inputs`: all Tensors, and the Variables that are used as numbers; sizes of dimensions follow from the arrays.
    `outputs`: what a run returns. A pipeline never changes: each rewrite returns another one. Its stages are known by
    name, and by the expression from which they come, however often they were rewritten.

    A stage has the name of the variable that holds it where the pipeline is made; others are t1, t2, ... An
    element-wise operation that is used once needs no name: it belongs to the stage that uses it. Outputs keep the names
    that they have at first, whatever stage gives them later.

    Raises UsageError, with the file and line, for inputs and outputs that do not belong together.
    """

    name: str
    inputs: tuple[Input, ...]
    outputs: tuple[Expression, ...]
    compounds: tuple[Compound, ...]
    nodes: tuple[Expression, ...]
    users: Mapping[Expression, Sequence[Expression]]
    names: Mapping[Expression, str]
    stages: tuple[Stage, ...]
    output_names: tuple[str, ...]

    def __init__(self, name: str, inputs: Sequence[Input], outputs: Sequence[Expression]) -> None:
        self.name = name
        self._handles: dict[Expression, Expression] = {}
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise error_at(user_line(), f"name {name!r}: expected a text of 1 to {LONGEST_NAME} characters")
        for label, values, example in (("inputs", inputs, "[g, w, lr]"), ("outputs", outputs, "[w1]")):
            if not isinstance(values, list | tuple):
                raise error_at(user_line(), f"{label} is {values!r}: expected a list, such as {example}")
        _check_outputs(outputs)
        _check_inputs(name, inputs, outputs)
        written = names_of_user()
        names = {node: written[id(node)] for node in in_order(outputs) if id(node) in written}
        self._set(inputs, outputs, (), names)
        self.output_names = tuple(self.names[output] for output in self.outputs)

    def _set(
        self,
        inputs: Iterable[Input],
        outputs: Iterable[Expression],
        compounds: Iterable[Compound],
        names: Mapping[Expression, str],
    ) -> None:
        self.inputs, self.outputs, self.compounds = tuple(inputs), tuple(outputs), tuple(compounds)
        self.nodes = tuple(in_order(self.outputs))
        self.users = users_of(self.nodes)
        self.names = self._all_names(names)
        self.stages = tuple(in_stages(self.nodes, self.compounds, self.names))

    def _all_names(self, user_names: Mapping[Expression, str]) -> dict[Expression, str]:
        """The names of inputs and of all stages."""
        names: dict[Expression, str] = {input_node: input_node.name for input_node in self.inputs}
        names |= {size: size.name for size in sizes_in(self.inputs)}
        taken = set(names.values()) | set(user_names.values())
        count = 0
        for node in self.nodes:
            if isinstance(node, Input | Constant):
                continue
            name = user_names.get(node)
            if name is None and self._needs_name(node):
                while name is None or name in taken:
                    count += 1
                    name = f"t{count}"
            if name is not None:
                names[node] = _unique(name, set(names.values()))
                taken.add(names[node])
        return names

    def _needs_name(self, node: Expression) -> bool:
        return node in self.outputs or not isinstance(node, Pointwise) or len(self.users[node]) > 1

    def __getitem__(self, stage: Handle) -> Expression:
        """The stage with this name, or what an expression of the user's has become. Raises UsageError."""
        if isinstance(stage, str):
            for node, name in self.names.items():
                if name == stage:
                    return node
            known = ", ".join(name for node, name in self.names.items() if not isinstance(node, Input))
            raise UsageError(f"{self.name} has no stage '{stage}'; its stages are {known}")
        if not isinstance(stage, Expression):
            raise UsageError(f"got {stage!r}, {a_type(stage)}; expected a stage of {self.name}, or its name")
        current = self._handles.get(stage, stage)
        if current not in self.users:
            raise UsageError(f"{self.name} has no such stage: {stage.text(['...'] * len(stage.operands))}")
        return current

    def belonging_to(self, stage: Expression) -> list[Expression]:
        """The expressions of a stage: its own, and those without a name that it is made of; in order."""
        members, waiting = {stage}, [stage]
        while waiting:
            for operand in waiting.pop().operands:
                if operand not in self.names and operand not in members and not isinstance(operand, Constant):
                    members.add(operand)
                    waiting.append(operand)
        return [node for node in self.nodes if node in members]

    def changed(
        self,
        changes: Mapping[Expression, Expression],
        *,
        outputs: Sequence[Expression] | None = None,
        names: Mapping[Expression, str] | None = None,
        compounds: Sequence[Compound] | None = None,
        program: str | None = None,
    ) -> Pipeline:
        """This program with each expression replaced as `changes` say. `outputs`: where they are replaced otherwise;
        `names`: of new expressions; `program`: another name for all of it."""
        pipeline = Pipeline.__new__(Pipeline)
        pipeline.name, pipeline.output_names = program or self.name, self.output_names
        kept_names = {changes.get(node, node): name for node, name in self.names.items() if not isinstance(node, Input)}
        pipeline._handles = {handle: changes.get(new, new) for handle, new in self._handles.items()}
        for old, new in changes.items():
            pipeline._handles.setdefault(old, new)
        if compounds is None:
            compounds = [
                compound.mapped({node: changes.get(node, node) for node in compound.nodes})
                for compound in self.compounds
            ]
        inputs = [changes.get(input_node, input_node) for input_node in self.inputs]
        if outputs is None:
            outputs = [changes.get(output, output) for output in self.outputs]
        pipeline._set(
            [input_node for input_node in inputs if isinstance(input_node, Input)],
            outputs,
            compounds,
            {**kept_names, **(names or {})},
        )
        return pipeline

    @property
    def known_values(self) -> set[str]:
        """The names of what a run may be given: inputs, and sizes of dimensions."""
        return {name for node, name in self.names.items() if isinstance(node, Input)}

    @property
    def groups(self) -> int:
        """The number of groups of ranks that the program is for."""
        target_groups = [node.to for node in self.nodes if isinstance(node, Send)]
        return 1 + max([0, *target_groups, *(input_node.type.group or 0 for input_node in self.inputs)])

    @property
    def least_ranks(self) -> int:
        """The least number of ranks in a group."""
        return 1 + max([0, *(node.root for node in self.nodes if isinstance(node, Broadcast))])

    def __str__(self) -> str:
        pairs = zip(self.output_names, self.outputs, strict=True)
        outputs = [name if name == self.names[output] else f"{name} = {self.names[output]}" for name, output in pairs]
        return program_text(self.name, self.inputs, outputs, self.stages, self.names)

    @cached_property
    def digest(self) -> str:
        """A text that no other program, or schedule, has: the number of stages, and a checksum."""
        at = {node: f"#{number}" for number, node in enumerate(self.nodes)}
        whole = [str(self), *(node.text([at[operand] for operand in node.operands]) for node in self.nodes)]
        text = hashlib.blake2b("\n".join(whole).encode(errors="backslashreplace"), digest_size=8).hexdigest()
        return f"{len(self.stages)} stages, checksum {text}"

    def print(self, file: TextIO | None = None) -> None:
        """Write the program to `file`, by default standard output: one line for each stage, with type and layout."""
        (sys.stdout if file is None else file).write(f"{self}\n")

    def draw(self, path: str | Path) -> None:
        """Write a picture of the program to `path`, as SVG. Raises UsageError where it cannot be written, ConfigError
        without matplotlib."""
        from omnireduce.programs.drawing import draw

        draw(self, Path(path))

    def interpret(self, values: Mapping[str, Any], ranks: int) -> dict[str, list[Array]]:
        """The results of a run on so many ranks of each group, computed here, slowly: see `interpreter.interpret`."""
        from omnireduce.programs.interpreter import interpret

        return interpret(self, values, ranks)

    def run(self, comm: Communicator, values: Mapping[str, Any], *, compare: bool = True) -> dict[str, Array]:
        """Run the program on this rank, as all ranks of `comm` do: see `runner.run`."""
        from omnireduce.programs.runner import run

        return run(self, comm, values, compare=compare)

    def on_shards(
        self, comm: Communicator, values: Mapping[str, Any], *, lazy: bool = False, name: str = ""
    ) -> OnShards:
        """This program with its fused AllReduce on the shards, which keep its tensors: see `on_shards.OnShards`."""
        from omnireduce.programs.shard_runner import OnShards

        return OnShards(self, comm, values, lazy=lazy, name=name)

    def codegen(
        self,
        path: str | Path,
        *,
        target: str = "omnireduce",
        schedule: str = "",
        numbers: Mapping[str, float] | None = None,
        on_shards: bool = True,
    ) -> None:
        """Write the program as a Python file that runs by itself: see `generated.source.codegen`."""
        from omnireduce.programs.generated.source import codegen

        codegen(self, path, target=target, schedule=schedule, numbers=numbers, on_shards=on_shards)

    def split(self, stage: Handle) -> Pipeline:
        """An AllReduce as ReduceScatter and AllGather: see `rewrites.split`."""
        from omnireduce.programs.rewrites import split

        return split(self, stage)

    def reorder(self, stages: Sequence[Handle], gather: Handle) -> Pipeline:
        """Compute stages on the parts, before `gather`: see `rewrites.reorder`."""
        from omnireduce.programs.rewrites import reorder

        return reorder(self, stages, gather)

    def as_slice(self, tensors: Sequence[Handle]) -> Pipeline:
        """Keep tensors in slices: see `rewrites.as_slice`."""
        from omnireduce.programs.rewrites import as_slice

        return as_slice(self, tensors)

    def fuse(self, stages: Sequence[Handle]) -> Pipeline:
        """Evaluate element-wise stages in one pass: see `rewrites.fuse`."""
        from omnireduce.programs.rewrites import fuse

        return fuse(self, stages)

    def fuse_into(self, stages: Sequence[Handle], operation: type[AllReduce] = AllReduce) -> Pipeline:
        """Put ReduceScatter, computations and AllGathers into one AllReduce: see `rewrites.fuse_into`."""
        from omnireduce.programs.rewrites import fuse_into

        return fuse_into(self, stages, operation)

    def overlap(self, stages: Sequence[Handle], *, chunks: int = 4) -> Pipeline:
        """Compute a MatMul chunk by chunk while its last chunk is reduced: see `rewrites.overlap`."""
        from omnireduce.programs.rewrites import overlap

        return overlap(self, stages, chunks=chunks)


def _check_outputs(outputs: Sequence[Expression]) -> None:
    """Raises UsageError unless these are what stages compute, and no tensor would get two values."""
    if not outputs:
        raise error_at(user_line(), "no outputs: expected what a run returns, such as [w1]")
    for output in outputs:
        if not isinstance(output, Expression):
            raise error_at(user_line(), f"{output!r} is {a_type(output)}; expected expressions as outputs")
        if output.is_under_way or isinstance(output, Input | Constant):
            raise error_at(output.source_line, f"an output is {short(output)}: expected what a stage computes")
    updated: dict[Tensor, Update] = {}
    for node in in_order(outputs):
        if isinstance(node, Update) and updated.setdefault(node.tensor, node) is not node:
            raise node.refuse(f"{node.tensor.name} is updated twice; expected once in a program")


def _check_inputs(program: str, inputs: Sequence[Input], outputs: Sequence[Expression]) -> None:
    """Raises UsageError unless these are all that the outputs need, and each has a name of its own."""
    source_line, nodes = user_line(), in_order(outputs)
    for input_node in inputs:
        if not isinstance(input_node, Input):
            raise error_at(source_line, f"an input is {input_node!r}: expected Tensors and Variables")
        if inputs.count(input_node) > 1:
            raise error_at(source_line, f"{input_node.name} is an input twice; expected once")
        if input_node not in nodes:
            raise error_at(source_line, f"{input_node.name} is an input, but the outputs do not need it: leave it out")
    for used in nodes:
        if isinstance(used, Input) and used not in inputs:
            raise error_at(used.source_line, f"{used.name} is used, but is not among the inputs of {program}")
    named: dict[str, Expression] = {}
    for known in (*inputs, *sizes_in(nodes)):
        if named.setdefault(known.name, known) is not known:
            raise error_at(
                known.source_line, f"there is another {known.name}: expected one name for each input and size"
            )


def _unique(name: str, taken: set[str]) -> str:
    unique, count = name, 1
    while unique in taken:
        count += 1
        unique = f"{name}_{count}"
    return unique
