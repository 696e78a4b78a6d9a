"""The script that lists hosts: when it runs, and what its faults do. None ends a job."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from launches import are_gone, run, runs
from local_cluster import WAIT_S, eventually

from omnireduce import ConfigError
from omnireduce.launch import elastic_job
from omnireduce.launch.elastic_job import Discovery
from omnireduce.launch.hosts import Host


class WaitingJob:
    """A job that only waits for the script."""

    def __init__(self) -> None:
        self.acts: dict[int, Callable[[], None]] = {}
        self.taken: list[list[Host]] = []

    def watch(self, descriptor: int, act: Callable[[], None]) -> None:
        self.acts[descriptor] = act

    def forget(self, descriptor: int) -> None:
        self.acts.pop(descriptor, None)

    def take_hosts(self, hosts: Sequence[Host]) -> None:
        self.taken.append(list(hosts))

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until the script has ended, or a turn has been taken and `until` holds."""
        while self.acts:
            with selectors.DefaultSelector() as selector:
                for each in self.acts:
                    selector.register(each, selectors.EVENT_READ)
                results = selector.select(WAIT_S)
                assert results, "the script says nothing, and does not end"
                for key, _ in results:
                    if key.fd in self.acts:
                        self.acts[key.fd]()
            if until():
                return


def script(folder: Path, text: str) -> Path:
    path = folder / "discover"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_job, "SCRIPT_PAUSE_S", 0.0)


def test_a_script_that_cannot_be_executed_for_a_moment_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, job = script(tmp_path, "echo node1:2; echo node2"), WaitingJob()
    looks = Discovery(str(path), 3)
    for mode in (0o700, 0o600, 0o700):
        path.chmod(mode)
        looks.start_if_due(job)
        job.wait()
    assert job.taken == [[Host("node1", 2), Host("node2", 3)]] * 2
    [record] = caplog.records
    assert record.__dict__["event"] == "discovery_failed"
    assert "Permission denied" in record.getMessage()


def test_a_script_that_was_never_executed_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--host-discovery-script .*: No such file"):
        Discovery(str(tmp_path / "none"), 1).start_if_due(WaitingJob())


def test_the_end_of_the_script_counts_not_that_of_its_output(tmp_path: Path) -> None:
    """It may close its output and go on: nobody waits for it meanwhile. What it has started may keep the output."""
    gate, pid_file, job = tmp_path / "gate", tmp_path / "pid", WaitingJob()
    os.mkfifo(gate)
    path = script(
        tmp_path, f"echo node1:2; exec 3>&1 >&-; sleep 1000 >&3 & echo $! >{pid_file}; exec 3>&-; read x <{gate}"
    )
    looks = Discovery(str(path), 1)
    looks.start_if_due(job)
    with gate.open("wb") as writer:  # once the script reads
        job.wait(until=lambda: not job.taken)
        writer.write(b"\n")
    job.wait()
    assert job.taken == [[Host("node1", 2)]]
    assert are_gone([int(pid_file.read_text())])


@pytest.mark.parametrize("how", ["late", "close"])
def test_what_the_script_has_started_ends_with_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pid_file, job = tmp_path / "pid", WaitingJob()
    looks = Discovery(
        str(script(tmp_path, f"sleep 1000 & echo $! >{pid_file}.new; mv {pid_file}.new {pid_file}; wait")), 1
    )
    looks.start_if_due(job)
    assert eventually(pid_file.exists)
    child = int(pid_file.read_text())
    assert runs(child)
    if how == "late":
        looks.start_if_due(job)  # not yet
        assert runs(child)
        monkeypatch.setattr(elastic_job, "SCRIPT_S", 0.0)
        looks.start_if_due(job)
        assert "it took more than 0 s" in caplog.text
    else:
        looks.close()
    assert not job.acts
    assert are_gone([child])


def test_a_job_waits_for_slots(tmp_path: Path) -> None:
    """Also when it starts."""
    path = script(tmp_path, f"echo x >>{tmp_path}/runs; echo localhost:$(wc -l <{tmp_path}/runs)")
    words = ["--min-np", "2", "--max-np", "4", "--host-discovery-script", str(path)]
    result = run(*words, "sh", "-c", "echo $OMNIRUN_SIZE")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:2", "[1]<stdout>:2"]
