"""Ranks, and what they print."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon

needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")


def _let_others_go_first() -> None:
    """Eight ranks of torch keep all processors busy for a minute; tests beside them have limits of time."""
    os.nice(19)
    os.setsid()
    with contextlib.suppress(OSError):  # not every system schedules by sessions
        Path("/proc/self/autogroup").write_text("19")


def output_of_ranks(daemon: Daemon, backend: str, *command: str, size: int = 2) -> str:
    """Output of `size` ranks of a Python program under mpirun, with a backend of Keras."""
    return output_of([str(MPIRUN), "-n", str(size), sys.executable, *command], daemon, backend)


def output_of(command: list[str], daemon: Daemon, backend: str, timeout_s: float = 8 * WAIT_S) -> str:
    """Output of a command that starts ranks with a backend of Keras."""
    pytest.importorskip(backend, reason=f"no {backend} here; `make torch` and `make keras` install torch and jax")
    environ = os.environ | {
        "KERAS_BACKEND": backend,
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(ROOT),
    }
    result = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False,
        preexec_fn=_let_others_go_first,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def reports_in(text: str) -> dict[str, list[dict[str, Any]]]:
    """By way, the lines of the ranks in their order."""
    results: dict[str, list[dict[str, Any]]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            report = json.loads(line)
            assert report.pop("rank") == len(results.setdefault(report.pop("way"), []))
            results[line.split('"way": "')[1].split('"')[0]].append(report)
    return results
