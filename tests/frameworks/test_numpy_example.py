"""A program in plain NumPy, on three ranks and on one."""

from __future__ import annotations

import re

import pytest
from local_cluster import ROOT, Daemon
from ranks_of import needs_mpirun, run_ranks

PROGRAM = str(ROOT / "examples/numpy_data_parallel.py")
pytestmark = needs_mpirun


@pytest.mark.parametrize("size", [3, 0])
def test_the_example_learns(daemon: Daemon, size: int) -> None:
    text = run_ranks(daemon, size, PROGRAM, "--samples", "500")
    lines = re.findall(r"^(\d) ranks?, epoch (\d+): mean squared error ([\d.]+) on rank 0$", text, re.MULTILINE)
    assert [line[:2] for line in lines] == [(str(size or 1), "1"), (str(size or 1), "20")]
    first, last = (float(line[2]) for line in lines)
    assert last < first / 2
