"""All connections of a shard: the events that each waits for, and how long it may stay."""

from __future__ import annotations

import itertools
import selectors
from collections.abc import Iterator
from dataclasses import dataclass

from omnireduce.core.wire.control import ControlMessage, Hello, encode_control
from omnireduce.core.wire.safe_text import SHOWN
from omnireduce.protocol.joining.authentication import Gate
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.job import Job
from omnireduce.support.logs import tagged
from omnireduce.transport.base import Link


class TimeLimit:
    """Connections, each of which may stay for `limit_s`. The oldest stands first, so no method has to look at all."""

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
        """When the time of the oldest is over."""
        return self._since[self.oldest] + self.limit_s if self._since else None

    def over(self, now: float) -> Iterator[Connection]:
        """Take out those whose time is over."""
        while self._since and now >= self._since[self.oldest] + self.limit_s:
            connection = self.oldest
            self.discard(connection)
            yield connection


@dataclass(slots=True, eq=False)
class Connection:
    """A peer: a newcomer, one that waits for its job to begin, a rank of a job, or one that leaves."""

    link: Link
    gate: Gate
    of_monitor: bool = False  # the daemon's own monitor asks here
    hello: Hello | None = None
    job: Job | None = None
    rank: int = -1
    leaving: bool = False
    has_left: bool = False  # it has said so
    number: int = 0  # those that came later have a higher one
    interest: int = selectors.EVENT_READ  # what the selector looks for; 0: it does not look

    def about(self, what: str) -> dict[str, object]:
        """The log's fields for the event `what`, with the facts known of this connection's peer."""
        hello, team = self.hello, self.gate.said or None
        peer: dict[str, object] = {"peer": self.link.peer, "user": self.link.user, "team": team}
        if hello is None or not hello.job.isprintable():
            return tagged(what, **peer)
        return tagged(what, job=hello.job[:SHOWN], rank=hello.rank, **peer)


HELLO_LIMIT = 4096  # bytes of a message of a peer that is in no job yet; an honest message has a tenth of that
LINGER_S = 1.0  # how long a leaver's last output may take
INTEREST = {False: selectors.EVENT_READ, True: selectors.EVENT_READ | selectors.EVENT_WRITE}  # True: it wants to write


class Connections:
    """All connections; each is in `selector`.

    `unidentified` ones have not said hello yet. `compilers` have said that their ranks compile, the oldest first:
    nothing is lost when one ends. `closing` ones are still sent our last words; those in `staying` have asked for more
    time.
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
        """A stranger has come."""
        connection.link.bound_control(HELLO_LIMIT)
        connection.number = next(self._numbers)
        self._all.add(connection)
        self.unidentified.add(connection, self._clock())
        self._selector.register(connection.link, selectors.EVENT_READ, connection)

    def add_uplink(self, link: Link, member: Connection) -> Connection:
        """The link of a relay to its upstream, for this member, is looked at from now on."""
        uplink = Connection(link, member.gate, hello=member.hello, number=next(self._numbers))
        self._all.add(uplink)
        self._selector.register(link, selectors.EVENT_READ, uplink)
        return uplink

    def go_on_by(self, connection: Connection, link: Link) -> None:
        """From now on the connection uses this link."""
        self.pause(connection)
        connection.link, connection.interest = link, selectors.EVENT_READ
        self._selector.register(link, selectors.EVENT_READ, connection)

    def say(self, connection: Connection, message: ControlMessage) -> None:
        """Send a message. What does not fit into the socket now leaves later, even if nothing else happens."""
        connection.link.send_control(encode_control(message))
        self.update_interest(connection)

    def update_interest(self, connection: Connection) -> None:
        """Let the selector look for room to write exactly as long as output waits."""
        wanted = INTEREST[connection.link.wants_write]
        if connection.interest not in (0, wanted) and connection in self._all:
            connection.interest = wanted
            self._selector.modify(connection.link, wanted, connection)

    def pause(self, connection: Connection) -> None:
        """Do not look at the connection any more: its unread input would end each wait at once."""
        if connection.interest and connection in self._all:
            connection.interest = 0
            self._selector.unregister(connection.link)

    def resume(self, connection: Connection) -> None:
        """Look at the connection again."""
        if not connection.interest and connection in self._all:
            connection.interest = INTEREST[connection.link.wants_write]
            self._selector.register(connection.link, connection.interest, connection)

    def let_leave(self, connection: Connection) -> None:
        """Give the connection a moment to read our last words."""
        connection.leaving = True
        self.unidentified.discard(connection)
        self.compilers.pop(connection, None)
        self.staying.discard(connection)
        self.closing.add(connection, self._clock())
        self.update_interest(connection)

    def let_stay(self, connection: Connection) -> None:
        """Give a connection that leaves more than a moment."""
        self.closing.discard(connection)
        self.staying.add(connection)

    def drop(self, connection: Connection) -> None:
        """Close the connection. If it had to read our last words, it has had the time."""
        self.pause(connection)
        self._all.discard(connection)
        self.unidentified.discard(connection)
        self.compilers.pop(connection, None)
        self.closing.discard(connection)
        self.staying.discard(connection)
        connection.link.drop()
