"""Selectors: they select the part of a gradient to send now. The rest is for a memory.

A selector returns the indices that it has selected, ascending. These are indices of elements in the flat array, or
numbers of blocks. It reads the array and changes nothing. NaN counts as the largest of all: it is sent at once, so that
all ranks see it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import Literal

import numpy as np

from omnireduce.compression.gradient_checks import check_seed, check_values
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.float32_bits import MAGNITUDE
from omnireduce.kernels.select import (
    BINS,
    LANES,
    SHIFT,
    count_at_least,
    count_magnitudes,
    list_at_least,
    sum_squares,
)
from omnireduce.runtime.rank.calls.arguments import whole_number

Unit = Literal["elements", "blocks"]
Selects = Literal["largest", "about", "some", "none"]
BLOCK = 256  # default size of a block in elements


class Selector(ABC):
    """Selects a part of each gradient. `unit`: elements or blocks; `block_size`: the elements of a block, of which the
    last may be short. `is_common`: all ranks select the same indices. `selects`: for tests of a selector of elements
    that each rank chooses for itself: the "largest" magnitudes; "about" as many of them as its `ratio` says; or "some"
    other elements."""

    unit: Unit = "elements"
    block_size = 1
    is_common = False
    selects: Selects = "largest"

    def select(self, x: Array, name: str = "", step: int = 0) -> Array:
        """The selected indices in `x`, float32 (elements,), ascending: int64 (n,).

        `name` and `step`: the gradient's name, and the number of its step. Raises UsageError for another array.
        """
        return self.choose(check_values(x), name, step)

    @abstractmethod
    def choose(self, x: Array, name: str, step: int) -> Array:
        """The result of `select`, for a valid array."""


def check_ratio(ratio: object) -> float:
    """`ratio` as a number. Raises UsageError unless it is above 0 and at most 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float | np.floating) or not 0 < ratio <= 1:
        raise UsageError(f"ratio {ratio!r}: expected more than 0 and at most 1")
    return float(ratio)


def selected_count(ratio: float, count: int) -> int:
    """The number of indices, out of `count`, that a selector with this ratio selects: at least one, unless `count` is
    0."""
    return min(count, max(1, int(count * ratio)))


def largest(x: Array, k: int) -> Array:
    """The indices of the `k` largest magnitudes of `x`, float32 (n,): int64 (k,), ascending. Among equal magnitudes,
    the first are taken."""
    if k >= x.size:
        return np.arange(x.size)
    bits = x.view(np.int32)
    counts = np.zeros((LANES, BINS), np.int64)
    count_magnitudes(bits, counts)
    above = np.cumsum(counts.sum(axis=0)[::-1])[::-1]  # for each bin, the elements in this or a higher bin
    bin_of_last = int(np.flatnonzero(above >= k)[-1])
    candidates = np.empty(int(above[bin_of_last]), np.int64)
    list_at_least(bits, bin_of_last << SHIFT, candidates)
    magnitudes = bits[candidates] & MAGNITUDE
    threshold = np.partition(magnitudes, candidates.size - k)[candidates.size - k]
    chosen = magnitudes >= threshold
    ties = np.flatnonzero(magnitudes == threshold)
    spare = int(np.count_nonzero(chosen)) - k
    chosen[ties[len(ties) - spare :]] = False
    indices: Array = candidates[chosen]
    return indices


def at_least(x: Array, magnitude: float, *, strictly: bool = False) -> Array:
    """The indices of elements of `x`, float32 (n,), whose magnitude is at least `magnitude`, or `strictly` above it:
    int64, ascending."""
    bits = x.view(np.int32)
    minimum_bits = _bits_of(magnitude) + strictly
    indices = np.empty(count_at_least(bits, minimum_bits), np.int64)
    list_at_least(bits, minimum_bits, indices)
    return indices


def _bits_of(magnitude: float) -> int:
    return int(np.float32(magnitude).view(np.int32))


class Everything(Selector):
    """Selects all elements."""

    def choose(self, x: Array, name: str, step: int) -> Array:
        return np.arange(x.size)


class TopK(Selector):
    """The elements with the largest magnitudes, a share `ratio` of all: max(1, int(elements * ratio))."""

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = check_ratio(ratio)

    def choose(self, x: Array, name: str, step: int) -> Array:
        return largest(x, selected_count(self.ratio, x.size))


class BlockTopK(Selector):
    """The blocks with the largest norms, a share `ratio` of all. They travel as blocks, without a list of elements."""

    unit: Unit = "blocks"

    def __init__(self, ratio: float = 0.01, block_size: int = BLOCK) -> None:
        self.ratio, self.block_size = check_ratio(ratio), whole_number(block_size, "block_size")
        if block_size < 8 or block_size % 8:
            raise UsageError(f"block_size {block_size}: expected a multiple of 8")

    def choose(self, x: Array, name: str, step: int) -> Array:
        squares = block_squares(x, self.block_size)
        return largest(squares, selected_count(self.ratio, squares.size))


def block_squares(x: Array, block_size: int) -> Array:
    """The squared norm of each block of `x`, float32 (elements,), with a short last block: float32 (blocks,)."""
    whole_blocks = x.size // block_size
    squares = np.empty(whole_blocks + (x.size % block_size > 0), np.float32)
    sum_squares(x[: whole_blocks * block_size].reshape(whole_blocks, block_size), squares[:whole_blocks])
    if whole_blocks < squares.size:
        sum_squares(x[whole_blocks * block_size :].reshape(1, -1), squares[whole_blocks:])
    return squares


class RandomK(Selector):
    """Elements drawn at random, a share `ratio` of all. All ranks draw the same elements, from the seed, the name and
    the step; no generator of the caller is used."""

    is_common = True

    def __init__(self, ratio: float = 0.01, seed: int = 0) -> None:
        self.ratio, self.seed = check_ratio(ratio), check_seed(seed)

    def choose(self, x: Array, name: str, step: int) -> Array:
        text = f"{self.seed} {step} {name}".encode()
        key = int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")
        rng = np.random.Generator(np.random.Philox(key=key))
        drawn = (
            rng.choice(x.size, selected_count(self.ratio, x.size), replace=False, shuffle=False)
            if x.size
            else np.empty(0)
        )
        return np.sort(drawn.astype(np.int64))


class Threshold(Selector):
    """The elements whose magnitude is above `threshold`: any number of them, even none."""

    def __init__(self, threshold: float = 0.01) -> None:
        self.threshold = _check_threshold(threshold)

    def choose(self, x: Array, name: str, step: int) -> Array:
        return at_least(x, self.threshold, strictly=True)


class GuardedThreshold(Threshold):
    """The elements whose magnitude is above `threshold`. If they are less than a share `ratio` of all, the largest
    elements, up to this share: so something is sent even if the threshold is too high."""

    def __init__(self, threshold: float = 0.01, ratio: float = 0.01) -> None:
        super().__init__(threshold)
        self.ratio = check_ratio(ratio)

    def choose(self, x: Array, name: str, step: int) -> Array:
        minimum, bits = selected_count(self.ratio, x.size), x.view(np.int32)
        if count_at_least(bits, _bits_of(self.threshold) + 1) < minimum:
            return largest(x, minimum)
        return super().choose(x, name, step)


class DgcSampling(Selector):
    """About a share `ratio` of the elements, above a threshold that a sample of 1 % of them gives.

    The threshold is multiplied by 1.3 or 0.7 until 0.7 to 1.3 times as many elements as wanted are above it. If a step
    goes too far, the next steps halve the interval; if no threshold fits, the largest elements are taken. After Lin et
    al., "Deep Gradient Compression", ICLR 2018. They take ten steps without halving, which can alternate for ever.
    """

    SAMPLE, UP, DOWN, ROUNDS = 0.01, 1.3, 0.7, 30
    selects: Selects = "about"

    def __init__(self, ratio: float = 0.01, seed: int = 0) -> None:
        self.ratio = check_ratio(ratio)
        self._sampler = RandomK(self.SAMPLE, seed)

    def choose(self, x: Array, name: str, step: int) -> Array:
        if not x.size:
            return np.empty(0, np.int64)
        sample = np.ascontiguousarray(x[self._sampler.select(x, name, step)])
        magnitudes = np.abs(sample[largest(sample, selected_count(self.ratio, sample.size))])
        threshold, aim = float(np.min(magnitudes)), self.ratio * x.size
        low, high = 0.0, np.inf  # too many elements are above `low`, too few above `high`
        for _ in range(self.ROUNDS):
            count = count_at_least(x.view(np.int32), _bits_of(threshold))
            if self.DOWN * aim <= count <= self.UP * aim:
                return at_least(x, threshold)
            if not 0 < threshold < np.inf:
                break
            low, high = (threshold, high) if count > aim else (low, threshold)
            if low > 0 and high < np.inf:
                threshold = (low * high) ** 0.5
            else:
                threshold *= self.UP if count > aim else self.DOWN
        return largest(x, selected_count(self.ratio, x.size))  # no threshold lies between, because magnitudes are equal


class Adaptive(Selector):
    """About a share `ratio` of the elements, above a threshold that follows the gradients from step to step.

    The first step of a name selects exactly this share. Each next step takes the last threshold, moved by the error of
    the last step. So it reads the gradient once. If it finds more than `MAX_RATIO` times as many elements as the
    share says, or fewer than that part of them, it selects exactly and starts anew.
    """

    MAX_RATIO, GAIN = 4.0, 0.5
    selects: Selects = "about"

    def __init__(self, ratio: float = 0.01) -> None:
        self.ratio = check_ratio(ratio)
        self._thresholds: dict[str, float] = {}

    def choose(self, x: Array, name: str, step: int) -> Array:
        aim = selected_count(self.ratio, x.size)
        threshold = self._thresholds.get(name, np.nan)
        count = count_at_least(x.view(np.int32), _bits_of(threshold)) if threshold > 0 else 0
        if not aim / self.MAX_RATIO <= count <= aim * self.MAX_RATIO or not x.size:
            indices = largest(x, aim)
            self._thresholds[name] = float(np.abs(x[indices]).min()) if indices.size else np.nan
            return indices
        indices = at_least(x, threshold)
        self._thresholds[name] = threshold * (count / aim) ** self.GAIN
        return indices


def _check_threshold(threshold: object) -> float:
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, int | float | np.floating)
        or not 0 <= threshold < np.inf
    ):
        raise UsageError(f"threshold {threshold!r}: expected a number from 0 on")
    return float(threshold)
