"""Processes that are killed at any moment: the timeline is valid JSON, and what they had noted is not lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import ROOT, WAIT_S, Daemon, Process, configured, unique_job
from pictured import Timeline

from omnireduce import Communicator
from omnireduce.runtime.tracing.merged_timeline import merge
from omnireduce.runtime.tracing.timeline import Timeline as Part
from omnireduce.runtime.tracing.timeline_reader import read_parts
from omnireduce.runtime.tracing.trace import Origin

WORKER = str(ROOT / "tests" / "runtime" / "pictured_worker.py")


def ranks(daemon: Daemon, path: Path, stack: ExitStack) -> list[Process]:
    job, results = unique_job(), []
    settings = [f"cluster.aggregators={json.dumps(daemon.addresses)}", f"trace.timeline={path}"]
    for rank in range(2):
        command = [sys.executable, WORKER, *settings, str(rank), "2", job]
        results.append(stack.enter_context(Process(*command)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_the_file_is_valid_whoever_is_killed(tmp_path: Path, seed: int) -> None:
    """One rank, or all ranks, or these and the daemon with its shards, in the middle of anything."""
    drawn, path = random.Random(seed), tmp_path / "timeline.json"
    everybody = drawn.random() < 0.5
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(2, f"trace.timeline={path}"))
        workers = ranks(daemon, path, stack)
        for step in range(drawn.randrange(2, 40)):
            for each in workers:
                assert each.line() == str(step)
            json.loads(path.read_text())
        victims = workers if everybody or drawn.random() < 0.5 else [drawn.choice(workers)]
        if everybody:
            daemon.expected_status = None
            for pid in [daemon.pid, *daemon.shard_pids]:
                os.kill(pid, signal.SIGKILL)
        for each in victims:
            each.signal(signal.SIGKILL)
        json.loads(path.read_text())
        for each in workers:
            each.wait()
        Timeline(path)
    again = tmp_path / "again.json"
    command = [sys.executable, "-m", "omnireduce", "trace", f"{path}.parts", "--timeline", str(again)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert result.returncode == 0, result.stderr
    assert_complete(Timeline(again), step)


def assert_complete(found: Timeline, step: int) -> None:
    """Both ranks have all that they did before they said `step`, and both shards have left something."""
    assert {"rank 0", "rank 1", "shard 0", "shard 1", "w"} == set(found.processes.values())
    for rank in ("rank 0", "rank 1"):
        whole = [span.args["step"] for span in found.rows["w", rank] if "step" in span.args]
        assert whole[:step] == list(range(step))
        assert found.ticks[rank, "work"]


@pytest.mark.parametrize("size", range(0, 400, 7))
def test_a_part_may_end_anywhere(tmp_path: Path, size: int) -> None:
    """As of a machine that lost its power."""
    part = Part(tmp_path, Origin(job="made up", kind="rank", number=0, ranks=1, shards=1), 100)
    for activity in ("ALLREDUCE", "QUEUE"):
        part.begin("w", activity, text='[]{}"\\')
    part.end("w", "ALLREDUCE", bytes=3)
    part.close()
    content = part.path.read_bytes()
    part.path.write_bytes(content[:size])
    if not read_parts(tmp_path):
        assert size < len(content.splitlines()[0])
        return
    merge(tmp_path, tmp_path / "timeline.json")
    Timeline(tmp_path / "timeline.json")


def test_a_forked_child_notes_nothing(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    config = configured(daemon.addresses, f"trace.timeline={path}", f"trace.profile={tmp_path}")
    with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
        timeline: Any = comm.timeline
        child = os.fork()
        if child == 0:
            timeline.begin("of the child", "ALLREDUCE")
            os._exit(0 if not comm.timeline.is_on else 1)
        assert os.waitpid(child, 0)[1] == 0
        comm.allreduce(np.ones(3), name="of the parent")
    assert {"rank 0", "of the parent"} == set(Timeline(path).processes.values())
