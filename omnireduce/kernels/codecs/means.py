"""One bit for each element, and what the two bits stand for: 1/32 of the bytes and 8 more for each block.

    below, above (float32 each) | bits (uint8 for eight elements, the lowest one first)

A set bit says that the element is below zero; it becomes `below`. All others become `above`: zeros, too, and NaN. Of
`onebit` these are the means of the elements that they stand for. Of `scaled_sign` they are the mean magnitude of the
block with either sign. Zeros at the end of a block have no part in a mean: they may be what fills a short block up. So
what was encoded once stays the same when it is encoded again. A mean over NaN is NaN, one over infinities infinite.

After Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
Speech DNNs", Interspeech 2014, and Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", ICML 2019.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.codecs.sign import BITS
from omnireduce.kernels.compiling.jit import inlined, kernel
from omnireduce.kernels.instructions import row_of, span_of

MEANS_BYTES = 8


@inlined
def _find_means(apart: bool, row: Array, means: Array) -> None:
    """Write what the bits of `row` stand for to `means`, float32 (2,)."""
    last, negatives, below, above = row.size, 0, np.float64(0), np.float64(0)
    while last > 0 and row[last - 1] == 0:
        last -= 1
    for i in range(last):
        if row[i] < 0:
            below += np.float64(row[i])
            negatives += 1
        else:
            above += np.float64(row[i])
    if apart:
        means[0], means[1] = below / max(negatives, 1), above / max(last - negatives, 1)
    else:
        means[1] = (above - below) / max(last, 1)
        means[0] = np.float32(0) - means[1]


@kernel
def _encode(apart: bool, source: Array, where: Array, encoded: Array, means: Array, mean_bytes: Array) -> None:
    """`means`: float32 (2,); `mean_bytes` the same memory as uint8."""
    for k in range(where.size):
        row, out = row_of(source, where[k]), row_of(encoded, k)
        _find_means(apart, row, means)
        for byte in range(MEANS_BYTES):
            out[byte] = mean_bytes[byte]
        for byte in range(out.size - MEANS_BYTES):
            sign_bits = 0
            for bit in range(BITS):
                sign_bits |= (row[BITS * byte + bit] < 0) << bit
            out[MEANS_BYTES + byte] = sign_bits


@kernel
def _sum(slots: Array, parts: Array, where: Array, totals: Array, means: Array, mean_bytes: Array) -> None:
    """`means`: float32 (2,); `mean_bytes` the same memory as uint8."""
    for k in range(len(parts)):
        total = row_of(totals, where[k])
        for i in range(total.size):
            total[i] = 0
        for sender in range(parts.shape[1]):
            at = parts[k, sender]
            if at >= 0:
                for byte in range(MEANS_BYTES):
                    mean_bytes[byte] = slots[at + byte]
                below, above = means[0], means[1]
                row = span_of(slots, at + MEANS_BYTES, total.size // BITS)
                for byte in range(row.size):
                    for bit in range(BITS):
                        total[BITS * byte + bit] += below if (row[byte] >> bit) & 1 else above


class SignMeans(CompiledCodec):
    """Signs with two means: one of each sign if they are `apart`, else the same of both."""

    def __init__(self, *, apart: bool) -> None:
        self._apart = apart

    def block_bytes(self, block_size: int) -> int:
        return MEANS_BYTES + block_size // BITS

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        means = np.empty(2, np.float32)
        _encode(self._apart, source, where, encoded, means, means.view(np.uint8))

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        means = np.empty(2, np.float32)
        _sum(slots, parts, where, totals, means, means.view(np.uint8))
