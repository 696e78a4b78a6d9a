"""`worker train --elastic` as processes of their own: one is killed and started again, the loss goes on falling."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

from local_cluster import Daemon, Process, eventually, unique_job

SMALL = ("train.steps=60", "train.max_files=40", "train.vocabulary=500", "train.dim=16", "elastic.last_call_s=0.5")
REPORT = re.compile(r"train: step (\d+) of 60, held-out loss (\d+\.\d+)")


def trainer(daemon: Daemon, job: str, rank: int, *arguments: str) -> Process:
    settings = [f"cluster.aggregators={json.dumps(daemon.addresses)}", f"cluster.job={job}", *SMALL]
    words = [word for setting in settings for word in ("--set", setting)]
    who = ("--rank", str(rank), "--size", "3")
    return Process(sys.executable, "-m", "omnireduce.worker", "train", "--elastic", *who, *words, *arguments)


def follow(worker: Process, step: int) -> float:
    """The loss that the worker reports after `step` steps."""
    while True:
        match = REPORT.fullmatch(worker.line())
        if match and int(match[1]) == step:
            return float(match[2])


def test_a_killed_worker_does_not_stop_the_training(daemon: Daemon, tmp_path: Path) -> None:
    job, results = unique_job("train"), tmp_path / "result.json"
    with (
        trainer(daemon, job, 0, "--json", str(results)) as first,
        trainer(daemon, job, 1) as victim,
        trainer(daemon, job, 2) as third,
    ):
        before = follow(first, 12)
        victim.signal(signal.SIGKILL)
        victim.wait()
        between = follow(first, 30)
        first.signal(signal.SIGSTOP)  # the others wait for it in their next step
        with trainer(daemon, job, 1) as restarted:
            assert eventually(lambda: "waiting for rank" in restarted.log), restarted.log
            first.signal(signal.SIGCONT)
            assert [first.wait(), third.wait(), restarted.wait()] == [0, 0, 0], first.log
        after = follow(first, 60)
        assert "weights: bit-identical on all workers, equal to a one-process run's" in first.line()
    assert before > between > after
    result = json.loads(results.read_text())
    assert result["workers"][0] == 3
    assert 2 in result["workers"]
    assert [point["step"] for point in result["curve"]] == list(range(6, 61, 6))
