"""The union of the ranks' indices, the check of a peer's indices, and the placing of rows, against obvious loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_values
from samples import DTYPES, Array, sparse_tensor

from omnireduce.core.blocks_and_stripes import Layout, Stripes
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.kernels.merge_indices import ABSENT, MARK_SHIFT, admit_indices, admit_marked, leave_out, plan_union
from omnireduce.kernels.scatter import add_rows, scatter_blocks

SEEDS = st.integers(0, 2**32 - 1)
LIMITS = np.iinfo(np.int64)
FAR = 2**40  # beyond what 32 bits can count


class Union:
    """The arguments of `plan_union` for given lists of indices."""

    def __init__(self, lists: list[list[int]], capacity: int, block_size: int = 8) -> None:
        ranks, longest = len(lists), max(map(len, lists), default=0) + 2
        self.indices = np.full((ranks, longest), LIMITS.min)  # indices beyond a rank's count must not matter
        for rank, each in enumerate(lists):
            self.indices[rank, : len(each)] = each
        self.position, self.count = np.zeros(ranks, np.int64), np.array([len(each) for each in lists])
        self.start = np.arange(ranks) * 1000
        self.block_size = block_size
        self.out_indices, self.parts = np.full(capacity, -9), np.full((capacity, ranks), -9)
        self.written, self.soles = 0, np.zeros(ranks, np.int64)

    def plan(self, watermark: int, *, marks_single_sender: bool = False) -> None:
        self.written += plan_union(
            *(self.indices, self.position, self.count, self.start, self.block_size, watermark),
            *(self.out_indices[self.written :], self.parts[self.written :], marks_single_sender, self.soles),
        )


@given(
    lists=st.lists(st.lists(st.integers(0, 30), unique=True).map(sorted), min_size=1, max_size=5),
    capacity=st.integers(1, 12),
    marks=st.lists(st.integers(0, 40), max_size=4).map(sorted),
    base=st.sampled_from([0, FAR]),
)
def test_plan_union(lists: list[list[int]], capacity: int, marks: list[int], base: int) -> None:
    lists = [[block + base for block in each] for each in lists]
    union = Union(lists, capacity)
    expected = sorted(set().union(*lists))
    done: list[int] = []
    for watermark in [mark + base for mark in marks] + [base + 41] * (len(expected) + 1):
        before = union.written
        union.plan(watermark)
        results = [int(block) for block in union.out_indices[before : union.written]]
        ready = [block for block in expected if block < watermark][len(done) :]
        assert results == ready[: capacity - before]
        for k, block in enumerate(results, before):
            for rank, each in enumerate(lists):
                part = union.start[rank] + each.index(block) * union.block_size if block in each else ABSENT
                assert union.parts[k, rank] == part
        done += results
        assert list(union.position) == [sum(block in done for block in each) for each in lists]
        assert (union.out_indices[union.written :] == -9).all()
        if union.written == capacity:  # the caller sends the result and starts an empty one
            union.written = 0
            union.out_indices[:] = -9
    assert done == expected


def test_plan_union_takes_nothing_at_the_watermark() -> None:
    union = Union([[5], [4, 5]], 4)
    union.plan(5)
    assert (union.written, union.out_indices[0]) == (1, 4)
    union.plan(5)
    assert union.written == 1


def test_plan_union_counts_beyond_32_bits() -> None:
    union = Union([[2**31, 2**61], [2**32 + 1]], 4, block_size=2**20)
    union.start[:] = 2**33, 2**34
    union.plan(2**62)
    assert list(union.out_indices[:3]) == [2**31, 2**32 + 1, 2**61]
    assert union.parts[:3].tolist() == [[2**33, ABSENT], [ABSENT, 2**34], [2**33 + 2**20, ABSENT]]


INDICES = st.lists(st.integers(-3, 12) | st.integers(LIMITS.min, LIMITS.max), max_size=6)


def fitting(indices: list[int], low: int, high: int, stripes: Stripes) -> int:
    owner = Layout(8 * high, 8, stripes.shards, stripes.stripe_blocks).owner
    for k, index in enumerate(indices):
        if not low <= index < high or owner(index) != stripes.shard:
            return k
        low = index + 1
    return len(indices)


SHARDS = st.integers(1, 4).flatmap(
    lambda shards: st.builds(Stripes, st.integers(0, shards - 1), st.just(shards), st.integers(1, 9))
)


@given(
    peer=INDICES | INDICES.map(sorted) | st.lists(st.integers(0, 9), unique=True).map(sorted),
    low=st.integers(0, 10),
    high=st.integers(0, 12),
    base=st.sampled_from([0, FAR]),
    stripes=st.just(Stripes()) | SHARDS,
)
def test_admit_indices(peer: list[int], low: int, high: int, base: int, stripes: Stripes) -> None:
    moved = [min(index + base, LIMITS.max) for index in peer]
    shared = np.array(moved, np.int64)
    admitted = np.full(len(moved), -9)
    expected = fitting(moved, low + base, high + base, stripes)
    assert admit_indices(shared, low + base, high + base, *stripes, admitted) == expected
    assert list(admitted) == moved


@pytest.mark.parametrize("index", [-1, LIMITS.min, LIMITS.max, 2**62])
def test_admit_indices_refuses_what_would_lie_outside(index: int) -> None:
    admitted = np.zeros(1, np.int64)
    assert admit_indices(np.array([index]), 0, 2**62, *Stripes(), admitted) == 0
    assert admit_indices(np.array([2**62 - 1]), 2**31, 2**62, *Stripes(), admitted) == 1


@given(
    blocks=st.lists(st.integers(0, 60) | st.integers(FAR, FAR + 60), unique=True, max_size=8).map(sorted),
    stripes=SHARDS,
)
def test_admit_indices_only_of_the_shard(blocks: list[int], stripes: Stripes) -> None:
    shared, admitted = np.array(blocks, np.int64), np.zeros(len(blocks), np.int64)
    assert admit_indices(shared, 0, 2 * FAR, *stripes, admitted) == fitting(blocks, 0, 2 * FAR, stripes)


@given(
    blocks=st.lists(st.integers(0, 12) | st.integers(FAR, FAR + 12), max_size=6),
    ascending=st.booleans(),
    alone=st.lists(st.integers(-1, 3), min_size=6, max_size=6),
    rank=st.integers(0, 3),
    low=st.integers(0, 10),
    stripes=SHARDS,
)
def test_admit_marked(
    blocks: list[int], ascending: bool, alone: list[int], rank: int, low: int, stripes: Stripes
) -> None:
    if ascending:
        blocks = sorted(set(blocks))
    marked = [block | (1 + who) << MARK_SHIFT for block, who in zip(blocks, alone, strict=False)]
    admitted, unchanged = np.full(len(blocks), -9), np.zeros(len(blocks), np.bool_)
    shared = np.array(marked, np.int64)
    expected = fitting(blocks, low, FAR + 9, stripes)
    assert admit_marked(shared, rank, low, FAR + 9, *stripes, admitted, unchanged) == expected
    assert admitted.tolist() == blocks
    assert unchanged.tolist() == [who == rank for who in alone[: len(blocks)]]


@given(seed=SEEDS, blocks=st.integers(0, 30), words=st.integers(1, 9), spare=st.integers(0, 3))
def test_scatter_blocks(seed: int, blocks: int, words: int, spare: int) -> None:
    rng = np.random.default_rng(seed)
    indices = np.flatnonzero(rng.random(blocks) < 0.5)
    rows = rng.integers(0, 2**63, (indices.size + spare, words), np.uint64)
    target = rng.integers(0, 2**63, (blocks, words), np.uint64)
    expected = target.copy()
    unchanged = rng.random(indices.size) < 0.5
    expected[indices[~unchanged]] = rows[: indices.size][~unchanged]
    there = target.copy()
    scatter_blocks(there, rows, indices, unchanged, False)
    assert (there == expected).all()
    fewer = np.concatenate([rows[: indices.size][~unchanged], rows[indices.size :]])
    scatter_blocks(target, fewer, indices, unchanged, True)
    assert (target == expected).all()


@given(seed=SEEDS, count=st.integers(0, 30), width=st.integers(1, 40))
def test_leave_out(seed: int, count: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    owners = rng.integers(0, 4, count)  # 0: nobody alone; else 1 + the rank
    marked = np.arange(count) + FAR | owners << MARK_SHIFT
    rows = rng.integers(0, 256, (count, width), np.uint8)
    for rank in range(3):
        out = np.full((count, width), 0xA5, np.uint8)
        expected = rows[owners != rank + 1]
        leave_out(marked, rank, rows, out)
        assert (out[: len(expected)] == expected).all()
        assert (out[len(expected) :] == 0xA5).all()


def add_slowly(values: Array, order: Array, starts: Array) -> Array:
    out = np.zeros((starts.size - 1, values.shape[1]), values.dtype)
    with np.errstate(all="ignore"):
        for group in range(starts.size - 1):
            members = order[starts[group] : starts[group + 1]]
            out[group] = values[members[0]]
            for member in members[1:]:
                out[group] = out[group] + values[member]
    return out


@pytest.mark.parametrize("dtype", [name for name in DTYPES if not ELEMENT_TYPES[name].is_narrow])
@given(seed=SEEDS, n=st.integers(1, 20), length=st.integers(1, 9))
def test_add_rows(dtype: str, seed: int, n: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    values = sparse_tensor(rng, dtype, n * length, length, 0.9).reshape(n, length)
    cuts = np.flatnonzero(rng.random(n - 1) < 0.4) + 1 if n > 1 else np.zeros(0, np.int64)
    order, starts = rng.permutation(n), np.concatenate([[0], cuts, [n]]).astype(np.int64)
    out = np.zeros((starts.size - 1, length), values.dtype)
    add_rows(values, order, starts, out)
    expected = add_slowly(values, order, starts)
    assert_same_values(out, expected)


@given(
    lists=st.lists(st.lists(st.integers(0, 9), unique=True).map(sorted), min_size=3, max_size=3),
    rank=st.integers(0, 2),
)
def test_marks_tell_whose_block_alone_a_result_is(lists: list[list[int]], rank: int) -> None:
    blocks = sorted(set().union(*lists))
    union = Union([[block + FAR for block in each] for each in lists], len(blocks))
    union.plan(FAR + 10, marks_single_sender=True)
    indices, unchanged = np.full(len(blocks), -1), np.zeros(len(blocks), np.bool_)
    assert admit_marked(union.out_indices, rank, FAR, FAR + 10, *Stripes(), indices, unchanged) == len(blocks)
    assert indices.tolist() == [block + FAR for block in blocks]
    alone = [[r for r in range(3) if block in lists[r]] == [rank] for block in blocks]
    assert unchanged.tolist() == alone
    assert union.soles[rank] == sum(alone)


def test_a_mark_leaves_room_for_the_largest_block_number_and_world_size() -> None:
    last = (1 << MARK_SHIFT) - 1
    union = Union([[]] * 31_999 + [[last]], 1)
    union.plan(last + 1, marks_single_sender=True)
    indices, unchanged = np.zeros(1, np.int64), np.zeros(1, np.bool_)
    assert admit_marked(union.out_indices, 31_999, 0, last + 1, *Stripes(), indices, unchanged) == 1
    assert (indices[0], unchanged[0]) == (last, True)
