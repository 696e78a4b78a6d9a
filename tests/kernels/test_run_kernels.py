"""Lists of runs: what is written is read, in windows of any size, and no list that a peer makes up does harm."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from harness import Guarded
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import indices_of_runs

from omnireduce.core.blocks_and_stripes import Stripes
from omnireduce.core.dtypes import Array
from omnireduce.kernels.index_runs import expand_runs, list_runs
from omnireduce.kernels.merge_indices import MARK_SHIFT

FAR = 2**40  # beyond what 32 bits can count
LARGEST = 2**MARK_SHIFT - 1
EDGES = [0, 1, 2, 3, 8, 2**31, FAR, LARGEST - 1, LARGEST, 1 << MARK_SHIFT, 2**62, 2**63 - 1]
STRIPES = st.builds(lambda shards, size: Stripes(0, shards, size), st.integers(1, 3), st.integers(1, 5))
WORDS = st.integers(0, 20) | st.sampled_from([*EDGES, *(-edge - 1 for edge in EDGES)])


def listed(indices: list[int], stripes: Stripes) -> list[int]:
    """The runs of `indices`, none if they are no shorter."""
    numbers = np.array(indices, np.int64)
    runs = Guarded((len(indices) // 2, 2), np.int64)
    result = list_runs(numbers, stripes.shards, stripes.stripe_blocks, runs.array)
    runs.check()
    assert numbers.tolist() == indices
    return [int(each) for each in runs.array[:result].reshape(-1)]


def expanded(words: list[int], stripes: Stripes, sizes: list[int]) -> tuple[list[int], int, list[int]]:
    """Expand a list in windows of `sizes`, until one is not full. Return the indices, the number of runs that are used
    up, and the length of the filled part of each window."""
    indices: list[int] = []
    run, used, lengths = 0, 0, []
    for size in sizes:
        window = Guarded((size,), np.int64)
        filled, run, used = expand_runs(
            np.array(words, np.int64), run, used, stripes.shards, stripes.stripe_blocks, window.array
        )
        window.check()
        assert (window.array[filled:] == 0).all()
        indices += [int(each) for each in window.array[:filled]]
        lengths.append(int(filled))
        if filled < size:
            break
    return indices, int(run), lengths


def windows(total: int, longest: int) -> list[int]:
    return [min(longest, total - at) for at in range(0, total, longest)]


@given(
    blocks=st.lists(st.booleans(), max_size=40),
    marks=st.lists(st.integers(0, 2), min_size=40, max_size=40),
    marked=st.booleans(),
    stripes=STRIPES,
    base=st.sampled_from([0, FAR // 30]),
    window=st.integers(1, 41),
)
def test_what_is_listed_is_expanded(
    blocks: list[bool], marks: list[int], marked: bool, stripes: Stripes, base: int, window: int
) -> None:
    """The shortest list of runs, if that is shorter than the indices."""
    places = [base * stripes.shards * stripes.stripe_blocks + at for at in range(120)]
    own_blocks = [block for block in places if block // stripes.stripe_blocks % stripes.shards == 0]
    pairs = list(zip(own_blocks, blocks, marks, strict=False))
    indices = [block | marked * mark << MARK_SHIFT for block, present, mark in pairs if present]
    follows = dict(pairwise(own_blocks))
    joined = sum(
        follows[one % 2**MARK_SHIFT] | one >> MARK_SHIFT << MARK_SHIFT == two for one, two in pairwise(indices)
    )
    runs = listed(indices, stripes)
    shortest = len(indices) - joined
    assert len(runs) == (2 * shortest if 2 * shortest < len(indices) else 0)
    if runs:
        assert indices_of_runs(runs, stripes.shards, stripes.stripe_blocks) == indices
        result, run, _ = expanded(runs, stripes, windows(len(indices), window))
        assert (result, run) == (indices, shortest)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_so_few_blocks_are_not_listed_as_runs(count: int) -> None:
    assert listed(list(range(count)), Stripes()) == []


def test_large_runs_are_as_large_as_they_say() -> None:
    indices = [*range(FAR, FAR + 5000), *range(FAR + 6000, FAR + 9000)]
    assert listed(indices, Stripes()) == [FAR, 5000, FAR + 6000, 3000]
    assert expanded([FAR, 5000, FAR + 6000, 3000], Stripes(), [4096, 3904])[:2] == (indices, 2)


def honest(words: list[int], stripes: Stripes, limit: int) -> tuple[list[int], int]:
    """The first `limit` indices of a list in which every run has one and stays below the largest number, and how many
    runs they use up."""
    indices: list[int] = []
    for run, (first, count) in enumerate(zip(words[::2], words[1::2], strict=True)):
        fitting = indices_of_runs(
            [first, max(0, min(count, limit - len(indices)))], stripes.shards, stripes.stripe_blocks
        )
        beyond = [at for at, each in enumerate(fitting) if each >> MARK_SHIFT != first >> MARK_SHIFT]
        indices += fitting[: beyond[0]] if beyond else fitting
        if count < 1 or beyond or len(fitting) < count or len(indices) == limit:
            return indices, run + (not beyond and 0 < count == len(fitting))
    return indices, len(words) // 2


@given(
    words=st.lists(st.tuples(WORDS, WORDS), max_size=5),
    stripes=STRIPES,
    size=st.integers(0, 30),
    window=st.integers(1, 31),
)
@example(words=[(2**63 - 1, 2**63 - 1)], stripes=Stripes(0, 3, 1), size=4, window=1)
@example(words=[(-(2**63), 2**63 - 1)], stripes=Stripes(0, 3, 4), size=30, window=7)
@example(words=[(0, 3), (5, 0)], stripes=Stripes(), size=3, window=2)
def test_no_list_does_harm(words: list[tuple[int, int]], stripes: Stripes, size: int, window: int) -> None:
    """A window gets only indices that the list has, and a list with too few of them leaves room."""
    flat = [word for pair in words for word in pair]
    result, run, lengths = expanded(flat, stripes, windows(size, window))
    expected, used_up = honest(flat, stripes, size)
    assert result == expected[: len(result)]
    assert (sum(lengths) == size) == (len(expected) == size)
    if len(expected) == size:
        assert run == (used_up if size else 0)


def test_a_run_may_shrink_between_two_windows() -> None:
    """Its owner can still write to it: what is gone is not filled in."""
    words: Array = np.array([7, 9], np.int64)
    own = np.zeros(4, np.int64)
    filled, run, used = expand_runs(words, 0, 0, 1, 64, own)
    assert (filled, run, used, own.tolist()) == (4, 0, 4, [7, 8, 9, 10])
    words[1] = 4
    assert expand_runs(words, run, used, 1, 64, own)[0] == 0
    words[1] = 3
    assert expand_runs(words, run, used, 1, 64, own)[0] == 0
