"""A signal that comes while it begins to be ignored. In a process of its own: the test's may have several threads."""

from __future__ import annotations

import subprocess
import sys

A_SIGNAL_COMES_MEANWHILE = """
import os, signal
from omnireduce.aggregator.ignored_signals import ignore

came, change = [], signal.signal
change(signal.SIGTERM, lambda *_: came.append("SIGTERM"))

def change_late(number, handler):
    os.kill(os.getpid(), number)
    return change(number, handler)

signal.signal = change_late
before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
ignore((signal.SIGTERM,))
os.kill(os.getpid(), signal.SIGTERM)
assert came == [], "its handler ran"
assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
"""


def test_a_signal_that_comes_while_it_begins_to_be_ignored() -> None:
    result = subprocess.run(
        [sys.executable, "-c", A_SIGNAL_COMES_MEANWHILE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
