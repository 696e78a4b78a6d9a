"""The threads of a rank: they work for different shards at the same time.

A signal handler may raise between any two lines here. So no lock is taken by Python code, as in `concurrent.futures`:
an interrupt would leave it locked. Queues and iterators are C code.
"""

from __future__ import annotations

import errno
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from omnireduce.errors import UsageError
from omnireduce.protocol.collective.shard_threads import ShardThreads, T, ThreadPool
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.rank.launcher_detection import detect_launch
from omnireduce.support.processors import quota, usable
from omnireduce.transport.base import Event, Link, Received

MAX_DEFAULT_THREADS = 6  # threads: an eighth of their work runs in the interpreter, one thread at a time


def threads_for(requested: int, links: Sequence[Link], ranks: int) -> Threads | None:
    """The threads of a rank with these links, `requested` or fewer; None if a single thread is enough. If `requested`
    is 0, the number follows from the processors: each shard on this host gets one, the ranks of the host share the
    others, and half of a rank's share is for the user's own work. `ranks`: the number of ranks that share memory here;
    the launcher may know of more. Raises BlockingIOError when the system has no room for the wanted threads."""
    count = min(requested or _by_processors(links, ranks), len(links))
    if count < 2:
        return None
    try:
        return Threads(count)
    except RuntimeError as error:  # it says that no thread can be started
        if not requested:
            return None
        raise BlockingIOError(errno.EAGAIN, f"no room for {count} threads; set transport.threads = 1") from error


def _by_processors(links: Sequence[Link], ranks: int) -> int:
    shards_here = sum(link.process is not None for link in links)
    share = (min(usable(), quota() or math.inf) - shards_here) / max(ranks, _launched_here())
    return min(int(share / 2), MAX_DEFAULT_THREADS)


def _launched_here() -> int:
    try:
        return detect_launch().local_size or 1
    except UsageError:  # rank and size may be arguments, so the variables of a launcher need not be right
        return 1


class Threads(ThreadPool):
    """`count` threads; one is the caller of `run`. Raises RuntimeError when the system has no room for them."""

    worth_bytes = 8 << 20  # for smaller tensors, handing work over takes longer than it saves

    def __init__(self, count: int) -> None:
        self.count = count
        self._runs: SimpleQueue[_Run | None] = SimpleQueue()
        self._others: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._runs, count - 1)  # needed if the rank is not shut down
        self._end.atexit = False  # work during the exit of the process still needs the threads
        try:
            for _ in range(count - 1):  # started now: inside a collective a lack of room would be noticed too late
                self._others.append(threading.Thread(target=_help, args=(self._runs,), name="omnireduce", daemon=True))
                self._others[-1].start()
        except BaseException:
            self._others = [thread for thread in self._others if thread.ident is not None]
            self.close()
            raise

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        run = _Run(calls)
        try:
            for _ in self._others[: len(calls) - 1]:
                self._runs.put(run)
            run.make_calls()
            return run.outcome()
        finally:
            try:
                run.settle()
            finally:  # after a second interrupt
                run.settle()

    def close(self) -> None:
        self._end()
        for thread in self._others:
            thread.join()


def _end(runs: SimpleQueue[_Run | None], others: int) -> None:
    for _ in range(others):
        runs.put(None)


def _help(runs: SimpleQueue[_Run | None]) -> None:
    while (run := runs.get()) is not None:
        run.help()
        run = None  # it refers to arrays of the user


class _Run:
    """Some calls. Each thread that takes part makes the next call, until none is left."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._size, self._remaining = len(calls), iter(enumerate(calls))
        self._outcomes: SimpleQueue[tuple[int, Any, BaseException | None]] = SimpleQueue()
        self._begun: list[
            None
        ] = []  # an entry for each other thread that has begun to help; in `_ended`, that has ended
        self._ended: list[None] = []

    def help(self) -> None:
        """Take part, in a thread that no signal handler interrupts."""
        self._begun.append(None)
        self.make_calls()
        self._ended.append(None)

    def make_calls(self) -> None:
        for number, call in self._remaining:
            try:
                self._outcomes.put((number, call(), None))
            except BaseException as error:
                self._outcomes.put((number, None, error))

    def outcome(self) -> list[Any]:
        """Wait for all calls; the results, in the order of the calls. Raises the first error among them."""
        outcomes = sorted((self._outcomes.get() for _ in range(self._size)), key=lambda outcome: outcome[0])
        errors = [error for _, _, error in outcomes if error is not None]
        errors.sort(key=lambda error: isinstance(error, Exception))  # Ctrl-C first: it may have caused the other errors
        if errors:
            try:
                raise errors[0]
            finally:
                outcomes, errors = [], []  # the error refers to this frame: otherwise they would be a reference cycle
        return [result for _, result, _ in outcomes]

    def settle(self) -> None:
        """Drop the calls that have not begun, and return when no other thread helps any more. Until then they use
        arrays that the caller may release."""
        deque(self._remaining, maxlen=0)
        while len(self._ended) < len(self._begun):
            time.sleep(0)  # gives up the interpreter's lock; after an interrupt this lasts as long as a call


class ParallelDriver(Driver):
    """Drives a rank's machine, and reads from several shards at the same time if the machine has threads."""

    machine: RankMachine

    def feed_all(self, peers: Collection[int]) -> None:
        shard_threads = self.machine.shard_threads
        if shard_threads is None or len(peers) < 2 or self.machine.ended is not None or not shard_threads.is_on:
            super().feed_all(peers)
            return
        # All links are read first, because effects of the machine may use any link.
        for peer, events in shard_threads.pool.run(
            [partial(self._read_ahead, shard_threads, peer) for peer in sorted(peers)]
        ):
            self.take(peer, events)

    def _read_ahead(self, shard_threads: ShardThreads, peer: int) -> tuple[int, Sequence[Event]]:
        """Read the link, and do the work that concerns this peer alone."""
        events = self.read(peer)
        for event in events:
            if isinstance(event, Received):
                shard_threads.place(peer, event.slot, event.nbytes)
        return peer, events
