"""Powers of two: a quarter of the bytes and one more for each block.

    codes (uint8 each) | exponent (uint8)         a code is a sign bit, and 7 bits for the power

The exponent is the one that the largest element of the block may get. Code 0 is zero. Codes 1 to 125 are powers: 125 is
the largest, and each one below is half of the next. 126 is NaN, 127 infinity. An element between two powers becomes the
upper one with the probability that makes it right on average: 3 becomes 4 as often as 2. What is below the lowest power
becomes that or zero, and what is subnormal 2^-126 or zero, right on average, too; elements of less than 2^-165 of the
largest one become zero. Above 2^127 there is no power: an element there becomes 2^127. So does no other.

After Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, which takes 9 bits.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.codecs.draws import drawn
from omnireduce.kernels.compiling.jit import inlined, kernel
from omnireduce.kernels.float32_bits import FRACTION, FRACTION_BITS, INFINITE, LARGEST_EXPONENT, MAGNITUDE, POWERS
from omnireduce.kernels.instructions import row_of, span_of

LARGEST_CODE, NOT_A_NUMBER, INFINITY = 125, 126, 127
MAGNITUDE_CODE, NEGATIVE = 127, 128  # the bits of a code
SPARE_BITS = 41  # bits of a random number beyond those that decide between two powers


@inlined
def _magnitude_code(magnitude: int, top: int, random: np.uint64) -> int:
    """The code of an element whose bits without the sign are `magnitude`, in a block with exponent `top`."""
    if magnitude >= INFINITE:
        return NOT_A_NUMBER if magnitude > INFINITE else INFINITY
    exponent = magnitude >> FRACTION_BITS
    if (random & np.uint64(FRACTION)) < np.uint64(magnitude & FRACTION):
        exponent += 1
    below = LARGEST_CODE - top + min(exponent, LARGEST_EXPONENT)
    if exponent == 0 or below >= 1:
        return below if exponent else 0
    spare = random >> np.uint64(FRACTION_BITS)
    missing = 1 - below
    return 1 if missing <= SPARE_BITS and spare >> np.uint64(SPARE_BITS - missing) == np.uint64(0) else 0


@kernel
def _encode(bits: Array, where: Array, encoded: Array, keys: Array) -> None:
    """`bits`: the source as int32."""
    size = bits.shape[1]
    for k in range(where.size):
        row, out, largest = row_of(bits, where[k]), row_of(encoded, k), 0
        for i in range(size):
            magnitude = row[i] & MAGNITUDE
            largest = max(largest, magnitude if magnitude < INFINITE else 0)
        top = min(max((largest + FRACTION) >> FRACTION_BITS, 1), LARGEST_EXPONENT)
        for i in range(size):
            code = _magnitude_code(row[i] & MAGNITUDE, top, drawn(keys[k], i))
            out[i] = code | NEGATIVE if row[i] < 0 else code
        out[size] = top


@inlined
def _value(code: np.int64, top: np.int64) -> np.float32:
    """The value of a code without its sign, in a block with exponent `top`."""
    if code == NOT_A_NUMBER:
        return np.float32(np.nan)
    if code == INFINITY:
        return np.float32(np.inf)
    exponent = np.int64(code + top - LARGEST_CODE)  # anything, if the message is wrong
    return POWERS[exponent] if code and 0 <= exponent <= LARGEST_EXPONENT else np.float32(0)


@kernel
def _sum(slots: Array, parts: Array, where: Array, totals: Array) -> None:
    for k in range(len(parts)):
        total = row_of(totals, where[k])
        for i in range(total.size):
            total[i] = 0
        for sender in range(parts.shape[1]):
            start = parts[k, sender]
            if start >= 0:
                row, top = span_of(slots, start, total.size), np.int64(slots[start + total.size])
                for i in range(total.size):
                    value = _value(np.int64(row[i] & MAGNITUDE_CODE), top)
                    total[i] += -value if row[i] & NEGATIVE else value


class Natural(CompiledCodec):
    """Powers of two, rounded at random."""

    def block_bytes(self, block_size: int) -> int:
        return block_size + 1

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        with np.errstate(over="ignore"):  # random numbers overflow with the JIT off
            _encode(source.view(np.int32), where, encoded, keys)

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        _sum(slots, parts, where, totals)
