"""Connections of a shard until they are in a job: identification, requests and answers."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Hashable, Iterable, Sequence

from omnireduce.core.admin_messages import AdminAnswer, AdminRequest
from omnireduce.core.status_messages import StatusRequest
from omnireduce.core.wire.control import Aborted, Hello, Leave, Refused, decode_control
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect, Admit, Announce, Replace
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.access import Access, is_operator
from omnireduce.runtime.shard.admin_requests import Administration
from omnireduce.runtime.shard.connections import Connection, Connections
from omnireduce.runtime.shard.job import failure_text
from omnireduce.runtime.shard.listening import BESIDE_JOBS, Listener, ListeningSockets
from omnireduce.runtime.shard.relay_admission import Relaying
from omnireduce.runtime.shard.status_requests import StatusPages, StatusRequests
from omnireduce.runtime.shard.teardown import Teardown
from omnireduce.transport.base import Control, Event, Link, Lost

log = logging.getLogger("omnireduce.aggregator")
MAX_UNIDENTIFIED = 4096  # connections that have not said Hello yet, or leave; fewer if descriptors are short


class PendingConnections:
    """Admits newcomers. `access` says who may join, and may be replaced; `change` is called with changes to jobs."""

    def __init__(
        self,
        *,
        access: Access,
        admission: Admission | Relaying,
        connections: Connections,
        teardown: Teardown,
        status_requests: StatusRequests,
        pages: StatusPages,
        clock: Clock,
        change: Callable[[Admit | Replace | Announce], None],
        administration: Administration,
    ) -> None:
        self.access, self._administration = access, administration
        self._admission, self._connections, self._teardown = admission, connections, teardown
        self._status_requests, self._pages, self._clock, self._change = status_requests, pages, clock, change

    def open(self, listener: Listener, listening: ListeningSockets, *, busy: bool) -> None:
        """Accept some of the connections that wait at a listener, fewer when jobs are `busy`."""
        unidentified, closing = self._connections.unidentified, self._connections.closing
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // self._admission.descriptors_of_one
        room = min(MAX_UNIDENTIFIED, descriptors // 2)
        limit = BESIDE_JOBS if busy else room
        for link in listening.accept(listener, limit=max(1, min(limit, room // 4))):
            try:
                if len(unidentified) + len(closing) >= room:
                    self._teardown.forget(max(unidentified, closing, key=len).oldest)
                if len(self._connections) >= descriptors * 3 // 4 and self._connections.compilers:
                    self._teardown.forget(next(iter(self._connections.compilers)))  # the rank comes again when ready
                if len(self._connections) < descriptors * 3 // 4:
                    self.adopt(link, of_monitor=listener.of_monitor)
                else:
                    listening.turn_away(link)
            except Exception as error:  # no memory, or a bug: only this client may lose its connection
                failure_text(error, None)

    def adopt(self, link: Link, *, of_monitor: bool = False) -> None:
        """Serve a worker that has just connected, or the daemon's monitor."""
        self._connections.add(Connection(link, self.access.gate(link), of_monitor))

    def handle_events(self, connection: Connection, events: Sequence[Event]) -> Sequence[Event]:
        """Handle a newcomer's events; return the events that came after its admission to a job."""
        for number, event in enumerate(events):
            if isinstance(event, Lost):
                if event.violation:
                    log.warning(
                        "dropped %s: %s", connection.link.peer, event.reason, extra=connection.log_fields("dropped")
                    )
                    self._connections.send(connection, Refused(event.reason))
                self._teardown.forget(connection)
            elif not isinstance(event, Control) or not self._read(connection, event.body):
                return events[number + 1 :]
        return ()

    def _read(self, connection: Connection, body: bytes) -> bool:
        """Handle a newcomer's control message; return whether to go on reading from it as a newcomer."""
        try:
            message = decode_control(body)
            self._status_requests.check(connection, message)
            if connection.hello is None and isinstance(message, AdminRequest):
                self._carry_out(connection, message)
                return False
            may_ask = isinstance(message, StatusRequest) and is_operator(connection.link)
            answer = None if may_ask else connection.gate.answer(message)
            if answer is not None:
                self._connections.send(connection, answer)
                return True
            if connection.hello is not None and isinstance(message, Leave):
                self._teardown.forget(connection, message.cause)
                return False
            if connection.hello is None and isinstance(message, StatusRequest):
                self._status_requests.ask(connection, message)
                return True
            if connection.hello is not None or not isinstance(message, Hello):
                raise ProtocolError(f"expected one Hello, got {type(message).__name__}")
        except ProtocolError as error:
            self.refuse(connection, str(error))
            self._admission.connection_ended(connection, self._clock())
            return False
        connection.hello = hello = connection.gate.signed(message)
        log.debug("%s wants to join", connection.link.peer, extra=connection.log_fields("hello"))
        self._connections.unidentified.discard(connection)
        if hello.compiling:
            self._connections.compilers[connection] = None
        self._read_rival(self._admission.rival(hello))
        self.answer(self._admission.hello(connection, hello, self._clock(), connection.gate.team.terms))
        return connection.job is None and not connection.leaving

    def _carry_out(self, connection: Connection, request: AdminRequest) -> None:
        """Carry out a request of an operator or a team. Raises ProtocolError if the peer may not make it."""
        order = self.access.order(request, connection.link, connection.gate)
        log.info("%s asks to %s", order.by, request.text, extra=connection.log_fields("admin"))
        jobs = self._administration.ask(order)
        self._connections.send(connection, AdminAnswer(jobs))
        self._teardown.leave(connection)

    def _read_rival(self, rival: Hashable | None) -> None:
        """Read from the connection of a rival: a worker that gave up and comes again at once may be here before the end
        of its first connection was read."""
        if isinstance(rival, Connection):
            self.handle_events(rival, rival.link.poll())

    def answer(self, effects: Iterable[AdmissionEffect]) -> None:
        """Pass the decisions of the admission on to newcomers and jobs."""
        for effect in list(effects):
            if isinstance(effect, Admit | Replace | Announce):
                self._change(effect)
                continue
            connection = effect.key
            assert isinstance(connection, Connection)
            if isinstance(effect.message, Refused):
                self.refuse(connection, effect.message.reason, temporary=effect.message.temporary)
            elif isinstance(effect.message, Aborted):
                self._connections.send(connection, effect.message)
                self._teardown.leave(connection)
            elif not connection.link.wants_write:  # no news for a peer that does not read
                self._connections.send(connection, effect.message)

    def refuse(self, connection: Connection, reason: str, *, temporary: bool = False) -> None:
        """Tell a connection why it cannot join, and let it leave."""
        self._pages.refuse(connection.link.user)
        log.warning("refused %s: %s", connection.link.peer, shown(reason), extra=connection.log_fields("refused"))
        self._connections.send(connection, Refused(reason, temporary))
        self._teardown.leave(connection)

    def expire(self, now: float) -> None:
        """Refuse connections that have not said Hello in time."""
        unidentified = self._connections.unidentified
        for connection in unidentified.expired(now):
            self.refuse(connection, f"no Hello within {unidentified.limit_s:g} s", temporary=True)
