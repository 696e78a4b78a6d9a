"""Property tests of rows inside a host, against NumPy in rank order and against the aggregators, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from harness import InprocCluster, one_host, slot_bytes_for
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Rows, assert_same_values, bits, expected_rows
from samples import CASES, Array, some_rows

from omnireduce.core.descriptor import PACKET_BYTES
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.kernels.exchange_row_steps import ROWS_PER_STEP
from omnireduce.kernels.regions import DESCRIPTORS, ROWS_AT, SLOTS
from omnireduce.protocol.collective.ragged_parts import packet_count

SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, op in CASES if op in ("sum", "mean")])
@settings(max_examples=25)
@given(
    seed=SEEDS, ranks=st.integers(1, 5), n_rows=st.integers(0, 40) | st.integers(0, 700), length=st.integers(1, 9),
    blocks=st.integers(1, 9), more=st.integers(1, 3),
)  # fmt: skip
def test_allreduce_rows(
    dtype: str, op: str, seed: int, ranks: int, n_rows: int, length: int, blocks: int, more: int
) -> None:
    row_bytes = length * ELEMENT_TYPES[dtype].itemsize
    cluster, rng = one_host(ranks, row_bytes, blocks, seed), np.random.default_rng(seed)
    cluster.record = []
    apart = InprocCluster(ranks, slot_bytes=slot_bytes_for(6, row_bytes), seed=seed)
    runs = []
    for _ in range(more):
        inputs = [some_rows(rng, dtype, n_rows, length) for _ in range(ranks)]
        for numbers, values in inputs:
            numbers.flags.writeable = values.flags.writeable = False
        results = [cluster.rows(rank, *brought, n_rows, op) for rank, brought in enumerate(inputs)]
        runs.append((inputs, results, [apart.rows(rank, *brought, n_rows, op) for rank, brought in enumerate(inputs)]))
    cluster.run()
    apart.run()
    assert cluster.record == [], "rows went through an aggregator"
    for inputs, results, through_shards in runs:
        union, sums = expected_rows([range(ranks)], inputs, n_rows, op)
        for rank, (mine, theirs) in enumerate(zip(results, through_shards, strict=True)):
            assert mine.result[0].tolist() == union.tolist()
            assert_same_values(mine.result[1], sums, f"rank {rank}")
            assert bits(mine.result[1]) == bits(theirs.result[1]), "other bits than through the aggregators"


@settings(max_examples=60)
@given(seed=SEEDS, ranks=st.integers(1, 4), slots=st.integers(1, 3))
def test_numbers_that_do_not_fit_one_slot(seed: int, ranks: int, slots: int) -> None:
    cluster = InprocCluster(ranks, slots=slots, slot_bytes=slot_bytes_for(1, 1), seed=seed, hosts=[range(ranks)])
    check_bytes(cluster, [some_rows(np.random.default_rng((seed, rank)), "uint8", 3000, 1) for rank in range(ranks)])


def test_a_union_that_is_not_listed_in_one_step() -> None:
    numbers = [np.arange(0, 2 * ROWS_PER_STEP, 2), np.arange(ROWS_PER_STEP, 3 * ROWS_PER_STEP // 2, 3), np.arange(7)]
    cluster = InprocCluster(3, slot_bytes=1 << 16, seed=1, hosts=[range(3)])
    check_bytes(cluster, [(number, (number % 50).astype(np.uint8).reshape(-1, 1)) for number in numbers])


def check_bytes(cluster: InprocCluster, inputs: Sequence[Rows]) -> None:
    """Rows of one byte, of which many fit a slot."""
    n_rows = 2 * ROWS_PER_STEP
    results = [cluster.rows(rank, *brought, n_rows) for rank, brought in enumerate(inputs)]
    cluster.run()
    union, sums = expected_rows([range(len(inputs))], inputs, n_rows, "sum")
    for result in results:
        assert result.result[0].tolist() == union.tolist()
        assert bits(result.result[1]) == bits(sums)


@settings(max_examples=60)
@given(seed=SEEDS, ranks=st.integers(1, 5), limit=st.integers(1, 9))
def test_parts_of_any_size(seed: int, ranks: int, limit: int) -> None:
    cluster, rng = one_host(ranks, 1024, 3, seed), np.random.default_rng(seed)
    parts = [rng.integers(0, 99, int(rng.integers(limit * 1024 // 8))) for _ in range(ranks)]
    results = [cluster.ragged(rank, part, limit) for rank, part in enumerate(parts)]
    cluster.run()
    for result in results:
        assert [part.tolist() for part in result.parts] == [part.tolist() for part in parts]


def test_what_was_exchanged_is_counted_as_by_the_aggregators() -> None:
    cluster = one_host(3, 32, 4, 1)
    apart = InprocCluster(3, seed=1)
    inputs = [np.arange(0, 20, 2), np.arange(0, 20, 5), np.zeros(0, np.int64)]
    for each in (cluster, apart):
        for rank, numbers in enumerate(inputs):
            each.rows(rank, numbers, np.ones((numbers.size, 8), np.float32), 20)
        each.run()
    for worker in cluster.workers:
        list(worker.leave())  # leaving reports the error
    cluster.settle()
    result, expected = (each.aggregators[0].account.total() for each in (cluster, apart))
    names = "collectives", "blocks", "rank_blocks", "own_blocks", "union_blocks"
    assert [getattr(result, name) for name in names] == [getattr(expected, name) for name in names]
    assert result.received_bytes == 14 * 32
    assert result.sent_bytes == (4 + 10 + 14) * 32


def test_packets_count_once() -> None:
    """A rank puts its own packets into memory, and no sums."""
    cluster = one_host(3, 1024, 4, 1)
    for rank, size in enumerate((3000, 0, 1000)):
        cluster.ragged(rank, np.ones(size, np.uint8), 8)
    cluster.run()
    sent = [worker.host.sent_bytes for worker in cluster.workers if worker.host is not None]
    assert sent == [packet_count(size) * PACKET_BYTES for size in (3000, 0, 1000)]


def test_different_tables_end_the_job_on_all_ranks() -> None:
    cluster = one_host(2, 32, 4, 1)
    cluster.rows(0, np.arange(3), np.ones((3, 8), np.float32), 20)
    cluster.rows(1, np.arange(3), np.ones((3, 8), np.float32), 21)
    cluster.settle()
    assert cluster.culprits() == {"ranks 0 and 1"}
    assert cluster.worker_ends[0].cause.reason == (  # type: ignore[union-attr]
        "submitted different collectives: collective 0: rank 0 called allreduce_rows of float32, n_rows 20, width 8, "
        "sum; rank 1 called allreduce_rows of float32, n_rows 21, width 8, sum"
    )


@pytest.mark.parametrize("rows", [0, 3])
def test_who_waits_for_a_third_rank_is_not_named(rows: int) -> None:
    cluster = one_host(3, 32, 4, 1, timeout_s=10.0)
    cluster.rows(0, np.arange(9), np.ones((9, 8), np.float32), 20)
    cluster.rows(2, np.arange(rows), np.ones((rows, 8), np.float32), 20)
    cluster.settle()
    cluster.now = 10.1
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


# messages that a rank may not send


def blamed_after(change: Callable[[Array], None], rows: int = 5) -> str:
    """Rank 1 has begun and staged its numbers, then changes its region before rank 0 looks; what rank 0 says."""
    cluster = one_host(2, 32, 4, 1)
    for rank in range(2):
        cluster.rows(rank, np.arange(rows), np.ones((rows, 8), np.float32), 20)
    for _ in range(2):
        cluster.worker_drivers[1].advance()
    region = cluster.regions[0][1].view(np.int64)
    assert region[SLOTS : SLOTS + rows].tolist() == list(range(rows))
    change(region)
    cluster.settle(paused=[cluster.worker_drivers[1]])
    cluster.check_guards()
    return said_by(cluster, 0)


def said_by(cluster: InprocCluster, rank: int) -> str:
    """Why the job has ended."""
    end = cluster.worker_ends[rank]
    assert end is not None
    assert end.cause is not None
    return f"{end.cause.culprit}: {end.cause.reason}"


NOT_IN_ORDER = "rank 1 (host h1, pid 101): protocol error: its shared memory is not in order"


@pytest.mark.parametrize("count", [-1, 21, 1 << 62, -(1 << 63)])
def test_a_count_that_cannot_be(count: int) -> None:
    assert blamed_after(lambda region: region.__setitem__(DESCRIPTORS + ROWS_AT, count)) == NOT_IN_ORDER


@pytest.mark.parametrize(("at", "number"), [(0, -1), (4, 20), (4, 1 << 62), (3, 2), (3, 1), (1, -(1 << 63))], ids=str)
def test_numbers_that_do_not_ascend_or_are_out_of_range(at: int, number: int) -> None:
    assert blamed_after(lambda region: region.__setitem__(SLOTS + at, number)) == NOT_IN_ORDER


def test_more_rows_than_there_is_memory_for() -> None:
    cluster = one_host(2, 32, 4, 1)
    for rank in range(2):
        cluster.rows(rank, np.arange(5), np.ones((5, 8), np.float32), 1 << 47)
    for _ in range(2):
        cluster.worker_drivers[1].advance()
    cluster.regions[0][1].view(np.int64)[DESCRIPTORS + ROWS_AT] = 1 << 47
    cluster.settle(paused=[cluster.worker_drivers[1]])
    assert said_by(cluster, 0) == (
        f"rank 0 (host h0, pid 100): no memory for the numbers of {5 + (1 << 47)} rows, "
        f"of which rank 1 (host h1, pid 101) handed over {1 << 47}"
    )


def test_a_result_that_there_is_no_memory_for() -> None:
    cluster = one_host(2, 32, 4, 1)
    cluster.rows(0, np.arange(3), np.ones((3, 8), np.float32), 20)
    cluster.rows(1, np.arange(2, 7), np.ones((5, 8), np.float32), 20, memory=lambda _: np.empty(1 << 60, np.uint8))
    cluster.settle()
    assert said_by(cluster, 1) == (
        "rank 1 (host h1, pid 101): no memory for a result of 7 rows, of which rank 1 (host h1, pid 101) handed over 5"
    )
    assert said_by(cluster, 0) == said_by(cluster, 1)


@settings(max_examples=150)
@given(seed=SEEDS, ranks=st.integers(2, 4), noise=st.floats(0.0, 1.0))
def test_whatever_stands_in_the_memory_of_another_rank(seed: int, ranks: int, noise: float) -> None:
    """A rank may spoil its own job, and ends it at the most; nothing outside of the regions is touched."""
    cluster, rng = one_host(ranks, 32, 4, seed), np.random.default_rng(seed)
    inputs = [some_rows(rng, "float32", 50, 8) for _ in range(ranks)]
    brought = [(numbers.copy(), values.copy()) for numbers, values in inputs]
    operands = [cluster.rows(rank, *each, 50) for rank, each in enumerate(inputs)]
    liar, honest = int(rng.integers(ranks)), int(rng.integers(25))
    for turn in range(50):
        for rank in range(ranks):
            if rank != liar or turn < honest:
                cluster.worker_drivers[rank].advance()
        if turn < honest:
            continue
        words = cluster.regions[0][liar].view(np.int64)
        some = rng.random(words.size) < noise
        words[some] = rng.choice([-1, 0, 1, 2, 3, 7, 1 << 48, 1 << 62, -(1 << 63)], int(some.sum()))
    cluster.check_guards()
    for (numbers, values), before, operand in zip(inputs, brought, operands, strict=True):
        assert bits(numbers) == bits(before[0])
        assert bits(values) == bits(before[1])
        union = operand.result[0]
        assert np.all(np.diff(union) > 0)
        assert union.size == 0 or (union[0] >= 0 and union[-1] < 50)
