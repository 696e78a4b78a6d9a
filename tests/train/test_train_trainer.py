"""The training loop in one process."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import WAIT_S, Ranks

from omnireduce.core.dtypes import Array
from omnireduce.support.config import Config, load_config
from omnireduce.worker.train.corpus import Corpus, load_corpus
from omnireduce.worker.train.trainer import (
    BlockedRows,
    Exchange,
    Trainer,
    block_size,
    held_out_pairs,
    mean_loss,
    no_exchange,
)

TOPICS = ["red green blue white black", "one two three four five", "cat dog cow hen pig"]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Words of one topic occur together, so that there is something to learn."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(30):
        words = np.array(TOPICS[i % 3].split())
        paths.append(tmp_path / f"m{i:02}.py")
        paths[-1].write_text(" ".join(rng.choice(words, 2000)))
    return load_corpus(paths, vocabulary=100, window=2, seed=1)


def configured(**values: object) -> Config:
    chosen = {"batch": 64, "dim": 8, "window": 2, "learning_rate": 0.2} | values
    return load_config(overrides=[f"train.{key}={value}" for key, value in chosen.items()], environ={})


def test_the_held_out_loss_falls(corpus: Corpus) -> None:
    config = configured()
    trainer = Trainer(corpus, config, ranks=(0,), size=1, exchange=no_exchange)
    held_out = held_out_pairs(corpus, config, pairs=2000)
    before = mean_loss(trainer.model, held_out)
    for number in range(60):
        trainer.step(number)
    assert before == pytest.approx(6 * np.log(2), rel=0.2)  # some negatives are the true word
    assert mean_loss(trainer.model, held_out) < before - 0.5


def test_the_topics_are_learnt(corpus: Corpus) -> None:
    trainer = Trainer(corpus, configured(), ranks=(0,), size=1, exchange=no_exchange)
    for number in range(300):
        trainer.step(number)
    vectors = trainer.model.weights[: len(corpus.words)]
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = vectors @ vectors.T
    topic = np.array([next(i for i, words in enumerate(TOPICS) if word in words.split()) for word in corpus.words])
    same = topic[:, None] == topic
    assert likeness[same].mean() > likeness[~same].mean() + 0.5


class RankOrderSum:
    """The exchange of ranks that are threads: `parts[0] + parts[1] + ...` in float32."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=WAIT_S)
        self._parts: list[Array] = [np.zeros(0)] * size

    def of(self, rank: int) -> Exchange:
        def exchange(gradient: Array) -> None:
            self._parts[rank] = gradient.copy()
            self._barrier.wait()
            gradient[...] = functools.reduce(np.add, self._parts)
            self._barrier.wait()

        return exchange


@pytest.mark.parametrize("dim", [8, 12])
def test_exchanged_shards_give_the_bits_of_one_process_with_all_shards(corpus: Corpus, dim: int) -> None:
    config, size, steps = configured(dim=dim), 3, 10
    exchanges = RankOrderSum(size)

    def run(rank: int) -> Trainer:
        trainer = Trainer(corpus, config, ranks=(rank,), size=size, exchange=exchanges.of(rank))
        for number in range(steps):
            trainer.step(number)
        return trainer

    one_process = Trainer(corpus, config, ranks=range(size), size=size, exchange=no_exchange)
    for number in range(steps):
        one_process.step(number)
    trainers = Ranks(size, run).results()
    assert {trainer.weights_digest() for trainer in trainers} == {one_process.weights_digest()}
    for records in zip(one_process.records, *(trainer.records for trainer in trainers), strict=True):
        unions = {record.union_blocks for record in records}
        assert len(unions) == 1
        assert max(record.own_blocks for record in records[1:]) <= unions.pop()


def test_another_step_rank_or_seed_has_another_batch(corpus: Corpus) -> None:
    def weights(rank: int, seed: int, number: int) -> bytes:
        trainer = Trainer(corpus, configured(seed=seed), ranks=(rank,), size=2, exchange=no_exchange)
        trainer.model.weights[...] = 0.1
        trainer.step(number)
        return trainer.weights_digest()

    assert weights(0, 1, 0) == weights(0, 1, 0)
    assert len({weights(0, 1, 0), weights(1, 1, 0), weights(0, 2, 0), weights(0, 1, 1)}) == 4


@pytest.mark.parametrize(("dim", "expected"), [(64, 64), (8, 8), (4096, 4096), (4, 256), (100, 256)])
def test_a_row_is_a_block_where_that_is_possible(dim: int, expected: int) -> None:
    assert block_size(configured(dim=dim)) == expected


@given(rows=st.integers(1, 40), dim=st.integers(1, 40), block=st.sampled_from([8, 16, 64]), seed=st.integers(0, 99))
def test_blocks_and_rows_equal_a_slow_oracle(rows: int, dim: int, block: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gradient = BlockedRows(rows, dim, block)
    gradient.rows[rng.random((rows, dim)) < 0.02] = 1
    gradient.rows[rng.random((rows, dim)) < 0.02] = -0.0
    flat = gradient.rows.ravel()
    blocks = [at // block for at in range(0, flat.size, block) if flat[at : at + block].any()]
    touched = {at // dim for result in blocks for at in range(result * block, min(flat.size, (result + 1) * block))}
    assert gradient.blocks == -(-flat.size // block)
    assert gradient.scan() == len(blocks)
    assert gradient.touched_rows().tolist() == sorted(touched)
