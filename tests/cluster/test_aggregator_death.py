"""Aggregators that die: every rank raises and names the address, and a new job works once the shard is back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
from cluster_checks import DEATH_S, FAILURE_S, assert_aborted, assert_serves, expect_round
from free_ports import free_address
from local_cluster import WAIT_S, Daemon, configured, eventually, gone_within, run_job, start_job, workers
from transports import TRANSPORTS, over

from omnireduce import AbortedError, Communicator, TransportError


@pytest.fixture(scope="module")
def mortal() -> Iterator[Daemon]:
    """A daemon of two shards, the second of which may be killed (five times a minute)."""
    with Daemon(2) as daemon:
        yield daemon


def kill_second_shard(daemon: Daemon) -> float:
    now = time.monotonic()
    os.kill(daemon.shard_pids[1], signal.SIGKILL)  # the youngest: it is restarted last
    return now


def names_of(daemon: Daemon) -> list[str]:
    return [f"aggregator {address}" for address in daemon.addresses]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_kill_of_a_shard_in_mid_collective(mortal: Daemon, transport: str) -> None:
    before = mortal.shard_pids
    culprit = f"aggregator {mortal.addresses[1]}"
    with workers(mortal, 3, "--hold", "2", "1", overrides=over(transport)) as (first, second, late):
        late.expect("held")
        for worker in (first, second):
            expect_round(worker, "started", 1)
        killed = kill_second_shard(mortal)
        assert_aborted([first, second], killed, DEATH_S, culprit)
        began = time.monotonic()
        late.go_on()
        assert_aborted([late], began, FAILURE_S, culprit)
    assert_serves(mortal, *over(transport))
    assert mortal.shard_pids[0] == before[0]
    assert mortal.shard_pids[1] != before[1]
    assert f"shard {mortal.addresses[1]} died with status -9" in mortal.log


def test_kill_of_a_shard_in_full_flow(mortal: Daemon) -> None:
    with workers(mortal, 2, "--elements", "8000000", overrides=over("tcp")) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        killed = kill_second_shard(mortal)
        assert_aborted(ranks, killed, DEATH_S, f"aggregator {mortal.addresses[1]}")
    assert_serves(mortal)


def test_kill_of_an_idle_shard_disturbs_no_later_job(mortal: Daemon) -> None:
    """A worker that comes while the shard is away waits for it."""
    kill_second_shard(mortal)
    assert_serves(mortal)


def test_kill_of_the_supervisor() -> None:
    """The shards see it and stop as on SIGTERM: idle jobs at once, a collective that stands still after `finish_s`."""
    with Daemon(2, "aggregator.finish_s=0.5") as daemon:
        daemon.expected_status = -signal.SIGKILL
        shards = daemon.shard_pids
        with workers(daemon, 2, "--hold", "1", "1") as stuck, workers(daemon, 1, "--hold", "0", "1") as idle:
            expect_round(stuck[0], "started", 1)
            stuck[1].expect("held")
            idle[0].expect("held")
            killed = daemon.signal(signal.SIGKILL)
            began = time.monotonic()
            idle[0].go_on()
            errors = assert_aborted(idle, began, FAILURE_S, *names_of(daemon))
            errors += assert_aborted(stuck[:1], killed, FAILURE_S, *names_of(daemon))
            began = time.monotonic()
            stuck[1].go_on()
            errors += assert_aborted(stuck[1:], began, FAILURE_S, *names_of(daemon))
            assert all("shutting down" in error["text"] for error in errors)
        assert all(gone_within(pid, FAILURE_S) for pid in shards)


def test_a_daemon_that_is_gone_for_good() -> None:
    """Supervisor and shards killed at once: connections break, a rank that joins says what to do."""
    with Daemon(2, listen=free_address(2)) as daemon:
        daemon.expected_status = -signal.SIGKILL
        config = configured(daemon.addresses, "cluster.join_timeout_s=0.3")
        with workers(daemon, 2, "--elements", "8000000") as ranks:
            for worker in ranks:
                expect_round(worker, "round", 1)
            shards = daemon.shard_pids
            killed = daemon.signal(signal.SIGKILL)
            for pid in shards:
                os.kill(pid, signal.SIGKILL)
            assert_aborted(ranks, killed, DEATH_S, *names_of(daemon))
        assert all(gone_within(pid, WAIT_S) for pid in shards)
        with pytest.raises(
            TransportError, match=r"cannot reach aggregator .* is `omnireduce aggregator` running there"
        ):
            Communicator(config, rank=0, size=1)


def test_a_daemon_that_is_started_again_at_its_address() -> None:
    """The same communicator stays dead; a new one works, also when it begins to join before the daemon is back."""

    def run(comm: Communicator) -> list[float]:
        return comm.allreduce(np.ones(3)).tolist()

    address = free_address()
    with Daemon(1, listen=address):
        config = configured([address])
        comm = Communicator(config, rank=0, size=1)
        assert run(comm) == [1.0] * 3
    with pytest.raises(AbortedError, match=f"aggregator {address}: "):
        run(comm)
    joining = start_job(config, 2, run)
    with Daemon(1, listen=address) as second:
        assert joining.results() == [[2.0] * 3] * 2
        assert run_job(config, 1, run) == [[1.0] * 3]
        assert second.addresses == [address]
    comm.shutdown()


def test_a_shard_that_dies_too_often_ends_the_daemon() -> None:
    """Something is broken for good: say so instead of restarting for ever."""
    with Daemon(2, "aggregator.finish_s=0") as daemon:
        daemon.expected_status = 1
        seen = set(daemon.shard_pids)

        def restarted_or_over() -> bool:
            return daemon.popen.poll() is not None or bool(set(daemon.shard_pids) - seen)

        for _ in range(6):
            kill_second_shard(daemon)
            assert eventually(restarted_or_over)
            seen.update(daemon.shard_pids)
        assert daemon.wait() == 1
        assert "6 shards died within 60 s; giving up" in daemon.log
        assert all(gone_within(pid, FAILURE_S) for pid in seen)
