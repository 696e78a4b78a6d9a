"""Skip-gram with negative sampling: one table of input and one of output vectors, trained with Adagrad.

Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", NeurIPS 2013, equation 4;
Duchi et al., "Adaptive Subgradient Methods", JMLR 12 (2011), whose per-element step sizes suit rare words.

Plain NumPy without BLAS: the same inputs give the same bits in every process, whatever its number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from omnireduce.core.dtypes import Array
from omnireduce.kernels.scatter import add_rows
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
        positions = rng.integers(0, tokens.size, pairs)
        file = np.searchsorted(starts, positions, side="right") - 1
        offset = rng.choice(self._offsets, pairs)
        outside = (positions + offset < starts[file]) | (positions + offset >= starts[file + 1])
        # inside, as files are longer than two windows
        context = np.where(outside, positions - offset, positions + offset)
        targets = np.empty((pairs, 1 + self._negatives), np.int64)
        targets[:, 0] = tokens[context]
        targets[:, 1:] = np.searchsorted(self._noise, rng.random((pairs, self._negatives)), side="right")
        return Pairs(tokens[positions].astype(np.int64), targets)


_EPSILON = 1e-7  # keeps the first division of an untouched element defined


class SkipGram:
    """`weights` (2 * words, dim): the input vectors of all words, then their output vectors. `squares`, of the same
    shape: the sums of their squared gradients."""

    def __init__(self, words: int, dim: int, *, seed: int, learning_rate: float, dtype: DTypeLike = np.float32) -> None:
        rng = np.random.default_rng(seed)
        self.words = words
        self.learning_rate = learning_rate
        self.weights = np.zeros((2 * words, dim), dtype)
        self.weights[:words] = (rng.random((words, dim)) - 0.5) / dim  # and zero output vectors, as word2vec starts
        self.squares = np.zeros_like(self.weights)

    def gradient(self, pairs: Pairs) -> tuple[Array, Array]:
        """Return the gradient of the mean loss of `pairs`: ascending rows (n,) of `weights`, values (n, dim)."""
        centres, targets, scores, real = self._scores(pairs)
        slope = 0.5 + 0.5 * np.tanh(0.5 * scores)  # the logistic function; this form cannot overflow
        slope[:, 0] -= 1
        slope *= real.astype(scores.dtype) / len(scores)
        rows = np.concatenate((pairs.centres, self.words + pairs.targets.ravel()))
        to_centres = np.einsum("bk,bkd->bd", slope, targets)
        to_targets = np.einsum("bk,bd->bkd", slope, centres)
        return _add_rows(rows, np.concatenate((to_centres, to_targets.reshape(-1, to_centres.shape[1]))))

    def loss(self, pairs: Pairs) -> float:
        """Return the mean over `pairs` of -log s(vu) - sum over negatives of log s(-vu), s the logistic function."""
        _, _, scores, real = self._scores(pairs)
        scores[:, 0] *= -1
        return float((np.logaddexp(0, scores) * real).sum(dtype=np.float64) / len(scores))

    def update(self, rows: Array, gradient: Array) -> None:
        """One Adagrad step on `rows`; a zero gradient, of either sign, changes nothing."""
        gradient = gradient + gradient.dtype.type(0)  # -0 becomes +0
        squares = self.squares[rows] + gradient * gradient
        self.squares[rows] = squares
        step = np.sqrt(squares, out=squares)
        step += _EPSILON
        np.divide(gradient, step, out=step)
        step *= self.learning_rate
        self.weights[rows] -= step

    def _scores(self, pairs: Pairs) -> tuple[Array, Array, Array, Array]:
        """Return centre vectors, target vectors, their scalar products, and which targets count.

        A negative that is the true context word by chance does not count.
        """
        centres = self.weights[pairs.centres]
        targets = self.weights[self.words + pairs.targets]
        real = pairs.targets != pairs.targets[:, :1]
        real[:, 0] = True
        return centres, targets, np.einsum("bd,bkd->bk", centres, targets), real


def _add_rows(rows: Array, values: Array) -> tuple[Array, Array]:
    """Add the values of equal rows; return the rows, ascending and without duplicates, and their sums."""
    order = np.argsort(rows, kind="stable")
    rows = rows[order]
    starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1], [True])))
    sums = np.empty((starts.size - 1, values.shape[1]), values.dtype)
    add_rows(values, order, starts, sums)
    return rows[starts[:-1]], sums
