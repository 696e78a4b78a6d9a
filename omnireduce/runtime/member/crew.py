"""The threads of a worker: they work for different shards at the same time."""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from omnireduce.processors import quota, usable
from omnireduce.protocol.division import Crew, Division
from omnireduce.protocol.worker import WorkerMachine
from omnireduce.runtime.driver import Driver
from omnireduce.transport.base import Event, Link, Received

T = TypeVar("T")
MOST_BY_ITSELF = 6  # threads: an eighth of their work is the interpreter's, which runs one at a time


def crew_for(wanted: int, links: Sequence[Link], ranks_here: int) -> Threads | None:
    """The threads of a rank with these links, `wanted` or fewer. 0: the shards here need a processor each, the
    `ranks_here` on this host share the others, and half of a share is for the user's own work. Raises BlockingIOError
    when the system has no room for them."""
    shards_here = sum(link.kind == "shm" for link in links)
    share = (min(usable(), quota() or math.inf) - shards_here) / ranks_here
    threads = min(wanted or min(int(share / 2), MOST_BY_ITSELF), len(links))
    return Threads(threads) if threads > 1 else None


class Threads(Crew):
    """`threads` threads, of which one is the caller."""

    worth_bytes = 8 << 20  # below that, to hand work over takes longer than it saves

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="omnireduce")
        self._start(threads - 1)

    def _start(self, helpers: int) -> None:
        """Start all at once: in a collective it would be too late to learn that there is no room."""
        all_run = threading.Barrier(helpers + 1)
        try:
            for _ in range(helpers):
                self._pool.submit(all_run.wait)
            all_run.wait()
        except BaseException as error:
            all_run.abort()
            self.close()
            if not isinstance(error, RuntimeError):
                raise
            wrong = f"no room for {helpers} more threads; set transport.threads = 1"
            raise BlockingIOError(errno.EAGAIN, wrong) from error

    def run(self, calls: Sequence[Callable[[], T]]) -> Iterator[T]:
        """What no other thread has begun when the caller is free, the caller does itself."""
        first, *others = calls
        begun: list[tuple[Future[T], Callable[[], T]]] = []
        try:
            begun.extend((self._pool.submit(call), call) for call in others)
            yield first()
            elsewhere = []
            for future, call in begun:
                if future.cancel():
                    yield call()
                else:
                    elsewhere.append(future)
            for future in elsewhere:
                yield future.result()
        finally:
            wait([future for future, _ in begun if not future.cancel()])  # they use what the caller may let go

    def close(self) -> None:
        self._pool.shutdown()


class DividingDriver(Driver):
    """Drives a worker's machine, and reads from several shards at the same time where the machine divides its work."""

    machine: WorkerMachine

    def __init__(self, machine: WorkerMachine, *arguments: Any, **options: Any) -> None:
        super().__init__(machine, *arguments, **options)

    def feed_all(self, peers: Collection[int]) -> None:
        division = self.machine.division
        if division is None or len(peers) < 2 or not division.is_on:
            super().feed_all(peers)
            return
        read = [partial(self._read_ahead, division, peer) for peer in peers]
        for peer, events in [*division.crew.run(read)]:  # first all: what the machine says may go to any link
            self.take(peer, events)

    def _read_ahead(self, division: Division, peer: int) -> tuple[int, Sequence[Event]]:
        """Read, and do what concerns this peer alone."""
        events = self.read(peer)
        for event in events:
            if isinstance(event, Received) and self.machine.ended is None:
                division.place(peer, event.slot, event.nbytes)
        return peer, events
