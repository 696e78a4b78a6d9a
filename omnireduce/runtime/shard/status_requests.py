"""Status requests that a shard has not answered yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from omnireduce.errors import ProtocolError
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.connection import Connection
from omnireduce.status import StatusRequest
from omnireduce.wire.control import ControlMessage, other_version

STATUSES = 4  # requests that are answered in one turn: the jobs come first
SHARE = 10  # answers take one part in so many of the time
PAUSE_S = 0.5  # longest pause after answers: their time may include a wait for a processor
MOST = 1024  # requests that may wait


class StatusRequests:
    """Requests, one of each connection. Those of the daemon's own monitor go first, the others as they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[Connection, StatusRequest] = {}
        self._again_at = clock()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def deadline(self) -> float | None:
        """When the next answer may be given."""
        return self._again_at if self._waiting else None

    def check(self, connection: Connection, message: ControlMessage) -> None:
        """Raise ProtocolError for a message of a connection whose request has not been answered yet."""
        if connection in self._waiting:
            raise ProtocolError(f"{type(message).__name__} before a StatusRequest was answered")

    def ask(self, connection: Connection, request: StatusRequest) -> None:
        """Take note of a request, or raise ProtocolError."""
        wrong = other_version(request.version)
        if not wrong and connection.link.wants_write:
            wrong = "a StatusRequest before the last answer was read"
        if not wrong and len(self._waiting) >= MOST and not connection.of_monitor:
            wrong = f"{MOST} status requests wait for an answer already: ask again later"
        if wrong:
            raise ProtocolError(wrong)
        self._waiting[connection] = request

    def withdraw(self, connection: Connection) -> None:
        """The connection wants no answer any more."""
        self._waiting.pop(connection, None)

    def take(self) -> Iterator[tuple[Connection, StatusRequest]]:
        """Take out the requests to be answered in this turn, one by one. The time that the answers take is measured."""
        if not self._waiting:
            return
        started = self._clock()
        chosen = [connection for connection in self._waiting if connection.of_monitor]
        if started >= self._again_at:
            chosen += islice((connection for connection in self._waiting if not connection.of_monitor), STATUSES)
        for connection in chosen:
            request = self._waiting.pop(connection, None)
            if request is not None:
                yield connection, request
        pause_s = min(SHARE * (self._clock() - started), PAUSE_S)
        self._again_at = max(self._again_at, started + pause_s)
