"""Some of the tests that torch ships, so that the program that runs all of them stays whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import WAIT_S

SOME = "^test_(get_future|reduce_min|isend|monitored_barrier_gloo)$"


def test_some_pass_and_a_failure_is_told() -> None:
    """`monitored_barrier` is there for gloo alone."""
    pytest.importorskip("expecttest", reason="no expecttest here; `make torch` installs it")
    command = [sys.executable, "-m", "tests.torch.torch_suite", "--world-size", "2", "-k", SOME]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8 * WAIT_S, check=False, cwd=root)
    assert done.returncode == 1, done.stderr
    assert "    3 passed\n" in done.stdout
    assert "    1 failed\n" in done.stdout
    assert "test_monitored_barrier_gloo: ValueError: monitored_barrier is only" in done.stdout
