"""The logs of real programs as JSON: every line parses, and says which job and rank it is about."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest
from cluster_checks import SLOWNESS, assert_aborted, expect_round, name_of
from local_cluster import READY_S, Daemon, Process, configured, eventually, unique_job, workers
from raw_peer import RawPeer, await_pending

from omnireduce import Communicator, RefusedError


def events(log: str, name: str = "") -> list[dict[str, Any]]:
    """The lines of a log, each of them JSON; those of one event, if it is named."""
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(line.keys() >= {"time", "level", "event", "pid", "message"} for line in lines)
    return [line for line in lines if name in ("", line["event"])]


def test_the_life_of_a_job() -> None:
    """A rank is stopped: the aggregator says whom the others wait for, and whose fault the end is."""
    job, stuck = unique_job("json"), [f"cluster.timeout_s={2 * SLOWNESS}"]
    with Daemon(1, "log.format=json", "log.level=debug") as daemon:
        with workers(daemon, 2, job=job, overrides=stuck) as (first, second):
            expect_round(first, "round", 1)
            stopped = second.signal(signal.SIGSTOP)
            culprit = name_of(second, 1)
            assert_aborted([first], stopped, 10 * SLOWNESS, culprit, kind="CollectiveTimeoutError")
            assert eventually(lambda: '"job_ended"' in daemon.log)
            second.signal(signal.SIGKILL)
        assert sorted((line["job"], line["rank"]) for line in events(daemon.log, "hello")) == [(job, 0), (job, 1)]
        [started] = events(daemon.log, "job_started")
        assert (started["job"], started["world_size"], started["generation"]) == (job, 2, 1)
        waiting = events(daemon.log, "waiting")
        assert all(line["job"] == job and line["seconds"] >= 1 for line in waiting)
        assert waiting[-1]["rank"] == 1  # a slow start may have been reported before
        [ended] = events(daemon.log, "job_ended")
        assert (ended["job"], ended["cause"], ended["culprit"]) == (job, "timeout", culprit)
        assert (started["transport"], list(ended["carried"])) == ("shm", ["memory"])
        assert {line["shard"] for line in (started, *waiting, ended)} == {daemon.addresses[0]}
        [ready] = events(daemon.log, "ready")
        assert ready["shards"] == daemon.addresses
        assert daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
        assert [line["event"] for line in events(daemon.log)][-2:] == ["stopping", "stopped"]


def test_who_broke_the_job() -> None:
    with Daemon(1, "log.format=json") as daemon:
        with workers(daemon, 2) as (first, second):
            expect_round(first, "round", 0)
            second.signal(signal.SIGKILL)
            first.expect("error")
        assert eventually(lambda: '"job_ended"' in daemon.log)
        [ended] = events(daemon.log, "job_ended")
        assert (ended["cause"], ended["rank"]) == ("lost", 1)


def test_a_bound_for_stragglers() -> None:
    """Below it the others are told, but the log stays silent."""
    job = unique_job("patient")
    with Daemon(1, "log.format=json", "aggregator.straggler_s=3600") as daemon:
        with workers(daemon, 2, "--hold", "1", "1", job=job, overrides=[f"cluster.timeout_s={SLOWNESS}"]) as ranks:
            ranks[0].expect("error")
            assert "waiting for rank 1" in ranks[0].log
        assert events(daemon.log, "waiting") == []


def test_a_refused_rank() -> None:
    job = unique_job("refused")
    with Daemon(1, "log.format=json") as daemon, RawPeer(daemon.addresses[0]) as first:
        first.hello(job, 0, 2)
        await_pending(first, [1])
        with pytest.raises(RefusedError):
            Communicator(configured(daemon.addresses), rank=0, size=2, job=job)
        [refused] = events(daemon.log, "refused")
        assert (refused["job"], refused["rank"], refused["level"]) == (job, 0, "warning")
        assert "is already in job" in refused["message"]


def test_a_worker_and_the_error_that_ends_it(daemon: Daemon) -> None:
    job = unique_job("alone")
    settings = [
        f"cluster.aggregators={json.dumps(daemon.addresses)}",
        *(f"cluster.job={job}", "cluster.join_timeout_s=3", "log.format=json"),
    ]
    command = [sys.executable, "-m", "omnireduce.worker", "bench", "--rank", "1", "--size", "2"]
    with Process(*command, *(word for setting in settings for word in ("--set", setting))) as worker:
        assert worker.wait(READY_S) == 1
        [waiting, *_, failed] = [line for line in events(worker.log) if line["level"] != "info"]
    assert (waiting["event"], waiting["job"], waiting["rank"]) == ("waiting_for_ranks", job, 1)
    assert (failed["event"], failed["level"]) == ("failed", "critical")
    assert "still waiting for rank 0" in failed["message"]
