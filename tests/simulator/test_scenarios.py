"""Named scenarios: what a seed once found, and what an operator would ask about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from omnireduce.core.wire.control import ControlMessage, Refused, decode_control
from omnireduce.errors import AbortedError, CollectiveTimeoutError, OmniReduceError, RefusedError
from omnireduce.transport.base import Control

from .cluster import Cluster
from .faults import strike
from .plan import Fault, JobPlan, NetworkPlan, Plan, ProtocolPlan
from .stranger import SILENT, Stranger
from .tamper import RULES, UNSEEN
from .worker import Worker
from .workload import Collective

NETWORK = NetworkPlan(1e-5, spike=0.0, latency_s=1e-3, slow=0.0, pipe_bytes=1 << 12, shared_memory=0.0)
SUM = Collective("allreduce", "sum", "float32", 900, 64, 0.7, 11)
BARRIER = Collective("barrier", "sum", "uint8", 0, 8, 0.0, 1)


def cluster(
    *faults: Fault, ranks: int = 2, shards: int = 1, work: tuple[Collective, ...] = (SUM,), **job: Any
) -> Cluster:
    """One job on a calm network whose pipes hold little."""
    protocol = ProtocolPlan(shards=shards, slots=2, stripe_blocks=3, scan_span=4)
    plan = JobPlan("job0", ranks, 0.0, work, **{"window": 1, "think_s": 0.0} | job)
    return Cluster(Plan(1, NETWORK, protocol, (plan,), faults))


def workers(run: Cluster, rank: int) -> list[Worker]:
    """The workers that were `rank`, in the order in which they came."""
    return [worker for worker in run.history or run.workers if worker.rank == rank]


def when(run: Cluster, rank: int, condition: Callable[[Worker], object], action: Callable[[Worker], object]) -> None:
    """Let `action` happen right after the event by which the first worker of `rank` meets `condition`."""

    def look(number: int) -> None:
        result = workers(run, rank)[:1]
        if result and condition(result[0]):
            action(result[0])
        else:
            run.world.at_event(number + 1, lambda: look(number + 1))

    look(0)


def joined(worker: Worker) -> bool:
    return worker.running


def error(run: Cluster, rank: int, attempt: int = 0) -> OmniReduceError | None:
    return workers(run, rank)[attempt].error


def test_a_lone_worker_that_dies_leaves_the_shard_up() -> None:
    run = cluster(ranks=1, think_s=1.0, work=(SUM, SUM))
    when(run, 0, joined, lambda _: strike(run, Fault("crash")))
    assert run.run() == []


def test_hello_and_death_in_one_breath_are_both_heard() -> None:
    run = cluster(Fault("late", rank=1, number=1.0))
    when(run, 1, lambda worker: worker.links, lambda _: strike(run, Fault("crash", rank=1)))
    assert run.run() == []
    result = error(run, 0)
    assert isinstance(result, AbortedError)
    assert result.culprit == workers(run, 1)[0].culprit
    assert (workers(run, 0)[0].ended_at or 99) < 2


def test_a_rank_that_talks_nonsense_while_a_job_gathers_may_come_again() -> None:
    run = cluster(Fault("late", rank=1, number=1.0), attempts=2)
    when(run, 0, lambda worker: worker.links, lambda _: strike(run, Fault("garbage")))
    assert run.run() == []
    assert isinstance(error(run, 0), RefusedError)
    assert error(run, 0, 1) is None
    assert error(run, 1) is None


def slow_down(worker: Worker) -> None:
    """From now on, the worker takes at most five turns a second."""
    worker.latency_s = lambda: 0.2


def shard_began(run: Cluster) -> bool:
    """A collective is under way on the first shard."""
    return any(not job.machine.idle for job in run.shards[0].server._jobs.values())


def delay_second_welcome(run: Cluster) -> None:
    """Rank 1 hears from shard 1 only 3 s after it was admitted there; rank 0 goes ahead."""

    def delay(worker: Worker, seconds: float) -> None:
        worker.links[1].other_end._delay_s = lambda: seconds

    when(run, 1, lambda worker: len(worker.links) == 2, lambda worker: delay(worker, 3.0))
    when(run, 1, joined, lambda worker: delay(worker, 0.0))


def test_a_rank_may_be_waited_for_before_it_is_welcome_everywhere() -> None:
    run = cluster(shards=2)
    delay_second_welcome(run)
    assert run.run() == []
    assert (workers(run, 0)[0].ended_at or 0) > 3
    assert [worker.error for worker in run.history] == [None, None]


def test_a_job_may_be_over_before_a_rank_is_welcome_everywhere() -> None:
    run = cluster(shards=2)
    delay_second_welcome(run)
    when(run, 0, joined, lambda _: strike(run, Fault("crash")))
    assert run.run() == []
    result = error(run, 1)
    assert isinstance(result, AbortedError)
    assert result.culprit == workers(run, 0)[0].culprit
    assert (workers(run, 1)[0].ended_at or 99) < 1


def assert_one_collective_then_the_stop(run: Cluster) -> None:
    for rank in range(2):
        result = error(run, rank)
        assert isinstance(result, AbortedError)
        assert "shutting down" in result.reason
        assert workers(run, rank)[0].completed == 1


def test_a_shard_that_drains_lets_a_job_end() -> None:
    run = cluster(work=(SUM, SUM))
    when(run, 1, joined, lambda _: strike(run, Fault("drain", number=0.001)))
    assert run.run() == []
    for rank in range(2):
        assert workers(run, rank)[0].error is None
        assert workers(run, rank)[0].completed == 2


def test_a_shard_that_stops_lets_a_collective_finish() -> None:
    run = cluster(work=(SUM, SUM))
    when(run, 1, joined, lambda _: strike(run, Fault("worker stall", rank=1, number=2.0)))
    run.world.at(0.5, lambda: strike(run, Fault("drain")))
    assert run.run() == []
    assert_one_collective_then_the_stop(run)


def test_what_another_shard_still_has_to_deliver_is_not_lost_when_one_stops() -> None:
    """Shard 0 is done with the collective. It stops, waits 5 s and hangs up. Only then the results of shard 1 come."""

    def delay(worker: Worker) -> None:
        worker.links[1].other_end._delay_s = lambda: 7.0

    run = cluster(shards=2, work=(SUM, SUM))
    for rank in range(2):
        when(run, rank, joined, delay)
    run.world.at(0.5, lambda: strike(run, Fault("drain")))
    assert run.run() == []
    assert_one_collective_then_the_stop(run)


def test_a_shard_that_stops_does_not_wait_for_ever() -> None:
    run = cluster(work=(SUM, SUM))
    when(run, 1, joined, lambda _: strike(run, Fault("freeze", rank=1, number=15.0)))
    run.world.at(0.5, lambda: strike(run, Fault("drain")))
    assert run.run() == []
    result = error(run, 0)
    assert isinstance(result, AbortedError)
    assert "did not finish within" in result.reason
    assert 5 < (workers(run, 0)[0].ended_at or 0) < 6


def test_a_second_process_with_the_same_rank_is_refused_at_once() -> None:
    run = cluster(Fault("duplicate", number=0.5), Fault("late", rank=1, number=1.0))
    assert run.run() == []
    refused = workers(run, 0)[1]
    assert isinstance(refused.error, RefusedError)
    assert workers(run, 0)[0].culprit in str(refused.error)
    assert (refused.ended_at or 99) < 0.6
    assert error(run, 0) is error(run, 1) is None


def test_a_rank_with_another_world_size_is_refused_at_once() -> None:
    run = cluster(Fault("world size", rank=1, number=1), Fault("late", rank=1, number=0.5), attempts=2)
    assert run.run() == []
    assert isinstance(error(run, 1), RefusedError)
    assert "world_size 3 differs from 2" in str(error(run, 1))
    assert error(run, 0) is error(run, 1, 1) is None


def test_nobody_waits_for_a_rank_of_the_same_launch_that_was_refused_for_good() -> None:
    """The third rank comes later, and is told as well."""
    faults = Fault("world size", rank=1, number=1), Fault("late", rank=1, number=0.5), Fault("late", rank=2, number=1.0)
    run = cluster(*faults, ranks=3, launch="mpirun-7")
    assert run.run() == []
    for rank, by in ((0, 0.6), (1, 0.6), (2, 1.1)):
        assert isinstance(error(run, rank), RefusedError)
        assert "world_size 4 differs from 3" in str(error(run, rank))
        assert (workers(run, rank)[0].ended_at or 99) < by


@pytest.mark.parametrize(("seed", "both"), [(11, ("'x11' of float32 (", "(1, ")), (12, ("'x12'", "'x14'"))])
def test_different_collectives_in_one_place_name_both_sides(seed: int, both: tuple[str, str]) -> None:
    """They may differ in nothing but the shape."""
    run = cluster(Fault("mismatch", rank=1, number=1), work=(SUM, replace(SUM, seed=seed)))
    assert run.run() == []
    for rank in range(2):
        result = error(run, rank)
        assert isinstance(result, AbortedError)
        assert all(name in result.reason for name in ("collective 1", "rank 0", "rank 1", *both))
        assert workers(run, rank)[0].completed == 1


def test_a_frozen_rank_is_named_by_those_that_waited_for_it() -> None:
    run = cluster(ranks=3)
    when(run, 1, joined, lambda _: strike(run, Fault("freeze", rank=1, number=60.0)))
    assert run.run() == []
    for rank in (0, 2):
        result = error(run, rank)
        assert isinstance(result, CollectiveTimeoutError)
        assert result.culprit == workers(run, 1)[0].culprit


def test_a_frozen_shard_is_named_and_serves_again_when_it_goes_on() -> None:
    run = cluster(ranks=3, shards=2, attempts=2, think_s=0.5, work=(SUM,) * 3)
    when(run, 0, lambda worker: worker.completed, lambda _: strike(run, Fault("shard freeze", shard=1, number=21.0)))
    assert run.run() == []
    for rank in range(3):
        result = error(run, rank)
        assert isinstance(result, CollectiveTimeoutError)
        assert result.culprit == "aggregator shard1:7400"
        assert error(run, rank, 1) is None


def test_a_rank_that_was_stopped_does_not_believe_that_what_it_reads_has_just_come() -> None:
    """Both stand still. The credit that the shard gave before is read 30 s after the limit."""
    run = cluster(work=(BARRIER,))
    when(run, 0, lambda worker: worker.links, slow_down)
    when(run, 1, joined, lambda _: strike(run, Fault("freeze", rank=1, number=50.0)))
    when(run, 1, lambda _: shard_began(run), lambda _: strike(run, Fault("shard freeze", number=60.0)))
    assert run.run() == []
    assert isinstance(error(run, 0), CollectiveTimeoutError)
    assert "aggregator shard0:7400" in str(error(run, 0))
    result = error(run, 1)
    assert isinstance(result, CollectiveTimeoutError)
    assert result.culprit == workers(run, 1)[0].culprit
    assert "it noticed that 30.0 s late: was it stopped or overloaded?" in result.reason


def test_a_lone_rank_that_lies_about_the_number_may_blame_the_shard_for_what_comes_back() -> None:
    run = cluster(ranks=1, think_s=1.0, work=(BARRIER, BARRIER))
    when(run, 0, joined, lambda _: strike(run, Fault("tampering", number=RULES.index(UNSEEN))))
    assert run.run() == []
    assert "aggregator shard0:7400: protocol error: a result out of order" in str(error(run, 0))


def test_ranks_join_again_after_their_shard_came_back() -> None:
    run = cluster(shards=2, attempts=2, think_s=0.5, work=(SUM,) * 3)
    when(run, 0, lambda worker: worker.completed, lambda _: strike(run, Fault("shard crash", shard=1, number=1.0)))
    assert run.run() == []
    for rank in range(2):
        result = error(run, rank)
        assert isinstance(result, AbortedError)
        assert "shard1:7400" in result.culprit
        assert error(run, rank, 1) is None


def test_a_rank_joins_the_next_generation_while_others_still_leave_the_last() -> None:
    run = cluster(ranks=3, rounds=3)
    when(run, 2, joined, slow_down)
    assert run.run() == []
    assert len(workers(run, 0)) == 3
    assert not any(worker.error for worker in run.history)


def test_a_rank_without_data_may_lag_behind_many_results() -> None:
    large = replace(SUM, dtype="uint8", elements=400 * 8192, block_size=8192, density=1.0, kind="broadcast", root=0)
    run = cluster(work=(large,))
    when(run, 1, joined, slow_down)
    assert run.run() == []
    assert not any(worker.error for worker in run.history)


def test_a_slow_reader_hears_why_the_job_ended() -> None:
    large = replace(SUM, elements=40 * 2048, block_size=2048, density=1.0)
    run = cluster(work=(large, large))
    when(run, 1, joined, slow_down)
    run.world.at(0.7, lambda: strike(run, Fault("crash")))
    assert run.run() == []
    result = error(run, 1)
    assert isinstance(result, AbortedError)
    assert result.culprit == workers(run, 0)[0].culprit


def test_who_says_no_hello_in_time_may_come_again() -> None:
    """It may be a survivor that was silent because the shard stood still, and that has time left."""
    messages: list[ControlMessage] = []

    class Silent(Stranger):
        def turn(self) -> None:
            if self.link is not None:
                messages.extend(decode_control(each.body) for each in self.link.poll() if isinstance(each, Control))

    run = cluster()
    run.world.at(0.5, lambda: run.strangers.append(Silent(run, 0, SILENT)))
    assert run.run() == []
    assert messages == [Refused("no Hello within 10 s", temporary=True)]
