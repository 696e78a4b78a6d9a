"""Selectors against NumPy: what is selected, of ties, zeros, NaN, and of nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import Array, random_values

from omnireduce import UsageError
from omnireduce.compression import (
    Adaptive,
    BlockTopK,
    DgcSampling,
    Everything,
    GuardedThreshold,
    RandomK,
    Selector,
    Threshold,
    TopK,
)
from omnireduce.compression.selectors import block_squares, largest

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 40) | st.integers(0, 3000)
RATIOS = st.sampled_from([0.001, 0.01, 0.3, 1.0])
ALL: list[Selector] = [
    Everything(), TopK(0.1), BlockTopK(0.1, 16), RandomK(0.1), Threshold(0.5), GuardedThreshold(9.0, 0.1),
    DgcSampling(0.1), Adaptive(0.1),
]  # fmt: skip


def numbers(seed: int, size: int) -> Array:
    """Any numbers, some of them equal, some of them none."""
    rng = np.random.default_rng(seed)
    x = random_values(rng, "float32", size)
    if size and seed % 3 == 0:
        x = rng.choice(np.array([0.0, -0.0, 1.5, -1.5, 2, np.inf, -np.inf, np.nan], np.float32), size)
    return x


def magnitudes(x: Array) -> Array:
    """Numbers that order as magnitudes do, with NaN at the end, and the first of equal ones in front."""
    return (x.view(np.int32) & 0x7FFFFFFF).astype(np.int64)


def top(x: Array, k: int) -> Array:
    return np.sort(np.argsort(-magnitudes(x), kind="stable")[:k])


@given(seed=SEEDS, size=SIZES, k=st.integers(0, 3000))
def test_the_largest_are_found(seed: int, size: int, k: int) -> None:
    x = numbers(seed, size)
    assert largest(x, min(k, size) or min(1, size)).tolist() == top(x, min(k, size) or min(1, size)).tolist()


@given(seed=SEEDS, size=SIZES, ratio=RATIOS)
def test_top_k(seed: int, size: int, ratio: float) -> None:
    x = numbers(seed, size)
    assert TopK(ratio).select(x).tolist() == top(x, max(1, int(size * ratio))).tolist()


@given(seed=SEEDS, size=SIZES, ratio=RATIOS, threshold=st.sampled_from([0.0, 1e-30, 0.7, 1.5, 1e30]))
def test_thresholds(seed: int, size: int, ratio: float, threshold: float) -> None:
    x = numbers(seed, size)
    above = np.flatnonzero(magnitudes(x) > magnitudes(np.full(1, threshold, np.float32))[0])
    assert Threshold(threshold).select(x).tolist() == above.tolist()
    count = min(size, max(1, int(size * ratio)))
    guarded = above if above.size >= count else top(x, count)
    assert GuardedThreshold(threshold, ratio).select(x).tolist() == guarded.tolist()


@pytest.mark.parametrize(
    "x",
    [np.zeros(500, np.float32), np.full(500, -1e-3, np.float32), np.full(500, np.nan, np.float32)],
    ids=["zeros", "all below and negative", "NaN"],
)
def test_a_guarded_threshold_never_sends_nothing(x: Array) -> None:
    assert len(GuardedThreshold(1.0, 0.02).select(x)) >= 10


@given(seed=SEEDS, size=SIZES, ratio=RATIOS, block_size=st.sampled_from([8, 64]))
def test_the_blocks_with_the_largest_norms(seed: int, size: int, ratio: float, block_size: int) -> None:
    x = np.random.default_rng(seed).integers(-9, 10, size).astype(np.float32)  # so that sums of squares are exact
    padded = np.pad(x, (0, -size % block_size)).reshape(-1, block_size)
    squares = (padded**2).sum(axis=1)
    assert (block_squares(x, block_size) == squares).all()
    result = BlockTopK(ratio, block_size).select(x)
    assert result.tolist() == top(squares, max(1, int(len(squares) * ratio))).tolist()


def test_random_elements_are_the_same_on_all_ranks_and_others_in_each_step() -> None:
    x, y = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    state = np.random.get_state()[1].copy()
    first = RandomK(0.05).select(x, "w", 3)
    assert first.tolist() == RandomK(0.05).select(y, "w", 3).tolist()
    assert len(set(first)) == len(first) == 50
    for other in (RandomK(0.05).select(x, "w", 4), RandomK(0.05).select(x, "v", 3), RandomK(0.05, 1).select(x, "w", 3)):
        assert first.tolist() != other.tolist()
    assert (np.random.get_state()[1] == state).all()
    drawn = np.bincount(np.concatenate([RandomK(0.1).select(x, step=step) for step in range(2000)]), minlength=1000)
    assert abs(drawn - 200).max() < 6 * 200**0.5


@given(seed=SEEDS, ratio=st.sampled_from([0.01, 0.1]))
def test_sampling_selects_about_as_many_as_wanted(seed: int, ratio: float) -> None:
    x = np.random.default_rng(seed).standard_normal(20_000).astype(np.float32)
    assert 0.7 * ratio <= len(DgcSampling(ratio).select(x, "w", seed)) / x.size <= 1.3 * ratio


def test_sampling_ends_where_no_threshold_selects_so_many() -> None:
    x = np.repeat(np.array([1, 2], np.float32), [900, 100])
    assert len(DgcSampling(0.3).select(x)) == 300
    assert len(DgcSampling(0.3).select(np.zeros(50, np.float32))) == 15
    assert len(DgcSampling(0.3).select(np.full(50, np.nan, np.float32))) == 15


def test_an_adaptive_threshold_follows_the_gradients() -> None:
    rng, selector = np.random.default_rng(0), Adaptive(0.01)
    for step in range(60):
        x = (rng.standard_normal(50_000) * 0.97**step).astype(np.float32)
        result = selector.select(x, "w", step)
        assert 500 / 4 <= len(result) <= 500 * 4
        smallest = np.abs(x[result]).min()
        assert (np.abs(np.delete(x, result)) <= smallest).all()
    assert len(selector.select(x * np.float32(1e6), "w")) == 500  # far off: it selects exactly


@pytest.mark.parametrize("selector", ALL, ids=lambda each: type(each).__name__)
@given(seed=SEEDS, size=SIZES)
def test_places_ascend_and_the_array_stays(selector: Selector, seed: int, size: int) -> None:
    x = numbers(seed, size)
    before = x.tobytes()
    result = selector.select(x, "w", 0)
    assert x.tobytes() == before
    assert result.dtype == np.int64
    assert (np.diff(result) > 0).all()
    assert result.size == 0 or 0 <= result[0] <= result[-1] < -(-size // selector.block_size)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (TopK, (0,), "ratio 0: expected more than 0 and at most 1"),
        (TopK, (1.5,), "ratio 1.5"),
        (RandomK, ("a",), "ratio 'a'"),
        (Threshold, (-1,), "threshold -1: expected a number from 0 on"),
        (Threshold, (float("nan"),), "threshold nan"),
        (BlockTopK, (0.1, 12), "block_size 12: expected a multiple of 8"),
        (GuardedThreshold, (1.0, True), "ratio True"),
        (BlockTopK, (0.1, 256.0), "block_size is 256.0, a float"),
    ],
)
def test_wrong_arguments(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(*arguments)


@pytest.mark.parametrize("x", [np.ones(4), np.ones((2, 2), np.float32), np.ones(8, np.float32)[::2], [1.0]])
def test_arrays_of_another_kind_are_refused(x: Any) -> None:
    for selector in ALL:
        with pytest.raises(UsageError, match="expected a flat, contiguous array of float32"):
            selector.select(x)
    assert TopK(np.float32(0.5)).select(np.ones(4, np.float32)).tolist() == [0, 1]


@pytest.mark.parametrize("larger", [0, 5])
def test_sampling_sends_something_of_equal_magnitudes(larger: int) -> None:
    x = np.where(np.arange(1000) < larger, 2, 1).astype(np.float32)
    assert 0 < DgcSampling(0.01).select(x).size <= 10
