"""A few of torch's own tests for its backends; `python -m tests.pytorch.torch_suite` runs all."""

from __future__ import annotations

import sys

import pytest
from local_cluster import WAIT_S, Process

FEW = (
    "DistributedDataParallelCPU", "all_gather_object_default_pg", "all_reduce_coalesced_max", "isend",
    "sparse_all_reduce_sum",
)  # fmt: skip


def test_torchs_own_tests_pass() -> None:
    pytest.importorskip("expecttest", reason="torch's tests import it; `make torch` installs it")
    names = f"^test_({'|'.join(FEW)})$"
    command = [sys.executable, "-m", "tests.pytorch.torch_suite", "--world-size", "2", "-k", names]
    with Process(*command, environ={"OMP_NUM_THREADS": "1"}, from_scratch=True) as suite:
        status = suite.wait(6 * WAIT_S)
        printed = [suite.line() for _ in range(len(FEW) + 1)]
    assert status == 0, "\n".join([*printed, suite.log])
    assert printed[-1].split() == [str(len(FEW)), "passed"]
