"""Sparse test tensors whose all-reduce has one exact result, and the oracle that knows it.

Every rank's tensor is cut into blocks; some are chosen, the others are zero. A chosen block is a window into
one table of random values, at a start that hashes the seed, the rank, the round and the block's number:
values vary by rank, round and position, yet any block of any rank can be made again without the tensor.
About one value in eight is zero (fewer for prod), but no window starts at one, so that a chosen block, a
short last one too, is never a zero block.

The oracle reduces in rank order what all ranks filled, by the service's own rules: an absent block takes part
as zeros, 16-bit floats accumulate in float32 and are rounded once, integers wrap, a mean is the sum divided
once. Integers take their whole range. Floats are such that every other order gives the same result, and so
any correct all-reduce passes:

| op        | float values                               | exact because                                  |
|-----------|--------------------------------------------|------------------------------------------------|
| sum, mean | whole, at most 2**significand / world size | every partial sum is a whole number that fits  |
| min, max  | the same                                   | nothing is rounded                             |
| prod      | 0, ±1/2, ±1, ±2                            | powers of two, in range for up to 120 ranks    |

A mean is not always exact (its divisor may be 3). There the rule itself is checked: one division, in the type
that accumulates. Comparison is by value: -0 equals 0, and NaN, which is never data here, equals nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import ELEMENT_TYPES, Array, ElementType
from omnireduce.errors import UsageError

_WINDOWS = 1 << 16  # windows in the table
_CHUNK_ELEMENTS = 1 << 17  # of the tensor that are worked on at once: temporaries stay small and in the cache
_OVERLAPS = ("random", "full", "none")
_REDUCE: dict[str, np.ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
}


class Dataset:
    """The tensors of `world_size` ranks: `elements` of `dtype`, a fraction `density` of the blocks not zero.

    Exactly `round(density * blocks)` blocks of each rank are chosen: independently ("random"), the same on
    all ranks ("full"), or disjoint ("none", there at most `blocks // world_size` each). `distribution` says which
    are likely: "uniform" all, "zipf" the first ones, as if blocks were drawn by Zipf's law, the i-th with weight 1/i,
    until so many different ones had come: what rows of an embedding, the most frequent first, do in a batch. Equal
    arguments give equal tensors in every process. Raises UsageError for disjoint blocks that cannot fit, for a mean of
    integers and for an unknown dtype, op, overlap or distribution.
    """

    any_order = True  # a correct all-reduce gives the same in any order, not only in that of the ranks

    def __init__(
        self,
        elements: int,
        *,
        dtype: str,
        block_size: int,
        density: float,
        overlap: str,
        op: str,
        world_size: int,
        seed: int,
        distribution: str = "uniform",
    ) -> None:
        self._type = check_data(dtype, op, density, overlap, world_size, distribution)
        self._layout = Layout(elements, block_size)
        self._op, self._world_size, self._seed = op, world_size, seed
        rng = np.random.default_rng([seed, 0])
        table = _values(self._type, op, world_size, _WINDOWS + block_size - 1, rng)
        self._starts = np.flatnonzero(table[:_WINDOWS])
        self._windows = np.lib.stride_tricks.sliding_window_view(_bits(table), block_size)
        self._masks = _masks(self._layout.blocks, density, overlap, world_size, seed, distribution)
        self._union = np.logical_or.reduce(self._masks)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._type.dtype

    @property
    def density(self) -> float:
        """Chosen blocks / blocks of each rank, as it came out; 0 for an empty tensor."""
        return share_set(self._masks[0])

    @property
    def union_density(self) -> float:
        """Blocks chosen on at least one rank / blocks; 0 for an empty tensor."""
        return share_set(self._union)

    @property
    def others_density(self) -> float:
        """Blocks chosen on another rank than a given one / blocks, mean over ranks; 0 for an empty tensor."""
        count = np.sum(self._masks, axis=0)
        return float(np.mean([share_set(count > mask) for mask in self._masks]))

    def fill(self, rank: int, round_number: int, out: Array) -> None:
        """Write the tensor of `rank` in one round to `out`, a contiguous array of any shape."""
        for first, rows in self._chunks(out):
            mask = self._masks[rank][first : first + len(rows)]
            bits = _bits(rows)
            if not mask.all():
                bits[...] = 0
            blocks = first + np.flatnonzero(mask)
            bits[mask] = self._blocks(rank, round_number, blocks, rows.shape[1])

    def wrong(self, round_number: int, result: Array) -> int:
        """The number of elements of `result` that differ from the all-reduce of that round's tensors."""
        count = 0
        for first, rows in self._chunks(result):
            union = self._union[first : first + len(rows)]
            # Outside the union every element must be zero, inside it what the oracle expects.
            values, blocks = rows[union], first + np.flatnonzero(union)
            count += self._count_nonzero(rows) - self._count_nonzero(values)
            count += int(np.count_nonzero(values != self._expected(round_number, blocks, rows.shape[1])))
        return count

    def _chunks(self, tensor: Array) -> Iterator[tuple[int, Array]]:
        """Yield (first block, view (blocks, elements per block) of `tensor`); a short last block alone."""
        layout = self._layout
        if tensor.dtype != self.dtype or tensor.size != layout.elements or not tensor.flags.c_contiguous:
            raise UsageError(f"got {tensor.dtype}[{tensor.size}], expected {self.dtype}[{layout.elements}], contiguous")
        flat = tensor.reshape(-1)
        full, size = layout.full_blocks, layout.block_size
        rows = flat[: full * size].reshape(full, size)
        step = max(1, _CHUNK_ELEMENTS // size)
        for first in range(0, full, step):
            yield first, rows[first : first + step]
        if layout.tail_elements:
            yield full, flat[full * size :].reshape(1, -1)

    def _blocks(self, rank: int, round_number: int, blocks: Array, width: int) -> Array:
        """The first `width` elements of chosen `blocks` (int64) of one rank, as bits: (blocks, width)."""
        key = np.random.SeedSequence([self._seed, rank, round_number]).generate_state(1, np.uint64)
        picks = _hash(blocks.astype(np.uint64) + key) >> np.uint64(32)
        picks = picks * np.uint64(self._starts.size) >> np.uint64(32)  # scales 32 random bits to [0, size)
        elements: Array = self._windows[self._starts[picks], :width]
        return elements

    def _expected(self, round_number: int, blocks: Array, width: int) -> Array:
        """The oracle: the reduction in rank order, of `blocks` (int64) that are in the union."""
        parts = (self._operand(rank, round_number, blocks, width) for rank in range(self._world_size))
        return reduce_in_rank_order(parts, self._type, self._op)

    def _operand(self, rank: int, round_number: int, blocks: Array, width: int) -> Array:
        """One rank's part, absent blocks as zeros."""
        mask = self._masks[rank][blocks]
        part = np.zeros((blocks.size, width), self.dtype)
        _bits(part)[mask] = self._blocks(rank, round_number, blocks[mask], width)
        return part

    def _count_nonzero(self, rows: Array) -> int:
        if self._type.is_narrow:  # on the bits, without the sign: much faster than by value
            return int(np.count_nonzero(_bits(rows) << 1))
        return int(np.count_nonzero(rows))


def reduce_in_rank_order(parts: Iterable[Array], element_type: ElementType, op: str) -> Array:
    """The result that the service promises for `parts`, as a new array. There is one part of each rank, of one shape
    and of elements of `element_type`.

    Their byte order may be any. Besides the result it needs the memory of one accumulator.
    """
    accumulator = np.dtype(np.float32) if element_type.is_narrow else element_type.dtype
    total, world_size = np.empty(0), 0
    with np.errstate(all="ignore"):  # as in the service: overflow gives an infinity, NaN is data
        for world_size, part in enumerate(parts, 1):
            if world_size == 1:
                total = part.astype(accumulator)
            else:
                _REDUCE[op](total, part, out=total, dtype=accumulator)
        if op == "mean":
            total /= accumulator.type(world_size)
        return total.astype(element_type.dtype, copy=False)


def check_reduction(dtype: str, op: str) -> ElementType:
    """The element type. Raises UsageError if the service has no such type or reduction of it."""
    if dtype not in ELEMENT_TYPES:
        raise UsageError(f"got dtype {dtype!r}, expected one of {', '.join(ELEMENT_TYPES)}")
    if op not in _REDUCE:
        raise UsageError(f"got op {op!r}, expected one of {', '.join(_REDUCE)}")
    if op == "mean" and not ELEMENT_TYPES[dtype].is_float:
        raise UsageError(f"the mean of {dtype} is not defined, expected a float dtype or another op")
    return ELEMENT_TYPES[dtype]


def check_data(
    dtype: str, op: str, density: float, overlap: str, world_size: int, distribution: str = "uniform"
) -> ElementType:
    """The element type of such data. Raises UsageError if there is no such data."""
    element_type = check_reduction(dtype, op)
    if overlap not in _OVERLAPS:
        raise UsageError(f"got overlap {overlap!r}, expected one of {', '.join(_OVERLAPS)}")
    if distribution not in _CHOOSE:
        raise UsageError(f"got distribution {distribution!r}, expected one of {', '.join(_CHOOSE)}")
    if overlap == "none" and density * world_size > 1:
        raise UsageError(
            f"{world_size} workers cannot have disjoint blocks at density {density:g}, "
            f"expected a density of at most {1 / world_size:g} or an overlap other than 'none'"
        )
    return element_type


def _values(element_type: ElementType, op: str, world_size: int, count: int, rng: np.random.Generator) -> Array:
    """The table: `count` random values, see the module's text."""
    if not element_type.is_float:
        limits = np.iinfo(element_type.dtype)
        values = rng.integers(limits.min, limits.max, count, element_type.dtype, endpoint=True)
    elif op == "prod":
        values = rng.choice([-1.0, 1.0], count) * rng.choice([0.5, 1.0, 2.0], count)
    else:
        significand_bits = int(ml_dtypes.finfo(element_type.dtype).nmant) + 1  # type: ignore[no-untyped-call]
        limit = max(1, 2**significand_bits // world_size)
        values = rng.integers(-limit, limit, count, endpoint=True)
    one_in = 8 * world_size if op == "prod" else 8  # or with many ranks every product would be zero
    values[rng.integers(one_in, size=count) == 0] = 0
    return values.astype(element_type.dtype)


def _masks(blocks: int, density: float, overlap: str, world_size: int, seed: int, distribution: str) -> list[Array]:
    """Each rank's chosen blocks: bool (blocks,)."""
    count = round(density * blocks)
    choose = _CHOOSE[distribution]
    if overlap == "full":
        return [choose(np.arange(blocks), count, np.random.default_rng([seed, 1]))] * world_size
    masks = []
    free = np.ones(blocks, np.bool_)
    if overlap == "none":
        count = min(count, blocks // world_size)
    for rank in range(world_size):
        mask = np.zeros(blocks, np.bool_)
        mask[free] = choose(np.flatnonzero(free), count, np.random.default_rng([seed, 1, rank]))
        masks.append(mask)
        if overlap == "none":
            free &= ~mask
    return masks


def _choose_uniform(blocks: Array, count: int, rng: np.random.Generator) -> Array:
    """Choose exactly `count` of `blocks` at random: bool, of the shape of `blocks`."""
    mask = np.arange(blocks.size) < count
    rng.shuffle(mask)
    return mask


def _choose_zipf(blocks: Array, count: int, rng: np.random.Generator) -> Array:
    """The same by Zipf's law over their numbers. Drawn again and again, block i first comes after an exponential time
    of mean i + 1; the `count` earliest are chosen (Efraimidis and Spirakis 2006)."""
    earliest = np.argsort(rng.standard_exponential(blocks.size) * (blocks + 1))[:count]
    mask = np.zeros(blocks.size, np.bool_)
    mask[earliest] = True
    return mask


_CHOOSE = {"uniform": _choose_uniform, "zipf": _choose_zipf}


def _hash(x: Array) -> Array:
    """Scramble uint64 (splitmix64, Steele, Lea and Flood 2014); arithmetic wraps."""
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: Array = x ^ (x >> np.uint64(31))
    return scrambled


def _bits(values: Array) -> Array:
    """The same memory as unsigned integers: NumPy copies those fast, and bfloat16 not."""
    bits: Array = values.view(f"u{values.dtype.itemsize}")
    return bits


def share_set(mask: Array) -> float:
    """The share of `mask` that is true; 0 if it is empty."""
    return int(np.count_nonzero(mask)) / mask.size if mask.size else 0.0
