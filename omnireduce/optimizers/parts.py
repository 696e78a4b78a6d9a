"""Parameters as they travel: each part has one state on the shards, and one exchange in a step."""

from __future__ import annotations

import contextlib
import math
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from omnireduce.core.block_program import PROGRAM_ELEMENTS, BlockProgram
from omnireduce.core.dtypes import Array
from omnireduce.core.layout import Layout
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.arguments import check_rows
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle
from omnireduce.support.files.paths import user_path

STEP, NUMBER = "step", "save"
MOST_STEPS, NUMBER_BITS = 1 << 62, 62
PART = re.compile(r"part-(\d+)-of-(\d+)\.npz")
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""By parameter and what is kept of it."""


def _file(folder: Path, part: int, parts: int) -> Path:
    return folder / f"part-{part}-of-{parts}.npz"


def _present(folder: Path) -> dict[int, set[int]]:
    """The numbers of the parts that are there, by how many there shall be."""
    numbers = dict[int, set[int]]()
    for name in os.listdir(folder):
        if match := PART.fullmatch(name):
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    return numbers


def _starts(size: int, parts: int) -> list[int]:
    """Where the parts of a flat array begin, and the last one ends: the first ones may have one number more."""
    return [part * (size // parts) + min(part, size % parts) for part in range(parts + 1)]


def check_steps(steps: object) -> int:
    """Raises UsageError for what is no number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MOST_STEPS:
        raise UsageError(f"the state is after {steps!r} steps; expected a whole number from 0 on")
    return steps


def check_state(state: Mapping[str, Any] | None, shapes: Shapes) -> dict[str, dict[str, Array]]:
    """What a `state_dict` keeps, by parameter. Raises UsageError for one that has no arrays of these shapes."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise UsageError(f"the state is {a_type(state)}; expected what state_dict has returned on this rank")
    check_steps(state.get(STEP))
    for name, kept in shapes.items():
        own = state["state"].get(name)
        for what, shape in kept.items():
            array = own.get(what) if isinstance(own, Mapping) else None
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.float32:
                raise UsageError(f"the state has no {what} of {name}: expected float32{list(shape)}")
    return dict(state["state"])


def key_of(parameter: str, what: str) -> str:
    """The name of an array in a file."""
    return f"{parameter}/{what}"


def share_of(values: Array, rank: int, size: int) -> Array:
    """What `rank` of `size` writes of an array: a copy."""
    start, stop = _starts(values.size, size)[rank : rank + 2]
    return values.reshape(-1)[start:stop].copy()


class Save(NamedTuple):
    """A save by `rank` of `size`, after `steps`. `number`: the same on all ranks, and another one for each save."""

    number: int
    steps: int
    rank: int
    size: int


def write_part(folder: str | Path, save: Save, shares: Mapping[str, Array]) -> None:
    """Write the shares of a rank, by `key_of`, under another name: what is in the folder stays whole until all ranks
    have written, and `publish_part` follows. Raises UsageError when they cannot be written."""
    place, arrays = user_path(folder), {STEP: np.array(save.steps), NUMBER: np.array(save.number), **shares}
    with _telling(place, save.rank):
        place.mkdir(parents=True, exist_ok=True)
        if others := sorted(set(_present(place)) - {save.size}):
            raise UsageError(
                f"{folder} has a state in {others[0]} parts; expected an empty folder, or one of {save.size} parts"
            )
        np.savez(_unfinished(place, save.rank), **arrays)  # type: ignore[arg-type]  # its other parameter has the name of no array


def publish_part(folder: str | Path, save: Save) -> None:
    """Let what a rank has written take the place of its part. Raises UsageError where that is not possible."""
    place = user_path(folder)
    with _telling(place, save.rank):
        _unfinished(place, save.rank).replace(_file(place, save.rank, save.size))


def discard_part(folder: str | Path, rank: int) -> None:
    """Remove what `rank` has written and will not publish."""
    with contextlib.suppress(OSError):
        _unfinished(user_path(folder), rank).unlink()


def _unfinished(place: Path, rank: int) -> Path:
    return place / f".part-{rank}.npz"


@contextlib.contextmanager
def _telling(place: Path, rank: int) -> Iterator[None]:
    """An error of the system becomes a UsageError, and nothing unfinished is left."""
    try:
        yield
    except OSError as error:
        discard_part(place, rank)
        raise UsageError(f"the state cannot be written to {place}: {error.strerror or error}") from error


class SavedParts:
    """A folder that holds a whole state of arrays of these `shapes`. `steps`: after how many.

    Raises UsageError for one that does not; all ranks come to the same, as all look at all parts.
    """

    def __init__(self, folder: str | Path, shapes: Shapes) -> None:
        self._folder, self._shapes = user_path(folder), shapes
        try:
            present = _present(self._folder)
        except OSError as error:
            raise UsageError(f"no state can be read from {folder}: {error.strerror}") from error
        whole = [parts for parts, numbers in present.items() if numbers == set(range(parts))]
        if len(present) != 1 or not whole:
            raise UsageError(f"{folder} has no whole state; expected part-0-of-N.npz to part-(N - 1)-of-N.npz")
        self._parts = whole[0]
        saves = {self._save_of(part) for part in range(self._parts)}
        if len(saves) > 1:
            steps = sorted(step for step, _ in saves)
            raise UsageError(
                f"{folder} has parts of {len(saves)} saves, after {steps} steps: the last one has not ended"
            )
        self.steps, _ = saves.pop()

    def _save_of(self, part: int) -> tuple[int, int]:
        """The steps and the save of a part, whose arrays fit. Raises UsageError."""
        file = _file(self._folder, part, self._parts)
        try:
            with np.load(file) as arrays:
                for name, what, size in self._sizes():
                    start, stop = _starts(size, self._parts)[part : part + 2]
                    array = arrays.get(key_of(name, what))
                    if array is None or array.shape != (stop - start,) or array.dtype != np.float32:
                        raise UsageError(f"it has no {what} of {name} with {stop - start} numbers of float32")
                return check_steps(arrays[STEP].item()), int(arrays[NUMBER].item())
        except Exception as error:  # any: a file may hold anything
            raise UsageError(f"{file} is no part of this state: {error}") from error

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        for name, kept in self._shapes.items():
            for what, shape in kept.items():
                yield name, what, math.prod(shape)

    def read(self, name: str, what: str, rank: int, size: int) -> Array | None:
        """An array with the parts that `rank` of `size` reads, and zeros in the rest; None if it reads none."""
        mine = range(rank, self._parts, size)
        if not mine:
            return None
        array = np.zeros(self._shapes[name][what], np.float32)
        places = list(pairwise(_starts(array.size, self._parts)))
        for part in mine:
            with np.load(_file(self._folder, part, self._parts)) as arrays:
                array.reshape(-1)[slice(*places[part])] = arrays[key_of(name, what)]
        return array


SMALL_BYTES = 1 << 19  # the largest array that is copied to travel with others


class Parameter(NamedTuple):
    """A name, and the weights: C-contiguous, float32."""

    name: str
    weights: Array


class Part(Protocol):
    """Some parameters. `layout`: of what travels; `state`: the number of their state on the shards."""

    state: int
    parameters: list[Parameter]

    @property
    def layout(self) -> Layout: ...

    def checked(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Of the gradients that a user gives, those of these parameters, as they travel. Raises UsageError."""
        ...

    def start(self, comm: Communicator, program: BlockProgram, gradients: Mapping[str, Any]) -> Handle[Any]:
        """Start the exchange of a step, with the gradients that this rank has."""
        ...

    def done(self) -> None:
        """The exchange is over: what came goes to the parameters."""
        ...

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        """Let `program` run on values of this rank, an array like the weights for each parameter. None: this rank
        brings nothing. Results go to the parameters."""
        ...

    def receive(self, comm: Communicator, program: BlockProgram, *, wanted: bool) -> dict[str, Array]:
        """What `program` makes of nothing, an array like the weights for each parameter; none if it is not `wanted`."""
        ...


class Dense:
    """One parameter of any size, or several small ones in a buffer, each at the start of a block."""

    def __init__(self, state: int, parameters: Sequence[Parameter], block_size: int) -> None:
        self.state, self.parameters, self.block_size = state, list(parameters), block_size
        sizes = [parameter.weights.size for parameter in parameters]
        starts = np.cumsum([0, *(-(-size // block_size) * block_size for size in sizes)]).tolist()
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]
        self._is_alone = len(sizes) == 1
        self._elements = sizes[0] if self._is_alone else starts[-1]
        self._weights = parameters[0].weights.reshape(-1) if self._is_alone else np.zeros(self._elements, np.float32)
        self._gradients = np.zeros(0 if self._is_alone else self._elements, np.float32)

    @property
    def layout(self) -> Layout:
        return Layout(self._elements, self.block_size)

    def checked(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
        mine = [parameter for parameter in self.parameters if parameter.name in gradients]
        return {parameter.name: dense_gradient(parameter, gradients[parameter.name]) for parameter in mine}

    def start(self, comm: Communicator, program: BlockProgram, gradients: Mapping[str, Any]) -> Handle[Any]:
        given = {
            parameter.name: gradients[parameter.name] for parameter in self.parameters if parameter.name in gradients
        }
        own = next(iter(given.values()), None)
        if own is not None and not self._is_alone:
            own = self._fill(self._gradients, given)
        return comm.fused_allreduce_async(own, program, out=self._weights, block_size=self.block_size)

    def _fill(self, flat: Array, values: Mapping[str, Array]) -> Array:
        """Put arrays at their places in `flat`, and zeros for those that are missing."""
        for parameter, place in zip(self.parameters, self._places, strict=True):
            flat[place] = values[parameter.name].reshape(-1) if parameter.name in values else 0
        return flat

    def done(self) -> None:
        if not self._is_alone:
            for parameter, place in zip(self.parameters, self._places, strict=True):
                parameter.weights.reshape(-1)[:] = self._weights[place]

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        own = None if values is None else self._fill(np.zeros(self._elements, np.float32), values)
        comm.fused_allreduce(own, program, out=self._weights, block_size=self.block_size)
        self.done()

    def receive(self, comm: Communicator, program: BlockProgram, *, wanted: bool) -> dict[str, Array]:
        values = np.zeros(self._elements, np.float32) if wanted else self._weights
        comm.fused_allreduce(None, program, out=values, block_size=self.block_size, wanted=wanted)
        places = zip(self.parameters, self._places, strict=True)
        return {parameter.name: values[place].reshape(parameter.weights.shape) for parameter, place in places if wanted}


class Table:
    """One parameter, (rows, row length), whose gradients come as rows."""

    def __init__(self, state: int, parameter: Parameter) -> None:
        self.state, self.parameters, self._weights = state, [parameter], parameter.weights
        if parameter.weights.ndim != 2 or not 1 <= parameter.weights.shape[1] <= PROGRAM_ELEMENTS:
            shape = list(parameter.weights.shape)
            raise UsageError(f"{parameter.name} is {shape}; expected [rows, row length of up to {PROGRAM_ELEMENTS}]")

    @property
    def layout(self) -> Layout:
        return Layout(self._weights.size, self._weights.shape[1])

    def checked(self, gradients: Mapping[str, Any]) -> dict[str, Any]:
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

    def done(self) -> None:
        """Rows go to their places at once."""

    def send(self, comm: Communicator, program: BlockProgram, values: Mapping[str, Array] | None) -> None:
        rows = self._no_rows()
        if values is not None:
            own = values[self.parameters[0].name]
            rows = np.arange(len(own)), own.copy()
        comm.fused_allreduce_rows(*rows, program, n_rows=len(self._weights), out=self._weights)

    def receive(self, comm: Communicator, program: BlockProgram, *, wanted: bool) -> dict[str, Array]:
        received = comm.fused_allreduce_rows(*self._no_rows(), program, n_rows=len(self._weights), wanted=wanted)
        return {self.parameters[0].name: received.rows.copy()} if wanted else {}


class Memory:
    """That of C-contiguous arrays, no two of which overlap."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        ranges = sorted(_range_of(array) for array in arrays)
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def holds_some_of(self, x: Array) -> bool:
        """Whether a C-contiguous array lies in it, or a part of it does."""
        start, end = _range_of(x)
        at = bisect_left(self._starts, end)
        return at > 0 and self._ends[at - 1] > start


def _range_of(x: Array) -> tuple[int, int]:
    start = x.ctypes.data
    return start, start + x.nbytes


def parameters_of(params: Mapping[str, Array] | Sequence[Array]) -> list[Parameter]:
    """The parameters in their order. Raises UsageError for what cannot be some."""
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
    """Raises UsageError for what are not some of these names."""
    if isinstance(tables, str) or not isinstance(tables, Collection):
        raise UsageError(f"tables is {tables!r}; expected a list of names of parameters")
    if wrong := [table for table in tables if not isinstance(table, str)]:
        raise UsageError(f"tables has {a_type(wrong[0])}; expected names of parameters, which are texts")
    if unknown := sorted(set(tables) - set(names)):
        raise UsageError(f"tables names {', '.join(unknown)}; expected some of {', '.join(names)}")


def parameter_of(name: str, weights: Any) -> Parameter:
    """Raises UsageError for what cannot be a parameter."""
    if not isinstance(weights, np.ndarray) or weights.dtype != np.float32:
        what = str(weights.dtype) if isinstance(weights, np.ndarray) else f"{a_type(weights)}"
        raise UsageError(f"parameter {name} is {what}; expected an array of float32")
    if not weights.flags.c_contiguous or not weights.flags.writeable or not weights.size:
        raise UsageError(f"parameter {name}: expected a C-contiguous array that may be written and is not empty")
    return Parameter(name, weights)


def dense_gradient(parameter: Parameter, given: Any) -> Array:
    """A gradient that a user has given, flat. Raises UsageError."""
    weights = parameter.weights
    if not isinstance(given, np.ndarray) or given.dtype != np.float32 or given.shape != weights.shape:
        what = f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"{a_type(given)}"
        raise UsageError(f"the gradient of {parameter.name} is {what}; expected float32{list(weights.shape)}")
    return np.ascontiguousarray(given).reshape(-1)


def row_gradients(parameter: Parameter, given: Any) -> tuple[Array, Array]:
    """Rows that a user has given, as a gradient. Raises UsageError."""
    n_rows, width = parameter.weights.shape
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    if not is_pair or not all(isinstance(array, np.ndarray) for array in given):
        raise UsageError(f"the gradient of {parameter.name} is {a_type(given)}; expected (indices, rows), arrays")
    indices, values = given
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


def parts_of(parameters: Sequence[Parameter], tables: set[str], block_size: int, *, apart: bool) -> list[Part]:
    """The parameters as they travel: `tables` as rows, large ones by themselves, small ones together unless `apart`."""
    parts, small = list[Part](), list[Parameter]()
    for parameter in parameters:
        if parameter.name in tables:
            parts.append(Table(len(parts), parameter))
        elif apart or parameter.weights.nbytes > SMALL_BYTES:
            parts.append(Dense(len(parts), [parameter], block_size))
        else:
            small.append(parameter)
    return [*parts, Dense(len(parts), small, block_size)] if small else parts
