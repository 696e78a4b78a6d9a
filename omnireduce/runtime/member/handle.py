"""What collectives under way look like to their caller, and the errors that they may end with."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.member.calls import Call

T = TypeVar("T")


class Waiter(Protocol):
    """What a handle needs of the engine."""

    def wait(self, handle: Started[Any], timeout_s: float | None) -> None: ...
    def end_error(self, *, under_way: bool = False) -> OmniReduceError: ...


class Handle(Generic[T], ABC):
    """Collectives under way. `wait` returns their result; the arrays belong to the collectives until then."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result. Any thread may wait, also several.

        Raises AbortedError or its subclass CollectiveTimeoutError when the job failed, ClosedError when this process
        shut the communicator down, and TimeoutError after `timeout_s` seconds (None: no such limit; `cluster.timeout_s`
        always applies); the collective is then still under way and may be waited for again.
        """

    def __await__(self) -> Generator[Any, None, T]:
        """`await handle` in a coroutine: as `wait`, while the event loop goes on. Where the coroutine is cancelled the
        collective goes on."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(over.set)

        self.when_done(tell)
        yield from over.wait().__await__()
        return self.wait()

    @abstractmethod
    def when_done(self, call: Callable[[], None]) -> None:
        """Have it called, once or more often, in any thread, as soon as this is done. It must not raise nor block."""


class Together(Handle[T]):
    """Several collectives as one; `result` makes one of their results."""

    def __init__(self, handles: Sequence[Handle[Any]], result: Callable[[list[Any]], T]) -> None:
        self._handles, self._result = handles, result

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    def when_done(self, call: Callable[[], None]) -> None:
        def ask() -> None:
            if self.done():
                call()

        for handle in self._handles:
            handle.when_done(ask)

    def wait(self, timeout_s: float | None = None) -> T:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        return self._result([handle.wait(None if end is None else end - time.monotonic()) for handle in self._handles])


class Started(Handle[T]):
    """One collective, which an engine has started."""

    def __init__(self, engine: Waiter, call: Call[T]) -> None:
        self._engine, self._result, self._name = engine, call.result, call.descriptor.name
        self._put_back = call.put_back
        self._when_done: list[Callable[[], None]] = []
        self._reads, self._writes = call.reads, call.writes
        self._thread = threading.current_thread()
        self._failed = False
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def when_done(self, call: Callable[[], None]) -> None:
        self._when_done.append(call)
        if self.finished:  # perhaps just now, by another thread, which may have seen the list without it
            call()

    def wait(self, timeout_s: float | None = None) -> T:
        self._engine.wait(self, timeout_s)
        if self._failed:
            raise self._engine.end_error(under_way=True)
        return self._result()

    def finish(self, *, failed: bool = False) -> None:
        """For the engine: the collective is over."""
        if not failed:
            self._put_back()
        self._reads = self._writes = ()
        self._failed = failed
        self.finished = True
        for call in self._when_done:
            call()

    def refuse(self, new: Started[Any]) -> None:
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
