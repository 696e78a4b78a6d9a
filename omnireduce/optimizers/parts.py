"""Parameters as they travel: each part has one state on the shards, and one exchange in a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from omnireduce.core.block_program import PROGRAM_ELEMENTS, BlockProgram
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.calls.arguments import check_rows
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle

SMALL_BYTES = 1 << 19  # the largest array that is copied to travel with others


class Parameter(NamedTuple):
    """A name, and the weights: C-contiguous, float32."""

    name: str
    weights: Array


class Part(Protocol):
    """Some parameters that share an exchange. `kind`: "dense" or "table". `layout`: of the exchanged elements.
    `state`: the number of their state on the shards."""

    kind: ClassVar[str]
    state: int
    parameters: list[Parameter]

    @property
    def layout(self) -> Layout: ...

    def check_gradients(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients of these parameters, as they travel, among those that a user gives. Raises UsageError."""
        ...

    def start(self, comm: Communicator, program: BlockProgram, gradients: Mapping[str, Any]) -> Handle[Any]:
        """Start the exchange of a step, with the gradients that this rank has."""
        ...

    def finish(self) -> None:
        """Copy the results to the parameters, after the exchange."""
        ...

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        """Let `program` run on values of this rank, an array like the weights for each parameter. None: this rank
        brings nothing. Results go to the parameters."""
        ...

    def receive(self, comm: Communicator, program: BlockProgram, *, is_receiver: bool) -> dict[str, Array]:
        """The result of `program` without a sum, an array like the weights for each parameter. It is empty unless this
        rank `is_receiver`."""
        ...


class DensePart:
    """One parameter of any size, or several small ones in a buffer, each at the start of a block."""

    kind: ClassVar[str] = "dense"

    def __init__(self, state: int, parameters: Sequence[Parameter], block_size: int) -> None:
        self.state, self.parameters, self.block_size = state, list(parameters), block_size
        sizes = [parameter.weights.size for parameter in parameters]
        starts = np.cumsum([0, *(-(-size // block_size) * block_size for size in sizes)]).tolist()
        self._slices = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._is_alone = len(sizes) == 1
        self._elements = sizes[0] if self._is_alone else starts[-1]
        self._weights = parameters[0].weights.reshape(-1) if self._is_alone else np.zeros(self._elements, np.float32)
        self._gradients = np.zeros(0 if self._is_alone else self._elements, np.float32)

    @property
    def layout(self) -> Layout:
        return Layout(self._elements, self.block_size)

    def check_gradients(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        present = [parameter for parameter in self.parameters if parameter.name in gradients]
        return {parameter.name: dense_gradient(parameter, gradients[parameter.name]) for parameter in present}

    def start(self, comm: Communicator, program: BlockProgram, gradients: Mapping[str, Any]) -> Handle[Any]:
        own_gradients = {
            parameter.name: gradients[parameter.name] for parameter in self.parameters if parameter.name in gradients
        }
        operand = next(iter(own_gradients.values()), None)
        if operand is not None and not self._is_alone:
            operand = self._fill(self._gradients, own_gradients)
        return comm.fused_allreduce_async(operand, program, out=self._weights, block_size=self.block_size)

    def _fill(self, flat: Array, values: Mapping[str, Array]) -> Array:
        """Copy arrays into their slices of `flat`, and zeros for those that are missing."""
        for parameter, part_slice in zip(self.parameters, self._slices, strict=True):
            flat[part_slice] = values[parameter.name].reshape(-1) if parameter.name in values else 0
        return flat

    def finish(self) -> None:
        if not self._is_alone:
            for parameter, part_slice in zip(self.parameters, self._slices, strict=True):
                parameter.weights.reshape(-1)[:] = self._weights[part_slice]

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        operand = None if values is None else self._fill(np.zeros(self._elements, np.float32), values)
        comm.fused_allreduce(operand, program, out=self._weights, block_size=self.block_size)
        self.finish()

    def receive(self, comm: Communicator, program: BlockProgram, *, is_receiver: bool) -> dict[str, Array]:
        values = np.zeros(self._elements, np.float32) if is_receiver else self._weights
        comm.fused_allreduce(None, program, out=values, block_size=self.block_size, wanted=is_receiver)
        pairs = zip(self.parameters, self._slices, strict=True)
        return {
            parameter.name: values[part_slice].reshape(parameter.weights.shape)
            for parameter, part_slice in pairs
            if is_receiver
        }


class TablePart:
    """One parameter, (rows, row length), whose gradients come as rows."""

    kind: ClassVar[str] = "table"

    def __init__(self, state: int, parameter: Parameter) -> None:
        self.state, self.parameters, self._weights = state, [parameter], parameter.weights
        if parameter.weights.ndim != 2 or not 1 <= parameter.weights.shape[1] <= PROGRAM_ELEMENTS:
            shape = list(parameter.weights.shape)
            raise UsageError(f"{parameter.name} is {shape}; expected [rows, row length of up to {PROGRAM_ELEMENTS}]")

    @property
    def layout(self) -> Layout:
        return Layout(self._weights.size, self._weights.shape[1])

    def check_gradients(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        parameter = self.parameters[0]
        return (
            {parameter.name: row_gradients(parameter, gradients[parameter.name])} if parameter.name in gradients else {}
        )

    def start(self, comm: Communicator, program: BlockProgram, gradients: Mapping[str, Any]) -> Handle[Any]:
        name, n_rows = self.parameters[0].name, len(self._weights)
        indices, values = gradients.get(name, self._no_rows())
        return comm.fused_allreduce_rows_async(indices, values, program, n_rows=n_rows, out=self._weights)

    def _no_rows(self) -> tuple[Array, Array]:
        return np.zeros(0, np.int64), self._weights[:0]

    def finish(self) -> None:
        """Do nothing: rows are written to the weights at once."""

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        rows = self._no_rows()
        if values is not None:
            table = values[self.parameters[0].name]
            rows = np.arange(len(table)), table.copy()
        comm.fused_allreduce_rows(*rows, program, n_rows=len(self._weights), out=self._weights)

    def receive(self, comm: Communicator, program: BlockProgram, *, is_receiver: bool) -> dict[str, Array]:
        received = comm.fused_allreduce_rows(*self._no_rows(), program, n_rows=len(self._weights), wanted=is_receiver)
        return {self.parameters[0].name: received.rows.copy()} if is_receiver else {}


class Memory:
    """Memory of C-contiguous arrays, no two of which overlap."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        ranges = sorted(_range_of(array) for array in arrays)
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def overlaps(self, x: Array) -> bool:
        """Whether a C-contiguous array lies in it, or a part of it does."""
        start, end = _range_of(x)
        at = bisect_left(self._starts, end)
        return at > 0 and self._ends[at - 1] > start


def _range_of(x: Array) -> tuple[int, int]:
    start = x.ctypes.data
    return start, start + x.nbytes


def parameters_of(params: Mapping[str, Array] | Sequence[Array]) -> list[Parameter]:
    """The parameters in their order. Raises UsageError if these cannot be parameters."""
    if not isinstance(params, Mapping | Sequence):
        raise UsageError(f"params is {a_type(params)}; expected a dict or a list of arrays")
    named = (
        list(params.items()) if isinstance(params, Mapping) else [(str(at), array) for at, array in enumerate(params)]
    )
    parameters = {name: parameter_of(name, array) for name, array in named if isinstance(name, str)}
    if len(parameters) < len(named):
        raise UsageError("the names of parameters: expected texts")
    if not parameters:
        raise UsageError("no parameters; expected at least one array")
    return list(parameters.values())


def check_tables(tables: Any, names: Sequence[str]) -> None:
    """Raises UsageError unless `tables` are some of these names."""
    if isinstance(tables, str) or not isinstance(tables, Collection):
        raise UsageError(f"tables is {tables!r}; expected a list of names of parameters")
    if not_texts := [table for table in tables if not isinstance(table, str)]:
        raise UsageError(f"tables has {a_type(not_texts[0])}; expected names of parameters, which are texts")
    if unknown := sorted(set(tables) - set(names)):
        raise UsageError(f"tables names {', '.join(unknown)}; expected some of {', '.join(names)}")


def parameter_of(name: str, weights: Any) -> Parameter:
    """A parameter. Raises UsageError if the weights cannot be used as one."""
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32:
        received = str(weights.dtype) if isinstance(weights, np.ndarray) else f"{a_type(weights)}"
        raise UsageError(f"parameter {name} is {received}; expected an array of float32")
    if not weights.flags.c_contiguous or not weights.flags.writeable or not weights.size:
        raise UsageError(f"parameter {name}: expected a C-contiguous array that may be written and is not empty")
    return Parameter(name, weights)


def dense_gradient(parameter: Parameter, gradient: Any) -> Array:
    """A gradient that a user has given, flat. Raises UsageError."""
    weights = parameter.weights
    if not isinstance(gradient, np.ndarray) or gradient.dtype != np.float32 or gradient.shape != weights.shape:
        received = (
            f"{gradient.dtype}{list(gradient.shape)}" if isinstance(gradient, np.ndarray) else f"{a_type(gradient)}"
        )
        raise UsageError(f"the gradient of {parameter.name} is {received}; expected float32{list(weights.shape)}")
    return np.ascontiguousarray(gradient).reshape(-1)


def row_gradients(parameter: Parameter, gradient: Any) -> tuple[Array, Array]:
    """Rows that a user has given, as a gradient. Raises UsageError."""
    n_rows, width = parameter.weights.shape
    is_pair = isinstance(gradient, tuple | list) and len(gradient) == 2
    if not is_pair or not all(isinstance(array, np.ndarray) for array in gradient):
        raise UsageError(f"the gradient of {parameter.name} is {a_type(gradient)}; expected (indices, rows), arrays")
    indices, values = gradient
    try:
        check_rows(indices, values, n_rows)
    except UsageError as error:
        raise UsageError(f"the gradient of {parameter.name}: {error}") from None
    if values.dtype != np.float32 or values.shape[1] != width:
        raise UsageError(
            f"the gradient of {parameter.name} has rows of {values.dtype}{list(values.shape[1:])}; expected "
            f"float32[{width}]"
        )
    return np.ascontiguousarray(indices), np.ascontiguousarray(values)


def as_weights(values: Array, parameter: Parameter) -> Array:
    """An array like the weights: one number for each row is repeated."""
    shape = parameter.weights.shape
    return values if values.shape == shape else np.repeat(values[:, None], shape[1], axis=1)


def parts_of(parameters: Sequence[Parameter], tables: set[str], block_size: int, *, separate: bool) -> list[Part]:
    """The parameters in parts, as they travel: `tables` as rows, large ones by themselves, and small ones together
    unless `separate`."""
    parts, small = list[Part](), list[Parameter]()
    for parameter in parameters:
        if parameter.name in tables:
            parts.append(TablePart(len(parts), parameter))
        elif separate or parameter.weights.nbytes > SMALL_BYTES:
            parts.append(DensePart(len(parts), [parameter], block_size))
        else:
            small.append(parameter)
    return [*parts, DensePart(len(parts), small, block_size)] if small else parts
