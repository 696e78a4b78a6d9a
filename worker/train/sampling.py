"""Draws skip-gram pairs with negative samples from a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.worker.train.corpus import Text

_NOISE_POWER = 0.75


@dataclass(frozen=True)
class Pairs:
    """Word numbers: `centres` (pairs,); `targets` (pairs, 1 + negatives), true context first, then negatives."""

    centres: Array
    targets: Array


class Sampler:
    """Pairs of words at most `window` apart in one file, each with `negatives` words of the noise distribution.

    A distance d has a probability proportional to `window + 1 - d`, as the shrinking window of word2vec gives it.
    """

    def __init__(self, text: Text, counts: Array, *, window: int, negatives: int) -> None:
        self._text = text
        self._negatives = negatives
        distances = np.repeat(np.arange(1, window + 1), np.arange(window, 0, -1))
        self._offsets = np.concatenate((-distances, distances))
        noise = np.cumsum(counts.astype(np.float64) ** _NOISE_POWER)
        self._noise = noise / noise[-1]

    def draw(self, rng: np.random.Generator, pairs: int) -> Pairs:
        """Return `pairs` pairs that depend on nothing but the text and the state of `rng`."""
        tokens, starts = self._text.tokens, self._text.starts
        at = rng.integers(0, tokens.size, pairs)
        file = np.searchsorted(starts, at, side="right") - 1
        offset = rng.choice(self._offsets, pairs)
        outside = (at + offset < starts[file]) | (at + offset >= starts[file + 1])
        context = np.where(outside, at - offset, at + offset)  # inside, as files are longer than two windows
        targets = np.empty((pairs, 1 + self._negatives), np.int64)
        targets[:, 0] = tokens[context]
        targets[:, 1:] = np.searchsorted(self._noise, rng.random((pairs, self._negatives)), side="right")
        return Pairs(tokens[at].astype(np.int64), targets)
