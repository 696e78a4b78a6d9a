"""Workers that die or are interrupted: every other rank learns in time who it was, and the daemon goes on."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator

import pytest
from cluster_checks import DEATH_S, FAILURE_S, assert_aborted, assert_serves, expect_round, name_of
from local_cluster import Daemon, Process, eventually, unique_job, workers
from transports import TRANSPORTS, over

LARGE = ("--elements", "8000000")  # 32 MB: always in the middle of something
either = pytest.mark.parametrize("transport", [over(way) for way in TRANSPORTS], ids=TRANSPORTS)


@either
def test_kill_in_mid_collective(daemon: Daemon, transport: tuple[str, ...]) -> None:
    """Rank 0 and the victim wait in a collective for rank 2, which computes and learns it at its next call."""
    job = unique_job("killed")
    with workers(daemon, 3, "--hold", "2", "1", job=job, overrides=transport) as (first, victim, late):
        expect_round(first, "started", 1)
        expect_round(victim, "started", 1)
        late.expect("held")
        killed = victim.signal(signal.SIGKILL)
        assert_aborted([first], killed, DEATH_S, name_of(victim, 1))
        began = time.monotonic()
        late.go_on()
        assert_aborted([late], began, FAILURE_S, name_of(victim, 1))
        assert_serves(daemon, *transport, job=job)


def test_kill_of_the_rank_that_others_wait_for(daemon: Daemon) -> None:
    with workers(daemon, 3, "--hold", "1", "1", overrides=over("tcp")) as (first, victim, third):
        for worker in (first, third):
            expect_round(worker, "started", 1)
        victim.expect("held")
        killed = victim.signal(signal.SIGKILL)
        assert_aborted([first, third], killed, DEATH_S, name_of(victim, 1))


@either
def test_kill_in_full_flow(daemon: Daemon, transport: tuple[str, ...]) -> None:
    """Kill a rank whose messages and results are on their way."""
    job = unique_job("flow")
    with workers(daemon, 3, *LARGE, job=job, overrides=transport) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        killed = ranks[1].signal(signal.SIGKILL)
        survivors = [worker for worker in ranks if worker is not ranks[1]]
        assert_aborted(survivors, killed, DEATH_S, name_of(ranks[1], 1))
        assert_serves(daemon, *transport, job=job)


def test_kill_of_all_but_one_at_once(daemon: Daemon) -> None:
    """Whichever death is seen first is named."""
    with workers(daemon, 4, "--hold", "0", "1") as (first, *victims):
        for worker in victims:
            expect_round(worker, "started", 1)
        first.expect("held")
        for worker in victims:
            worker.signal(signal.SIGKILL)
        for worker in victims:
            worker.wait()
        first.go_on()
        error = first.expect("error")
        assert error["type"] == "AbortedError"
        assert error["culprit"] in [name_of(worker, rank) for rank, worker in enumerate(victims, 1)]
    assert_serves(daemon)


@either
def test_interrupt_of_a_rank_that_waits(daemon: Daemon, transport: tuple[str, ...]) -> None:
    """Ctrl-C in a collective: the others are told, and the program's status is 130."""
    with workers(daemon, 3, "--hold", "2", "1", overrides=transport) as (first, victim, late):
        expect_round(first, "started", 1)
        expect_round(victim, "started", 1)
        late.expect("held")
        interrupted = victim.signal(signal.SIGINT)
        assert victim.expect("error")["type"] == "KeyboardInterrupt"
        assert victim.wait() == 130
        [error] = assert_aborted([first], interrupted, FAILURE_S, name_of(victim, 1))
        assert "KeyboardInterrupt" in error["text"]
        late.go_on()
        assert late.expect("error")["culprit"] == name_of(victim, 1)


def test_interrupt_of_a_rank_that_computes(daemon: Daemon) -> None:
    with workers(daemon, 3, "--hold", "1", "1") as (first, victim, third):
        victim.expect("held")
        interrupted = victim.signal(signal.SIGINT)
        assert victim.wait() == 130
        for error in assert_aborted([first, third], interrupted, FAILURE_S, name_of(victim, 1)):
            assert "left because of KeyboardInterrupt" in error["text"]


def test_interrupt_in_full_flow(daemon: Daemon) -> None:
    with workers(daemon, 3, *LARGE, overrides=over("tcp")) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        interrupted = ranks[2].signal(signal.SIGINT)
        assert ranks[2].wait() == 130
        assert_aborted(ranks[:2], interrupted, FAILURE_S, name_of(ranks[2], 2))
    assert_serves(daemon)


def test_a_rank_that_leaves_while_others_go_on(daemon: Daemon) -> None:
    """A shutdown is no failure; the others learn it when they need the rank again."""
    job = unique_job("leaves")
    with workers(daemon, 3, job=job, per_rank=[("--rounds", "2"), (), ()]) as (leaver, second, third):
        began = time.monotonic()
        leaver.expect("left")
        assert leaver.wait() == 0
        for error in assert_aborted([second, third], began, FAILURE_S, name_of(leaver, 0)):
            assert "had shut down when collective 2" in error["text"]


@pytest.fixture
def quiet_daemon() -> Iterator[Daemon]:
    """A daemon of this test alone: with many others at once, its log leaves lines out."""
    with Daemon() as started:
        yield started


def test_interrupt_of_the_worker_program(quiet_daemon: Daemon) -> None:
    """Both programs of a benchmark end at once, the interrupted one with status 130."""
    job = unique_job("bench")
    settings = {
        "cluster.aggregators": json.dumps(quiet_daemon.addresses),
        "cluster.job": job,
        "bench.elements": "1000",
        "bench.density": "0.5",
        "bench.rounds": "1000000",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]

    def start(rank: int) -> Process:
        return Process(sys.executable, "-m", "omnireduce.worker", "bench", "--rank", str(rank), "--size", "2", *words)

    with start(0) as victim, start(1) as other:
        assert eventually(lambda: f"job '{job}'" in quiet_daemon.log), victim.log + other.log  # all ranks have joined
        interrupted = victim.signal(signal.SIGINT)
        assert victim.wait() == 130
        assert other.wait() == 1
        assert time.monotonic() - interrupted < FAILURE_S
        assert victim.log.splitlines()[-1] == "Interrupted"
        assert name_of(victim, 0) in other.log.splitlines()[-1]
        assert "Traceback" not in victim.log + other.log
