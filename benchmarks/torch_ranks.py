"""Ranks that torchrun starts, in an environment with torch."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec

from benchmarks.environments import ROOT, python_of
from benchmarks.group import THREADS, PeerError, end_torchrun

RUN_S = 300.0  # the longest that a run may take


def run_ranks(module: str, ranks: int, *arguments: str) -> str:
    """Run a module on so many ranks of this host: in this environment, if it has torch, else in that of gloo. Return
    what they print.

    Raises PeerError where they fail, OmniReduceError where torch cannot be installed.
    """
    python = sys.executable if find_spec("torch") else str(python_of("gloo"))
    start = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")} | THREADS
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = subprocess.Popen(
            [*start, "-m", module, *arguments], cwd=ROOT, env=environ,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        stack.callback(end_torchrun, process)
        try:
            said, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            raise PeerError(module, f"took longer than {RUN_S:g} s") from None
        if process.returncode:
            log.seek(0)
            raise PeerError(module, f"failed: {log.read()[-2000:]}")
        return said
