"""Blocks as the ranks of a traced job had them: both densities come out. Of other numbers of ranks the union is between
that of ranks that have the same blocks, and that of ranks that have theirs at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.console.plan import patterns
from omnireduce.console.plan.patterns import TracedPatterns, popularity

SHARES = st.floats(0, 1)
DENSITIES = st.one_of(st.floats(1e-6, 1 - 1e-6), st.sampled_from([0.0, 1.0]))
RANKS = st.one_of(st.integers(2, 200), st.sampled_from([1000, 4096]))


def at_random(density: float, ranks: int) -> float:
    return float(-np.expm1(ranks * np.log1p(-density))) if density < 1 else 1.0


def union(found: tuple[np.ndarray, np.ndarray], ranks: int) -> float:
    likelihoods, shares = found
    return float(1 - (shares * (1 - likelihoods) ** ranks).sum())


@given(DENSITIES, SHARES, RANKS)
def test_both_densities_come_out(density: float, share: float, ranks: int) -> None:
    together = density + share * (at_random(density, ranks) - density)
    likelihoods, shares = result = popularity(density, together, ranks)
    assert shares.sum() == pytest.approx(1)
    assert (shares >= 0).all()
    assert (likelihoods >= 0).all()
    assert (likelihoods <= 1).all()
    assert (shares * likelihoods).sum() == pytest.approx(density, rel=1e-6)
    assert union(result, ranks) == pytest.approx(together, rel=1e-4 if ranks <= 100 else 0.015)


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_few_blocks_are_as_likely_on_average(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    known = popularity(0.3, 0.4, 2)
    monkeypatch.setattr(patterns, "popularity", lambda *_: known)  # once: it takes its time
    results = [TracedPatterns(blocks, 0.3, 0.4, 2, seed).of(rank).mean() for seed in range(2000) for rank in range(2)]
    assert np.mean(results) == pytest.approx(0.3, abs=0.03)


@given(DENSITIES, SHARES, st.integers(2, 16), st.integers(1, 128))
def test_more_ranks_have_more_blocks_but_not_more_than_at_random(
    density: float, share: float, ranks: int, others: int
) -> None:
    result = popularity(density, density + share * (at_random(density, ranks) - density), ranks)
    together = union(result, others)
    assert density * (1 - 1e-6) <= together <= at_random(density, others) * (1 + 1e-6)
    assert union(result, others + 1) >= together - 1e-12


@pytest.mark.parametrize("ranks", [2, 5])
def test_less_in_common_than_at_random_is_at_random(ranks: int) -> None:
    result = popularity(0.1, ranks * 0.1, ranks)
    assert union(result, ranks) == pytest.approx(at_random(0.1, ranks), rel=1e-4)


@pytest.mark.parametrize(
    ("density", "together", "ranks"), [(0.1121, 0.1781, 2), (0.0341, 0.1456, 8), (0.5, 0.5, 4), (0.2, 0.36, 2)]
)
def test_blocks_are_drawn_so(density: float, together: float, ranks: int) -> None:
    traced = TracedPatterns(100_000, density, together, ranks)
    drawn = [traced.of(rank) for rank in range(ranks)]
    assert np.mean(drawn) == pytest.approx(density, rel=0.02)
    assert np.logical_or.reduce(drawn).mean() == pytest.approx(together, rel=0.02)
    assert np.array_equal(traced.of(1), drawn[1])
    assert not np.array_equal(TracedPatterns(100_000, density, together, ranks, seed=1).of(1), drawn[1])


@pytest.mark.parametrize("density", [0.0, 1.0])
@pytest.mark.parametrize("blocks", [0, 1, 1000])
def test_nothing_and_everything(blocks: int, density: float) -> None:
    assert TracedPatterns(blocks, density, density, 4).of(3).tolist() == [density == 1] * blocks


def test_popular_blocks_explain_a_training_better_than_common_ones() -> None:
    """Measured: `train` over the standard library, 20 steps, with 2, 4 and 8 ranks. Of the union of 8, two ranks tell
    within a tenth; blocks that are common to all, and others at random, would say 0.189."""
    result = popularity(0.0341, 0.0579, 2)
    assert union(result, 4) == pytest.approx(0.0938, rel=0.04)
    assert union(result, 8) == pytest.approx(0.1456, rel=0.11)
