"""Calls that a signal handler, or another callback, may interrupt to make a call of its own.

A handler runs on top of whatever its thread does, which may be the middle of a turn. There it must neither touch the
machine nor wait for the call that it interrupts. It can ask to leave; the outermost call does so before it returns.
"""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from omnireduce.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")
Own = TypeVar("Own", bound="Interruptible")


class Here(threading.local):
    """For each thread: how many calls are under way, one on top of the other, and whether one was asked to leave."""

    depth = 0
    asked = False


class Interruptible(ABC):
    """The base of a class with such calls."""

    _here: Here

    @property
    def inside(self) -> bool:
        """Whether this thread is in a call. Code that is not part of the call can ask this only in a signal handler,
        which has interrupted the call."""
        return self._here.depth > 0

    def _refuse_nested(self) -> None:
        """Raise UsageError in a call on top of another one."""
        if self._here.depth > 1:
            raise UsageError(
                "a collective from a signal handler (or another callback) that interrupts a collective of the same "
                "thread would wait for itself; let the handler set a flag, and call it from the program"
            )

    @abstractmethod
    def _shut_down(self) -> None:
        """Leave, and close everything."""


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
                here.asked = False
                self._shut_down()

    return entered
