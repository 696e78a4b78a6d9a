"""Scenarios that each rank of a job plays, one after the other: functions of a script in this folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack

from local_cluster import ROOT, WAIT_S, Daemon, Process, unique_job
from nursery import TORCH


def play(daemon: Daemon, script: str, size: int, scenarios: Sequence[str]) -> None:
    """Let ranks play them. The log of a rank ends with the one that failed."""
    words = [str(ROOT / "tests" / "pytorch" / script), str(size), unique_job("scenarios"), *scenarios]
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses)}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Process(sys.executable, words[0], str(rank), *words[1:], environ=environ, preloaded=TORCH)
            )
            for rank in range(size)
        ]
        for each in ranks:
            assert each.wait(WAIT_S * (2 + len(scenarios) // 6)) == 0, each.log
