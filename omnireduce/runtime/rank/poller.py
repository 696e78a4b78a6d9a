"""Poller of a waiting rank: for its links, wake-ups from this process, and the other ranks of its host."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from omnireduce.protocol.host.exchange import HostExchange
from omnireduce.support.os_error_origin import raised_by_signal_handler
from omnireduce.transport.base import Link

UNKNOWN = -1  # the mask of a link while it changes
PEEKED = [(-2, 0)]  # stands for "something came that no descriptor shows"
Ready = list[tuple[int, int]]  # descriptors, with their events


class Poller:
    """Polls `links`, one per shard, and `host`, whose ranks wake each other by `eventfds`, one for each rank. It closes
    the eventfds. Raises OSError."""

    def __init__(self, links: Sequence[Link], host: HostExchange | None, eventfds: Sequence[int]) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._waking = threading.RLock()  # reentrant: a signal handler may close while its thread wakes another
        self._links, self._host, self._eventfds = links, host, list(eventfds)
        self._own_eventfd = -1 if host is None else self._eventfds[host.me]
        self._masks, self._descriptors = [0] * len(links), [-1] * len(links)
        self._poll = select.poll()
        self._shards: dict[int, int] = {}  # watched shards, by descriptor
        self._news: list[int] = []
        # links with news that their descriptor does not show
        self._peeking = [shard for shard, link in enumerate(links) if type(link).peek is not Link.peek]
        for descriptor in (self._wake, self._own_eventfd):
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)

    def wake(self) -> None:
        """Let the polling thread return, if there still may be one."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wake_rank(self, rank: int) -> None:
        """Wake another rank of this host."""
        try:
            os.eventfd_write(self._eventfds[rank], 1)
        except BlockingIOError as error:  # the eventfd is full: the rank wakes anyway
            if raised_by_signal_handler(error):
                raise

    @property
    def has_something_to_wait_for(self) -> bool:
        """The exchange inside the host cannot go on at once."""
        return self._host is None or not self._host.can_go_on

    def watch_all(self) -> None:
        """Register with the poll object the events that each link now waits for."""
        for shard in range(len(self._links)):
            self._watch(shard)

    def _watch(self, shard: int) -> None:
        link = self._links[shard]
        events = 0 if link.over else select.POLLIN | (select.POLLOUT if link.wants_write else 0)
        if events == self._masks[shard]:
            return
        self._masks[shard] = UNKNOWN  # Ctrl-C may come between the change of the poll object and of this list
        if events:
            self._descriptors[shard] = link.fileno()
            self._shards[self._descriptors[shard]] = shard
            self._poll.register(self._descriptors[shard], events)
        else:
            self._unwatch(shard)
        self._masks[shard] = events

    def _unwatch(self, shard: int) -> None:
        if self._descriptors[shard] >= 0:
            with suppress(KeyError):
                self._poll.unregister(self._descriptors[shard])
            self._shards.pop(self._descriptors[shard], None)
            self._descriptors[shard] = -1

    def forget(self, shard: int) -> None:
        """The link is about to be closed."""
        self._unwatch(shard)
        self._masks[shard] = 0

    def wait(self, spin_until: float, patience_ms: float | None, lock: threading.RLock) -> None:
        """Return when there is news, or after `patience_ms`. Spin first, until `spin_until`. A thread that holds `lock`
        may use or close links."""
        self._note(self._spin(spin_until, lock) or self._sleep(patience_ms))

    def check(self) -> None:
        """Look for news once, without waiting."""
        self._note(self._poll.poll(0))

    def _note(self, ready: Ready) -> None:
        self._news = news = []
        for descriptor, _ in self._poll.poll(0) if ready is PEEKED else ready:
            if descriptor in self._shards:
                news.append(self._shards[descriptor])
            elif descriptor in (self._wake, self._own_eventfd):
                self._drain(descriptor)

    def news(self) -> list[int]:
        """The shards whose links had news at the last look."""
        unseen = [shard for shard in self._peeking if self._links[shard].peek()]
        return [*{*self._news, *unseen}] if unseen else self._news

    def _drain(self, descriptor: int) -> None:
        try:
            os.eventfd_read(descriptor)
        except BlockingIOError as error:  # another rank has drained it
            if raised_by_signal_handler(error):
                raise

    def _spin(self, until: float, lock: threading.RLock) -> Ready:
        while time.monotonic() < until:
            with lock:
                if self._peeking and any(self._links[shard].peek() for shard in self._peeking):
                    return PEEKED
            if self._host is not None and self._host.await_step():
                return PEEKED
            ready = self._poll.poll(0)
            if ready:
                return ready
            os.sched_yield()
        return []

    def _sleep(self, patience_ms: float | None) -> Ready:
        """Sleep on the descriptors. Another rank of this host wakes this rank when it has moved."""
        if self._host is None:
            return self._poll.poll(patience_ms)
        if not self._host.fall_asleep():
            return PEEKED
        try:
            return self._poll.poll(patience_ms)
        finally:
            self._host.wake_up()

    def abandon(self) -> None:
        """In a forked child: close. Another thread of the parent may have held the lock."""
        self._waking = threading.RLock()
        self.close()

    def close(self) -> None:
        """Close all descriptors of the poller. The links stay open."""
        with self._waking:  # forget each descriptor before closing it: an interrupt may come after each line
            descriptors = [descriptor for descriptor in (self._wake, *self._eventfds) if descriptor >= 0]
            self._wake, self._own_eventfd, self._eventfds, self._host = -1, -1, [], None
        for descriptor in descriptors:
            os.close(descriptor)
