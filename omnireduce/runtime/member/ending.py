"""Cleanup of open communicators when their process ends or forks.

While one is open, `sys.excepthook` is replaced by a function that remembers the exception which ends the process, and
then shows it as before. So the other ranks can be told which one it was. With the last communicator the replacement
goes, too, unless somebody has put a function of their own in its place: theirs may call ours.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol


class Open(Protocol):
    """A communicator that has not left its job."""

    def _abandon(self) -> None:
        """Close all in a forked child, and tell nobody."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the job, because of `error` if there is one."""


class _Process:
    """The open communicators of this process, and what ended it."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Open] = weakref.WeakSet()
        self._ended_by: BaseException | None = None
        self._hook = self._remember  # one object, to be recognised by
        self._show: Callable[..., object] | None = None  # what ours has replaced; None: it has replaced nothing
        self._lock = threading.RLock()  # a signal handler may close on top of a thread that does

    def opened(self, communicator: Open) -> None:
        with self._lock:
            self.open.add(communicator)
            if self._show is None:
                self._show, sys.excepthook = sys.excepthook, self._hook

    def closed(self, communicator: Open) -> None:
        with self._lock:
            self.open.discard(communicator)
            self._restore()

    def _restore(self) -> None:
        """Once nothing is open, forget the exception. Take our function away, if it is still there."""
        if self.open:
            return
        self._ended_by = None
        if sys.excepthook is self._hook and self._show is not None:
            sys.excepthook, self._show = self._show, None

    def _remember(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            self._ended_by = error
        show = sys.__excepthook__ if self._show is None else self._show
        show(kind, error, trace)

    def abandon_in_child(self) -> None:
        """A forked child must neither speak for its parent nor keep the parent's connections open after its death."""
        self._lock = threading.RLock()  # perhaps another thread of the parent held it
        for communicator in list(self.open):
            communicator._abandon()
        self.open.clear()
        self._restore()

    def leave_all(self) -> None:
        """At the end of the process leave all jobs. If an exception ended it, the other ranks read which one."""
        error = self._ended_by
        for communicator in list(self.open):
            communicator.__exit__(None if error is None else type(error), error, None)


_process = _Process()
opened, closed = _process.opened, _process.closed


def is_by_exception() -> bool:
    """Whether an exception ends this process."""
    return _process._ended_by is not None


os.register_at_fork(after_in_child=_process.abandon_in_child)
atexit.register(_process.leave_all)
