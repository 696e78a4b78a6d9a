"""Compressors that replace elements by few values, and have no codec: the service moves the decompressed gradient.

Compressors with a codec are in `packing_compressors`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.compression.grace.built_in_base import BuiltInCompressor, Context
from omnireduce.compression.grace.selecting_compressors import decode_gaps, encode_gaps
from omnireduce.compression.memories import finite, overflowing
from omnireduce.compression.selectors import Selects, check_ratio, largest, selected_count
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls.arguments import whole_number


class AdaqCompressor(BuiltInCompressor):
    """The largest elements of each sign, a share `compress_ratio` of all with this sign, as their mean.

    NaN counts as positive. After Dryden et al., "Communication Quantization for Data-Parallel Training of Deep Neural
    Networks", MLHPC 2016.
    """

    selects: Selects = "none"

    def __init__(self, compress_ratio: float = 0.3) -> None:
        super().__init__(tensors_size_are_same=False)
        self.compress_ratio = check_ratio(compress_ratio)

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        means, indices = np.zeros(2, np.float32), []
        for sign, has_sign in enumerate((x < 0, ~(x <= 0))):
            side = np.where(has_sign, x, np.float32(0))
            count = int(np.count_nonzero(side))
            chosen = largest(side, selected_count(self.compress_ratio, count)) if count else np.empty(0, np.int64)
            with overflowing():
                means[sign] = np.mean(side[chosen], dtype=np.float64) if count else 0
            indices.append(chosen)
        return [means, *map(encode_gaps, indices)]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        values = np.zeros(ctx.template.size, np.float32)
        for mean, gaps in zip(arrays[0], arrays[1:], strict=True):
            values[decode_gaps(gaps)] = mean
        return values


class SketchCompressor(BuiltInCompressor):
    """The number of a quantile for each element, a byte, and the means of the `quantiles`.

    After Jiang et al., "SketchML: Accelerating Distributed Machine Learning with Data Sketches", SIGMOD 2018.
    """

    MAX_QUANTILES = 256

    def __init__(self, quantiles: int = 64) -> None:
        super().__init__()
        self.quantiles = whole_number(quantiles, "quantiles")
        if not 2 <= self.quantiles <= self.MAX_QUANTILES:
            raise UsageError(f"quantiles {quantiles}: expected 2 to {self.MAX_QUANTILES}")

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        if not x.size:
            return [np.empty(0, np.float32), np.empty(0, np.uint8)]
        ranked = np.sort(x)  # NaN last
        inner = np.arange(1, self.quantiles) * x.size // self.quantiles
        numbers = np.searchsorted(ranked[inner], x, side="right").astype(np.uint8)
        counts = np.bincount(numbers, minlength=self.quantiles)
        with overflowing():
            sums = np.bincount(numbers, x, minlength=self.quantiles)
            means = sums / np.maximum(counts, 1)
        return [means.astype(np.float32), numbers]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        means, numbers = arrays
        values: Array = means[numbers]
        return values


def _dynamic_magnitudes() -> Array:
    """128 numbers from 0 to 1: each power of ten has half as many as the next larger one."""
    magnitudes = [0.0]
    for power in range(7):
        edges = np.linspace(0.1, 1, 2 ** (6 - power) + 1)
        magnitudes += [*(10.0**-power * (edges[:-1] + edges[1:]) / 2)]
    return np.sort(np.array(magnitudes, np.float32))


class U8bitCompressor(BuiltInCompressor):
    """A sign and one of 128 magnitudes, finer for small elements, times the largest: a byte for each element.

    A gradient that is not finite becomes NaN. After Dettmers, "8-Bit Approximations for Parallelism in Deep Learning",
    ICLR 2016.
    """

    MAGNITUDES = _dynamic_magnitudes()
    NEGATIVE = 128

    def __init__(self) -> None:
        super().__init__()

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        scale = np.abs(x).max(initial=0)
        scale = scale if np.isfinite(scale) else np.float32(np.nan)
        middles = (self.MAGNITUDES[:-1] + self.MAGNITUDES[1:]) / 2
        with overflowing():
            codes = np.searchsorted(middles, np.abs(x, dtype=np.float64) / (scale or 1)).astype(np.uint8)
        codes[x < 0] |= self.NEGATIVE
        return [np.array([scale], np.float32), codes]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        scale, codes = arrays
        values: Array = self.MAGNITUDES[codes % self.NEGATIVE] * scale
        values[codes >= self.NEGATIVE] *= -1
        return values


class InceptionnCompressor(BuiltInCompressor):
    """Each element within `error_bound`, in as few bytes as needed: none, one, two or four.

    GRACE's default is 2e-10, which makes few gradients shorter; the authors take 2^-10. Here numbers are multiples of
    twice the bound. After Li et al., "A Network-Centric Hardware/Algorithm Co-Design to Accelerate Distributed
    Training of Deep Neural Networks", MICRO 2018.
    """

    BITS = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.uint8)  # codes for the bytes of an element: 0, 1, 2, 4

    def __init__(self, error_bound: float = 2e-10) -> None:
        super().__init__(tensors_size_are_same=False)
        self.error_bound = float(finite(error_bound, "error_bound"))
        if self.error_bound <= 0:
            raise UsageError(f"error_bound {error_bound!r}: expected a number above 0")

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        steps = np.abs(np.rint(np.divide(x, 2 * self.error_bound, dtype=np.float64)))
        kinds = 3 - (steps <= 32767).astype(np.int64) - (steps <= 127) - (steps == 0)
        short, long = (np.rint(x[kinds == kind] / (2 * self.error_bound)) for kind in (1, 2))
        bits = np.packbits(self.BITS[kinds].reshape(-1))
        return [bits, short.astype(np.int8), long.astype(np.int16), x[kinds == 3]]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        bits, *numbers = arrays
        pairs = np.unpackbits(bits, count=2 * ctx.template.size).reshape(-1, 2)
        kinds, values = 2 * pairs[:, 0] + pairs[:, 1], np.zeros(ctx.template.size, np.float32)
        for kind, (part, unit) in enumerate(zip(numbers, (2 * self.error_bound, 2 * self.error_bound, 1), strict=True)):
            values[kinds == kind + 1] = part * unit
        return values
