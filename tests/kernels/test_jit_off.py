"""The same tests on the same code as plain Python: what they prove does not hang on the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="this is the run that the test starts")
def test_kernels_and_hostile_peers_with_the_jit_off() -> None:
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        # NumPy warns when its scalars overflow, which compiled code does silently, and as intended
        *("-W", "ignore:overflow encountered:RuntimeWarning", "-W", "ignore:invalid value encountered:RuntimeWarning"),
        *("tests/kernels", "tests/protocol/test_hostile_peers.py"),
    ]
    environ = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
