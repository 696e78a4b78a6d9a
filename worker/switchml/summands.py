"""The tensors that the ranks of a benchmark sum, and the expected results.

Each rank has a table of 2^20 values. The elements of a tensor are windows into it, at another place for each 2^20
elements: to fill and to check a tensor costs little more than to copy it. Values are whole numbers, or for random
floats whole numbers / 1024, such that their sums are exact as long as the significand holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnireduce.dtypes import Array
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.switchml.dummy import DummyCommunicator

LENGTH = 1 << 20
SHIFT = 7919  # of the window from one to the next, in elements: a prime, so that all places come
LARGEST = 1000  # of what is drawn
SHOWN = 5
DTYPES = {"int32": np.dtype(np.int32), "float": np.dtype(np.float32)}


@dataclass(frozen=True, slots=True)
class Wrong:
    """How many elements are wrong, and the first of them: their indices, and what was found and expected there."""

    count: int
    first: tuple[tuple[int, float, float], ...]

    def __str__(self) -> str:
        listed = "; ".join(f"[{index}] is {actual:g}, expected {expected:g}" for index, actual, expected in self.first)
        return f"{self.count} wrong elements, the first: {listed}"

    def beside(self, other: Wrong) -> Wrong:
        """Both together."""
        return Wrong(self.count + other.count, (*self.first, *other.first)[:SHOWN])


class Summands:
    """The tensors of `dtype` of `size` ranks, random ones with a `seed`. `number` tells several of a rank apart.
    `alike`: all ranks have the tensors of this rank."""

    def __init__(self, dtype: np.dtype[Any], size: int, seed: int | None = None, *, alike: int | None = None) -> None:
        self.dtype, self._size, self._seed = dtype, size, seed
        self._own = (-1, np.empty(0))  # rank, and its table
        self._sums = np.zeros(2 * LENGTH)
        for rank in range(size):
            self._sums += self._table(rank if alike is None else alike)

    def _table(self, rank: int) -> NDArray[np.float64]:
        """Two rounds of it, so that every window is in one piece."""
        if self._seed is None:
            values = np.arange(LENGTH) % LARGEST + (rank + 1.0)
        else:
            drawn = np.random.default_rng([self._seed, rank]).integers(-LARGEST, LARGEST, LENGTH, endpoint=True)
            values = drawn / (1 if self.dtype.kind == "i" else 1024)
        return np.concatenate([values, values])

    def fill(self, rank: int, out: Array, number: int = 0) -> None:
        """Write a tensor of a rank to `out`."""
        if self._own[0] != rank:
            self._own = (rank, self._table(rank).astype(self.dtype))
        for part, place in _parts(out, number):
            part[:] = self._own[1][place]

    def wrong(self, result: Array, *, number: int = 0, rounds: int = 1, err: float = 0.0) -> Wrong:
        """Compare with the sum of all ranks. After more than one of the `rounds`, each rank has put in what the one
        before gave. `err`: per cent of the expected value by which a float may differ, up or down."""
        factor = float(self._size) ** (rounds - 1)
        allowed = 0.0 if self.dtype.kind == "i" else err / 100
        count, first, start = 0, list[tuple[int, float, float]](), 0
        for part, place in _parts(result, number):
            expected, actual = self._sums[place] * factor, part.astype(np.float64)
            is_right = np.abs(actual - expected) <= allowed * np.abs(expected)  # NaN is not
            at = np.flatnonzero(~is_right)
            count += len(at)
            first += [(start + int(i), float(actual[i]), float(expected[i])) for i in at[: SHOWN - len(first)]]
            start += len(part)
        return Wrong(count, tuple(first))

    def most_rounds(self) -> int | None:
        """After how many rounds in place the type still holds the sums; None for ever."""
        info: Any = np.iinfo(self.dtype) if self.dtype.kind == "i" else np.finfo(self.dtype)
        if self._size == 1:
            return None
        largest, rounds = float(np.abs(self._sums).max()), 0
        while largest <= float(info.max):
            largest, rounds = largest * self._size, rounds + 1
        return rounds


def _parts(tensor: Array, number: int) -> Iterator[tuple[Array, slice]]:
    """The parts of a tensor, each with its place in a table."""
    flat = tensor.reshape(-1)
    for turn, start in enumerate(range(0, flat.size, LENGTH), number * 31):
        part, place = flat[start : start + LENGTH], turn * SHIFT % LENGTH
        yield part, slice(place, place + part.size)


def summands_of(comm: Communicator | DummyCommunicator, dtype: str, seed: int | None) -> Summands:
    """Those of the ranks of a context. The dummy backend makes sums as if all had what this one has."""
    alike = comm.rank if isinstance(comm, DummyCommunicator) else None
    return Summands(DTYPES[dtype], comm.size, seed, alike=alike)
