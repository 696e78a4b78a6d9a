"""-1, 0 or 1, times one scale for each block: five elements in a byte, an 18th of the bytes of 256 elements.

    scale (float32) | digits (uint8 for five elements, to base 3: 0, 1, 2 stand for -1, 0, 1)

The scale is the largest element of the block. An element becomes its sign times the scale with the probability
|element| / scale, else 0: right on average, to 2^-24 of the scale. A block with NaN or infinities becomes NaN as a
whole.

After Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", NIPS 2017.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.codecs.draws import uniform
from omnireduce.kernels.compiling.jit import inlined, kernel
from omnireduce.kernels.float32_bits import INFINITE, MAGNITUDE
from omnireduce.kernels.instructions import row_of, span_of

SCALE_BYTES, IN_BYTE, BASE = 4, 5, 3
NOT_A_NUMBER = 0x7FC0_0000  # the bits of such a float32


@inlined
def _draw_digits(row: Array, scale: np.float32, key: np.uint64, digits: Array) -> None:
    for i in range(row.size):
        stands = np.int32(uniform(key, i) < abs(row[i]) / scale)
        digits[i] = 1 + stands * (np.int32(row[i] > 0) - np.int32(row[i] < 0))


@kernel
def _encode(
    source: Array, bits: Array, where: Array, encoded: Array, scale: Array, scale_bits: Array, keys: Array
) -> None:
    """`bits`: `source` as int32. `scale`: float32 (1,); `scale_bits` the same memory as int32."""
    size = source.shape[1]
    digits = np.ones(-(-size // IN_BYTE) * IN_BYTE, np.uint8)  # the padding of the last byte stands for nothing
    for k in range(where.size):
        row, word, out, largest = row_of(source, where[k]), row_of(bits, where[k]), row_of(encoded, k), np.int32(0)
        for i in range(size):
            largest = max(largest, word[i] & np.int32(MAGNITUDE))
        is_finite = largest < INFINITE
        scale_bits[0] = largest if is_finite else np.int32(NOT_A_NUMBER)
        if is_finite:
            _draw_digits(row, scale[0], keys[k], digits)
        for byte in range(SCALE_BYTES):
            out[byte] = scale_bits[0] >> 8 * byte & 0xFF
        for byte in range(out.size - SCALE_BYTES):
            packed_digits = np.uint8(0)
            for i in range(IN_BYTE):
                packed_digits = packed_digits * np.uint8(BASE) + digits[IN_BYTE * byte + IN_BYTE - 1 - i]
            out[SCALE_BYTES + byte] = packed_digits


@kernel
def _sum(slots: Array, parts: Array, where: Array, totals: Array, scale: Array, scale_bytes: Array) -> None:
    """`scale`: float32 (1,); `scale_bytes` the same memory as uint8."""
    for k in range(len(parts)):
        total = row_of(totals, where[k])
        for i in range(total.size):
            total[i] = 0
        for sender in range(parts.shape[1]):
            at = parts[k, sender]
            if at >= 0:
                for byte in range(SCALE_BYTES):
                    scale_bytes[byte] = slots[at + byte]
                _add_digits(span_of(slots, at + SCALE_BYTES, (total.size + IN_BYTE - 1) // IN_BYTE), scale[0], total)


@inlined
def _add_digits(row: Array, scale: np.float32, total: Array) -> None:
    for byte in range(row.size):
        digits, start = np.int64(row[byte]), IN_BYTE * byte
        for i in range(start, min(start + IN_BYTE, total.size)):
            total[i] += scale * np.float32(digits % BASE - 1)
            digits //= BASE


class Ternary(CompiledCodec):
    """Signs and zeros, rounded at random."""

    def block_bytes(self, block_size: int) -> int:
        return SCALE_BYTES + -(-block_size // IN_BYTE)

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        scale = np.empty(1, np.float32)
        with np.errstate(over="ignore"):  # random numbers overflow with the JIT off
            _encode(source, source.view(np.int32), where, encoded, scale, scale.view(np.int32), keys)

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        scale = np.empty(1, np.float32)
        _sum(slots, parts, where, totals, scale, scale.view(np.uint8))
