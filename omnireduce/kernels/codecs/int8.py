"""8-bit integers with one scale, a power of two, for each block: a quarter of the bytes and one more.

    numbers (int8 each) | exponent (uint8)        a number q stands for q * 2^(exponent - 133)

The exponent is that of the largest element of the block, so that this one becomes 64 to 127. An element that is not
finite becomes NaN, for which -128 stands; it has no part in the scale. Numbers are rounded to the nearest, ties to
even: an error of half a scale at most, of a whole one next to the largest float32. That is 1/127 of the largest element
or less, or 2^-133 if this is more. What was encoded once stays the same when it is encoded again.

Each rank sends its own scale with each block, and the aggregator adds in float32. So no sum can overflow, nothing has
to be agreed in advance, and ranks with small gradients lose nothing to those with large ones. SwitchML agrees on one
scale a message ahead, because a switch can add integers only: Sapio et al., "Scaling Distributed Machine Learning with
In-Network Aggregation", NSDI 2021.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.compiling.jit import inlined, kernel
from omnireduce.kernels.float32_bits import FRACTION_BITS, INFINITE, LARGEST_EXPONENT, MAGNITUDE
from omnireduce.kernels.instructions import LINE_BYTES, prefetch, row_of, span_of

NOT_A_NUMBER, LARGEST = -128, 127
LINE = LINE_BYTES // 4  # elements
AHEAD = 2048  # elements between what is encoded and what is fetched: the processor alone looks less far
SCALES = np.exp2(np.arange(256) - 133.0).astype(np.float32)
_LIMITS = (LARGEST * SCALES[:255]).view(np.int32)  # bits of the largest element that has this scale
# 1 / scale as two factors, because 2^133 is no float32
_DOWN = 133 - np.arange(256)
FIRST, SECOND = (np.exp2(powers.astype(np.float64)).astype(np.float32) for powers in (_DOWN // 2, _DOWN - _DOWN // 2))


@inlined
def _largest(word: Array) -> np.int32:
    """The bits of the largest magnitude; not finite if any element is not."""
    largest = np.int32(0)
    for i in range(word.size):
        magnitude = np.int32(word[i] & np.int32(MAGNITUDE))
        if magnitude > largest:
            largest = magnitude
    return largest


@inlined
def largest_finite(word: Array) -> np.int32:
    largest = np.int32(0)
    for i in range(word.size):
        magnitude = np.int32(word[i] & np.int32(MAGNITUDE))
        if largest < magnitude < np.int32(INFINITE):
            largest = magnitude
    return largest


@inlined
def exponent_for(largest: np.int32) -> np.int32:
    """The exponent of a block whose largest magnitude has these bits."""
    exponent = np.int32(largest >> np.int32(FRACTION_BITS))
    if exponent < LARGEST_EXPONENT and largest > _LIMITS[exponent]:
        exponent += np.int32(1)
    return exponent


@inlined
def _rounded(scaled: np.float32) -> np.int8:
    """The nearest int8 within ±LARGEST. The limit matters only in blocks near the largest float32."""
    number = np.int32(np.rint(scaled))
    return np.int8(min(max(number, np.int32(-LARGEST)), np.int32(LARGEST)))


@kernel
def _encode(source: Array, bits: Array, where: Array, numbers: Array, encoded: Array) -> None:
    """`bits`: `source` as int32. `numbers`: `encoded` as int8. Each loop over elements is one that vectorises."""
    size, last = source.shape[1], where.size - 1
    ahead = max(1, AHEAD // size)
    for k in range(where.size):
        row, word, out = row_of(source, where[k]), row_of(bits, where[k]), row_of(numbers, k)
        later = row_of(bits, where[min(k + ahead, last)])
        for i in range(0, size, LINE):
            prefetch(later, i)
        largest = _largest(word)
        is_finite = largest < np.int32(INFINITE)
        if not is_finite:
            largest = largest_finite(word)
        exponent = exponent_for(largest)
        first, second = FIRST[exponent], SECOND[exponent]
        if is_finite:
            for i in range(size):
                out[i] = _rounded((row[i] * first) * second)
        else:
            for i in range(size):
                is_number = word[i] & MAGNITUDE < INFINITE
                out[i] = _rounded((row[i] * first) * second) if is_number else np.int8(NOT_A_NUMBER)
        encoded[k, size] = exponent


@inlined
def _value(number: np.int8, scale: np.float32) -> np.float32:
    return np.float32(number) * scale if number != NOT_A_NUMBER else np.float32(np.nan)


@kernel
def _sum(numbers: Array, slots: Array, parts: Array, where: Array, totals: Array) -> None:
    """`numbers`: `slots` as int8. A block of one sender is written, and not added to zeros: as fast as a copy."""
    for k in range(len(parts)):
        total, present = row_of(totals, where[k]), 0
        for sender in range(parts.shape[1]):
            start = parts[k, sender]
            if start >= 0:
                row, scale = span_of(numbers, start, total.size), SCALES[slots[start + total.size]]
                if present == 0:
                    for i in range(total.size):
                        total[i] = _value(row[i], scale)
                else:
                    for i in range(total.size):
                        total[i] += _value(row[i], scale)
                present += 1
        if present == 0:
            total[:] = 0


class Int8(CompiledCodec):
    """8-bit integers with a scale for each block."""

    def block_bytes(self, block_size: int) -> int:
        return block_size + 1

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        _encode(source, source.view(np.int32), where, encoded.view(np.int8), encoded)

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        _sum(slots.view(np.int8), slots, parts, where, totals)
