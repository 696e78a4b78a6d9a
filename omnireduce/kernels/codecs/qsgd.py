"""The numbers and the scale of int8, rounded at random: right on average.

An element between two multiples of the scale becomes the upper one with the probability that makes it right on average,
to 2^-24 of the scale. What was encoded once stays the same when it is encoded again. NaN and infinities are as in int8.

After Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", NIPS 2017, which
scales by the norm of a bucket; by the largest element, as here, it is said to preserve more.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.codecs.draws import uniform
from omnireduce.kernels.codecs.int8 import FIRST, LARGEST, NOT_A_NUMBER, SECOND, Int8, exponent_for, largest_finite
from omnireduce.kernels.compiling.jit import inlined, kernel
from omnireduce.kernels.float32_bits import INFINITE, MAGNITUDE
from omnireduce.kernels.instructions import row_of


@inlined
def _rounded(scaled: np.float32, random: np.float32) -> np.int32:
    """The whole number below or above `scaled`, which is not negative."""
    below = np.int32(scaled)
    return min(np.int32(below + np.int32(random < scaled - np.float32(below))), np.int32(LARGEST))


@kernel
def _encode(source: Array, bits: Array, where: Array, numbers: Array, encoded: Array, keys: Array) -> None:
    """`bits`: `source` as int32. `numbers`: `encoded` as int8."""
    size = source.shape[1]
    for k in range(where.size):
        row, word, out = row_of(source, where[k]), row_of(bits, where[k]), row_of(numbers, k)
        exponent = exponent_for(largest_finite(word))
        for i in range(size):
            if word[i] & MAGNITUDE >= INFINITE:
                out[i] = np.int8(NOT_A_NUMBER)
            else:
                magnitude = _rounded((abs(row[i]) * FIRST[exponent]) * SECOND[exponent], uniform(keys[k], i))
                out[i] = np.int8(-magnitude if row[i] < 0 else magnitude)
        encoded[k, size] = exponent


class Qsgd(Int8):
    """8-bit integers with a scale for each block, rounded at random."""

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        with np.errstate(over="ignore"):  # random numbers overflow with the JIT off
            _encode(source, source.view(np.int32), where, encoded.view(np.int8), encoded, keys)
