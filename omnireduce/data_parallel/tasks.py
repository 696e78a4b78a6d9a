"""Collectives that were submitted by name, as their caller sees them."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, Protocol

from omnireduce.data_parallel.operations import Operation


class Waiter(Protocol):
    """What a task needs of the dispatcher."""

    def wait_for(self, task: Task, timeout_s: float | None) -> None: ...


class FailedTask(NamedTuple):
    """In place of a result."""

    error: Exception


class Task:
    """A collective that was submitted."""

    __slots__ = ("_dispatcher", "error", "is_done", "operation", "result", "since")

    def __init__(self, dispatcher: Waiter, operation: Operation) -> None:
        self._dispatcher, self.operation, self.since = dispatcher, operation, time.monotonic()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return the result. Raises UsageError where ranks differ about it, TimeoutError after `timeout_s` seconds (it
        may be waited for again), and what ends the job."""
        if not self.is_done:
            self._dispatcher.wait_for(self, timeout_s)
        if self.error is not None:
            raise self.error.with_traceback(None)  # it may be that of many tasks
        return self.result
