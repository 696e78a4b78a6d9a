"""The training loop of one process, which knows only that somebody adds up its gradient.

One step: the process adds the gradients of its shards, one shard per rank, into a dense float32 array that is zero in
every row the batches did not touch; an `Exchange` replaces it by the sum over all ranks; Adagrad applies the mean. A
worker has the shard of its own rank. The one-process run, which must end with the same bits, has all shards. It adds
their gradients in rank order, as the aggregators do, and exchanges nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from omnireduce.core.dtypes import Array, element_type
from omnireduce.kernels.nonzero_blocks import nonzero_blocks
from omnireduce.support.config import Config
from omnireduce.worker.train.corpus import Corpus
from omnireduce.worker.train.model import Pairs, Sampler, SkipGram

Exchange = Callable[[Array], None]
"""Replaces a gradient, in place, by its sum over all ranks."""

_TRAINING, _EVALUATION = range(2)  # independent random streams of one seed


def no_exchange(gradient: Array) -> None:
    """The exchange of a process that has the shards of all ranks: its gradient is the sum already."""


@dataclass(frozen=True)
class StepRecord:
    """Seconds of one step, and how many blocks of its gradient were non-zero before and after the exchange."""

    compute_s: float
    exchange_s: float
    own_blocks: int
    union_blocks: int


class Trainer:
    """Trains on the shards of `ranks` (ascending) out of `size`; the model starts the same on every rank.

    Scanning for the density of a gradient before its exchange is measurement and not part of the recorded times.
    """

    def __init__(self, corpus: Corpus, config: Config, *, ranks: Sequence[int], size: int, exchange: Exchange) -> None:
        train = config.train
        self._batch, self._seed = train.batch, train.seed
        self._exchange = exchange
        self._sampler = Sampler(corpus.train, corpus.counts, window=train.window, negatives=train.negatives)
        self.model = SkipGram(len(corpus.words), train.dim, seed=train.seed, learning_rate=train.learning_rate)
        self.gradient = BlockedRows(2 * len(corpus.words), train.dim, block_size(config))
        self.records: list[StepRecord] = []
        self.set_shards(ranks, size)

    def set_shards(self, ranks: Sequence[int], size: int) -> None:
        """From now on train on the shards of `ranks` out of `size`; a step that failed is forgotten."""
        self._ranks, self._size = ranks, size
        self.gradient.rows[...] = 0

    def step(self, number: int, inspect: Callable[[Array], None] | None = None) -> None:
        """Draw the shards' batches of step `number`, exchange the gradient, update the model, append to `records`.

        `inspect` sees the gradient before the exchange; its time is not recorded.
        """
        gradient = self.gradient
        began = time.perf_counter()
        for rank in self._ranks:
            batch = self._sampler.draw(np.random.default_rng((self._seed, _TRAINING, number, rank)), self._batch)
            rows, values = self.model.gradient(batch)
            gradient.rows[rows] += values
        computed = time.perf_counter()
        own_blocks = gradient.scan()
        if inspect:
            inspect(gradient.rows)
        started = time.perf_counter()
        self._exchange(gradient.rows)
        exchanged = time.perf_counter()
        union_blocks = gradient.scan()
        rows = gradient.touched_rows()
        self.model.update(rows, gradient.rows[rows] / np.float32(self._size))
        gradient.rows[rows] = 0
        compute_s = computed - began + time.perf_counter() - exchanged
        self.records.append(StepRecord(compute_s, exchanged - started, own_blocks, union_blocks))

    def weights_digest(self) -> bytes:
        """SHA-256 of the weights' bits."""
        return hashlib.sha256(self.model.weights.tobytes()).digest()


class BlockedRows:
    """A dense gradient `rows` (n_rows, dim), at first zero, in memory of whole blocks, so that it can be scanned."""

    def __init__(self, n_rows: int, dim: int, block: int) -> None:
        self.block_size = block
        self.blocks = -(-n_rows * dim // block)
        flat = np.zeros(self.blocks * block, np.float32)
        self.rows: Array = flat[: n_rows * dim].reshape(n_rows, dim)
        self._words = flat.view(np.uint64).reshape(self.blocks, -1)
        self._mask = element_type(np.float32).zero_mask
        self._is_nonzero = np.zeros(self.blocks, bool)
        self.scan()  # compiles the kernel

    def scan(self) -> int:
        """Look for non-zero blocks; return how many there are."""
        return nonzero_blocks(self._words, self._mask, self._is_nonzero)

    def touched_rows(self) -> Array:
        """The rows, ascending, that share an element with a block that the last scan found non-zero."""
        if self.block_size == self.rows.shape[1]:
            return np.flatnonzero(self._is_nonzero)
        elements = np.repeat(self._is_nonzero, self.block_size)[: self.rows.size]
        return np.flatnonzero(elements.reshape(self.rows.shape).any(axis=1))


def block_size(config: Config) -> int:
    """One row is one block where the protocol allows blocks of that size, else the configured block size."""
    dim = config.train.dim
    return dim if dim % 8 == 0 and 8 <= dim <= 65536 else config.protocol.block_size


def held_out_pairs(corpus: Corpus, config: Config, pairs: int = 20_000) -> list[Pairs]:
    """Pairs of the held-out files with their negatives, always the same ones for one seed, in batches."""
    train = config.train
    sampler = Sampler(corpus.held_out, corpus.counts, window=train.window, negatives=train.negatives)
    rng = np.random.default_rng((train.seed, _EVALUATION))
    return [sampler.draw(rng, 1000) for _ in range(pairs // 1000)]


def mean_loss(model: SkipGram, batches: Sequence[Pairs]) -> float:
    """The mean loss over batches of equal size."""
    return float(np.mean([model.loss(batch) for batch in batches]))
