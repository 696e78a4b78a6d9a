"""Programs of a data-parallel training as ranks, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon
from needle_here import needle_folder

needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
LAUNCHERS = "OMPI_", "PMI", "SLURM_", "TORCHELASTIC", "OMNIREDUCE_", "OMNIRUN_"


def run_ranks(daemon: Daemon, size: int, *command: str) -> str:
    """What `size` ranks print under mpirun; 0: one process without a launcher."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(needle_folder())]),
    }
    start = [str(MPIRUN), "-n", str(size)] if size else []
    done = subprocess.run(
        [*start, sys.executable, *command], env=environ, capture_output=True, text=True, timeout=4 * WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def told(text: str) -> dict[str, list[dict[str, Any]]]:
    """By way, what the ranks have told in lines of JSON, in the order of their ranks."""
    lines: Sequence[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    found: dict[str, list[dict[str, Any]]] = {}
    for each in sorted(lines, key=lambda line: line["rank"]):
        found.setdefault(each["way"], []).append(each)
    return found
