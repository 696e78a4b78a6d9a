"""The listening sockets of a shard: who connects becomes a link."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
from collections.abc import Callable, Sequence

from omnireduce.logs import tagged
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.reserve import NO_DESCRIPTORS, Reserve
from omnireduce.transport.base import Link

log = logging.getLogger("omnireduce.aggregator")
NO_ROOM = (*NO_DESCRIPTORS, errno.ENOBUFS, errno.ENOMEM)
PAUSE_S = 1.0  # in which nobody is accepted, when the system has no room for one more

MakeLink = Callable[[socket.socket], Link]


class Listening:
    """Keeps `listeners`, each with what makes a link of a socket that it accepts, in `selector`.

    Where the system has no room for one more connection, the first that waits would keep a socket readable. By a
    descriptor that is kept back it is told so (`turn_away`); where that fails, all are left alone until `again_at`.
    """

    def __init__(
        self,
        listeners: Sequence[tuple[socket.socket, MakeLink]],
        selector: selectors.BaseSelector,
        clock: Clock,
        turn_away: Callable[[Link], None],
    ) -> None:
        self._listeners, self._selector, self._clock, self._turn_away = listeners, selector, clock, turn_away
        self._reserve = Reserve() if listeners else None
        self.again_at: float | None = None
        self._begin()

    def _begin(self) -> None:
        for listener, make_link in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, make_link)

    def resume(self, now: float) -> None:
        """Listen again, if it is time."""
        if self.again_at is not None and now >= self.again_at:
            self.again_at = None
            self._begin()

    def accept(self, listener: socket.socket, make_link: MakeLink) -> Link | None:
        """The link of who waits at a listener that was readable; None when it cannot be had."""
        if self.again_at is not None:  # since an earlier event of the same turn
            return None
        try:
            sock, _ = listener.accept()
        except OSError as error:
            log.error("cannot accept a connection: %s", error, extra=tagged("accept_failed"))
            if error.errno in NO_ROOM and not self._answer(listener, make_link):
                self._pause()
            return None
        try:
            return make_link(sock)
        except OSError as error:  # the peer has reset the connection already
            log.info("lost a connection at once: %s", error, extra=tagged("newcomer_lost"))
            sock.close()
            return None

    def _answer(self, listener: socket.socket, make_link: MakeLink) -> bool:
        """Tell who waits that there is no room, if the descriptor that is kept back is enough for that."""
        assert self._reserve is not None
        with self._reserve.spent():
            try:
                self._turn_away(make_link(listener.accept()[0]))
            except OSError:
                return False
        return True

    def close(self) -> None:
        if self._reserve is not None:
            self._reserve.close()

    def _pause(self) -> None:
        self.again_at = self._clock() + PAUSE_S
        for listener, _ in self._listeners:
            self._selector.unregister(listener)
