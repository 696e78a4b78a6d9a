"""What a collective under way looks like to its caller, and the errors that it may end with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.member.calls import Call

T = TypeVar("T")


class Waiter(Protocol):
    """What a handle needs of the engine."""

    def wait(self, handle: Handle[T], timeout_s: float | None) -> None: ...
    def end_error(self, *, under_way: bool = False) -> OmniReduceError: ...


class Handle(Generic[T]):
    """A collective under way. `wait` returns its result; the arrays belong to the collective until then."""

    def __init__(self, engine: Waiter, call: Call[T]) -> None:
        self._engine, self._result, self._name = engine, call.result, call.descriptor.name
        self._reads, self._writes = call.reads, call.writes
        self._thread = threading.current_thread()
        self._failed = False
        self.finished = False

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.finished

    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result. Any thread may wait, also several.

        Raises AbortedError or its subclass CollectiveTimeoutError when the job failed, ClosedError when this process
        shut the communicator down, and TimeoutError after `timeout_s` seconds (None: no such limit; `cluster.timeout_s`
        always applies); the collective is then still under way and may be waited for again.
        """
        self._engine.wait(self, timeout_s)
        if self._failed:
            raise self._engine.end_error(under_way=True)
        return self._result()

    def __await__(self) -> Generator[Any, None, T]:
        """`await handle` in a coroutine: `wait` in a thread of the event loop's executor, which goes on where the
        coroutine is cancelled."""
        return asyncio.get_running_loop().run_in_executor(None, self.wait).__await__()

    def finish(self, *, failed: bool = False) -> None:
        """For the engine: the collective is over."""
        self._reads = self._writes = ()
        self._failed = failed
        self.finished = True

    def refuse(self, new: Handle[T]) -> None:
        """Raise UsageError if `new` may not be under way together with this one."""
        if new._name and new._name == self._name and new._thread is not self._thread:
            raise UsageError(
                f"a collective named '{self._name}' of thread '{self._thread.name}' is under way; thread "
                f"'{new._thread.name}' must wait for it or use another name: the ranks tell them apart by nothing else"
            )
        pairs = [(a, b) for a in new._writes for b in self._reads + self._writes]
        pairs += [(a, b) for a in new._reads for b in self._writes]
        if any(np.may_share_memory(a, b) for a, b in pairs):
            raise UsageError("this array is in use by a collective that is under way; wait for its handle first")
