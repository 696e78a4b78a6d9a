"""Which blocks of a tensor the ranks have: drawn, or those of saved arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError

OVERLAPS = ("random", "full", "none")


class Patterns(Protocol):
    """The blocks that are not zero, of each rank. They are made anew each time, so that thousands of ranks need no
    memory."""

    @property
    def blocks(self) -> int:
        """How many blocks the tensor has."""

    def of(self, rank: int) -> Array:
        """Which of them the rank has: bool (blocks,)."""


class DrawnPatterns:
    """Each of `blocks` is not zero with probability `density`: for each rank alone ("random"), for all together
    ("full"), or for one rank at most ("none").

    Raises UsageError where that cannot be.
    """

    def __init__(self, blocks: int, density: float, overlap: str, ranks: int, seed: int = 0) -> None:
        if not 0 <= density <= 1:
            raise UsageError(f"density {density:g}: expected from 0 to 1")
        if overlap not in OVERLAPS:
            raise UsageError(f"overlap {overlap!r}: expected one of {', '.join(OVERLAPS)}")
        if overlap == "none" and density * ranks > 1 + 1e-9:
            raise UsageError(
                f"{ranks} ranks cannot have different blocks at density {density:g}; at most at {1 / ranks:g}"
            )
        self.blocks, self._density, self._overlap, self._seed = blocks, density, overlap, seed

    def of(self, rank: int) -> Array:
        alone = self._overlap == "random"
        drawn = np.random.default_rng([self._seed, rank if alone else 0]).random(self.blocks, np.float32)
        if self._overlap == "none":
            drawn -= rank * self._density
            return (drawn >= 0) & (drawn < self._density)
        found: Array = drawn < self._density
        return found


class KnownPatterns:
    """The blocks of each rank, bool (blocks,) each."""

    def __init__(self, masks: Sequence[Array]) -> None:
        self.blocks, self._masks = masks[0].size, masks

    def of(self, rank: int) -> Array:
        return self._masks[rank]


class SummedPatterns:
    """The blocks that each group of `size` neighbours has together, as those of one rank."""

    def __init__(self, patterns: Patterns, size: int) -> None:
        self.blocks, self._patterns, self._size = patterns.blocks, patterns, size

    def of(self, rank: int) -> Array:
        first = rank * self._size
        found = self._patterns.of(first).copy()
        for other in range(first + 1, first + self._size):
            found |= self._patterns.of(other)
        return found
