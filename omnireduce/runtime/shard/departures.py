"""How the connections of a shard end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from omnireduce.errors import ProtocolError
from omnireduce.protocol.membership import Membership
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.connection import Connection
from omnireduce.runtime.shard.connections import Connections
from omnireduce.runtime.shard.questions import Questions
from omnireduce.transport.base import Control, Event
from omnireduce.wire.control import Aborted, Cause, Report, decode_control


class Departures:
    """Lets connections go: with a moment to read our last words, or at once. When the last connection of a job goes,
    the job's memory goes, too."""

    def __init__(self, connections: Connections, questions: Questions, membership: Membership, clock: Clock) -> None:
        self._connections, self._questions, self._membership, self._clock = connections, questions, membership, clock
        self._members: dict[int, list[Connection]] = {}  # by generation, of jobs whose memory is still there

    def enter(self, generation: int, members: list[Connection]) -> None:
        """These connections are in a job now. The job must be closed when all of them have gone."""
        self._members[generation] = members

    def members(self, generation: int) -> Sequence[Connection]:
        """The connections of a job that have not gone yet."""
        return tuple(self._members.get(generation, ()))

    def leave(self, connection: Connection) -> None:
        """Give the connection a moment to read our last words, then drop it."""
        if connection.link.over:
            self.drop(connection)
        elif connection in self._connections and not connection.leaving:
            self._questions.withdraw(connection)
            self._connections.let_leave(connection)

    def hear(self, connection: Connection, events: Sequence[Event]) -> None:
        """If a rank that leaves reports, let all ranks of its job stay: a collective goes on in memory, of which their
        shard sees nothing."""
        if connection.job is not None and any(isinstance(each, Control) and _is_report(each.body) for each in events):
            for member in self.members(connection.job.generation):
                self._connections.let_stay(member)

    def send_away(self, cause: Cause) -> None:
        """Tell those that were let stay why they must leave now."""
        for connection in tuple(self._connections.staying):
            self._connections.say(connection, Aborted(cause))
            self._connections.let_leave(connection)

    def forget(self, connection: Connection) -> None:
        """Drop a connection that may wait for its job to begin."""
        self.drop(connection)
        self._membership.gone(connection, self._clock())

    def drop(self, connection: Connection) -> None:
        """Close the connection."""
        if connection not in self._connections:
            return
        self._questions.withdraw(connection)
        self._connections.drop(connection)
        if connection.job is not None:
            members = self._members[connection.job.generation]
            members.remove(connection)
            if not members:
                connection.job.close()
                self._membership.released(connection.job.generation)
                del self._members[connection.job.generation]


def _is_report(body: bytes) -> bool:
    with suppress(ProtocolError):
        return isinstance(decode_control(body), Report)
    return False
