"""Programs of a data-parallel training as ranks, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon, Process
from needle_here import needle_folder

needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
LAUNCHERS = "OMPI_", "PMI", "SLURM_", "TORCHELASTIC", "OMNIREDUCE_", "OMNIRUN_"
SIZE = 3
Told = dict[str, list[dict[str, Any]]]
"""By way, what ranks have told, in their order."""


def _environ(daemon: Daemon) -> dict[str, str]:
    return {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(needle_folder())]),
    }


def run_ranks(daemon: Daemon, size: int, *command: str) -> str:
    """Output of `size` ranks under mpirun; 0: of one process without a launcher."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)} | _environ(daemon)
    start = [str(MPIRUN), "-n", str(size)] if size else []
    result = subprocess.run(
        [*start, sys.executable, *command], env=environ, capture_output=True, text=True, timeout=4 * WAIT_S, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@contextmanager
def two_ranks(daemon: Daemon, launch: str, *command: str) -> Iterator[list[Process]]:
    """Two ranks, by the variables of torchrun; they are gone at the end."""
    environ = _environ(daemon) | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": launch}
    with ExitStack() as stack:
        yield [
            stack.enter_context(Process(sys.executable, *command, environ=environ | {"RANK": rank, "LOCAL_RANK": rank}))
            for rank in "01"
        ]


def reports_in(text: str) -> Told:
    """Reports of ranks, from lines of JSON, by kind."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    results: Told = {}
    for each in sorted(lines, key=lambda line: int(line["rank"])):
        results.setdefault(each["way"], []).append(each)
    return results


def assert_trained_alike(ranks: Told, alone: Told, folder: Path, way: str, *, rtol: float, atol: float) -> None:
    """All ranks have the same bits, and one process nearly these: sums of float32 in another order differ in their last
    bits."""
    assert [each["digest"] for each in ranks[way]] == [ranks[way][0]["digest"]] * SIZE
    assert len(alone[way]) == 1
    with np.load(folder / f"{way}-{SIZE}-0.npz") as mine, np.load(folder / f"{way}-1-0.npz") as reference:
        assert mine.files == reference.files != []
        for name in mine.files:
            np.testing.assert_allclose(mine[name], reference[name], rtol=rtol, atol=atol)
