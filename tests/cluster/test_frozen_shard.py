"""An aggregator shard that is stopped: to the system it is alive, and its connections stay open."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cluster_checks import FAILURE_S, assert_aborted, assert_serves, expect_round
from local_cluster import SLOWNESS, Daemon, Ranks, configured, eventually, unique_job, workers
from transports import KINDS, MEMORY, over

from omnireduce import ClosedError
from omnireduce.runtime.rank.joining import JoinedWorker, hello_of, join


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("transport", KINDS)
def test_a_stopped_shard_is_named_and_serves_again_when_it_goes_on(transport: str) -> None:
    timeout_s = 2 * SLOWNESS  # the round before takes much less on a busy machine
    limits = [f"cluster.timeout_s={timeout_s}", *over(transport)]
    with Daemon(2) as daemon:
        with workers(daemon, 3, per_rank=[("--hold", "0", "1"), (), ()], overrides=limits) as ranks:
            expect_round(ranks[1], "started", 1)
            ranks[0].expect("held")
            with stopped(daemon.shard_pids[1]):
                since = time.monotonic()
                ranks[0].go_on()
                culprit = f"aggregator {daemon.addresses[1]}"
                errors = assert_aborted(ranks, since, timeout_s + FAILURE_S, culprit, kind="CollectiveTimeoutError")
        why = f"not complete after {timeout_s:g} s; nothing came from there for"
        assert all(why in error["text"] for error in errors)
        assert_serves(daemon, *over(transport))


def test_a_shard_that_stood_still_says_so() -> None:
    """To its log, and to the ranks. The time limit of another job tells how long it stood still at least."""
    waiting, timed = ("--hold", "1", "1"), ["cluster.timeout_s=8", *over("tcp")]
    with Daemon(1) as daemon, workers(daemon, 2, *waiting, overrides=over("tcp")) as (rank, late):
        expect_round(rank, "started", 1)
        late.expect("held")
        assert eventually(lambda: "waits for" in daemon.log)
        with workers(daemon, 2, "--hold", "1", "1", overrides=timed) as others:
            expect_round(others[0], "started", 1)
            with stopped(daemon.shard_pids[0]):
                others[0].expect("error")
        assert eventually(lambda: "event=stood_still" in daemon.log)
        assert eventually(lambda: f"waiting for aggregator {daemon.addresses[0]}, which stood still for" in rank.log)
        late.go_on()
        expect_round(rank, "round", 1)


def test_ranks_that_share_memory_go_on_beside_stopped_shards() -> None:
    with Daemon(1) as daemon, workers(daemon, 3, overrides=[*over(MEMORY), "cluster.timeout_s=60"]) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        with stopped(daemon.shard_pids[0]):
            last = [worker.expect("round")["round"] for worker in ranks]
            for worker, number in zip(ranks, last, strict=True):
                expect_round(worker, "round", number + 100)


@pytest.mark.parametrize("transport", ["shm", "tcp"])  # it is about connections before RDMA begins
def test_a_worker_that_gave_up_asks_again_before_the_shard_has_read_that(transport: str) -> None:
    """The shard finds all at once: the first hello, the end of that connection, and the second hello."""
    with Daemon(1) as daemon:
        config, job = configured(daemon.addresses, *over(transport)), unique_job()
        hellos = [hello_of(config, job, "", rank, 2) for rank in range(2)]

        second_hello = threading.Event()  # rank 0 has said its second hello

        def go_on(rank: int) -> bool:
            if rank == 0:
                os.kill(daemon.shard_pids[0], signal.SIGCONT)
                second_hello.set()
            return False

        def come(rank: int) -> JoinedWorker:
            assert rank == 0 or second_hello.wait(FAILURE_S)  # else the first hello of rank 0 would do for a job
            return join(config, hellos[rank], None, lambda: go_on(rank))

        with stopped(daemon.shard_pids[0]):
            with pytest.raises(ClosedError):
                join(config, hellos[0], None, lambda: True)
            arrivals = Ranks(2, come).results()
        assert [arrival.joined.rank for arrival in arrivals] == [0, 1]
        for arrival in arrivals:
            for link in arrival.links:
                link.close()
