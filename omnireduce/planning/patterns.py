"""Patterns of the ranks' non-zero blocks: drawn at random, drawn as in a trace, or those of saved arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError

OVERLAPS = ("random", "full", "none")
REMEMBERED_BYTES = 1 << 28
LIKELIHOODS = 64  # that blocks can have: exact for 127 ranks, and within 1 % for thousands
LEAST_ALIKE, MOST_ALIKE = 1e-6, 1e6  # all ranks have the same blocks; all blocks are as likely


class Patterns(Protocol):
    """The blocks of each rank that are not zero. They are computed anew at each call, so that thousands of ranks need
    no memory."""

    @property
    def blocks(self) -> int:
        """The number of blocks of the tensor."""

    def of(self, rank: int) -> Array:
        """The blocks that the rank has: bool (blocks,)."""


class DrawnPatterns:
    """Each of `blocks` is not zero with probability `density`: drawn for each rank by itself ("random"), once for all
    ranks ("full"), or so that at most one rank has a block ("none").

    Raises UsageError if that is impossible.
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
        mask: Array = drawn < self._density
        return mask


class TracedPatterns:
    """Blocks drawn for any number of ranks, as `ranks` ranks of a traced job had them. `density`: the share of blocks
    that a rank had, mean over the ranks; `union_density`: the share that at least one rank had. Some blocks are
    popular, as words of a language are: each block has its own probability, with which each rank has it."""

    def __init__(self, blocks: int, density: float, union_density: float, ranks: int, seed: int = 0) -> None:
        self.blocks, self._seed = blocks, seed
        likelihoods, shares = popularity(density, union_density, ranks)
        random = np.random.default_rng([seed, 0])
        ends = np.floor(np.cumsum(shares) * blocks + random.random()).astype(np.int64)  # few blocks: right on average
        ends[-1] = blocks
        block_likelihoods = np.repeat(likelihoods.astype(np.float32), np.diff(ends, prepend=0))
        self._likelihoods = random.permutation(block_likelihoods)

    def of(self, rank: int) -> Array:
        drawn = np.random.default_rng([self._seed, 1 + rank]).random(self.blocks, np.float32)
        mask: Array = drawn < self._likelihoods
        return mask


def popularity(density: float, union_density: float, ranks: int) -> tuple[Array, Array]:
    """Probabilities that a rank has a block, and the share of blocks with each of them: at most (LIKELIHOODS,) each. A
    rank then has `density` of the blocks, and two or more `ranks` together have `union_density`.

    The probabilities are Gauss nodes of a beta distribution: twice as many of its moments are exact. If ranks have
    less in common than by chance, all blocks are equally likely.
    """
    density = min(1.0, max(0.0, density))
    if density in (0.0, 1.0):
        return np.full(1, density), np.ones(1)
    others, missing = np.arange(ranks), math.log(max(1 - union_density, 1e-300))
    low, high = LEAST_ALIKE, MOST_ALIKE
    while high > low * (1 + 1e-9):
        alike = math.sqrt(low * high)  # the sum of the two parameters
        if np.log1p(-alike * density / (alike + others)).sum() > missing:  # what no rank has is too much
            low = alike
        else:
            high = alike
    return _gauss_nodes(low * density, low * (1 - density))


def _gauss_nodes(a: float, b: float) -> tuple[Array, Array]:
    """Nodes and weights of the beta distribution: eigenvalues of the Jacobi matrix of its orthogonal polynomials, and
    the squares of the first elements of its eigenvectors (Golub and Welsch, 1969)."""
    s, n = a + b, np.arange(1, LIKELIHOODS)
    diagonal = np.concatenate(([(a - b) / s], (a - b) * (s - 2) / ((2 * n + s - 2) * (2 * n + s))))
    n = n[1:]
    beside = (
        4 * n * (n + a - 1) * (n + b - 1) * (n + s - 2) / ((2 * n + s - 2) ** 2 * (2 * n + s - 1) * (2 * n + s - 3))
    )
    beside = np.sqrt(np.concatenate(([4 * a * b / (s * s * (s + 1))], beside)))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, -1))
    return np.clip((values + 1) / 2, 0, 1), vectors[0] ** 2


class RememberedPatterns:
    """A cache of patterns: as many ranks as fit into `REMEMBERED_BYTES`, with one bit for each block."""

    def __init__(self, patterns: Patterns) -> None:
        self.blocks, self._patterns = patterns.blocks, patterns
        self._known: dict[int, Array] = {}
        self._most = REMEMBERED_BYTES // (1 + patterns.blocks // 8)

    def of(self, rank: int) -> Array:
        known = self._known.get(rank)
        if known is not None:
            return np.unpackbits(known, count=self.blocks).view(np.bool_)
        mask = self._patterns.of(rank)
        if len(self._known) < self._most:
            self._known[rank] = np.packbits(mask)
        return mask


class KnownPatterns:
    """Patterns that are given: the blocks of each rank, bool (blocks,) each."""

    def __init__(self, masks: Sequence[Array]) -> None:
        self.blocks, self._masks = masks[0].size, masks

    def of(self, rank: int) -> Array:
        return self._masks[rank]


class SummedPatterns:
    """The blocks that each group of `size` successive ranks has together, as those of one rank."""

    def __init__(self, patterns: Patterns, size: int) -> None:
        self.blocks, self._patterns, self._size = patterns.blocks, patterns, size

    def of(self, rank: int) -> Array:
        first = rank * self._size
        mask = self._patterns.of(first).copy()
        for other in range(first + 1, first + self._size):
            mask |= self._patterns.of(other)
        return mask
