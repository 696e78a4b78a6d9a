"""bfloat16 and float16: half the bytes, rounded to the nearest, ties to even.

bfloat16 has the range of float32 and 8 bits of precision: a relative error of 2^-9 at most, for numbers that are not
subnormal. float16 has 11 bits, 2^-12, but becomes infinite from 65,520 on and loses precision below 2^-14. Infinities
and NaN stay what they are.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.base import CompiledCodec
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.kernels.instructions import row_of, span_of
from omnireduce.kernels.reduce import decode_half, encode_half


@kernel
def _encode(brain: bool, source: Array, where: Array, encoded: Array, scratch: Array, bits: Array) -> None:
    """`scratch`: float32 (block size,), and `bits` the same memory as uint32."""
    for k in range(where.size):
        row = row_of(source, where[k])
        for i in range(row.size):
            scratch[i] = row[i]
        encode_half(brain, scratch, bits, row_of(encoded, k))


@kernel
def _sum(brain: bool, slots: Array, parts: Array, where: Array, totals: Array, scratch: Array, bits: Array) -> None:
    """`slots`: as uint16. `scratch`: float32 (block size,), and `bits` the same memory as uint32."""
    for k in range(len(parts)):
        total = row_of(totals, where[k])
        for i in range(total.size):
            total[i] = 0
        for sender in range(parts.shape[1]):
            if parts[k, sender] >= 0:
                decode_half(brain, span_of(slots, parts[k, sender] // 2, total.size), scratch, bits)
                for i in range(total.size):
                    total[i] += scratch[i]


class Half(CompiledCodec):
    """16-bit floats: bfloat16 if it is `brain`, else float16."""

    def __init__(self, *, brain: bool) -> None:
        self._brain = brain

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        scratch = np.empty(source.shape[1], np.float32)
        _encode(self._brain, source, where, encoded.view(np.uint16), scratch, scratch.view(np.uint32))

    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        scratch = np.empty(totals.shape[1], np.float32)
        _sum(self._brain, slots.view(np.uint16), parts, where, totals, scratch, scratch.view(np.uint32))
