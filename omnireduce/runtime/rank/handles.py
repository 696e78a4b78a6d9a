"""Handles of collectives under way, and checks of new collectives against them."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from omnireduce.errors import OmniReduceError, UsageError
from omnireduce.runtime.rank.calls.arguments import Names
from omnireduce.runtime.rank.calls.single import Call, once

T = TypeVar("T")


def _nothing() -> None:
    """Do nothing."""


class Waiter(Protocol):
    """The part of the engine that a handle needs."""

    def wait(self, handle: SingleHandle[Any], timeout_s: float | None) -> None: ...
    def end_error(self, *, under_way: bool = False) -> OmniReduceError: ...


class EngineObserver(Protocol):
    """The part of an observer that an engine needs."""

    def watch(self, calls: Sequence[Call[Any]], handles: Sequence[SingleHandle[Any]], /) -> tuple[Call[Any], ...]: ...


class DoneCallback(Protocol):
    """A function that is called when a collective is over."""

    def __call__(self, *, failed: bool) -> None: ...


class Handle(Generic[T], ABC):
    """Handle of collectives under way. `wait` returns their result; the arrays belong to the collectives until they are
    done."""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> T:
        """Return the result. Any thread may wait, even several at once.

        Raises AbortedError or its subclass CollectiveTimeoutError when the job failed, ClosedError when this process
        shut the communicator down, and TimeoutError after `timeout_s` seconds (None: no such limit; `cluster.timeout_s`
        always applies). After TimeoutError the collective is still under way, and may be waited for again.
        """

    def __await__(self) -> Generator[Any, None, T]:
        """`await handle` in a coroutine does what `wait` does, while the event loop goes on. If the coroutine is
        cancelled, the collective goes on."""
        loop = asyncio.get_running_loop()
        for part in self._parts:
            yield from part.over(loop).__await__()
        # The collective is over, but `wait` may still read an object or copy a part, which may take long.
        return (yield from loop.run_in_executor(None, self.wait).__await__())

    @property
    @abstractmethod
    def _parts(self) -> Sequence[SingleHandle[Any]]:
        """The single collectives of this handle."""


class HandleGroup(Handle[T]):
    """Several collectives as one; `result` makes one result of all their results."""

    def __init__(self, handles: Sequence[SingleHandle[Any]], result: Callable[[list[Any]], T]) -> None:
        self._handles = handles
        self._result = once(lambda: result([handle.wait() for handle in handles]))

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)

    @property
    def _parts(self) -> Sequence[SingleHandle[Any]]:
        return self._handles

    def wait(self, timeout_s: float | None = None) -> T:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for handle in self._handles:
            handle.wait(None if deadline is None else deadline - time.monotonic())
        return self._result()


class SingleHandle(Handle[T]):
    """One collective, which an engine has started."""

    def __init__(self, engine: Waiter, call: Call[T]) -> None:
        self._engine, self._result, self.name = engine, call.result, call.descriptor.name
        self._put_back = call.put_back
        self._waiting: set[Callable[[], None]] = set()  # each function wakes a coroutine
        self._reads, self._writes = call.reads, call.writes
        self.thread = threading.current_thread()
        self._failed = False
        self.on_over: DoneCallback | None = None
        self.finished = False

    def done(self) -> bool:
        return self.finished

    @property
    def _parts(self) -> Sequence[SingleHandle[Any]]:
        return (self,)

    async def over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return when the collective is over."""
        is_over = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(is_over.set)

        self._waiting.add(wake)
        try:
            while not self.finished:  # another thread may finish it now, before it can see `wake`
                await is_over.wait()
        finally:
            self._waiting.discard(wake)

    def tell(self) -> None:
        """For the engine: wake the coroutines that wait, once the collective is over."""
        for wake in tuple(self._waiting):
            wake()

    def abandon(self) -> None:
        """For the engine: in a forked child, no coroutine waits."""
        self._waiting.clear()

    def wait(self, timeout_s: float | None = None) -> T:
        if not self.finished:
            self._engine.wait(self, timeout_s)
        if self._failed:
            raise self._engine.end_error(under_way=True)
        return self._result()

    def finish(self, *, failed: bool = False) -> None:
        """For the engine: the collective is over."""
        if not failed:
            self._put_back()
        self._reads = self._writes = ()
        self._put_back, self._failed = _nothing, failed
        callback, self.on_over = self.on_over, None
        if callback is not None:
            callback(failed=failed)
        self.finished = True
        self.tell()

    def refuse(self, new: SingleHandle[Any]) -> None:
        """Raise UsageError if `new` may not be under way together with this collective."""
        if new.name and new.name == self.name and new.thread is not self.thread:
            raise UsageError(
                f"a collective named '{self.name}' of thread '{self.thread.name}' is under way; thread "
                f"'{new.thread.name}' must wait for it or use another name: only names tell threads apart on all ranks"
            )
        pairs = [(a, b) for a in new._writes for b in self._reads + self._writes]
        pairs += [(a, b) for a in new._reads for b in self._writes]
        if any(np.may_share_memory(a, b) for a, b in pairs):
            raise UsageError("this array is in use by a collective that is under way; wait for its handle first")


def check_free(new: Sequence[SingleHandle[Any]], under_way: Collection[SingleHandle[Any]], names: Names) -> None:
    """Raise UsageError if a collective in `new` uses arrays of another collective, or a name of another thread."""
    for handle in new:
        for other in under_way:
            other.refuse(handle)
        if handle.name:
            names.claim(handle.name, handle.thread)


def check_fits(block_bytes: int, largest: int) -> None:
    """Raise UsageError for a block that does not fit a slot, which holds blocks of up to `largest` bytes."""
    if block_bytes > largest:
        raise UsageError(
            f"a block of {block_bytes} bytes does not fit a slot, which holds blocks of up to {largest} bytes; choose "
            "a smaller block_size (or shorter rows), or raise protocol.slot_bytes"
        )
