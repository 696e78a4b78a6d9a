"""A full disk where logs and traces go: programs do their work and end with the right status all the same.

`/dev/full` takes nothing, like a file on a full disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_checks import assert_aborted, assert_serves, expect_round, name_of
from local_cluster import ROOT, WAIT_S, Daemon, eventually, unique_job, workers

NOISY = "log.level=debug"


@pytest.fixture
def full() -> Iterator[int]:
    """A descriptor to which nothing can be written."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_daemon_that_cannot_log(full: int, form: str) -> None:
    """Jobs end well and badly, a shard dies; in the end the daemon stops with status 0."""
    with Daemon(2, NOISY, f"log.format={form}", stderr=full) as daemon:
        first = daemon.shard_pids
        assert_serves(daemon)
        with workers(daemon, 2) as (survivor, victim):
            expect_round(victim, "round", 1)
            killed = victim.signal(signal.SIGKILL)
            assert_aborted([survivor], killed, WAIT_S, name_of(victim, 1))
        os.kill(first[0], signal.SIGKILL)
        assert eventually(lambda: len({*daemon.shard_pids} - {*first}) == 1)
        assert_serves(daemon)


def worker(*arguments: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "omnireduce.worker", *arguments]
    result = subprocess.run(
        command, cwd=ROOT, stdout=stdout, stderr=stderr, text=True, check=False, timeout=WAIT_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return result.returncode, result.stdout or "", result.stderr or ""


def bench(daemon: Daemon) -> list[str]:
    settings = {
        "cluster.aggregators": f'["{daemon.addresses[0]}"]', "cluster.job": unique_job("bench"), "log.level": "debug",
        "bench.elements": "1000", "bench.density": "0.5", "bench.rounds": "3",
    }  # fmt: skip
    return ["bench", "--rank", "0", "--size", "1", *(w for k, v in settings.items() for w in ("--set", f"{k}={v}"))]


def test_a_worker_that_cannot_log(daemon: Daemon, full: int) -> None:
    status, out, _ = worker(*bench(daemon), stderr=full)
    assert status == 0
    assert "wrong" in out


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("bench", "--set", "bench.rounds=0"), 2),
        (("bench", "--nonsense"), 2),
        (("density", "there-is-no-such-file.npy"), 2),
    ],
)
def test_a_worker_that_cannot_say_what_is_wrong_has_the_right_status(
    full: int, arguments: tuple[str, ...], status: int
) -> None:
    assert worker(*arguments, stderr=full)[0] == status


def test_results_that_cannot_be_written_are_an_error(daemon: Daemon, full: int) -> None:
    status, _, log = worker(*bench(daemon), stdout=full)
    assert status == 1
    assert "No space left on device" in log.splitlines()[-1]
    assert "Traceback" not in log


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A full file system."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True, capture_output=True)


def test_traces_that_do_not_fit_on_the_disk(tiny: Path) -> None:
    """The job is none the worse for it, the log says so, and no part of a trace is left."""
    folder = tiny / "traces"
    folder.mkdir()
    free = os.statvfs(tiny)
    (tiny / "large").write_bytes(bytes(free.f_bavail * free.f_bsize))
    trace = f"trace.folder={folder}"
    with Daemon(1, trace) as daemon:
        for _ in range(2):
            assert_serves(daemon, trace)
        assert eventually(lambda: "the trace cannot be written: No space left on device" in daemon.log)
        assert "internal error" not in daemon.log
    assert [path for path in folder.iterdir() if path.name.endswith(".partial")] == []


def test_a_timeline_that_does_not_fit_on_the_disk(tiny: Path) -> None:
    """The same. What fits is there: also a trace of which a part fits does not end its process."""
    free = os.statvfs(tiny)
    (tiny / "large").write_bytes(bytes(max(0, free.f_bavail - 2) * free.f_bsize))
    settings = f"trace.timeline={tiny / 'timeline.json'}"
    with Daemon(1, settings) as daemon:
        for _ in range(2):
            assert_serves(daemon, settings)
        assert "internal error" not in daemon.log
    assert [path for path in tiny.iterdir() if path.name.endswith(".partial")] == []
