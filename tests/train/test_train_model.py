"""Pairs, the gradient against finite differences, and Adagrad against a dense oracle."""

from __future__ import annotations

import numpy as np
import pytest

from omnireduce.core.dtypes import Array
from omnireduce.worker.train.corpus import Text
from omnireduce.worker.train.model import Pairs, Sampler, SkipGram

WORDS, DIM = 12, 5


def model_of(rng: np.random.Generator, dtype: type = np.float64) -> SkipGram:
    model = SkipGram(WORDS, DIM, seed=1, learning_rate=0.1, dtype=dtype)
    model.weights[...] = rng.normal(size=model.weights.shape)
    return model


def pairs_of(rng: np.random.Generator, pairs: int = 20, negatives: int = 4) -> Pairs:
    """Pairs of few words, so that rows repeat and negatives hit the true word."""
    return Pairs(rng.integers(0, WORDS - 2, pairs), rng.integers(0, WORDS - 2, (pairs, 1 + negatives)))


@pytest.mark.parametrize("seed", range(3))
def test_gradient_equals_finite_differences(seed: int) -> None:
    rng = np.random.default_rng(seed)
    model, pairs = model_of(rng), pairs_of(rng)
    rows, values = model.gradient(pairs)
    dense = np.zeros_like(model.weights)
    dense[rows] = values

    step = 1e-6
    for index in np.ndindex(*model.weights.shape):
        kept = model.weights[index]
        model.weights[index] = kept + step
        above = model.loss(pairs)
        model.weights[index] = kept - step
        below = model.loss(pairs)
        model.weights[index] = kept
        assert dense[index] == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_gradient_has_each_touched_row_once_in_order() -> None:
    rng = np.random.default_rng(0)
    pairs = pairs_of(rng)
    rows, values = model_of(rng, np.float32).gradient(pairs)
    assert rows.tolist() == sorted({*pairs.centres.tolist(), *(WORDS + pairs.targets).ravel().tolist()})
    assert values.shape == (rows.size, DIM)
    assert values.dtype == np.float32


def test_gradient_has_the_same_bits_wherever_the_weights_lie_in_memory() -> None:
    rng = np.random.default_rng(0)
    model, pairs = model_of(rng, np.float32), pairs_of(rng)
    expected = model.gradient(pairs)[1].tobytes()
    for offset in range(1, 17):
        memory = np.zeros(model.weights.size + 16, np.float32)[offset:][: model.weights.size]
        moved = memory.reshape(model.weights.shape)
        moved[...] = model.weights
        model.weights = moved
        assert model.gradient(pairs)[1].tobytes() == expected


def test_a_fresh_model_knows_nothing() -> None:
    model = SkipGram(WORDS, DIM, seed=1, learning_rate=0.1)
    targets = np.array([[1, 2, 3, 1]])  # the last negative is the true word and does not count
    assert model.loss(Pairs(np.array([0]), targets)) == pytest.approx(3 * np.log(2))


def test_large_scores_do_not_overflow() -> None:
    model = SkipGram(WORDS, DIM, seed=1, learning_rate=0.1)
    model.weights[...] = 1e4
    pairs = Pairs(np.array([0, 1]), np.array([[1, 2], [3, 4]]))
    assert np.isfinite(model.loss(pairs))
    assert np.isfinite(model.gradient(pairs)[1]).all()


def test_update_is_adagrad() -> None:
    rng = np.random.default_rng(0)
    model = model_of(rng)
    weights, squares = model.weights.copy(), np.zeros_like(model.weights)
    for _ in range(5):
        rows = np.flatnonzero(rng.random(2 * WORDS) < 0.4)
        values = rng.normal(size=(rows.size, DIM))
        gradient = np.zeros_like(weights)
        gradient[rows] = values
        squares += gradient**2
        weights -= 0.1 * gradient / (np.sqrt(squares) + 1e-7)
        model.update(rows, values)
    assert model.weights == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("weight", [0.0, -0.0, 1.5])
def test_a_zero_gradient_changes_nothing_whatever_its_sign(weight: float) -> None:
    rows = np.array([0, 3])

    def after(zero: float) -> bytes:
        model = SkipGram(WORDS, DIM, seed=1, learning_rate=0.1)
        model.weights[...] = weight
        model.update(rows, np.full((2, DIM), zero, np.float32))
        return model.weights.tobytes()

    assert after(0.0) == after(-0.0) == np.full((2 * WORDS, DIM), weight, np.float32).tobytes()


def sampler_of(lengths: list[int], window: int, counts: Array | None = None, negatives: int = 3) -> Sampler:
    """A text in which every word tells its position."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    counts = np.ones(starts[-1], np.int64) if counts is None else counts
    return Sampler(Text(np.arange(starts[-1]), starts), counts, window=window, negatives=negatives)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_pairs_stay_in_their_file_and_window(window: int) -> None:
    lengths = [2 * window + 1, 40, 2 * window + 1, 2 * window + 2]
    pairs = sampler_of(lengths, window).draw(np.random.default_rng(0), 20_000)
    file = np.repeat(np.arange(len(lengths)), lengths)
    contexts = pairs.targets[:, 0]
    distances = np.abs(contexts - pairs.centres)
    assert (file[contexts] == file[pairs.centres]).all()
    assert set(distances.tolist()) == set(range(1, window + 1))
    assert set(pairs.centres.tolist()) == set(range(sum(lengths)))


def test_near_words_are_likelier() -> None:
    pairs = sampler_of([10_000], 4).draw(np.random.default_rng(0), 100_000)
    distances = np.abs(pairs.targets[:, 0] - pairs.centres)
    assert np.bincount(distances)[1:] / 100_000 == pytest.approx(np.array([4, 3, 2, 1]) / 10, abs=0.01)


def test_negatives_follow_the_unigram_distribution_to_the_power_three_quarters() -> None:
    counts = np.array([1000, 500, 100, 20, 5, 1])
    pairs = sampler_of([6], 2, counts, negatives=10).draw(np.random.default_rng(0), 20_000)
    expected = counts**0.75 / (counts**0.75).sum()
    assert np.bincount(pairs.targets[:, 1:].ravel(), minlength=6) / 200_000 == pytest.approx(expected, abs=0.005)


def test_pairs_depend_on_the_generator_only() -> None:
    sampler = sampler_of([50, 60], 3)
    first, second, other = (sampler.draw(np.random.default_rng(seed), 100) for seed in (1, 1, 2))
    assert np.array_equal(first.targets, second.targets)
    assert not np.array_equal(first.targets, other.targets)
