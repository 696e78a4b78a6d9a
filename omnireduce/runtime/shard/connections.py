"""Connections of a shard: the events that each waits for, and the time that it may stay."""

from __future__ import annotations

import itertools
import selectors
from collections.abc import Iterator
from dataclasses import dataclass

from omnireduce.core.wire.control import ControlMessage, Hello, encode_control
from omnireduce.core.wire.safe_text import SHOWN
from omnireduce.protocol.joining.authentication import Gate
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.support.logs import tagged
from omnireduce.transport.base import Link


class TimeLimit:
    """Connections that may stay for `limit_s`, the oldest first. So no method has to look at all of them."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._since

    def add(self, connection: Connection, now: float) -> None:
        """The connection's time begins now."""
        assert connection not in self._since
        self._since[connection] = now

    def discard(self, connection: Connection) -> None:
        """The connection is gone, or may stay."""
        self._since.pop(connection, None)

    @property
    def oldest(self) -> Connection:
        """The connection that has been here for longest."""
        return next(iter(self._since))

    @property
    def deadline(self) -> float | None:
        """The time when the oldest connection must go; None without any."""
        return self._since[self.oldest] + self.limit_s if self._since else None

    def expired(self, now: float) -> Iterator[Connection]:
        """Take out the connections whose time is over."""
        while self._since and now >= self._since[self.oldest] + self.limit_s:
            connection = self.oldest
            self.discard(connection)
            yield connection


@dataclass(slots=True, eq=False)
class Connection:
    """A peer: a newcomer, a worker that waits for its job to begin, a rank of a job, or a peer that leaves."""

    link: Link
    gate: Gate
    of_monitor: bool = False  # the connection of the daemon's own monitor
    hello: Hello | None = None
    job: ShardJob | None = None
    rank: int = -1
    leaving: bool = False
    has_left: bool = False  # the rank has said Leave
    number: int = 0  # ascending in the order of arrival
    interest: int = selectors.EVENT_READ  # the events that the selector looks for; 0: none

    def log_fields(self, event: str) -> dict[str, object]:
        """The log's fields for the event `event`, with the facts known of this connection's peer."""
        hello, team = self.hello, self.gate.claimed_team or None
        peer: dict[str, object] = {"peer": self.link.peer, "user": self.link.user, "team": team}
        if hello is None or not hello.job.isprintable():
            return tagged(event, **peer)
        return tagged(event, job=hello.job[:SHOWN], rank=hello.rank, **peer)


HELLO_LIMIT = 4096  # the longest message of a peer that is in no job yet; an honest message has a tenth of that
LINGER_S = 1.0  # the time in which a peer that leaves may read its last messages
INTEREST = {False: selectors.EVENT_READ, True: selectors.EVENT_READ | selectors.EVENT_WRITE}  # key: output waits


class Connections:
    """All connections; each is in `selector`.

    `unidentified`: they have not said Hello yet. `compilers`: they have said that their ranks compile, the oldest
    first; nothing is lost when such a connection ends. `closing`: they are still sent the last messages. `staying`:
    these have asked for more time.
    """

    def __init__(self, selector: selectors.BaseSelector, clock: Clock, hello_timeout_s: float) -> None:
        self._selector, self._clock = selector, clock
        self._all: set[Connection] = set()
        self._numbers = itertools.count()
        self.unidentified, self.closing = TimeLimit(hello_timeout_s), TimeLimit(LINGER_S)
        self.compilers: dict[Connection, None] = {}
        self.staying: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._all

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._all))

    def add(self, connection: Connection) -> None:
        """A new connection has come."""
        connection.link.bound_control(HELLO_LIMIT)
        connection.number = next(self._numbers)
        self._all.add(connection)
        self.unidentified.add(connection, self._clock())
        self._selector.register(connection.link, selectors.EVENT_READ, connection)

    def add_uplink(self, link: Link, member: Connection) -> Connection:
        """Look for events of `link`, a relay's uplink for this member, from now on."""
        uplink = Connection(link, member.gate, hello=member.hello, number=next(self._numbers))
        self._all.add(uplink)
        self._selector.register(link, selectors.EVENT_READ, uplink)
        return uplink

    def replace_link(self, connection: Connection, link: Link) -> None:
        """Use this link for the connection from now on."""
        self.pause(connection)
        connection.link, connection.interest = link, selectors.EVENT_READ
        self._selector.register(link, selectors.EVENT_READ, connection)

    def send(self, connection: Connection, message: ControlMessage) -> None:
        """Send a message. If the socket has no room for all of it, the rest leaves later by itself."""
        connection.link.send_control(encode_control(message))
        self.update_interest(connection)

    def update_interest(self, connection: Connection) -> None:
        """Let the selector look for room to write if output waits, and only then."""
        interest = INTEREST[connection.link.wants_write]
        if connection.interest not in (0, interest) and connection in self._all:
            connection.interest = interest
            self._selector.modify(connection.link, interest, connection)

    def pause(self, connection: Connection) -> None:
        """Stop looking for events of the connection: its unread input would end each wait at once."""
        if connection.interest and connection in self._all:
            connection.interest = 0
            self._selector.unregister(connection.link)

    def resume(self, connection: Connection) -> None:
        """Look for events of the connection again."""
        if not connection.interest and connection in self._all:
            connection.interest = INTEREST[connection.link.wants_write]
            self._selector.register(connection.link, connection.interest, connection)

    def let_leave(self, connection: Connection) -> None:
        """Give the connection a moment to read the last messages."""
        connection.leaving = True
        self.unidentified.discard(connection)
        self.compilers.pop(connection, None)
        self.staying.discard(connection)
        self.closing.add(connection, self._clock())
        self.update_interest(connection)

    def let_stay(self, connection: Connection) -> None:
        """Give a connection that leaves more time."""
        self.closing.discard(connection)
        self.staying.add(connection)

    def drop(self, connection: Connection) -> None:
        """Close the connection at once."""
        self.pause(connection)
        self._all.discard(connection)
        self.unidentified.discard(connection)
        self.compilers.pop(connection, None)
        self.closing.discard(connection)
        self.staying.discard(connection)
        connection.link.drop()
