"""Property tests of jobs on several hosts, of which each sends its sum: against NumPy in the same order, bit by bit."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
from harness import InprocCluster, indices_of, slot_bytes_for
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import (
    assert_results,
    assert_same_values,
    bits,
    expected_rows,
    reduce_by_host,
    reduce_in_rank_order,
)
from samples import CASES, Array, some_rows, sparse_tensor

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import describe
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.blocks import read_header, seal
from omnireduce.core.wire.control import Aborted, Cause, encode_control
from omnireduce.kernels.chunk import NON_ZERO, PRESENT
from omnireduce.kernels.regions import STATE
from omnireduce.protocol.collective.dense_operands import DenseTensor, HostSum
from omnireduce.protocol.collective.effects import End
from omnireduce.protocol.host.exchange_state import Group, PassKind, preset
from omnireduce.protocol.sharding import Sharding

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 40) | st.integers(0, 700) | st.sampled_from([0, 1, 7, 8, 9, 17, 255, 256, 257, 300])
HOSTS = st.lists(st.integers(1, 4), min_size=2, max_size=3).filter(lambda sizes: max(sizes) > 1)


def spread(sizes: Sequence[int], seed: int) -> list[list[int]]:
    """Ranks of hosts of these sizes, in any order; hosts in the order of their first ranks."""
    ranks = np.random.default_rng(seed).permutation(sum(sizes)).tolist()
    hosts = [sorted(ranks[sum(sizes[:at]) : sum(sizes[: at + 1])]) for at in range(len(sizes))]
    return sorted(hosts)


def junk(nbytes: int) -> Array:
    """Memory for rows."""
    return np.full(nbytes, 0xAB, np.uint8)


def several_hosts(
    hosts: Sequence[Sequence[int]], block_bytes: int, blocks: int, seed: int, shards: int
) -> InprocCluster:
    ranks = sum(map(len, hosts))
    return InprocCluster(
        ranks, slots=2, slot_bytes=slot_bytes_for(blocks, block_bytes), seed=seed, hosts=hosts, shards=shards
    )


@pytest.mark.parametrize(("form", "hosts", "at_once"), [("tensor", 1, 2), ("sum", 2, 4)])
@pytest.mark.parametrize("kib", [4, 64, 128, 200, 256, 1024, 1536, 2048, 102_400])
def test_a_chunk_is_as_large_as_the_protocol_says(form: PassKind, hosts: int, at_once: int, kib: int) -> None:
    slot_bytes, descriptor = 1 << 20, describe("allreduce", "", "float32", (kib * 256,), "sum", 256)
    layout = Sharding.among(hosts, 3, 64, 0, slot_bytes).layout(descriptor)
    state = preset(Group(0, 2, 3, 1 << 20, 1 << 18, slot_bytes), descriptor, layout, form).state.view(STATE)[0]
    assert state["chunk_blocks"] == min(512, max(64, kib // at_once))
    assert state["chunks"] == -(-kib // state["chunk_blocks"])
    assert state["shards"] == 0 or layout.stripe_blocks == state["chunk_blocks"]


@pytest.mark.integration  # a quarter of all seconds of the pure parts
@pytest.mark.parametrize(("dtype", "op"), CASES)
@settings(max_examples=5)
@given(
    seed=SEEDS, sizes=HOSTS, elements=SIZES, octets=st.integers(1, 4), blocks=st.integers(1, 9),
    shards=st.integers(1, 4), more=st.integers(1, 3),
)  # fmt: skip
def test_allreduce(
    dtype: str, op: str, seed: int, sizes: list[int], elements: int, octets: int, blocks: int, shards: int, more: int
) -> None:
    block_size, hosts = 8 * octets, spread(sizes, seed)
    cluster = several_hosts(hosts, block_size * ELEMENT_TYPES[dtype].itemsize, blocks, seed, shards)
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(more):
        inputs = [sparse_tensor(rng, dtype, elements, block_size, rng.random()) for _ in range(sum(sizes))]
        results, kept = [], []
        for rank, x in enumerate(inputs):
            out = None
            if rng.random() < 0.5:
                out = np.full(elements, 3, x.dtype)
                kept.append((x, x.copy()))
            results.append(cluster.allreduce(rank, x.copy() if out is None else x, out, op=op, block_size=block_size))
        runs.append((inputs, results, kept))
    cluster.run()
    for inputs, results, kept in runs:
        assert_results(results, reduce_by_host(hosts, inputs, op))
        for x, before in kept:
            assert bits(x) == bits(before), "the input of an out-of-place collective changed"


@settings(max_examples=40)
@given(seed=SEEDS, sizes=HOSTS, size=SIZES, root=st.integers(0, 11), shards=st.integers(1, 3))
def test_bytes_arrive_as_they_are(seed: int, sizes: list[int], size: int, root: int, shards: int) -> None:
    several_hosts(spread(sizes, seed), 8, 9, seed, shards).check_broadcast(seed, size, root % sum(sizes))


@pytest.mark.integration
@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, op in CASES if op in ("sum", "mean")])
@settings(max_examples=8)
@given(
    seed=SEEDS, sizes=HOSTS, n_rows=st.integers(0, 40) | st.integers(0, 700), length=st.integers(1, 9),
    blocks=st.integers(1, 9), shards=st.integers(1, 4), more=st.integers(1, 3),
)  # fmt: skip
def test_allreduce_rows(
    dtype: str, op: str, seed: int, sizes: list[int], n_rows: int, length: int, blocks: int, shards: int, more: int
) -> None:
    hosts, rng = spread(sizes, seed), np.random.default_rng(seed)
    cluster = several_hosts(hosts, length * ELEMENT_TYPES[dtype].itemsize, blocks, seed, shards)
    runs = []
    for _ in range(more):
        inputs = [some_rows(rng, dtype, n_rows, length) for _ in range(sum(sizes))]
        for numbers, values in inputs:
            numbers.flags.writeable = values.flags.writeable = False
        results = [cluster.rows(rank, *brought, n_rows, op, memory=junk) for rank, brought in enumerate(inputs)]
        runs.append((inputs, results))
    cluster.run()
    for inputs, results in runs:
        union, sums = expected_rows(hosts, inputs, n_rows, op)
        for rank, each in enumerate(results):
            assert each.result[0].tolist() == union.tolist()
            assert_same_values(each.result[1], sums, f"rank {rank}")
            assert bits(each.result[1]) == bits(results[0].result[1]), "other bits than on rank 0"


@settings(max_examples=40)
@given(seed=SEEDS, sizes=HOSTS, limit=st.integers(1, 9), shards=st.integers(1, 3))
def test_parts_of_any_size(seed: int, sizes: list[int], limit: int, shards: int) -> None:
    cluster, rng = several_hosts(spread(sizes, seed), 1024, 3, seed, shards), np.random.default_rng(seed)
    parts = [rng.integers(0, 99, int(rng.integers(limit * 1024 // 8))) for _ in range(sum(sizes))]
    results = [cluster.ragged(rank, part, limit) for rank, part in enumerate(parts)]
    cluster.run()
    for result in results:
        assert [part.tolist() for part in result.parts] == [part.tolist() for part in parts]


def test_a_host_sends_and_gets_each_row_once() -> None:
    cluster = several_hosts([[0, 1, 2], [3]], 32, 4, 1, 1)
    cluster.record = []
    for rank, numbers in enumerate(([1, 5], [1, 7], [1], [2, 7])):
        cluster.rows(rank, np.array(numbers), np.ones((len(numbers), 8), np.float32), 20)
    cluster.run()
    sent = {(each.rank, each.down): each.indices for each in cluster.record if each.indices}
    up, down = {0: [1, 5, 7], 3: [2, 7]}, [1, 2, 5, 7]
    assert {rank: indices for (rank, is_down), indices in sent.items() if not is_down} == up
    assert {rank: [block % 2**48 for block in blocks] for (rank, is_down), blocks in sent.items() if is_down} == {
        0: down, 3: down,
    }  # fmt: skip
    took = [host.received_bytes for host in cluster.hosts if host is not None]
    assert took == [3 * 32, 4 * 32, 4 * 32], "rank 0 adds up, the others take its rows"


@settings(max_examples=40)
@given(seed=SEEDS, sizes=HOSTS, shards=st.integers(1, 3))
def test_rows_and_dense_tensors_mix(seed: int, sizes: list[int], shards: int) -> None:
    hosts, ranks = spread(sizes, seed), sum(sizes)
    cluster, rng = several_hosts(hosts, 32, 4, seed, shards), np.random.default_rng(seed)
    dense = [[rng.integers(-9, 9, 50).astype(np.float32) for _ in range(ranks)] for _ in range(2)]
    expected = [reduce_in_rank_order(tensors, "sum") for tensors in dense]
    numbers = np.arange(0, 20, 2)
    rows = []
    for rank in range(ranks):
        cluster.allreduce(rank, dense[0][rank])
        rows.append(cluster.rows(rank, numbers, np.ones((10, 8), np.float32), 20))
        cluster.allreduce(rank, dense[1][rank])
    cluster.run()
    assert_results(dense[0], expected[0])
    assert_results(dense[1], expected[1])
    for row in rows:
        assert np.array_equal(row.result[0], numbers)
        assert np.array_equal(row.result[1], np.full((10, 8), ranks, np.float32))


@pytest.mark.parametrize("late", range(3))
def test_a_host_shows_only_what_its_shard_has_answered(late: int) -> None:
    """Rank 0 is the delegate of two shards, of which one may be late."""
    hosts = [[0, 1], [2]]
    cluster = several_hosts(hosts, 32, 1, late, 3)
    inputs = [np.arange(1, 161, dtype=np.float32) * 10**rank for rank in range(3)]
    totals = [cluster.allreduce(rank, x.copy(), block_size=8) for rank, x in enumerate(inputs)]
    cluster.settle(paused=[cluster.aggregator_drivers[late]])
    assert cluster.finished == [[], [], []]
    cluster.run()
    assert_results(totals, reduce_by_host(hosts, inputs, "sum"))


@pytest.mark.parametrize("late", range(3))
def test_a_host_shares_rows_when_all_its_shards_have_answered(late: int) -> None:
    """Rank 0 is the delegate of two shards. Nobody is late while it waits for one of them."""
    hosts = [[0, 1], [2]]
    cluster, rng = several_hosts(hosts, 32, 1, late, 3), np.random.default_rng(late)
    inputs = [some_rows(rng, "float32", 600, 8) for _ in range(3)]
    results = [cluster.rows(rank, *brought, 600) for rank, brought in enumerate(inputs)]
    cluster.settle(paused=[cluster.aggregator_drivers[late]])
    assert cluster.finished == [[], [], []]
    assert [worker.host.awaited_ranks() for worker in cluster.workers if worker.host is not None] == [[], []]
    cluster.run()
    union, sums = expected_rows(hosts, inputs, 600, "sum")
    for result in results:
        assert result.result[0].tolist() == union.tolist()
        assert_same_values(result.result[1], sums, "rows")


def test_nobody_passes_a_barrier_before_all_hosts_are_there() -> None:
    cluster = several_hosts([[0, 1], [2, 3]], 8, 4, 1, 2)
    for rank in (0, 1, 2):
        cluster.move_bytes(rank, "barrier", None, np.empty(0, np.uint8))
    cluster.settle()
    assert cluster.finished == [[], [], [], []]
    cluster.move_bytes(3, "barrier", None, np.empty(0, np.uint8))
    cluster.run()


@pytest.mark.parametrize(
    ("other", "culprits"), [(1, {"ranks 0 and 1"}), (2, {"ranks 0 and 2", "ranks 2 and 3"}), (3, {"ranks 2 and 3"})]
)
def test_different_collectives_end_the_job_on_all_ranks(other: int, culprits: set[str]) -> None:
    """Rank 2 sends for rank 3: its shard and its host see that it differs."""
    cluster = several_hosts([[0, 1], [2, 3]], 32, 4, 1, 1)
    for rank in range(4):
        cluster.allreduce(rank, np.ones(20 if rank != other else 30, np.float32))
    cluster.settle()
    [culprit] = cluster.culprits()
    assert culprit in culprits


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("others", [{0}, {1}, {2}, {3}, {0, 2}, {0, 3}, {1, 2}, {1, 3}, {0, 1}])
def test_rows_beside_a_tensor_end_the_job_on_all_ranks(others: set[int], dtype: type) -> None:
    """Also if each host has a rank that has rows of float16: none of them sends a sum, and the shard sees rows only.
    Then each may name its own ranks."""
    cluster = several_hosts([[0, 1], [2, 3]], 32, 4, 1, 1)
    for rank in range(4):
        if rank in others:
            cluster.rows(rank, np.arange(3), np.ones((3, 8), dtype), 20)
        else:
            cluster.allreduce(rank, np.ones(20, np.float32))
    cluster.settle()
    results = cluster.culprits()
    assert len(results) in (1, 2)
    for culprit in results:
        named = set(map(int, re.findall(r"\d+", culprit)))
        assert (len(named), len(named & others)) == (2, 1), culprit


def test_a_host_sends_no_sum_that_float16_cannot_hold() -> None:
    hosts = [[0, 1], [2, 3]]
    cluster = several_hosts(hosts, 32, 4, 1, 1)
    means = [cluster.allreduce(rank, np.full(20, 40_000, np.float16), op="mean", block_size=16) for rank in range(4)]
    signs = [1, 1, -1, -1]
    sums = [cluster.allreduce(rank, np.full(20, 40_000 * signs[rank], np.float16), block_size=16) for rank in range(4)]
    cluster.run()
    assert all((mean == 40_000).all() for mean in means)
    assert all((each == 0).all() for each in sums)


@pytest.mark.parametrize("has_rows", [False, True])
def test_a_delegate_that_left_before_it_has_shown_is_not_waited_for(has_rows: bool) -> None:
    """The shard stops while the delegate's message is under way: the delegate needs it, the other rank needs him."""
    cluster = several_hosts([[0, 1], [2, 3]], 32, 4, 1, 1)
    for rank in (0, 1):
        if has_rows:
            cluster.rows(rank, np.arange(3), np.ones((3, 8), np.float32), 20)
        else:
            cluster.allreduce(rank, np.ones(20, np.float32))
    cluster.settle(paused=cluster.aggregator_drivers)
    stops = Cause("aggregator 127.0.0.1:7400", "shutting down", orderly=True)
    for rank in range(4):
        cluster.down[0][rank].send_control(encode_control(Aborted(stops)))
    cluster.settle(paused=cluster.aggregator_drivers)
    assert cluster.worker_ends == [End(stops)] * 4


def wait(cluster: InprocCluster, seconds: float, paused: int | None = None) -> None:
    """Let time pass, in halves of a second, until a rank ends its job; one rank may be stopped."""
    drivers = [worker_driver for rank, worker_driver in enumerate(cluster.worker_drivers) if rank != paused]
    until = cluster.now + seconds
    while cluster.now < until and not any(cluster.worker_ends):
        cluster.now += 0.5
        order = [*drivers, *cluster.aggregator_drivers]
        cluster.random.shuffle(order)
        for driver in order:
            driver.turn()


def named(cluster: InprocCluster) -> set[str]:
    """Culprits that the ranks whose job has ended name."""
    return {end.cause.culprit for end in cluster.worker_ends if end is not None and end.cause is not None}


@pytest.mark.parametrize("seed", range(4))
def test_every_shard_knows_who_of_a_host_is_late(seed: int) -> None:
    """The other host has waited for longer, and judges first. Each shard waits for another delegate."""
    cluster = several_hosts([[0, 1, 2], [3, 4, 5]], 32, 1, seed, 2)
    for rank in (3, 4, 5):
        cluster.allreduce(rank, np.ones(80, np.float32))
    wait(cluster, 15.0)
    for rank in (0, 1):
        cluster.allreduce(rank, np.ones(80, np.float32))
    wait(cluster, 100.0)
    assert named(cluster) == {"rank 2 (host h2, pid 102)"}


def test_a_rank_blames_nobody_for_what_was_said_of_an_earlier_collective() -> None:
    cluster = several_hosts([[0, 1], [2, 3]], 32, 4, 1, 1)
    for rank in (0, 1, 2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    wait(cluster, 5.0)
    cluster.allreduce(3, np.ones(20, np.float32))
    cluster.run()
    for rank in range(4):
        cluster.allreduce(rank, np.ones(20, np.float32))
    for _ in range(50):
        for driver in cluster.worker_drivers:
            driver.advance()
    wait(cluster, 100.0, paused=0)  # its sum is sent, and its host waits for what it shows
    assert named(cluster) == {"rank 0 (host h0, pid 100)"}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("has_rows", [False, True])
def test_a_delegate_that_stops_before_it_shares_is_named_alone(has_rows: bool, shards: int) -> None:
    """It has sent its sums. The other ranks of its host wait for it, and see no rank that is late."""
    cluster = several_hosts([[0, 1, 2], [3]], 32, 4, 1, shards)
    for rank in range(4):
        if has_rows:
            cluster.rows(rank, np.arange(20), np.ones((20, 8), np.float32), 20)
        else:
            cluster.allreduce(rank, np.ones(160, np.float32))
    cluster.settle(paused=cluster.aggregator_drivers)
    wait(cluster, 100.0, paused=0)
    assert named(cluster) == {"rank 0 (host h0, pid 100)"}


def test_a_delegate_that_stops_before_it_has_summed_is_late() -> None:
    """The others of its host have passed the first leg of rows, and wait for it in the second."""
    cluster = several_hosts([[0, 1], [2]], 32, 8, 1, 1)
    for rank in range(3):
        cluster.rows(rank, np.arange(20), np.ones((20, 8), np.float32), 200)
    first, second = cluster.hosts[0], cluster.hosts[1]
    assert first is not None
    assert second is not None
    first._steps = second._steps = 1
    for _ in range(1000):
        cluster.worker_drivers[1].advance()
        state = first._state[0]
        knows_all = state["has_agreed"] and not state["is_listing"] and not state["wants_room"]
        if not (knows_all and state["staged"] == state["chunks"] == state["combined"] + 1):
            cluster.worker_drivers[0].advance()
    assert (first._begun_passes, second._begun_passes) == (0, 1)
    cluster.settle(paused=[cluster.worker_drivers[0]])
    assert second.awaited_ranks() == [0]


def test_packets_that_a_shard_loses_are_not_the_fault_of_neighbours_alone() -> None:
    cluster = several_hosts([[0, 1], [2, 3]], 1024, 40, 1, 1)

    def lose_the_last(shard: int, rank: int, down: bool, slot: Array, nbytes: int) -> int:
        if not down or rank != 0:
            return nbytes
        header = read_header(slot, nbytes)
        indices = np.array(indices_of(slot, header))
        return seal(slot, header.collective, header.frontier, indices[:-1], header.block_bytes)

    cluster.tamper = lose_the_last
    for rank in range(4):
        cluster.ragged(rank, np.arange(300) + 1000 * rank, 8)
    cluster.settle()
    for end in cluster.worker_ends[:2]:
        assert end is not None
        assert end.cause is not None
        assert end.cause.culprit.startswith("aggregator 127.0.0.1:7400"), end.cause


def test_the_wait_for_ranks_begins_with_the_first_message() -> None:
    """Nobody waited in the pause before it."""
    cluster = several_hosts([[0, 2], [1, 3]], 32, 4, 1, 1)
    cluster.now = 30.0
    for rank in (0, 2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    cluster.settle(paused=cluster.aggregator_drivers)
    cluster.aggregator_drivers[0].turn()  # it slept until the first message came
    for now in (30.0, 31.0):
        cluster.now = now
        cluster.settle()
    assert any("since 1" in warning for warning in cluster.warnings)
    assert not any("since 3" in warning or "stood still" in warning for warning in cluster.warnings)


@pytest.mark.parametrize(("dtype", "moments"), [(np.float32, 0), (np.float16, 3)], ids=["by host", "rank by rank"])
def test_a_rank_that_may_still_wait_for_its_shard_speaks_before_it_is_named(dtype: type, moments: int) -> None:
    """Rank 0 has finished the first collective. Rank 1, of the same host, comes to no second one."""
    cluster = InprocCluster(3, slots=2, slot_bytes=slot_bytes_for(4, 32), seed=1, hosts=[[0, 1], [2]], timeout_s=5.0)
    for rank in range(3):
        cluster.rows(rank, np.arange(3), np.ones((3, 8), dtype), 20)
    cluster.run()
    cluster.allreduce(0, np.ones(20, np.float32))
    for now in (0.0, 2.5, 5.0 - 1e-6):
        cluster.now = now
        cluster.settle()
    assert cluster.worker_ends[0] is None
    cluster.now = 5.0
    cluster.settle()
    if moments:
        assert cluster.worker_ends[0] is None
        assert cluster.workers[0].deadline == pytest.approx(5.0 + moments * 0.25)
        cluster.now = 5.0 + moments * 0.25
        cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


@pytest.mark.parametrize("ranks", [[[0, 1], [2]], [[0], [1, 2]]], ids=["with a neighbour", "alone"])
@pytest.mark.parametrize("next_one", ["tensor", "rows"])
@pytest.mark.parametrize("gap_s", [0.002, 0.4])
def test_a_shard_that_hangs_is_named_though_others_wait_for_a_rank(
    ranks: list[list[int]], next_one: str, gap_s: float
) -> None:
    """The second shard froze after it had served ranks 1 and 2, which begin another collective. Rank 0 does not."""
    slot_bytes = slot_bytes_for(4, 32)
    cluster = InprocCluster(3, slots=2, slot_bytes=slot_bytes, seed=1, hosts=ranks, timeout_s=5.0, shards=2)
    cluster.up[0][1].deliver = lambda event: None  # type: ignore[method-assign]
    for rank in range(3):
        cluster.rows(rank, np.arange(20), np.ones((20, 8), np.float16), 200)
    cluster.settle()
    assert cluster.finished == [[], [0], [0]]
    cluster.now = gap_s
    for rank in (1, 2):
        if next_one == "rows":
            cluster.rows(rank, np.arange(20), np.ones((20, 8), np.float16), 200)
        else:
            cluster.allreduce(rank, np.ones(200, np.float32))
    while not all(cluster.worker_ends) and cluster.now < 10:
        cluster.settle(paused=cluster.aggregator_drivers[1:])
        cluster.now += 0.05
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401"}


def test_a_rank_alone_on_its_host_lets_the_others_judge_who_is_late() -> None:
    """It sees the delegate of the other host only, and that one waits for a neighbour."""
    cluster = InprocCluster(3, slots=2, slot_bytes=slot_bytes_for(4, 32), seed=1, hosts=[[0, 1], [2]], timeout_s=5.0)
    for rank in (2, 0):
        cluster.allreduce(rank, np.ones(20, np.float32))
    for now in range(6):
        cluster.now = now
        cluster.settle(paused=[cluster.worker_drivers[0], cluster.worker_drivers[1]])
    assert cluster.worker_ends[2] is None
    assert cluster.workers[2].deadline == pytest.approx(5.5)


def host_sum(blocks: int, ready: int, non_zero: Sequence[int] = ()) -> HostSum:
    """The sum of a host whose blocks of 8 bytes are known below `ready`."""
    layout = Layout(blocks, 1, 1, 1)
    result = HostSum(DenseTensor(None, np.zeros(blocks), layout, np.uint64(2**63 - 1)))
    result.notes[:ready] = PRESENT
    result.notes[list(non_zero)] |= NON_ZERO
    for block in range(-1, ready + 1, 7):  # it becomes ready step by step
        result.ready = block
    result.ready = ready
    return result


@pytest.mark.parametrize(
    ("host_sum", "cursor", "worth"),
    [
        (host_sum(0, -1), 0, False),
        (host_sum(0, 0), 0, True),
        (host_sum(5, 3), 3, False),  # nothing follows
        (host_sum(5, 3), 4, False),  # the next block of this shard is not there
        (host_sum(5, 3), 2, True),  # an eighth of few blocks is one
        (host_sum(5, 5), 5, True),  # there is only to say that all are sent
        (host_sum(800, 109), 10, False),
        (host_sum(800, 110), 10, True),  # an eighth
        (host_sum(8000, 209), 10, False),
        (host_sum(8000, 210), 10, True),  # a span
        (host_sum(800, 50, range(10)), 0, True),  # as many as a message takes
        (host_sum(800, 50, range(9)), 0, False),
        (host_sum(800, 50, range(10)), 1, False),
    ],
)
def test_a_sum_is_packed_when_it_is_worth_a_message(host_sum: HostSum, cursor: int, worth: bool) -> None:
    assert host_sum.is_worth_packing(cursor, 200, 10) is worth
