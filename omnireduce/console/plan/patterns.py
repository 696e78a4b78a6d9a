"""Patterns: which blocks each rank has. They are drawn, or those of a trace or of saved arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.nonzero_blocks import find_blocks
from omnireduce.support.files.tensors import read_tensors

OVERLAPS = ("random", "full", "none")
REMEMBERED_BYTES = 1 << 28
LIKELIHOODS = 64  # that blocks can have: exact for 127 ranks, and within 1 % for thousands
MIN_LIKENESS, MAX_LIKENESS = 1e-6, 1e6  # lowest: all ranks have the same blocks; highest: all blocks are equally likely


class Load(NamedTuple):
    """Numbers of blocks of a tensor that is cut into windows of successive blocks, for each window and shard.

    `own` (senders, windows, shards): blocks that a sender has, none of zeros; `sole`, of the same shape: those that no
    other sender has; `union` (windows, shards): blocks that any sender has; `all` (windows, shards): all blocks of the
    tensor, even those of zeros.
    """

    own: Array
    sole: Array
    union: Array
    all: Array

    @property
    def density(self) -> float:
        """Blocks that are not zero / blocks, mean over the senders."""
        return float(self.own.sum() / max(1, len(self.own) * self.all.sum()))

    @property
    def union_density(self) -> float:
        """Blocks that are not zero on at least one sender / blocks."""
        return float(self.union.sum() / max(1, self.all.sum()))


def load_of(patterns: Patterns, senders: int, layout: Layout, windows: int) -> Load:
    """The load of a tensor with this layout, whose blocks on the first `senders` ranks are those of `patterns`."""
    blocks = np.arange(layout.blocks)
    window = blocks * windows // max(1, layout.blocks)
    bins = window * layout.shards + blocks // layout.stripe_blocks % layout.shards
    owners = np.zeros(layout.blocks, np.int32)
    for sender in range(senders):
        owners += patterns.of(sender)

    starts = np.flatnonzero(np.diff(bins, prepend=-1))  # of neighbours that belong to one window and shard

    def count_blocks(chosen: Array) -> Array:
        neighbour_counts = np.add.reduceat(chosen.view(np.int8), starts, dtype=np.int64) if starts.size else starts
        counts = np.bincount(bins[starts], weights=neighbour_counts, minlength=windows * layout.shards)
        return counts.astype(np.int32).reshape(windows, layout.shards)

    has_one_owner, shape = owners == 1, (senders, windows, layout.shards)
    own, sole = np.empty(shape, np.int32), np.zeros(shape, np.int32)
    for sender in range(senders):
        mask = patterns.of(sender)
        own[sender] = count_blocks(mask)
        mask = mask & has_one_owner
        if mask.any():
            sole[sender] = count_blocks(mask)
    return Load(own, sole, count_blocks(owners > 0), count_blocks(owners >= 0))


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
        is_random = self._overlap == "random"
        drawn = np.random.default_rng([self._seed, rank if is_random else 0]).random(self.blocks, np.float32)
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
        rng = np.random.default_rng([seed, 0])
        # One random offset for all boundaries: even if there are few blocks, the shares are right on average.
        boundaries = np.floor(np.cumsum(shares) * blocks + rng.random()).astype(np.int64)
        boundaries[-1] = blocks
        block_likelihoods = np.repeat(likelihoods.astype(np.float32), np.diff(boundaries, prepend=0))
        self._likelihoods = rng.permutation(block_likelihoods)

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
    other_ranks, log_missing = np.arange(ranks), math.log(max(1 - union_density, 1e-300))
    low, high = MIN_LIKENESS, MAX_LIKENESS
    while high > low * (1 + 1e-9):
        likeness = math.sqrt(low * high)  # the sum of the two parameters
        if np.log1p(-likeness * density / (likeness + other_ranks)).sum() > log_missing:  # what no rank has is too much
            low = likeness
        else:
            high = likeness
    return _gauss_nodes(low * density, low * (1 - density))


def _gauss_nodes(a: float, b: float) -> tuple[Array, Array]:
    """Nodes and weights of the beta distribution: eigenvalues of the Jacobi matrix of its orthogonal polynomials, and
    the squares of the first elements of its eigenvectors (Golub and Welsch, 1969)."""
    s, n = a + b, np.arange(1, LIKELIHOODS)
    diagonal = np.concatenate(([(a - b) / s], (a - b) * (s - 2) / ((2 * n + s - 2) * (2 * n + s))))
    n = n[1:]
    off_diagonal = (
        4 * n * (n + a - 1) * (n + b - 1) * (n + s - 2) / ((2 * n + s - 2) ** 2 * (2 * n + s - 1) * (2 * n + s - 3))
    )
    off_diagonal = np.sqrt(np.concatenate(([4 * a * b / (s * s * (s + 1))], off_diagonal)))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(off_diagonal, -1))
    return np.clip((values + 1) / 2, 0, 1), vectors[0] ** 2


class RememberedPatterns:
    """A cache of patterns: as many ranks as fit into `REMEMBERED_BYTES`, with one bit for each block."""

    def __init__(self, patterns: Patterns) -> None:
        self.blocks, self._patterns = patterns.blocks, patterns
        self._packed_masks: dict[int, Array] = {}
        self._limit = REMEMBERED_BYTES // (1 + patterns.blocks // 8)

    def of(self, rank: int) -> Array:
        packed = self._packed_masks.get(rank)
        if packed is not None:
            return np.unpackbits(packed, count=self.blocks).view(np.bool_)
        mask = self._patterns.of(rank)
        if len(self._packed_masks) < self._limit:
            self._packed_masks[rank] = np.packbits(mask)
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
        for member in range(first + 1, first + self._size):
            mask |= self._patterns.of(member)
        return mask


class SavedBlocks(NamedTuple):
    """The arrays of a file one behind the other, each from a new block on: which blocks are not zero, bool (blocks,),
    and the bytes of an element."""

    mask: Array
    itemsize: int


def read_blocks(path: str, block_size: int) -> SavedBlocks:
    """Read a file. Raises FileError, and UsageError for what the service does not reduce, for arrays of elements of
    different sizes, and for none."""
    masks, sizes = [], set()
    for tensor in read_tensors(path):
        try:
            masks.append(find_blocks(tensor.values, block_size))
        except UsageError as error:
            raise UsageError(f"{path}: {tensor.name}: {error}") from None
        sizes.add(tensor.values.itemsize)
    if len(sizes) != 1:
        contents = "no arrays" if not sizes else f"elements of {' and '.join(map(str, sorted(sizes)))} bytes"
        raise UsageError(f"{path} holds {contents}; expected arrays whose elements have one size")
    return SavedBlocks(np.concatenate(masks), sizes.pop())


def read_all(paths: Sequence[str], block_size: int) -> tuple[list[Array], int]:
    """The blocks of each file, and the bytes of an element. Raises what `read_blocks` raises, and UsageError where the
    files do not hold the same tensors."""
    all_saved = [read_blocks(path, block_size) for path in paths]
    for path, saved in zip(paths, all_saved, strict=True):
        if (saved.mask.size, saved.itemsize) != (all_saved[0].mask.size, all_saved[0].itemsize):
            raise UsageError(f"{path} holds other tensors than {paths[0]}; expected one file of each rank")
    return [saved.mask for saved in all_saved], all_saved[0].itemsize
