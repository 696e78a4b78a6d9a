"""Workers that are late or stopped: the error after `cluster.timeout_s` names them on every rank, others included."""

from __future__ import annotations

import re
import signal
import threading
import time

import numpy as np
import pytest
from cluster_checks import FAILURE_S, SLOWNESS, assert_aborted, assert_serves, expect_round, name_of
from local_cluster import WAIT_S, Daemon, configured, run_job, unique_job, workers
from transports import TRANSPORTS, over

from omnireduce import CollectiveTimeoutError, Communicator

TIMEOUT = "CollectiveTimeoutError"


@pytest.mark.parametrize(("transport", "timeout_s"), [("tcp", 0.3), ("shm", 2.0)])
def test_a_late_rank_is_named(daemon: Daemon, transport: str, timeout_s: float) -> None:
    """Limits below and above the second after which warnings begin."""
    limits = [f"cluster.timeout_s={timeout_s}", *over(transport)]
    with workers(daemon, 2, "--hold", "1", "0", overrides=limits) as (first, late):
        late.expect("held")
        expect_round(first, "started", 0)
        name = name_of(late, 1)
        (error,) = assert_aborted([first], time.monotonic(), timeout_s + FAILURE_S, name, kind=TIMEOUT)
        assert "collective 0 (allreduce 'gradient' of float32 (100000,), sum" in error["text"]
        assert f"not complete after {timeout_s:g} s" in error["text"]
        assert f"waiting for {name} since" in first.log
        assert first.log.count(f"waiting for {name}") <= 3  # not once per shard and second
        late.go_on()
        assert_aborted([late], time.monotonic(), FAILURE_S, name, kind=TIMEOUT)
        assert not re.search(r"waiting for .* \(host", late.log)


def test_two_late_ranks_are_both_named(daemon: Daemon) -> None:
    holds = [(), ("--hold", "1", "0"), ("--hold", "2", "0")]
    with workers(daemon, 3, per_rank=holds, overrides=["cluster.timeout_s=0.5"]) as (first, second, third):
        expect_round(first, "started", 0)
        culprits = f"{name_of(second, 1)}, {name_of(third, 2)}"
        assert_aborted([first], time.monotonic(), 0.5 + FAILURE_S, culprits, kind=TIMEOUT)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_named_and_told_when_it_goes_on(daemon: Daemon, transport: str) -> None:
    """SIGSTOP in full flow: to the system it is alive, and it has messages and results under way."""
    job = unique_job("stopped")
    timeout_s = 3 * SLOWNESS
    limits = [f"cluster.timeout_s={timeout_s}", *over(transport)]
    with workers(daemon, 3, "--elements", "2000000", job=job, overrides=limits) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        stopped = ranks[1].signal(signal.SIGSTOP)
        name = name_of(ranks[1], 1)
        assert_aborted([ranks[0], ranks[2]], stopped, timeout_s + FAILURE_S, name, kind=TIMEOUT)
        assert_serves(daemon, *over(transport), job=job)
        went_on = ranks[1].signal(signal.SIGCONT)
        assert_aborted([ranks[1]], went_on, FAILURE_S, name, kind=TIMEOUT)


def test_a_rank_that_computes_for_long_is_alive(daemon: Daemon) -> None:
    """Only a collective has a time limit; it counts from its start, not from the last one."""
    holds, timeout_s = [("--hold", "0", "1"), ("--hold", "1", "1")], 2.0  # a round takes much less on a busy machine
    with workers(daemon, 2, "--rounds", "2", per_rank=holds, overrides=[f"cluster.timeout_s={timeout_s}"]) as ranks:
        for worker in ranks:
            worker.expect("held")
        for worker in ranks:
            with pytest.raises(AssertionError, match="no event 'error'"):
                worker.expect("error", timeout_s=0.6 * timeout_s)
        for worker in ranks:
            worker.go_on()
        for worker in ranks:
            worker.expect("left")


def test_the_limit_holds_for_collectives_that_nobody_waits_for(daemon: Daemon) -> None:
    """The background thread keeps it."""
    over = threading.Event()

    def run(comm: Communicator) -> str:
        if comm.rank == 0:
            handle = comm.allreduce_async(np.ones(10), name="forgotten")
            deadline = time.monotonic() + 0.3 + FAILURE_S
            while not handle.done():
                assert time.monotonic() < deadline
                over.wait(0.01)
            over.set()
        else:
            assert over.wait(WAIT_S)
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* collective 0 \(allreduce 'forgotten'") as caught:
            comm.barrier()
        return caught.value.culprit.split(" (")[0]

    assert run_job(configured(daemon.addresses, "cluster.timeout_s=0.3"), 2, run) == ["rank 1"] * 2


def test_time_outs_do_not_disturb_other_jobs(daemon: Daemon) -> None:
    """A job that stands still on the same shards."""
    with workers(daemon, 2, "--hold", "1", "0", overrides=["cluster.timeout_s=30"]) as (first, late):
        expect_round(first, "started", 0)
        assert_serves(daemon)
        late.go_on()
        expect_round(late, "round", 0)
