"""Status requests that a shard has not answered yet."""

from __future__ import annotations

from itertools import islice

from omnireduce.errors import ProtocolError
from omnireduce.runtime.connection import Connection
from omnireduce.status import StatusRequest
from omnireduce.wire import ControlMessage, other_version

STATUSES = 4  # that are answered in one turn: the jobs come first


class Questions:
    """One of each connection, those who asked first in front."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, StatusRequest] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, connection: Connection, message: ControlMessage) -> None:
        """Raise ProtocolError for a message of a connection that has to wait for its answer."""
        if connection in self._waiting:
            raise ProtocolError(f"{type(message).__name__} before a StatusRequest was answered")

    def ask(self, connection: Connection, request: StatusRequest) -> None:
        """Take note of a request, or raise ProtocolError."""
        wrong = other_version(request.version)
        if not wrong and connection.link.wants_write:
            wrong = "a StatusRequest before the last answer was read"
        if wrong:
            raise ProtocolError(wrong)
        self._waiting[connection] = request

    def withdraw(self, connection: Connection) -> None:
        """The connection wants no answer any more."""
        self._waiting.pop(connection, None)

    def take(self) -> list[tuple[Connection, StatusRequest]]:
        """Take out those that are to be answered in this turn."""
        first = list(islice(self._waiting, STATUSES))
        return [(connection, self._waiting.pop(connection)) for connection in first]
