"""Gate at the end of the process: it lets daemon threads finish what must not be cut off.

When the interpreter ends, Python (before 3.14) ends each daemon thread that wants the interpreter's lock again, at that
place. If functions of C++ are in progress there, C++ ends the process instead: it writes "terminate called without an
active exception", and the status is that of SIGABRT. PyTorch releases the lock and takes it again in most of its
functions, even when it frees a tensor. So a thread that calls a user's function, or has the last reference to an array
of a user, does that inside the gate.
"""

from __future__ import annotations

import logging
import os
import threading
from types import TracebackType

from omnireduce.support.logs import tagged

LONGEST_WAIT_S = 5.0  # for threads inside, at the end of the process
log = logging.getLogger("omnireduce")


class ExitGate:
    """A context for daemon threads: the end of the process waits while they are inside.

    A thread that comes later ends: `with exit_gate` raises SystemExit, which ends a thread without a word.
    """

    def __init__(self) -> None:
        self._start_afresh()
        os.register_at_fork(after_in_child=self._start_afresh)  # the child has none of the threads

    def _start_afresh(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_closing, self._is_closed = 0, False, False

    def __enter__(self) -> None:
        with self._changed:
            if self._is_closed:
                raise SystemExit
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def check(self) -> None:
        """Raise SystemExit if the process ends: for a thread inside whose wait might be long."""
        if self._is_closing:
            raise SystemExit

    def close(self) -> None:
        """Wait until no thread is inside, at most `LONGEST_WAIT_S`, and let none in from then on. While threads are
        inside, others may enter, because the threads inside may wait for them."""
        with self._changed:
            self._is_closing = True
            if not self._changed.wait_for(lambda: self._inside <= 0, LONGEST_WAIT_S):
                text = "a function of yours, such as a callback of a future, still runs %g s after the program"
                log.warning(text + ": it is cut off", LONGEST_WAIT_S, extra=tagged("cut_off"))
            self._is_closed = True


exit_gate = ExitGate()
