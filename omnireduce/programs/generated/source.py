"""Generation of the whole file of a program."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.errors import UsageError, a_type
from omnireduce.programs.communication import ReduceScatter
from omnireduce.programs.expressions import (
    FLOATS,
    Arithmetic,
    Cast,
    Constant,
    Dropout,
    Expression,
    Float32,
    Float64,
    Input,
    Tensor,
    Type,
    Variable,
    as_expression,
    is_narrow,
)
from omnireduce.programs.generated.oracle import Oracle
from omnireduce.programs.generated.rank_side import RankWriter, Target
from omnireduce.programs.generated.statements import (
    MARGIN,
    Names,
    Statements,
    Text,
    break_line,
    quoted,
    shape_text,
)
from omnireduce.programs.lowering import lowered
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import number_value, sizes_in
from omnireduce.programs.shard_runner import runs_on_shards
from omnireduce.programs.stages import FusedAllReduce
from omnireduce.programs.whole_tensor_operations import ReduceTensor, Update
from omnireduce.support.files.output import check_writable, write_file


class SourceWriter(Statements):
    """Writes the program in the language. `imports`: the names of `omnireduce.programs` that the text uses."""

    def __init__(self, pipeline: Pipeline, names: Names) -> None:
        super().__init__(names)
        self._pipeline = pipeline
        self.imports: set[str] = {"AllReduce", "Pipeline"}

    def _constant(self, node: Constant) -> str:
        return node.text(())

    def _type(self, node: Expression) -> str:
        name = str(node.type.dtype)
        name = name[0].upper() + name[1:]
        name = {"Bfloat16": "BFloat16", "Uint8": "UInt8", "Uint16": "UInt16", "Uint32": "UInt32"}.get(name, name)
        self.imports.add(name)
        return name

    def render(self, node: Expression) -> Text:
        operands = [self.value(operand) for operand in node.operands]
        if isinstance(node, Arithmetic):
            left, right = (operand.within(node.least_precedence(at)) for at, operand in enumerate(operands))
            return Text(f"{left} {node.symbol} {right}", node.precedence)
        self.imports.add(type(node).__name__)
        if isinstance(node, Cast):
            return Text(f"Cast({self._type(node)}, {operands[0].text})")
        if isinstance(node, ReduceScatter | ReduceTensor):
            self.imports.add(repr(node.reduction))
        return Text(node.text([operand.text for operand in operands]))

    def function(self) -> list[str]:
        """The lines of a function that makes the pipeline."""
        pipeline, names = self._pipeline, self.names
        lines = ["def program():", f'{MARGIN}"""The program in its own language."""']
        sizes = [size for size in sizes_in(pipeline.inputs) if size not in pipeline.inputs]
        for input_node in [*sizes, *pipeline.inputs]:
            lines += self._declaration(input_node)
        for node in pipeline.nodes:
            if node in names and not isinstance(node, Input):
                lines += self.assigned(names[node], node)
        inputs = ", ".join(names[input_node] for input_node in pipeline.inputs)
        outputs = ", ".join(names[output] for output in pipeline.outputs)
        lines += break_line(f"pipeline = Pipeline({quoted(pipeline.name)}, [{inputs}], [{outputs}])", 1)
        fused = next(compound for compound in pipeline.compounds if isinstance(compound, FusedAllReduce))
        stages = ", ".join(names[node] for node in fused.nodes if node in names)
        return [*lines, *break_line(f"return pipeline.fuse_into([{stages}], AllReduce)", 1)]

    def _declaration(self, node: Input) -> list[str]:
        name, kind = self.names[node], self._type(node)
        if isinstance(node, Variable):
            self.imports.add("Variable")
            return break_line(f'{name} = Variable({kind}, "{name}")', 1)
        assert isinstance(node, Tensor)
        self.imports |= {"Tensor", node.type.layout.value}
        shape = shape_text(node.type.shape, self.names)
        shape = shape[1:-2] if len(node.type.shape) == 1 else shape
        return break_line(f'{name} = Tensor({kind}, {shape}, {node.type.layout.value}, "{name}")', 1)


TARGETS = {"omnireduce": Target("omnireduce", True), "mpi4py": Target("mpi4py", False)}
RATE = 0.01  # of variables of a float type, unless it is said


def codegen(
    pipeline: Pipeline,
    path: str | Path,
    *,
    target: str = "omnireduce",
    schedule: str = "",
    numbers: Mapping[str, float] | None = None,
    on_shards: bool = True,
) -> None:
    """Write `pipeline` to `path` as a Python file that runs by itself: `mpirun -n 2 python FILE [EPOCHS]`.

    `target`: "omnireduce" uses this library, and numba for passes over memory; "mpi4py" only that and NumPy.
    `schedule`: what the file says of how the program is done. `numbers`: what Variables are, by name; others are the
    number of the step if they are integers, and 0.01 if they are not. `on_shards`: a fused AllReduce runs on the
    shards, where the target is "omnireduce" and shards can run it; else by its definition.

    The file compares what it does with what the program means, and prints a line with times in ms for each size.
    Raises UsageError for another target, an unknown number, element types that MPI has not, and where the file cannot
    be written.
    """
    check_writable(path)
    write_file(source(pipeline, str(path), target, schedule, numbers or {}, on_shards).encode(), path)


def source(
    pipeline: Pipeline, path: str, target: str, schedule: str, numbers: Mapping[str, float], on_shards: bool
) -> str:
    """The text of the file."""
    if target not in TARGETS:
        raise UsageError(f"target {target!r}: expected {' or '.join(TARGETS)}")
    _check_numbers(pipeline, numbers)
    return _File(pipeline, Path(path).name, TARGETS[target], schedule, numbers, on_shards).text()


def _check_numbers(pipeline: Pipeline, numbers: object) -> None:
    """Raises UsageError unless these are numbers of Variables, by name; sizes have values of their own in a file."""
    sizes = sizes_in(pipeline.nodes)
    variables = {
        variable.name: variable
        for variable in pipeline.inputs
        if isinstance(variable, Variable) and variable not in sizes
    }
    if not isinstance(numbers, Mapping):
        raise UsageError(f"numbers is {a_type(numbers)}; expected a dict, by the names of Variables")
    if unknown := sorted(map(str, numbers.keys() - variables.keys())):
        names = ", ".join(variables) or "none"
        raise UsageError(f"numbers: {pipeline.name} has no Variable {', '.join(unknown)}; it has {names}")
    for name, value in numbers.items():
        number_value(value, variables[name].type, name)


class _File:
    """All parts of a file, and what they need of it."""

    def __init__(
        self,
        pipeline: Pipeline,
        file: str,
        target: Target,
        schedule: str,
        numbers: Mapping[str, float],
        on_shards: bool,
    ) -> None:
        self._pipeline, self._file, self._target, self._schedule = pipeline, file, target, schedule
        self._names = Names(pipeline.names, pipeline.nodes)
        self._sizes = sizes_in(pipeline.nodes)
        self._fixed_numbers = numbers
        self._shards = on_shards and target.name == "omnireduce" and runs_on_shards(pipeline)
        self._parts = RankWriter(pipeline, self._names, target)
        self._oracle = Oracle(pipeline, self._names)
        self._program_writer = SourceWriter(pipeline, self._names)

    def text(self) -> str:
        environment = Environment(
            loader=FunctionLoader(_template), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        functions, expected = self._functions(), self._expected()
        tables, numbers = self._tables(), self._numbers()
        used = self._used()
        is_mpi = self._target.name == "mpi4py"
        language = sorted(self._program_writer.imports)
        language_import = _imported("omnireduce.programs", language) if self._shards else ""
        context: dict[str, Any] = {
            "mpi": is_mpi, "groups": self._pipeline.groups, "used": used, "named": "" if is_mpi else ", name",
            "sum": "MPI.SUM" if is_mpi else '"sum"',
        }  # fmt: skip
        job = environment.get_template("job.jinja").render(context)
        dtypes = self._names.dtypes | ({"float64"} if "squares" in used else set())
        ml_types = sorted(name for name in dtypes if name in ELEMENT_TYPES and not ELEMENT_TYPES[name].is_native)
        numpy_types = sorted(dtypes - {*ml_types}, key=lambda name: (name.rstrip("0123456789_"), len(name), name))
        context |= {
            "title": self._title(), "summary": self._summary(), "file": self._file.replace("\\", "").replace('"', ""),
            "ml_types": ml_types, "has_numba": any("@njit" in function for function in functions),
            "numpy_types": numpy_types, "numpy_import": _imported("numpy", numpy_types),
            "language_import": language_import,
            "program": quoted(self._pipeline.name), "least_ranks": self._pipeline.least_ranks,
            "tables": tables, "numbers": numbers, "functions": functions, "expected": expected,
            "job": job, "shards": self._shards, "reduced": self._reduced(),
            "results": self._results_text(), "bits": self._bits(),
        }  # fmt: skip
        return environment.get_template("file.jinja").render(context).rstrip() + "\n"

    def _title(self) -> str:
        name = _plain(self._pipeline.name)
        return f"{name}, {_plain(self._schedule)}." if self._schedule else f"{name}."

    def _summary(self) -> str:
        where = "on the shards" if self._shards else ("with numba" if self._target.has_numba else "with NumPy")
        return f"Written by omnireduce.programs. It communicates by {self._target.name} and computes {where}."

    def _inputs(self) -> list[str]:
        """The arguments of a step: the inputs, and all sizes."""
        inputs = [input_node for input_node in self._pipeline.inputs if input_node not in self._sizes]
        return [self._names[input_node] for input_node in [*inputs, *self._sizes]]

    def _functions(self) -> list[str]:
        if self._shards:
            return ["\n".join(self._program_writer.function())]
        head = break_line(f"def run_step({', '.join(['job', *self._inputs()])}):", 0)
        body = [*head, f'{MARGIN}"""One step on this rank. Updated tensors are written in place, in the end."""']
        body += [*self._parts.body(), *self._outputs()]
        return [*self._parts.functions, "\n".join(body)]

    def _outputs(self) -> list[str]:
        pairs = [
            (name, output.type.group, self._names[output.tensor if isinstance(output, Update) else output])
            for name, output in zip(self._pipeline.output_names, self._pipeline.outputs, strict=True)
        ]
        if self._pipeline.groups == 1:
            return break_line("return {" + ", ".join(f'"{name}": {value}' for name, _, value in pairs) + "}", 1)
        lines = [f"{MARGIN}outputs = {{}}"]
        for name, group, value in pairs:
            if group is not None:
                lines.append(f"{MARGIN}if job.group == {group}:")
            lines.append(f'{MARGIN * (1 + (group is not None))}outputs["{name}"] = {value}')
        return [*lines, f"{MARGIN}return outputs"]

    def _expected(self) -> str:
        body = self._oracle.body()
        pairs = zip(self._pipeline.output_names, self._pipeline.outputs, strict=True)
        entries = ", ".join(f'"{name}": {self._names[output]}' for name, output in pairs)
        head = break_line(f"def expected({', '.join(['ranks', *self._inputs()])}):", 0)
        docstring = f'{MARGIN}"""One step of all ranks. Updated tensors are written in place, in the end."""'
        return "\n".join([*head, docstring, *body, *break_line(f"return {{{entries}}}", 1)])

    def _used(self) -> set[str]:
        used = set(self._oracle.used) | (set() if self._shards else self._parts.used)
        if any(isinstance(node, Dropout) for node in self._pipeline.nodes):
            used.add("dropout")
        is_mpi = self._target.name == "mpi4py"
        if "norm" in used:
            used.add("all_reduce")
        if "all_reduce" in used or (is_mpi and "all_gather" in used):
            used.add("room")
        if used & {"norm", "norm function"}:
            used.add("squares")
        if used & ({"all_gather", "shape"} | ({"reduce_scatter"} if is_mpi else set())):
            used.add("shapes_of_parts")
        if is_mpi and used & {"all_gather", "reduce_scatter", "dropout"}:
            used.add("math")
        self._check_types(is_mpi)
        return used

    def _check_types(self, is_mpi: bool) -> None:
        """Raises UsageError for what MPI has no type for."""
        for node in self._pipeline.nodes if is_mpi else []:
            if is_narrow(node.type.dtype):
                raise UsageError(
                    f"{self._pipeline.name} has values of {node.type.dtype}, for which MPI has no type: expected "
                    'target="omnireduce", or a Cast'
                )

    def _tables(self) -> str:
        tensors = [node for node in self._pipeline.inputs if isinstance(node, Tensor)]
        outputs = zip(self._pipeline.output_names, self._pipeline.outputs, strict=True)
        sizes = [f'"{self._names[size]}"' for size in self._sizes]
        labels = ["FusedAllReduce"] if self._shards else list(dict.fromkeys(self._parts.labels()))
        dimensions = max(
            [1, *(sum(isinstance(dimension, Variable) for dimension in tensor.type.shape) for tensor in tensors)]
        )
        lines = ["# Input tensors, output tensors, sizes of dimensions, and labels of the times"]
        lines += self._table("TENSORS", {self._names[tensor]: tensor.type for tensor in tensors})
        lines += self._table("OUTPUTS", {name: output.type for name, output in outputs})
        lines += break_line(f"SIZES = [{', '.join(sizes)}]", 0)
        lines += break_line(f"LABELS = [{', '.join(quoted(label) for label in labels)}]", 0)
        return "\n".join([*lines, f"DIMENSIONS = {dimensions}  # of the tensor with the most"])

    def _table(self, name: str, kinds: Mapping[str, Type]) -> list[str]:
        lines = [f"{name} = {{"]
        if not kinds:
            return [f"{name} = {{}}"]
        for key, kind in kinds.items():
            names = ", ".join(str(x) if isinstance(x, int) else f'"{self._names[x]}"' for x in kind.shape)
            shape = f"({names},)" if len(kind.shape) == 1 else f"({names})"
            group = kind.group if kind.group is not None or self._pipeline.groups > 1 else 0
            kind_text = f'Kind({self._names.dtype(kind.dtype)}, {shape}, "{kind.layout.value}", {group})'
            lines.append(f'{MARGIN}"{key}": {kind_text},')
        return [*lines, "}"]

    def _numbers(self) -> str:
        entries = []
        for input_node in self._pipeline.inputs:
            if isinstance(input_node, Variable) and input_node not in self._sizes:
                dtype = self._names.dtype(input_node.type.dtype)
                number = f"{dtype}({RATE if input_node.type.dtype in FLOATS else 'step'})"
                if input_node.name in self._fixed_numbers:
                    number = self._oracle.value(
                        as_expression(self._fixed_numbers[input_node.name], input_node.type.dtype)
                    ).text
                entries.append(f'"{self._names[input_node]}": {number}')
        return "\n".join(break_line(f"return {{{', '.join(entries)}}}", 1))

    # on the shards

    def _reduced(self) -> str:
        return self._names[lowered(self._pipeline).reduced] if self._shards else ""

    def _results_text(self) -> str:
        entries = []
        for name, output in zip(self._pipeline.output_names, self._pipeline.outputs, strict=True):
            is_kept = isinstance(output, Update) and output.type.layout.is_sliced
            value = (
                f'shards.tensor("{self._names[output.operands[0]]}")'
                if is_kept
                else f'results["{self._names[output]}"]'
            )
            entries.append(f'"{name}": {value}')
        lines = break_line(f"return {{{', '.join(entries)}}}", 2)
        return "\n".join(lines).strip().removeprefix("return ")

    def _bits(self) -> int:
        """The number of bits of a result that are certain."""
        dtypes = {node.type.dtype for node in self._pipeline.nodes if node.type.dtype in FLOATS}
        if any(is_narrow(dtype) for dtype in dtypes):
            return 6
        return 18 if Float32 in dtypes or Float64 not in dtypes else 40


def _template(name: str) -> str:
    return files("omnireduce.programs.generated").joinpath(name).read_text()


def _imported(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 88:
        return line
    return "\n".join([f"from {module} import (", *(f"{MARGIN}{name}," for name in names), ")"])


def _plain(text: str) -> str:
    """A text as it may stand in a docstring."""
    return text.replace("\\", "/").replace('"', "'")
