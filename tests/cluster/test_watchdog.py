"""A shard that hangs is replaced; one that waits, or whose host was stopped, is not taken for one that hangs."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_checks import assert_serves, expect_round
from local_cluster import READY_S, ROOT, WAIT_S, Daemon, Process, eventually, workers

from omnireduce.aggregator.heartbeats import CHECK_S, Heartbeat, HeartbeatWatch, check_interval_s
from omnireduce.aggregator.systemd import watchdog_s

HANGS_S = 1.0  # the limit in these tests; a busy machine may keep a process waiting for a part of it


class OneShard:
    """A daemon seen by the workers of one of its shards."""

    def __init__(self, daemon: Daemon, shard: int) -> None:
        self.addresses = daemon.addresses[shard : shard + 1]


def replaced(daemon: Daemon, pid: int) -> bool:
    return eventually(lambda: len(daemon.shard_pids) == len(daemon.addresses) and pid not in daemon.shard_pids)


def test_a_stopped_shard_is_replaced_and_jobs_on_others_go_on() -> None:
    with Daemon(2, f"aggregator.watchdog_s={HANGS_S}") as daemon:
        with workers(OneShard(daemon, 0), 2) as ranks:  # type: ignore[arg-type]
            stopped = daemon.shard_pids[1]
            os.kill(stopped, signal.SIGSTOP)
            assert replaced(daemon, stopped)
            now = ranks[0].expect("round")["round"]
            for rank in ranks:
                expect_round(rank, "round", now + 3)
        assert f"event=shard_hangs pid={daemon.pid} shard={daemon.addresses[1]}" in daemon.log
        assert f"shard {daemon.addresses[1]} died with status -9" in daemon.log
        assert_serves(daemon)


def test_a_shard_that_spins_says_where_and_is_replaced() -> None:
    script = str(ROOT / "tests" / "cluster" / "spinning_daemon.py")
    options = ["--listen", "127.0.0.1:0", "--shards", "2", "--set", f"aggregator.watchdog_s={HANGS_S}"]
    with Process(sys.executable, script, *options, environ={"PYTHONPATH": str(ROOT)}) as process:
        word, *addresses = process.line(READY_S).split()
        assert word == "ready"
        assert eventually(lambda: f"shard {addresses[0]} died with status -9" in process.log)
        [line] = [line for line in process.log.splitlines() if "event=shard_hangs" in line]
        assert "in turn_for_ever" in line
        assert "in run_or_spin" in line
        assert len(line) < 4096
        assert eventually(lambda: len(children_of(process)) == 2)
        process.addresses = addresses  # type: ignore[attr-defined]
        assert_serves(process)  # type: ignore[arg-type]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


def children_of(process: Process) -> list[str]:
    return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()


@contextmanager
def systemd(tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, str]]]:
    """Socket and environment that systemd gives a service that must send WATCHDOG=1 every two seconds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(WAIT_S)
        yield sock, {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000000"}


def test_systemd_hears_of_idle_shards_and_not_of_those_that_hang(tmp_path: Path) -> None:
    with systemd(tmp_path) as (sock, environ), Daemon(2, "aggregator.watchdog_s=0", environ=environ) as daemon:
        assert sock.recv(4096).startswith(b"READY=1")
        pids = daemon.shard_pids
        for _ in range(8):  # four seconds
            assert sock.recv(4096) == b"WATCHDOG=1"
        os.kill(pids[0], signal.SIGSTOP)
        assert eventually(lambda: not select.select([sock], [], [], 1.5)[0] or not sock.recv(4096))
        os.kill(pids[0], signal.SIGCONT)
        assert sock.recv(4096) == b"WATCHDOG=1"
        assert daemon.shard_pids == pids


def test_idle_shards_are_left_alone(tmp_path: Path) -> None:
    """With a limit so short that it would be over many times."""
    with systemd(tmp_path) as (sock, environ), Daemon(2, f"aggregator.watchdog_s={HANGS_S}", environ=environ) as daemon:
        pids = daemon.shard_pids
        since = time.monotonic()
        while time.monotonic() - since < 4 * HANGS_S:
            assert sock.recv(4096)
        assert daemon.shard_pids == pids


def test_a_host_that_was_stopped_is_no_hang() -> None:
    pulse = Heartbeat()
    watch = HeartbeatWatch(pulse)
    start = time.monotonic()
    for second in range(5):
        pulse.beat()
        watch.check(start + second)
        assert watch.silent_s == 0
    watch.check(start + 3600)
    assert watch.silent_s == 2 * CHECK_S
    pulse.beat()
    watch.check(start + 3601)
    assert watch.silent_s == 0
    for second in range(4):
        watch.check(start + 3602 + second)
    assert watch.silent_s == 4


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_what_systemd_wants(environ: dict[str, str], expected: float | None) -> None:
    assert watchdog_s(environ) == expected


def test_a_shard_turns_often_enough() -> None:
    assert check_interval_s(0) == check_interval_s(30) == CHECK_S
    assert check_interval_s(1) == 0.25
