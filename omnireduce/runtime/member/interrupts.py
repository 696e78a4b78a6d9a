"""Calls that a signal handler, or another callback, may interrupt to make a call of its own.

A handler runs on top of whatever its thread does, which may be the middle of a turn. There it must neither touch the
machine nor wait for the call that it interrupts. It can ask for something, such as to leave; the outermost call does
that before it returns.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from omnireduce.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
Own = TypeVar("Own", bound="Interruptible")


class ThreadState(threading.local):
    """The state of one thread: how many calls are under way, nested, and what to do after them."""

    depth = 0
    asked: tuple[Callable[[], None], ...] = ()


class Interruptible:
    """The base of a class with such calls."""

    _here: ThreadState

    @property
    def inside(self) -> bool:
        """Whether this thread is in a call. Code that is not part of the call can ask this only in a signal handler,
        which has interrupted the call."""
        return self._here.depth > 0

    def afterwards(self, function: Callable[[], None], *, first: bool = False) -> None:
        """Call `function` when the outermost call of this thread is over, perhaps before others."""
        self._here.asked = (function, *self._here.asked) if first else (*self._here.asked, function)

    def _refuse_nested(self) -> None:
        """Raise UsageError in a call on top of another one."""
        if self._here.depth > 1:
            raise UsageError(
                "a collective from a signal handler (or another callback) that interrupts a collective of the same "
                "thread would wait for itself; let the handler set a flag, and call it from the program"
            )


def entering(method: Callable[Concatenate[Own, P], T]) -> Callable[Concatenate[Own, P], T]:
    """Count `method` as a call; after the outermost one do what was asked for meanwhile."""

    @functools.wraps(method)
    def entered(self: Own, /, *args: P.args, **kwargs: P.kwargs) -> T:
        here = self._here
        before = here.depth
        here.depth = before + 1  # no handler runs between an assignment and `try`, or at the start of `finally`
        try:
            return method(self, *args, **kwargs)
        finally:
            here.depth = before
            if here.asked and not before:
                asked, here.asked = here.asked, ()
                for function in asked:
                    function()

    return entered
