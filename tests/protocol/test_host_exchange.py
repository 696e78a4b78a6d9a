"""Property tests of the exchange inside a host, against NumPy in rank order and against the aggregators, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
from harness import Guarded, InprocCluster, one_host, slot_bytes_for
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_results, bits, reduce_in_rank_order
from samples import CASES, sparse_tensor

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.control import Aborted, Cause, encode_control
from omnireduce.kernels.regions import STATE
from omnireduce.protocol.collective.effects import Effect, End, Finish
from omnireduce.protocol.host.exchange import BY_ITSELF, HostExchange
from omnireduce.protocol.host.exchange_state import Counts, Group

SEEDS = st.integers(0, 2**32 - 1)
SIZES = st.integers(0, 40) | st.integers(0, 700) | st.sampled_from([0, 1, 7, 8, 9, 17, 255, 256, 257, 300])


@pytest.mark.parametrize(("dtype", "op"), CASES)
@settings(max_examples=15)
@given(
    seed=SEEDS, ranks=st.integers(1, 5), elements=SIZES, octets=st.integers(1, 4), blocks=st.integers(1, 9),
    more=st.integers(1, 3),
)  # fmt: skip
def test_allreduce(
    dtype: str, op: str, seed: int, ranks: int, elements: int, octets: int, blocks: int, more: int
) -> None:
    block_size = 8 * octets
    cluster = one_host(ranks, block_size * ELEMENT_TYPES[dtype].itemsize, blocks, seed)
    apart = InprocCluster(ranks, slot_bytes=slot_bytes_for(6, block_size * ELEMENT_TYPES[dtype].itemsize), seed=seed)
    rng = np.random.default_rng(seed)
    runs = []
    for _ in range(more):
        inputs = [sparse_tensor(rng, dtype, elements, block_size, rng.random()) for _ in range(ranks)]
        results, through_shards, kept = [], [], []
        for rank, x in enumerate(inputs):
            through_shards.append(apart.allreduce(rank, x.copy(), op=op, block_size=block_size))
            out = None
            if rng.random() < 0.5:
                out = np.full(elements, 3, x.dtype)
                kept.append((x, x.copy()))
            results.append(cluster.allreduce(rank, x.copy() if out is None else x, out, op=op, block_size=block_size))
        runs.append((inputs, results, through_shards, kept))
    cluster.run()
    apart.run()
    for inputs, results, through_shards, kept in runs:
        assert_results(results, reduce_in_rank_order(inputs, op))
        assert bits(results[0]) == bits(through_shards[0]), "other bits than through the aggregators"
        for x, before in kept:
            assert bits(x) == bits(before), "the input of an out-of-place collective changed"


@settings(max_examples=100)
@given(seed=SEEDS, ranks=st.integers(1, 5), size=SIZES, root=st.integers(0, 4), blocks=st.integers(1, 9))
def test_bytes_arrive_as_they_are(seed: int, ranks: int, size: int, root: int, blocks: int) -> None:
    one_host(ranks, 8, blocks, seed).check_broadcast(seed, size, root % ranks)


@settings(max_examples=100)
@given(seed=SEEDS, ranks=st.integers(1, 4))
def test_rows_and_dense_tensors_mix(seed: int, ranks: int) -> None:
    cluster, rng = one_host(ranks, 32, 4, seed, shards=2), np.random.default_rng(seed)
    dense = [[rng.integers(-9, 9, 50).astype(np.float32) for _ in range(ranks)] for _ in range(2)]
    expected = [reduce_in_rank_order(tensors, "sum") for tensors in dense]
    numbers = np.arange(0, 20, 2)
    for rank in range(ranks):
        cluster.allreduce(rank, dense[0][rank])
        rows = cluster.rows(rank, numbers, np.ones((10, 8), np.float32), 20)
        cluster.allreduce(rank, dense[1][rank])
        if rank == 0:
            first = rows
    cluster.run()
    assert_results(dense[0], expected[0])
    assert_results(dense[1], expected[1])
    assert np.array_equal(first.result[0], numbers)
    assert np.array_equal(first.result[1], np.full((10, 8), ranks, np.float32))


def test_different_collectives_end_the_job_on_all_ranks() -> None:
    cluster = one_host(3, 32, 4, 1)
    cluster.allreduce(0, np.ones(20, np.float32))
    cluster.allreduce(1, np.ones(20, np.float32))
    cluster.allreduce(2, np.ones((4, 5), np.float32))
    cluster.settle()
    assert cluster.culprits() == {"ranks 0 and 2"}
    reason = cluster.worker_ends[0].cause.reason  # type: ignore[union-attr]
    assert reason == (
        "submitted different collectives: collective 0: rank 0 called allreduce of float32 (20,), sum; "
        "rank 2 called allreduce of float32 (4, 5), sum"
    )


def test_different_collectives_after_a_fault_are_not_why_the_job_is_over() -> None:
    """A rank called something else, and ended the job; the aggregator has not told so yet."""
    cluster = one_host(2, 32, 4, 1)
    first, second = cluster.worker_drivers
    cluster.allreduce(0, np.ones(20, np.float32))
    first.advance()
    first.perform(cluster.workers[0].leave("interrupted"))
    cluster.allreduce(1, np.ones(30, np.float32))
    for _ in range(5):
        second.turn()
    assert cluster.worker_ends[1] is None
    cluster.settle()
    assert cluster.worker_ends[1] == End(Cause("rank 0 (host h0, pid 100)", "interrupted"))


def test_an_aggregator_that_does_not_say_why_the_job_is_over_is_blamed() -> None:
    cluster = one_host(2, 32, 4, 1)
    first, second = cluster.worker_drivers
    cluster.allreduce(0, np.ones(20, np.float32))
    cluster.allreduce(1, np.ones(20, np.float32))
    first.perform(cluster.workers[0].leave("interrupted"))  # the aggregator hangs: it does not read that
    for _ in range(5):
        second.turn()
        cluster.now += 30.0
    end = cluster.worker_ends[1]
    assert end is not None
    assert end.cause is not None
    assert (end.cause.culprit, end.cause.timeout) == ("aggregator 127.0.0.1:7400", True)
    assert end.cause.reason.endswith("this aggregator does not say why: is it stopped?")


def test_a_rank_that_does_not_come_is_blamed_though_another_one_has_ended_the_job() -> None:
    """The word of the aggregator is late. It would say the same."""
    cluster = one_host(3, 32, 4, 1)
    first, second, _ = cluster.worker_drivers
    for rank in range(2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    for _ in range(5):
        first.turn()
        second.turn()
    cluster.now = 60.0
    first.turn()
    for _ in range(5):
        second.turn()
        cluster.now += 30.0
    for end in cluster.worker_ends[:2]:
        assert end is not None
        assert end.cause is not None
        assert (end.cause.culprit, end.cause.timeout) == ("rank 2 (host h2, pid 102)", True)


def test_who_waits_for_the_reason_of_an_end_is_not_late() -> None:
    """It has seen that another rank called something else, and that one has ended the job: it takes no step."""
    cluster = one_host(3, 32, 4, 1)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(30 if rank == 0 else 20, np.float32))
    for _ in range(8):
        for driver in cluster.worker_drivers[1:]:
            driver.push()
    for _ in range(8):
        cluster.worker_drivers[0].turn()  # it ends the job; the aggregator hangs, and does not read that
    assert cluster.worker_ends[0] is not None
    while cluster.worker_ends[1:] == [None, None]:
        for driver in cluster.worker_drivers[1:]:
            driver.turn()
        cluster.now += 2.0
    culprits = {end.cause.culprit for end in cluster.worker_ends[1:] if end is not None and end.cause is not None}
    assert culprits == {"aggregator 127.0.0.1:7400"}


def test_the_state_begins_with_the_group_and_has_the_counts_together() -> None:
    names = STATE.names or ()
    at = names.index(Counts._fields[0])
    assert names[at : at + len(Counts._fields)] == Counts._fields
    assert names[: len(Group._fields) - 1] == Group._fields[:-1]


@pytest.mark.parametrize("has_told", [True, False])
def test_what_an_aggregator_has_told_comes_before_what_memory_shows(has_told: bool) -> None:
    """A rank that begins a collective has not read yet what its links have brought."""
    cluster, behind = one_host(2, 32, 4, 1), Cause("rank 1", "left behind")
    first, second = cluster.worker_drivers
    first.perform(cluster.workers[0].leave())
    if has_told:
        cluster.down[0][1].send_control(encode_control(Aborted(behind)))
    cluster.allreduce(1, np.ones(20, np.float32))
    second.push()
    assert cluster.worker_ends[1] is None
    second.turn()
    what = "had shut down when collective 0 (allreduce of float32 (20,), sum) began"
    assert cluster.worker_ends[1] == End(behind if has_told else Cause("rank 0 (host h0, pid 100)", what))


def test_a_rank_that_lags_is_named() -> None:
    cluster = one_host(3, 32, 4, 1, timeout_s=10.0)
    for rank in (0, 2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    cluster.settle()
    cluster.now = 1.5
    cluster.settle()
    assert cluster.warnings[0] == (
        "collective 0 (allreduce of float32 (20,), sum): waiting for rank 1 (host h1, pid 101) since 1.5 s"
    )
    cluster.now = 10.1
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


def test_a_rank_that_takes_its_last_step_and_leaves_has_not_left_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does both while another rank looks whether it lags."""
    cluster = one_host(2, 32, 4, 1)
    for rank in range(2):
        cluster.move_bytes(rank, "barrier", None, np.zeros(0, np.uint8))
    first, second = cluster.hosts
    assert first is not None
    assert second is not None
    awaited_ranks = HostExchange.awaited_ranks

    def late_look(self: HostExchange) -> list[int]:
        result = awaited_ranks(self)
        if self is first and second.is_busy:
            monkeypatch.undo()
            cluster.settle(paused=[cluster.worker_drivers[0]])
            cluster.worker_drivers[1].perform(cluster.workers[1].leave())
        return result

    cluster.worker_drivers[0].advance()
    monkeypatch.setattr(HostExchange, "awaited_ranks", late_look)
    assert first.departed(BY_ITSELF) == []
    cluster.settle()
    assert cluster.worker_ends[0] is None
    assert cluster.finished == [[0], [0]]


def test_nothing_follows_the_end_of_a_job_whose_aggregator_stopped() -> None:
    cluster = one_host(2, 32, 4, 1)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    first, effects = cluster.workers[0], list[Effect]()
    first._retired[0] = Cause("aggregator 127.0.0.1:7400", "is shutting down", orderly=True)
    for _ in range(30):
        cluster.worker_drivers[1].advance()
        effects += first.advance(cluster.now)
    assert isinstance(effects[-1], End)
    assert any(isinstance(effect, Finish) for effect in effects)


@pytest.mark.parametrize("has_heard", [False, True])
def test_nobody_sleeps_while_a_rank_that_left_is_a_reason_to_end(has_heard: bool) -> None:
    """Rank 0 has left because an aggregator stops, which is news to rank 1, or not. Nobody would wake it."""
    cluster = one_host(2, 32, 4, 1)
    stops = encode_control(Aborted(Cause("aggregator 127.0.0.1:7400", "is shutting down", orderly=True)))
    cluster.allreduce(1, np.ones(20, np.float32))
    cluster.settle()
    second = cluster.hosts[1]
    assert second is not None
    if has_heard:
        cluster.down[0][1].send_control(stops)
        cluster.worker_drivers[1].turn()
        assert cluster.worker_ends[1] is None, "rank 0 may still take part"
    cluster.down[0][0].send_control(stops)
    cluster.worker_drivers[0].turn()
    assert cluster.worker_ends[0] is not None
    assert second.fall_asleep() != has_heard


def test_steps_count_as_movement_even_if_the_last_look_was_in_vain() -> None:
    cluster = one_host(2, 32, 4, 1)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(20, np.float32))
    cluster.now = 5.0
    cluster.worker_drivers[0].advance()
    assert cluster.hosts[0] is not None
    assert cluster.hosts[0].moved_at == 5.0


@settings(max_examples=80)
@given(seed=SEEDS, ranks=st.integers(2, 4), noise=st.floats(0.0, 1.0))
def test_whatever_stands_in_the_memory_of_another_rank(seed: int, ranks: int, noise: float) -> None:
    """A rank may spoil its own job, and ends it at the most; nothing outside of the tensors and regions is touched."""
    cluster, rng = one_host(ranks, 32, 4, seed), np.random.default_rng(seed)
    guarded = [Guarded((50,), np.float32) for _ in range(ranks)]
    for rank, each in enumerate(guarded):
        cluster.allreduce(rank, each.array)
    liar = int(rng.integers(ranks))
    for _ in range(20):
        for rank in range(ranks):
            if rank != liar:
                cluster.worker_drivers[rank].advance()
        words = cluster.regions[0][liar].view(np.int64)
        some = rng.random(words.size) < noise
        words[some] = rng.choice([-1, 0, 1, 2, 3, 7, 1 << 48, 1 << 62, -(1 << 63)], int(some.sum()))
    for each in (*guarded, *cluster.guards):
        each.check()
