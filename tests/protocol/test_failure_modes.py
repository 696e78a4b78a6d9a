"""Known failure modes of earlier systems, and what a cluster says when something is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from harness import InprocCluster, slot_bytes_for
from oracle import assert_results, reduce_in_rank_order
from samples import DTYPES, Array, sparse_tensor

from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.core.wire.control import Cause, Hello, Leave, Pending, Waiting, decode_control, encode_control
from omnireduce.protocol.rank_deadline import CollectiveDeadline
from omnireduce.transport.base import Event

BLOCK = 8
ONE_BLOCK_SLOTS = slot_bytes_for(1, BLOCK * 4)


def reduce(cluster: InprocCluster, inputs: list[Array], op: str = "sum", block_size: int = BLOCK) -> None:
    """All-reduce in place on all ranks and compare with the oracle."""
    expected = reduce_in_rank_order(inputs, op)
    for rank, x in enumerate(inputs):
        cluster.allreduce(rank, x, op=op, block_size=block_size)
    cluster.run()
    assert_results(inputs, expected)


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_a_worker_that_contributes_nothing_and_lags_by_thousands_of_results(silent: int) -> None:
    cluster = InprocCluster(3, slots=2, slot_bytes=ONE_BLOCK_SLOTS, scan_span=16)
    inputs = [np.arange(3000 * BLOCK, dtype=np.float32) + 1 for _ in range(3)]
    inputs[silent][:] = 0
    expected = reduce_in_rank_order(inputs, "sum")
    for rank, x in enumerate(inputs):
        cluster.allreduce(rank, x)
    driver = cluster.worker_drivers[silent]
    cluster.settle(paused=[driver])  # the others go as far as they can before it starts
    for _ in range(50):
        driver.turn()
        cluster.settle(paused=[driver])
    cluster.run(idle={driver: 0.95})
    assert_results(inputs, expected)


def test_a_worker_that_lags_by_thousands_of_collectives() -> None:
    cluster = InprocCluster(3, slots=2, slot_bytes=ONE_BLOCK_SLOTS)
    inputs = [[np.full(BLOCK * (number % 3), 1 + number, np.int32) for number in range(2000)] for _ in range(3)]
    for rank in (0, 2, 1):
        for number in range(2000):
            if rank == 1:
                inputs[rank][number][:] = 0
            cluster.allreduce(rank, inputs[rank][number])
        cluster.settle()
    cluster.run()
    for result in inputs:
        assert all((result[number] == 2 * (1 + number)).all() for number in range(2000))


@pytest.mark.parametrize("elements", [17, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("blocks_per_slot", [1, 64])
def test_small_tensors_with_larger_messages(elements: int, dtype: str, blocks_per_slot: int) -> None:
    rng, element = np.random.default_rng(elements), ELEMENT_TYPES[dtype]
    for shards in (1, 3):
        slot_bytes = slot_bytes_for(blocks_per_slot, 256 * element.itemsize)
        cluster = InprocCluster(2, shards=shards, slot_bytes=slot_bytes, stripe_blocks=1)
        reduce(cluster, [sparse_tensor(rng, dtype, elements, 256, 1.0) for _ in range(2)], block_size=256)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_blocks_of_only_nan(dtype: str, op: str) -> None:
    nan = np.full(5 * BLOCK + 3, np.nan, ELEMENT_TYPES[dtype].dtype)
    inputs = [np.zeros_like(nan), nan, np.zeros_like(nan)]
    reduce(InprocCluster(3, shards=2, stripe_blocks=1), inputs, op)
    assert np.isnan(inputs[0].astype(np.float32)).all()


@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_blocks_of_only_the_most_negative_integer(dtype: str, op: str) -> None:
    lowest = np.full(5 * BLOCK + 3, np.iinfo(dtype).min, dtype)
    reduce(InprocCluster(3, shards=2, stripe_blocks=1), [np.zeros_like(lowest), lowest, np.zeros_like(lowest)], op)


@pytest.mark.parametrize(("ranks", "shards"), [(1, 4), (2, 3), (2, 7)])
def test_fewer_workers_than_shards(ranks: int, shards: int) -> None:
    rng = np.random.default_rng(shards)
    for elements in (3, 100, 999):
        inputs = [sparse_tensor(rng, "float32", elements, BLOCK, 0.6) for _ in range(ranks)]
        reduce(InprocCluster(ranks, shards=shards, stripe_blocks=2), inputs)


@pytest.mark.parametrize(("ranks", "shards"), [(3, 2), (5, 2), (5, 4), (7, 3)])
def test_worker_counts_that_do_not_divide(ranks: int, shards: int) -> None:
    rng = np.random.default_rng(ranks)
    for elements in (ranks + 1, 101, 997):
        inputs = [sparse_tensor(rng, "float64", elements, BLOCK, 0.6) for _ in range(ranks)]
        reduce(InprocCluster(ranks, shards=shards), inputs, "mean")


# messages when something is wrong


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("late", [0, 2])
def test_two_different_tensors_submitted_in_the_same_place(shards: int, late: int) -> None:
    cluster = InprocCluster(3, shards=shards)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(40, np.float32), name="same")
    cluster.run()
    shapes = [("fc1.weight", 1000), ("fc1.weight", 1000), ("fc1.weight", 1000)]
    shapes[late] = ("fc2.bias", 10)
    for rank, (name, elements) in enumerate(shapes):
        cluster.allreduce(rank, np.ones(elements, np.float32), name=name)
    cluster.settle()
    assert all(str(late) in culprit for culprit in cluster.culprits())
    for end in cluster.worker_ends:
        assert end is not None
        assert end.cause is not None
        assert "collective 1" in end.cause.reason
        assert "'fc1.weight' of float32 (1000,)" in end.cause.reason
        assert "'fc2.bias' of float32 (10,)" in end.cause.reason
    cluster.check_guards()


@pytest.mark.parametrize(
    "other",
    [
        {"op": "max"},
        {"name": "b"},
        {"block_size": 16},
        {"x": np.ones(41, np.float32)},
        {"x": np.ones((4, 10), np.float32)},
        {"x": np.ones(40, np.int32)},
    ],
)
def test_any_difference_between_descriptors_is_an_error(other: dict[str, object]) -> None:
    cluster = InprocCluster(2)
    cluster.allreduce(0, np.ones(40, np.float32), name="a")
    arguments = {"x": np.ones(40, np.float32), "name": "a"} | other
    cluster.allreduce(1, **arguments)  # type: ignore[arg-type]
    cluster.settle()
    (culprits,) = cluster.culprits()
    assert culprits == "ranks 0 and 1"


def test_different_kinds_of_collectives_are_an_error() -> None:
    cluster = InprocCluster(2)
    cluster.allreduce(0, np.ones(40, np.uint8))
    cluster.move_bytes(1, "broadcast", None, np.ones(40, np.uint8))
    cluster.settle()
    (culprits,) = cluster.culprits()
    assert culprits == "ranks 0 and 1"


def test_a_rank_that_dies_is_named_on_all_others() -> None:
    cluster = InprocCluster(3, shards=2)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(5000, np.float32))
    for driver in cluster.worker_drivers:
        driver.turn()
    for link in cluster.up[1]:
        link.close()
    cluster.settle(paused=[cluster.worker_drivers[1]])
    for rank in (0, 2):
        end = cluster.worker_ends[rank]
        assert end is not None
        assert end.cause is not None
        assert (end.cause.culprit, end.cause.reason) == ("rank 1 (host h1, pid 101)", "connection closed")


def test_an_aggregator_that_dies_is_named_on_all_ranks() -> None:
    cluster = InprocCluster(3, shards=2)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(5000, np.float32))
    for driver in cluster.worker_drivers:
        driver.turn()
    for link in cluster.down[1]:
        link.close()
    cluster.settle(paused=[cluster.aggregator_drivers[1]])
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401"}


def test_a_collective_that_takes_too_long_names_who_is_waited_for() -> None:
    cluster = InprocCluster(3, shards=2, timeout_s=5.0)
    for rank in (0, 2):
        cluster.allreduce(rank, np.ones(50, np.float32), name="w")
    for now in (0.5, 1.5, 4.9):
        cluster.now = now
        cluster.settle()
        assert cluster.worker_ends == [None] * 3
    assert any("rank 1 (host h1, pid 101)" in warning for warning in cluster.warnings)
    for now in (5.0, 5.25):  # others may judge first, for a moment
        cluster.now = now
        cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}
    for end in cluster.worker_ends:
        assert end is not None
        assert end.cause is not None
        assert end.cause.timeout
        assert "allreduce 'w' of float32 (50,), sum" in end.cause.reason


def test_who_blames_a_rank_lets_it_blame_a_shard_before() -> None:
    """The other rank waits for a shard that hangs, and says so right after the time limit."""
    cluster = InprocCluster(2, shards=2, timeout_s=5.0)
    cluster.allreduce(0, np.ones(50, np.float32))
    for now in range(6):  # a shard late with a turn stood still itself
        cluster.now = now
        cluster.settle()
    assert cluster.worker_ends == [None] * 2
    assert cluster.workers[0].deadline == pytest.approx(5.25)
    cluster.worker_drivers[1].perform(cluster.workers[1].lost(1, "is stopped", cluster.now))
    cluster.settle()
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401"}


def test_a_shard_that_hangs_is_named() -> None:
    """Not the rank that the others waited for before."""
    cluster = InprocCluster(2, shards=2, timeout_s=5.0)
    hung = [cluster.aggregator_drivers[1]]
    cluster.allreduce(0, np.ones(50, np.float32))
    for now in (0.0, 1.0):
        cluster.now = now
        cluster.settle()
    assert "waiting for rank 1" in cluster.warnings[-1]
    cluster.allreduce(1, np.ones(50, np.float32))
    cluster.settle(paused=hung)
    cluster.now = 4.9
    cluster.settle(paused=hung)
    assert cluster.worker_ends == [None] * 2
    cluster.now = 5.0
    cluster.settle(paused=hung)
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401"}
    assert "nothing came from there for 4.0 s: is it stopped or overloaded?" in str(cluster.worker_ends[0])


def test_a_shard_that_stood_still_is_named_though_it_moves_on() -> None:
    """It has read what came from one rank only, and says that it waits for the other one."""
    cluster = InprocCluster(2, shards=2, timeout_s=5.0)
    stopped = cluster.aggregator_drivers[1]
    for rank in range(2):
        cluster.allreduce(rank, np.ones(50 * BLOCK, np.float32))
    cluster.settle(paused=[stopped])
    stopped.feed(0)
    stopped.advance()
    cluster.now = 4.5
    stopped.advance()
    cluster.settle(paused=[stopped])
    assert any("stood still for 3.5 s during collective 0" in warning for warning in cluster.warnings)
    assert "waiting for aggregator 127.0.0.1:7401, which stood still for 3.5 s" in cluster.warnings[-2]
    assert "waiting for rank 1 (host h1, pid 101) since 1.0 s" in cluster.warnings[-1]
    for now in (5.0, 5.25):
        cluster.now = now
        cluster.settle(paused=[stopped])
    assert cluster.culprits() == {"aggregator 127.0.0.1:7401, which stood still"}
    assert "all ranks waited for 3.5 s of this time" in str(cluster.worker_ends[0])


def test_who_a_hostile_shard_names_still_fits_a_message() -> None:
    waiting = Waiting("x", "the aggregator" + "a" * 4082, 1.0).with_sender("127.0.0.1:7400")
    assert waiting.who.startswith("aggregator 127.0.0.1:7400aaa")
    decode_control(encode_control(Leave(Cause(waiting.who, "not complete", timeout=True))))


def test_a_wait_counts_from_where_this_workers_collective_began() -> None:
    patience = CollectiveDeadline("rank 0", ["127.0.0.1:7400"], 60.0)
    patience.begin(39.0)
    patience.heard(Waiting("x", "aggregator 127.0.0.1:7400, which stood still", 39.0), 40.0)
    patience.heard(Waiting("x", "rank 1", 32.0), 73.0)
    assert patience.cause(99.0, "not complete", []).culprit == "rank 1"


def test_a_shard_that_stood_still_for_a_moment_still_names_the_rank_that_is_late() -> None:
    cluster = InprocCluster(2, timeout_s=3.0)
    cluster.allreduce(0, np.ones(50, np.float32))
    for now in (0.0, 2.1, 3.0, 3.15):
        cluster.now = now
        cluster.settle()
    assert any("the aggregator" not in warning and "stood still for 1.1 s" in warning for warning in cluster.warnings)
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


def test_a_shard_whose_results_come_until_the_end_is_not_blamed() -> None:
    cluster = InprocCluster(1, slot_bytes=ONE_BLOCK_SLOTS, timeout_s=5.0)
    cluster.allreduce(0, np.ones(100 * BLOCK, np.float32))
    for second in range(6):
        cluster.now = float(second)
        for driver in (*cluster.worker_drivers, *cluster.aggregator_drivers):
            driver.turn()
    assert cluster.culprits() == {"rank 0 (host h0, pid 100)"}
    assert "though it moves on; raise cluster.timeout_s" in str(cluster.worker_ends[0])


def test_a_rank_that_came_just_before_the_end_is_the_one_that_was_waited_for() -> None:
    cluster = InprocCluster(2, slot_bytes=ONE_BLOCK_SLOTS, timeout_s=5.0)
    cluster.allreduce(0, np.ones(100 * BLOCK, np.float32))
    for now in (0.0, 1.0, 2.0, 3.0, 4.0):
        cluster.now = now
        cluster.settle()
    cluster.allreduce(1, np.ones(100 * BLOCK, np.float32))
    cluster.now = 4.9
    for driver in (*cluster.worker_drivers, *cluster.aggregator_drivers):
        driver.turn()
    cluster.now = 5.0
    for driver in cluster.worker_drivers:
        driver.turn()
    cluster.now = 5.25  # others may judge first, for a moment
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}
    assert "all ranks waited for 4.0 s of this time" in str(cluster.worker_ends[0])


def test_a_rank_that_is_stopped_while_it_looks_for_input_does_not_blame_the_aggregator() -> None:
    """The notice of a stall is still unread; it blames the rank itself, for which the others waited."""
    cluster = InprocCluster(2, timeout_s=5.0)
    stopped = cluster.worker_drivers[1]
    for rank in range(2):
        cluster.allreduce(rank, np.ones(50, np.float32))
    cluster.settle()
    cluster.allreduce(0, np.ones(50, np.float32), name="w")
    cluster.settle()
    [link] = cluster.up[1]

    def stop_after_poll() -> Sequence[Event]:
        """Once, all others go on for six seconds right after this rank has looked."""
        link.poll = poll  # type: ignore[method-assign]
        events = poll()
        for now in (1.0, 3.0, 6.0):
            cluster.now = now
            cluster.settle(paused=[stopped])
        return events

    poll, link.poll = link.poll, stop_after_poll  # type: ignore[method-assign]
    cluster.allreduce(1, np.ones(50, np.float32), name="w")
    for _ in range(2):
        stopped.turn()
    for now in (6.5, 6.75):  # both noticed late, have listened for a moment, and let others judge for another one
        cluster.now = now
        for driver in cluster.worker_drivers:
            driver.turn()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


def test_who_notices_late_listens_for_a_moment_before_it_judges() -> None:
    """It was stopped; what the aggregator said meanwhile comes in parts."""
    cluster = InprocCluster(1, timeout_s=5.0)
    [worker] = cluster.worker_drivers
    cluster.allreduce(0, np.ones(50, np.float32))
    cluster.now = 6.0
    worker.turn()
    assert cluster.worker_ends == [None]
    assert worker.machine.deadline == pytest.approx(6.25)
    cluster.settle()
    assert worker.machine.deadline is None  # complete
    cluster.allreduce(0, np.ones(50, np.float32), name="next")
    cluster.now = 11.0
    worker.turn()
    assert cluster.worker_ends != [None]  # just in time: the aggregator has been silent, as far as this rank knows


def test_a_rank_that_sends_for_long_without_finding_a_block_is_waited_for() -> None:
    """Its messages move the shard on, but nothing of that reaches the ranks that are done sending."""
    cluster = InprocCluster(2, slots=2, scan_span=1, timeout_s=5.0)
    for rank in range(2):
        cluster.allreduce(rank, np.zeros(200 * BLOCK, np.float32))
    slow = cluster.worker_drivers[1]
    for tenth in range(51):
        cluster.now = tenth / 10
        slow.turn()
        cluster.settle(paused=[slow])
    slow.turn()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


def test_a_rank_that_takes_no_results_is_the_one_that_is_waited_for() -> None:
    cluster = InprocCluster(2, slots=2, slot_bytes=ONE_BLOCK_SLOTS)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(100 * BLOCK, np.float32))
    # rank 1 has sent all that its slots hold, and reads nothing any more
    cluster.worker_drivers[1].advance()
    cluster.settle(paused=[cluster.worker_drivers[1]])
    for cluster.now in (1.0, 2.0):
        cluster.settle(paused=[cluster.worker_drivers[1]])
    assert cluster.warnings
    assert all("rank 1 (host h1, pid 101)" in warning and "rank 0" not in warning for warning in cluster.warnings)
    cluster.run()


def test_a_rank_that_has_left_is_named_when_the_others_go_on() -> None:
    cluster = InprocCluster(2)
    for rank in range(2):
        cluster.allreduce(rank, np.ones(50, np.float32))
    cluster.run()
    cluster.worker_drivers[1].perform(cluster.workers[1].leave())
    cluster.allreduce(0, np.ones(50, np.float32))
    cluster.settle()
    end = cluster.worker_ends[0]
    assert end is not None
    assert end.cause is not None
    assert end.cause.culprit == "rank 1 (host h1, pid 101)"
    assert "had shut down" in end.cause.reason


def test_all_ranks_leave_and_the_job_ends_cleanly() -> None:
    cluster = InprocCluster(3, shards=2)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(50, np.float32))
    cluster.run()
    for rank in range(3):
        assert not cluster.workers[rank].said_goodbye
        cluster.worker_drivers[rank].perform(cluster.workers[rank].leave())
    cluster.settle()
    assert all(end is not None and end.cause is None for end in cluster.aggregator_ends)
    assert all(worker.said_goodbye for worker in cluster.workers)


def test_leaving_with_a_collective_under_way_ends_it_everywhere() -> None:
    cluster = InprocCluster(3, shards=2)
    for rank in range(3):
        cluster.allreduce(rank, np.ones(5000, np.float32))
    cluster.worker_drivers[2].perform(cluster.workers[2].leave())
    cluster.settle()
    assert cluster.culprits() == {"rank 2 (host h2, pid 102)"}


@pytest.mark.parametrize("message", [Pending([1], 1), Hello(1, "j", 0, 1, 0, 1, 2, 65536, "h", 1, 64)])
def test_a_control_message_out_of_place_is_a_protocol_error(message: Hello | Pending) -> None:
    cluster = InprocCluster(2, shards=2)
    cluster.up[1][0].send_control(encode_control(message))
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}


def test_leaving_twice_is_a_protocol_error() -> None:
    cluster = InprocCluster(2, shards=2)
    for _ in range(2):
        cluster.up[1][0].send_control(encode_control(Leave()))
    cluster.settle()
    assert cluster.culprits() == {"rank 1 (host h1, pid 101)"}
