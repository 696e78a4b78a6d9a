"""Workers under a real launcher."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon, Process, Ranks
from transports import KINDS, MEMORY, called, over

SCRIPT = str(ROOT / "tests" / "cluster" / "looping_worker.py")
pytestmark = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")


def command(daemon: Daemon, size: int, *arguments: str) -> list[str]:
    assert MPIRUN is not None
    addresses = ",".join(daemon.addresses)
    return [MPIRUN, "-n", str(size), sys.executable, SCRIPT, "--aggregators", addresses, *arguments]


def events(daemon: Daemon, size: int, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run a launch to its end: its status, what all ranks reported, and their standard error."""
    launch = command(daemon, size, *arguments)
    result = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, timeout=4 * WAIT_S, check=False)
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines()], result.stderr


@pytest.mark.parametrize("transport", [MEMORY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_rank_size_and_job_come_from_the_launcher(daemon: Daemon, transport: str) -> None:
    """Twice, so that the second launch is a job of its own."""
    for size in (2, 3):
        settings = [word for setting in over(transport) for word in ("--set", setting)]
        status, result, log = events(daemon, size, "--rounds", "3", *settings)
        assert status == 0, log
        joined = sorted((each["rank"], each["size"], each["transport"]) for each in result if each["event"] == "joined")
        assert joined == [(rank, size, called(transport)) for rank in range(size)]
        assert sum(each["event"] == "round" for each in result) == 3 * size


@pytest.mark.slow
def test_two_launches_at_once_are_two_jobs(daemon: Daemon) -> None:
    """Their ids keep them apart without any configuration."""
    for status, events_of_rank, log in Ranks(2, lambda _: events(daemon, 2, "--rounds", "3")).results():
        assert status == 0, log
        assert sum(each["event"] == "left" for each in events_of_rank) == 2


@pytest.mark.slow
def test_a_failed_collective_is_the_status_of_the_launch(daemon: Daemon) -> None:
    """Rank 0, the one whose standard input mpirun forwards, is late."""
    with Process(*command(daemon, 2, "--hold", "0", "0", "--set", "cluster.timeout_s=0.5")) as launch:
        error: dict[str, Any] = {"event": ""}
        while error["event"] != "error":
            error = json.loads(launch.line())
        assert error["type"] == "CollectiveTimeoutError"
        assert error["culprit"].startswith("rank 0 (host ")
        assert launch.popen.stdin is not None
        launch.popen.stdin.write(b"\n")
        launch.popen.stdin.close()
        assert launch.wait() != 0
