"""The largest elements or blocks of a tensor, found by counting, without a sort.

The bits of a float32 without its sign order as magnitudes do, with NaN at the end.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import kernel, reordering
from omnireduce.kernels.float32_bits import MAGNITUDE
from omnireduce.kernels.instructions import row_of

SHIFT, BINS = 20, 1 << 11  # a bin holds the magnitudes that differ in their last 20 bits only
LANES = 4  # neighbours count in tables of their own: the next one need not wait for the last one


@kernel
def count_magnitudes(bits: Array, counts: Array) -> None:
    """Add to `counts`, int64 (LANES, BINS), how many of `bits`, int32 (n,), are in each bin."""
    whole = bits.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            counts[lane, (bits[start + lane] & MAGNITUDE) >> SHIFT] += 1
    for i in range(whole, bits.size):
        counts[0, (bits[i] & MAGNITUDE) >> SHIFT] += 1


@kernel
def list_at_least(bits: Array, minimum: int, indices: Array) -> int:
    """List where the magnitude's bits of `bits`, int32 (n,), are `minimum` or more; return how many there are. Of these
    the first ones are in `indices`, int64, as many as fit."""
    count = 0
    for i in range(bits.size):
        if bits[i] & MAGNITUDE >= minimum:
            if count < indices.size:
                indices[count] = i
            count += 1
    return count


@kernel
def count_at_least(bits: Array, minimum: int) -> int:
    """The number of `bits`, int32 (n,), that have a magnitude with bits of `minimum` or more."""
    count = 0
    for i in range(bits.size):
        count += (bits[i] & MAGNITUDE) >= minimum
    return count


@reordering
def sum_squares(blocks: Array, out: Array) -> None:
    """The sum of the squares of each of `blocks`, float32 (n, block size), to `out`, float32 (n,)."""
    for k in range(len(blocks)):
        row, total = row_of(blocks, k), np.float32(0)
        for i in range(row.size):
            total += row[i] * row[i]
        out[k] = total


@kernel
def zero_blocks(x: Array, block_size: int, blocks: Array) -> None:
    """Zero these blocks of `x`, float32 (elements,), of which the last one may be short."""
    for block in blocks:
        for i in range(block * block_size, min((block + 1) * block_size, x.size)):
            x[i] = 0


@kernel
def copy_blocks(x: Array, block_size: int, blocks: Array, out: Array) -> None:
    """Copy these blocks of `x` to the same places of `out`; both float32 (elements,)."""
    for block in blocks:
        for i in range(block * block_size, min((block + 1) * block_size, x.size)):
            out[i] = x[i]
