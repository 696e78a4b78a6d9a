"""Teardown of a shard's connections, and of the memory of their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from omnireduce.core.wire.control import Aborted, Cause, ControlMessage, Leave, Report, decode_control
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.admission import Admission
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.connections import Connection, Connections
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.runtime.shard.relay_admission import Relaying
from omnireduce.runtime.shard.status_requests import StatusRequests
from omnireduce.transport.base import Control, Event, Lost


class Teardown:
    """Ends connections: after a moment to read the last messages, or at once. With the last connection of a job, it
    also gives the job's memory back."""

    def __init__(
        self, connections: Connections, status_requests: StatusRequests, admission: Admission | Relaying, clock: Clock
    ) -> None:
        self._connections, self._status_requests, self._admission, self._clock = (
            connections,
            status_requests,
            admission,
            clock,
        )
        self._members: dict[int, list[Connection]] = {}  # by generation, for jobs whose memory is in use
        self._failures: dict[int, Cause] = {}  # by generation, why a rank failed after its job had been told to end

    def enter(self, generation: int, members: list[Connection]) -> None:
        """These connections are in a job now. The job must be closed when all of them have gone."""
        self._members[generation] = members

    def members(self, generation: int) -> Sequence[Connection]:
        """The connections of a job that have not gone yet."""
        return tuple(self._members.get(generation, ()))

    def leave(self, connection: Connection) -> None:
        """Give the connection a moment to read the last messages, then drop it."""
        if connection.link.over:
            self.drop(connection)
        elif connection in self._connections and not connection.leaving:
            self._status_requests.withdraw(connection)
            self._connections.let_leave(connection)

    def handle_events(self, connection: Connection, events: Sequence[Event]) -> None:
        """Handle events of a leaving rank. If it reports, a collective goes on in memory, which the shard cannot see:
        then all ranks of its job stay. If a rank that stays fails, the others must not wait for it."""
        job = connection.job
        if job is None or not job.is_member(connection.rank):
            return
        for event in events:
            message = _decoded(event)
            if isinstance(message, Report):
                self._let_stay(job)
            elif isinstance(event, Lost) and not connection.has_left:
                self._end_stay(connection, job, Cause(job.machine.names_of([connection.rank]), event.reason))
            elif isinstance(message, Leave):
                connection.has_left = True
                self._end_stay(connection, job, message.cause)

    def _let_stay(self, job: ShardJob) -> None:
        """Keep the connections of this job that have not left. If a rank has failed, send them away instead."""
        failure = self._failures.get(job.generation)
        members = [member for member in self.members(job.generation) if job.is_member(member.rank)]
        for member in [member for member in members if not member.has_left]:
            if failure is None:
                self._connections.let_stay(member)
            else:
                self._send_away(member, failure)

    def _end_stay(self, connection: Connection, job: ShardJob, cause: Cause | None) -> None:
        """A rank leaves. If it has a cause, tell it to ranks that stay, and to ranks that will ask to stay."""
        if connection in self._connections.staying:
            self._connections.let_leave(connection)
        if cause is None:
            return
        if not cause.orderly:
            self._failures.setdefault(job.generation, cause)
        for member in self.members(job.generation):
            if member in self._connections.staying:
                self._send_away(member, cause)

    def send_away(self, cause: Cause) -> None:
        """Tell the ranks that stay why they must leave now."""
        for connection in tuple(self._connections.staying):
            self._send_away(connection, cause)

    def _send_away(self, connection: Connection, cause: Cause) -> None:
        self._connections.send(connection, Aborted(cause))
        if connection in self._connections.staying:
            self._connections.let_leave(connection)

    def forget(self, connection: Connection, cause: Cause | None = None) -> None:
        """Drop a connection that may wait for its job to begin; `cause`: why it leaves, if it says so."""
        self.drop(connection)
        self._admission.connection_ended(connection, self._clock(), cause)

    def drop(self, connection: Connection) -> None:
        """Close the connection."""
        if connection not in self._connections:
            return
        self._status_requests.withdraw(connection)
        self._connections.drop(connection)
        if connection.job is not None:
            members = self._members[connection.job.generation]
            members.remove(connection)
            if not members:
                connection.job.close()
                self._admission.released(connection.job.generation)
                del self._members[connection.job.generation]
                self._failures.pop(connection.job.generation, None)


def _decoded(event: Event) -> ControlMessage | None:
    with suppress(ProtocolError):
        return decode_control(event.body) if isinstance(event, Control) else None
    return None
