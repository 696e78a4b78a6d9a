"""Counts of block patterns, against counting one block after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.console.plan.patterns import DrawnPatterns, KnownPatterns, RememberedPatterns, SummedPatterns, load_of
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError


@st.composite
def masks(draw: st.DrawFn) -> list[Array]:
    blocks, senders = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    return [np.array(draw(st.lists(st.booleans(), min_size=blocks, max_size=blocks)), np.bool_) for _ in range(senders)]


@given(masks(), st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
def test_each_block_is_counted_where_it_belongs(found: list[Array], shards: int, stripe: int, windows: int) -> None:
    blocks, layout = found[0].size, Layout(found[0].size, 1, shards, stripe)
    load = load_of(KnownPatterns(found), len(found), layout, windows)
    own_blocks = np.zeros((len(found), windows, shards), int)
    sole, union = np.zeros_like(own_blocks), np.zeros((windows, shards), int)
    for block in range(blocks):
        index = block * windows // blocks, layout.owner(block)
        having = [sender for sender, mask in enumerate(found) if mask[block]]
        union[index] += bool(having)
        for sender in having:
            own_blocks[(sender, *index)] += 1
            sole[(sender, *index)] += len(having) == 1
    assert np.array_equal(load.own, own_blocks)
    assert np.array_equal(load.sole, sole)
    assert np.array_equal(load.union, union)
    assert load.all.sum() == blocks
    assert np.all(load.union <= load.all)


@pytest.mark.parametrize(("overlap", "union"), [("random", 1 - 0.9**5), ("full", 0.1), ("none", 0.5)])
def test_blocks_are_drawn_as_asked(overlap: str, union: float) -> None:
    patterns = DrawnPatterns(100_000, 0.1, overlap, 5)
    drawn = [patterns.of(rank) for rank in range(5)]
    assert [mask.mean() for mask in drawn] == pytest.approx([0.1] * 5, rel=0.05)
    assert np.logical_or.reduce(drawn).mean() == pytest.approx(union, rel=0.05)
    assert np.array_equal(patterns.of(3), drawn[3])


@pytest.mark.parametrize("room", [0, 200, 1 << 20])
def test_patterns_that_are_remembered_are_the_same(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnireduce.console.plan.patterns.REMEMBERED_BYTES", room)
    patterns = DrawnPatterns(1001, 0.2, "random", 4)
    remembered = RememberedPatterns(patterns)
    for rank in (0, 3, 0, 1, 3):
        result = remembered.of(rank)
        assert result.dtype == np.bool_
        assert np.array_equal(result, patterns.of(rank))


def test_a_group_has_what_any_of_it_has() -> None:
    patterns = DrawnPatterns(1000, 0.2, "random", 6)
    summed = SummedPatterns(patterns, 3)
    assert np.array_equal(summed.of(1), patterns.of(3) | patterns.of(4) | patterns.of(5))


@pytest.mark.parametrize(("density", "overlap"), [(-0.1, "random"), (1.1, "full"), (0.3, "none"), (0.1, "some")])
def test_what_cannot_be_drawn_is_refused(density: float, overlap: str) -> None:
    with pytest.raises(UsageError):
        DrawnPatterns(10, density, overlap, 4)
