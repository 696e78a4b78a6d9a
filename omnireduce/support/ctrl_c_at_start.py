"""Ctrl-C during the start of a program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def slow_imports() -> Iterator[None]:
    """A context in which Ctrl-C ends the process without a traceback. Afterwards the program handles it as before."""
    former_handler = signal.getsignal(signal.SIGINT)
    is_default = former_handler is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_default:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    yield
    if is_default:
        signal.signal(signal.SIGINT, former_handler)
