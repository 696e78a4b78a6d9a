"""One bit for each element: a vote. 1/32 of the bytes.

A set bit says that the element is below zero. All others count as positive: zeros, too, and NaN. The sum of a block is
the vote of the ranks that have sent it: -1 where most elements are below zero, else 1. Where no rank has sent the
block, it is 0.

After Bernstein et al., "signSGD with Majority Vote is Communication Efficient and Fault Tolerant", ICLR 2019.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.instructions import row_of, span_of

BITS = 8  # bits of a byte, the lowest first


@kernel
def _encode(source: Array, where: Array, encoded: Array) -> None:
    for k in range(where.size):
        row, out = row_of(source, where[k]), row_of(encoded, k)
        for byte in range(out.size):
            vote_bits = 0
            for bit in range(BITS):
                vote_bits |= (row[BITS * byte + bit] < 0) << bit
            out[byte] = vote_bits


@kernel
def _sum(slots: Array, parts: Array, where: Array, totals: Array) -> None:
    for k in range(len(parts)):
        total = row_of(totals, where[k])
        for i in range(total.size):
            total[i] = 0
        for sender in range(parts.shape[1]):
            if parts[k, sender] >= 0:
                row = span_of(slots, parts[k, sender], total.size // BITS)
                for byte in range(row.size):
                    for bit in range(BITS):
                        total[BITS * byte + bit] += np.float32(1) - np.float32(2) * np.float32((row[byte] >> bit) & 1)


class Sign(CompiledCodec):
    """Signs, and their majority."""

    def block_bytes(self, block_size: int) -> int:
        return block_size // BITS

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        _encode(source, where, encoded)

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        _sum(slots, parts, where, totals)
