"""Listeners of a shard, its listening sockets: each accepted connection becomes a link."""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from omnireduce.core.wire.control import Refused, encode_control
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.file_descriptors import NO_ROOM, PAUSE_S, Reserve
from omnireduce.support.logs import tagged
from omnireduce.transport.base import Link

log = logging.getLogger("omnireduce.aggregator")

FULL = "too many connections; raise ulimit -n of the aggregator, or wait"
ACCEPTED, BESIDE_JOBS = 64, 8  # connections that a listener accepts in one turn: without jobs, and while jobs run


class Listener(NamedTuple):
    """A listening socket; `make_link` makes a link of an accepted socket. `of_monitor`: only for the daemon's own
    monitor."""

    sock: socket.socket
    make_link: Callable[[socket.socket], Link]
    of_monitor: bool = False


class ListeningSockets:
    """Keeps `listeners` in `selector`, and accepts connections there.

    If the system has no room for one more connection, the first waiting connection would keep its listener readable. A
    descriptor is kept back to accept this connection and to tell it so (`turn_away`). If that fails, no connection is
    accepted until `deadline`.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        selector: selectors.BaseSelector,
        clock: Clock,
        connected: Callable[[], int],
    ) -> None:
        self._listeners, self._selector, self._clock, self._connected = listeners, selector, clock, connected
        self._reserve = Reserve() if listeners else None
        self.deadline: float | None = None
        self._begin()

    def _begin(self) -> None:
        for listener in self._listeners:
            self._selector.register(listener.sock, selectors.EVENT_READ, listener)

    def resume(self, now: float) -> None:
        """Listen again, if it is time."""
        if self.deadline is not None and now >= self.deadline:
            self.deadline = None
            self._begin()

    def accept(self, listener: Listener, limit: int) -> Iterator[Link]:
        """Accept connections at a listener that was readable, at most `limit`, and yield their links."""
        for _ in range(min(limit, ACCEPTED)):
            if self.deadline is not None:  # set by an earlier event of the same turn
                return
            try:
                sock, _ = listener.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.error("cannot accept a connection: %s", error, extra=tagged("accept_failed"))
                if error.errno in NO_ROOM and not self._answer(listener):
                    self._pause()
                continue
            try:
                yield listener.make_link(sock)
            except OSError as error:  # the peer has reset the connection already
                log.info("lost a connection at once: %s", error, extra=tagged("newcomer_lost"))
                sock.close()

    def _answer(self, listener: Listener) -> bool:
        """Tell the waiting connection that there is no room; return False if the reserved descriptor is not enough."""
        assert self._reserve is not None
        with self._reserve.spent():
            try:
                self.turn_away(listener.make_link(listener.sock.accept()[0]))
            except OSError:
                return False
        return True

    def turn_away(self, link: Link) -> None:
        """Tell the peer of `link` that there are too many connections."""
        count = self._connected()
        log.error("turned a connection away: %d are open", count, extra=tagged("turned_away", connections=count))
        link.poll()  # a local connection that is closed with unread input would lose the answer
        link.send_control(encode_control(Refused(FULL, temporary=True)))
        link.close()

    def close(self) -> None:
        if self._reserve is not None:
            self._reserve.close()

    def _pause(self) -> None:
        self.deadline = self._clock() + PAUSE_S
        for listener in self._listeners:
            self._selector.unregister(listener.sock)
