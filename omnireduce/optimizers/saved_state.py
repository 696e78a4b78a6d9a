"""Saved state of an optimizer: a folder with a file of each rank, and the checks of what comes from it."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.support.files.paths import user_path

STEP, NUMBER = "step", "save"
MAX_STEPS, NUMBER_BITS = 1 << 62, 62
PART = re.compile(r"part-(\d+)-of-(\d+)\.npz")
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]
"""Shapes of arrays, by parameter and by column of its state."""


def _part_file(folder: Path, part: int, parts: int) -> Path:
    return folder / f"part-{part}-of-{parts}.npz"


def _parts_present(folder: Path) -> dict[int, set[int]]:
    """The numbers of the parts that are there, by how many there shall be."""
    numbers = dict[int, set[int]]()
    for name in os.listdir(folder):
        if match := PART.fullmatch(name):
            numbers.setdefault(int(match[2]), set()).add(int(match[1]))
    return numbers


def _starts(size: int, parts: int) -> list[int]:
    """The starts of the parts of a flat array, and the end of the last one. The first parts may be longer by one."""
    return [part * (size // parts) + min(part, size % parts) for part in range(parts + 1)]


def check_steps(steps: object) -> int:
    """Raises UsageError for what is no number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MAX_STEPS:
        raise UsageError(f"the state is after {steps!r} steps; expected a whole number from 0 on")
    return steps


def check_state(state: Mapping[str, Any] | None, shapes: Shapes) -> dict[str, dict[str, Array]]:
    """The arrays of a `state_dict`, by parameter. Raises UsageError if arrays of these shapes are missing."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        raise UsageError(f"the state is {a_type(state)}; expected what state_dict has returned on this rank")
    check_steps(state.get(STEP))
    for name, columns in shapes.items():
        arrays = state["state"].get(name)
        for column, shape in columns.items():
            array = arrays.get(column) if isinstance(arrays, Mapping) else None
            if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.float32:
                raise UsageError(f"the state has no {column} of {name}: expected float32{list(shape)}")
    return dict(state["state"])


def key_of(parameter: str, column: str) -> str:
    """The name of an array in a file."""
    return f"{parameter}/{column}"


def share_of(values: Array, rank: int, size: int) -> Array:
    """A copy of the part of an array that `rank` of `size` writes."""
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
    path, arrays = user_path(folder), {STEP: np.array(save.steps), NUMBER: np.array(save.number), **shares}
    with _reporting_errors(path, save.rank):
        path.mkdir(parents=True, exist_ok=True)
        if other_sizes := sorted(set(_parts_present(path)) - {save.size}):
            raise UsageError(
                f"{folder} has a state in {other_sizes[0]} parts; expected an empty folder, or one of {save.size} parts"
            )
        np.savez(_unfinished_file(path, save.rank), **arrays)  # type: ignore[arg-type]  # its other parameter has the name of no array


def publish_part(folder: str | Path, save: Save) -> None:
    """Let what a rank has written take the place of its part. Raises UsageError where that is not possible."""
    path = user_path(folder)
    with _reporting_errors(path, save.rank):
        _unfinished_file(path, save.rank).replace(_part_file(path, save.rank, save.size))


def discard_part(folder: str | Path, rank: int) -> None:
    """Remove what `rank` has written and will not publish."""
    with contextlib.suppress(OSError):
        _unfinished_file(user_path(folder), rank).unlink()


def _unfinished_file(path: Path, rank: int) -> Path:
    return path / f".part-{rank}.npz"


@contextlib.contextmanager
def _reporting_errors(path: Path, rank: int) -> Iterator[None]:
    """Turn an error of the operating system into a UsageError, and leave nothing unfinished."""
    try:
        yield
    except OSError as error:
        discard_part(path, rank)
        raise UsageError(f"the state cannot be written to {path}: {error.strerror or error}") from error


class SavedParts:
    """A folder that holds a whole state of arrays of these `shapes`. `steps`: after how many.

    Raises UsageError for one that does not; all ranks come to the same, as all look at all parts.
    """

    def __init__(self, folder: str | Path, shapes: Shapes) -> None:
        self._folder, self._shapes = user_path(folder), shapes
        try:
            present = _parts_present(self._folder)
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
        file = _part_file(self._folder, part, self._parts)
        try:
            with np.load(file) as arrays:
                for name, column, size in self._sizes():
                    start, stop = _starts(size, self._parts)[part : part + 2]
                    array = arrays.get(key_of(name, column))
                    if array is None or array.shape != (stop - start,) or array.dtype != np.float32:
                        raise UsageError(f"it has no {column} of {name} with {stop - start} numbers of float32")
                return check_steps(arrays[STEP].item()), int(arrays[NUMBER].item())
        except Exception as error:  # any: a file may hold anything
            raise UsageError(f"{file} is no part of this state: {error}") from error

    def _sizes(self) -> Iterator[tuple[str, str, int]]:
        for name, columns in self._shapes.items():
            for column, shape in columns.items():
                yield name, column, math.prod(shape)

    def read(self, name: str, column: str, rank: int, size: int) -> Array | None:
        """An array with the parts that `rank` of `size` reads, and zeros in the rest; None if it reads none."""
        own_parts = range(rank, self._parts, size)
        if not own_parts:
            return None
        array = np.zeros(self._shapes[name][column], np.float32)
        bounds = list(pairwise(_starts(array.size, self._parts)))
        for part in own_parts:
            with np.load(_part_file(self._folder, part, self._parts)) as arrays:
                array.reshape(-1)[slice(*bounds[part])] = arrays[key_of(name, column)]
        return array
