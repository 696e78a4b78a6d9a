"""Signals that a process ignores from some moment on."""

from __future__ import annotations

import signal
from collections.abc import Collection


def ignore(numbers: Collection[signal.Signals]) -> None:
    """Ignore these signals from now on.

    They are blocked meanwhile: Python complains on stderr of a signal that comes while it changes the handler. The
    process must have one thread only.
    """
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)
