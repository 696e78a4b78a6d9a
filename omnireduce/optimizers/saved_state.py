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
    """The starts of the parts of a flat array, and the end of the last one. The first parts may be longer by one."""
    return [part * (size // parts) + min(part, size % parts) for part in range(parts + 1)]


def check_steps(steps: object) -> int:
    """Raises UsageError for what is no number of steps."""
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps < MOST_STEPS:
        raise UsageError(f"the state is after {steps!r} steps; expected a whole number from 0 on")
    return steps


def check_state(state: Mapping[str, Any] | None, shapes: Shapes) -> dict[str, dict[str, Array]]:
    """The arrays of a `state_dict`, by parameter. Raises UsageError if arrays of these shapes are missing."""
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
