"""Profiles of real jobs: every collective counts, over any transport, waited for or not, complete or failed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from local_cluster import ROOT, WAIT_S, Daemon, configured, run_job, unique_job, workers
from transports import KINDS, MEMORY, over

from omnireduce import AbortedError, Communicator, ConfigError, load_config
from omnireduce.runtime.tracing.profile import SHOWN_SIZES, Profile, Tally

ROW = re.compile(r"^(\w*) +(\d+) +([\d.]+) +([\d.]+) +(\d+)$")


def tables(text: str) -> dict[str, list[tuple[int, float, float, int]]]:
    """The rows of each table: that of all routines as "Routine", and one for each of these, by its name."""
    results: dict[str, list[tuple[int, float, float, int]]] = {}
    table = ""
    for line in text.splitlines():
        if "#calls" in line:
            table = line.split()[0]
        elif row := ROW.match(line):
            key = f"{table} {row[1]}".strip()
            results.setdefault(key, []).append((int(row[2]), float(row[3]), float(row[4]), int(row[5])))
    return results


def everything(comm: Communicator) -> None:
    x = np.zeros(4096, np.float32)
    x[:256] = comm.rank + 1
    for _ in range(3):
        comm.allreduce(x)
    comm.allreduce_async(np.ones(2048), name="later").wait()
    comm.allreduce([np.ones(10, np.float32), np.ones(20, np.float32)])
    comm.allreduce_rows(np.array([1, 2]), np.ones((2, 8), np.float32), n_rows=10)
    comm.broadcast(np.ones(100))
    comm.allgather(np.ones(10))
    comm.barrier()


@pytest.mark.parametrize("kind", [*KINDS, MEMORY])
def test_a_profile_counts_every_collective(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "made"
    run_job(configured(daemon.addresses, f"trace.profile={folder}", *over(kind)), 2, everything)
    for rank in range(2):
        text = (folder / f"omnireduce_profile.{rank}").read_text()
        result = tables(text)
        summed = {key.split()[1]: row[0][:2] for key, row in result.items() if key.startswith("Routine")}
        assert summed == {
            "Allreduce": (5, pytest.approx((3 * 16384 + 16384 + 120) / 5, abs=0.1)),
            "Allreduce_rows": (1, 64.0),
            "Broadcast": (1, 800.0),
            "Allgather": (1, 80.0),
            "Barrier": (1, 0.0),
        }
        assert [row[:2] for row in result["Allreduce"]] == [(1, 120.0), (4, 16384.0)]
        assert sum(row[3] for row in result["Allreduce"]) > 0
        assert all(row[2] >= 0 for rows in result.values() for row in rows)
        for line in ("communication time", "elapsed time", "cpu time", "system time", "resident set size"):
            assert re.search(rf"{line} += [\d.]+ (seconds|MiB)\.", text)


def test_a_profile_says_which_bytes_travelled(daemon: Daemon, tmp_path: Path) -> None:
    """One block of sixteen is not zero."""

    def run(comm: Communicator) -> int:
        comm.barrier()
        before = comm.statistics().sent_bytes
        x = np.zeros(4096, np.float32)
        x[:256] = 1
        comm.allreduce(x)
        return comm.statistics().sent_bytes - before

    sent = run_job(configured(daemon.addresses, f"trace.profile={tmp_path}", *over("tcp")), 2, run)
    for rank in range(2):
        result = tables((tmp_path / f"omnireduce_profile.{rank}").read_text())
        assert result["Allreduce"] == [(1, 16384.0, result["Allreduce"][0][2], sent[rank])]
        assert 1024 < sent[rank] < 2048


def test_a_job_that_failed_leaves_its_profile(daemon: Daemon, tmp_path: Path) -> None:
    def run(comm: Communicator) -> None:
        comm.allreduce(np.ones(10))
        handle = comm.allreduce_async(np.ones(10 + comm.rank), name="differs")
        with pytest.raises(AbortedError):
            handle.wait()

    run_job(configured(daemon.addresses, f"trace.profile={tmp_path}"), 2, run)
    for rank in range(2):
        text = (tmp_path / f"omnireduce_profile.{rank}").read_text()
        assert tables(text)["Routine Allreduce"][0][0] == 2
        assert "calls that failed        = 1." in text


def test_a_program_that_does_not_shut_down_leaves_its_profile(daemon: Daemon, tmp_path: Path) -> None:
    program = "import numpy as np, omnireduce as omni; omni.init(); omni.allreduce(np.ones(5)); raise SystemExit(3)"
    environ = {"OMNIREDUCE_PROFILE": "1", "OMNIREDUCE_CLUSTER_AGGREGATORS": daemon.addresses[0]}
    environ |= {"OMNIREDUCE_CLUSTER_JOB": unique_job(), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environ, check=False, timeout=WAIT_S)
    assert result.returncode == 3
    assert tables((tmp_path / "omnireduce_profile.0").read_text())["Allreduce"][0][:2] == (1, 40.0)


def test_survivors_of_a_kill_leave_their_profiles(daemon: Daemon, tmp_path: Path) -> None:
    with workers(daemon, 2, overrides=[f"trace.profile={tmp_path}"]) as (one, other):
        one.expect("round")
        other.signal(signal.SIGKILL)
        one.expect("error")
        one.wait()
    text = (tmp_path / "omnireduce_profile.0").read_text()
    assert tables(text)["Routine Allreduce"][0][0] > 1
    assert not (tmp_path / "omnireduce_profile.1").exists()


def test_a_second_job_of_a_process_has_a_file_of_its_own(daemon: Daemon, tmp_path: Path) -> None:
    config = configured(daemon.addresses, f"trace.profile={tmp_path}")
    jobs = [unique_job(), unique_job()]
    for job in jobs:
        run_job(config, 1, lambda comm: comm.barrier(), job)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "omnireduce_profile.0",
        f"omnireduce_profile.{jobs[1]}.0",
    ]


def test_a_folder_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nobody = configured(["127.0.0.1:1"], f"trace.profile={tmp_path / 'file' / 'inner'}")
    with pytest.raises(ConfigError, match=r"trace\.profile: got .*, expected a folder for profiles.*: Not a directory"):
        Communicator(nobody, rank=0, size=1)


@pytest.mark.parametrize(("value", "profile"), [("1", "1"), ("0", "0"), ("", ""), ("/some/folder", "/some/folder")])
def test_the_variable(value: str, profile: str) -> None:
    assert load_config(environ={"OMNIREDUCE_PROFILE": value}).trace.profile == profile


def test_the_longer_variable_wins() -> None:
    environ = {"OMNIREDUCE_PROFILE": "1", "OMNIREDUCE_TRACE_PROFILE": "0"}
    assert load_config(environ=environ).trace.profile == "0"


def test_calls_at_the_same_time_count_once_in_all() -> None:
    profile, second = Profile(), 10**9
    for at in (1, 2):
        profile.begin(at * second)
    profile.end("allreduce", Tally(1, 8, 3 * second), 4 * second)
    profile.end("allreduce", Tally(1, 8, 3 * second), 5 * second)
    assert "total communication time = 4.000 seconds." in profile.text()
    assert tables(profile.text())["Allreduce"] == [(2, 8.0, 6.0, 0)]


def test_many_sizes_are_put_together() -> None:
    profile = Profile()
    for size in range(10_000):
        profile.begin(size)
        profile.end("broadcast", Tally(1, size, 10**6), size)
    rows = tables(profile.text())["Broadcast"]
    assert len(rows) <= SHOWN_SIZES
    assert sum(row[0] for row in rows) == 10_000
    assert tables(profile.text())["Routine Broadcast"][0][:2] == (10_000, 4999.5)
