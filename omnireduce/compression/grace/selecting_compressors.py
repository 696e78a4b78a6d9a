"""Compressors that send a part of the elements: their values, and their indices as the gaps between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.compression import selectors
from omnireduce.compression.grace.built_in_base import BuiltInCompressor, Context
from omnireduce.core.dtypes import Array


def encode_gaps(indices: Array) -> Array:
    """Ascending indices as the gaps between them, in the smallest type of unsigned integers that has room."""
    gaps = np.diff(indices, prepend=0)
    return gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))


def decode_gaps(gaps: Array) -> Array:
    """The reverse of `encode_gaps`: int64."""
    return np.cumsum(gaps, dtype=np.int64)


class SelectingCompressor(BuiltInCompressor):
    """Sends the elements that its selector selects: `sent[0]` are their values, `sent[1]` the gaps between their
    indices."""

    selector: selectors.Selector

    def __init__(self, selector: selectors.Selector, *, tensors_size_are_same: bool = False) -> None:
        super().__init__(tensors_size_are_same=tensors_size_are_same)
        self.selector = selector
        self.selects = "some" if selector.is_common or selector.unit == "blocks" else selector.selects

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        indices = self.selector.select(x, ctx.name, ctx.step)
        return [x[indices], encode_gaps(indices)]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        values = np.zeros(ctx.template.size, np.float32)
        values[decode_gaps(arrays[1])] = arrays[0]
        return values


class TopKCompressor(SelectingCompressor):
    """The elements with the largest magnitudes: max(1, int(elements * compress_ratio))."""

    def __init__(self, compress_ratio: float = 0.3) -> None:
        super().__init__(selectors.TopK(compress_ratio), tensors_size_are_same=True)
        self.compress_ratio = compress_ratio


class DgcCompressor(SelectingCompressor):
    """About a share `compress_ratio`, above a threshold that a sample gives: see `DgcSampling`."""

    def __init__(self, compress_ratio: float = 0.3, seed: int = 0) -> None:
        super().__init__(selectors.DgcSampling(compress_ratio, seed))


class ThresholdCompressor(SelectingCompressor):
    """The elements whose magnitude is above `threshold`: any number, even none."""

    def __init__(self, threshold: float = 0.01) -> None:
        super().__init__(selectors.Threshold(threshold))
        self.threshold = threshold


class GuardedThresholdCompressor(SelectingCompressor):
    """The elements above `threshold`, but no fewer than max(1, int(elements * compress_ratio)): then the largest."""

    def __init__(self, threshold: float = 0.01, compress_ratio: float = 0.01) -> None:
        super().__init__(selectors.GuardedThreshold(threshold, compress_ratio))
        self.threshold, self.compress_ratio = threshold, compress_ratio


class AdaptiveCompressor(SelectingCompressor):
    """About a share `compress_ratio`, above a threshold that follows the gradients: see `Adaptive`."""

    def __init__(self, compress_ratio: float = 0.3) -> None:
        super().__init__(selectors.Adaptive(compress_ratio))


class RandomKCompressor(SelectingCompressor):
    """Elements drawn at random, the same on all ranks: their values travel, their indices do not."""

    communicators = ("allreduce", "allgather", "broadcast", "aggregator")

    def __init__(self, compress_ratio: float = 0.3, seed: int = 0) -> None:
        super().__init__(selectors.RandomK(compress_ratio, seed), tensors_size_are_same=True)
        self.compress_ratio = compress_ratio

    def encode(self, x: Array, ctx: Context) -> Sequence[Array]:
        return [x[self.selector.select(x, ctx.name, ctx.step)]]

    def decode(self, arrays: Sequence[Array], ctx: Context) -> Array:
        values = np.zeros(ctx.template.size, np.float32)
        values[self.selector.select(values, ctx.name, ctx.step)] = arrays[0]
        return values
