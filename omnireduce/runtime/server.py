"""One aggregator shard as an event loop: listeners, newcomers, jobs. A single thread; a slow or hostile peer costs
only itself.

A connection is a newcomer until its Hello is admitted, then a rank of a job, then (for a moment) a leaver whose last
output is still being written.
"""

from __future__ import annotations

import logging
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from omnireduce.config import Verbs
from omnireduce.errors import ProtocolError
from omnireduce.logs import tagged
from omnireduce.protocol.effects import End
from omnireduce.protocol.limits import Limits
from omnireduce.protocol.membership import Admit, Announce, Membership, MembershipEffect, Replace
from omnireduce.runtime.access import ANYBODY, Access
from omnireduce.runtime.connection import Connection
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.job import WARN_AFTER_S, Job, why_not_started
from omnireduce.runtime.listening import Listening, MakeLink
from omnireduce.runtime.questions import Questions
from omnireduce.runtime.report import Report
from omnireduce.runtime.time_limit import TimeLimit
from omnireduce.runtime.traced import ShardTraces
from omnireduce.status import StatusRequest
from omnireduce.transport.base import Control, Event, Link, Lost
from omnireduce.wire import (
    Aborted,
    Cause,
    Hello,
    Leave,
    Newcomers,
    Refused,
    decode_control,
    encode_control,
    shown,
)

log = logging.getLogger("omnireduce.aggregator")
FULL = "too many connections; raise ulimit -n of the aggregator, or wait"
LINGER_S = 1.0  # how long a leaver's last output may take
MAX_STRANGERS = 4096  # connections that have not said Hello yet, or leave; fewer when descriptors are short


class ShardServer:
    """Serves jobs until `stop`.

    `listeners` are (listening socket, function that makes a link of an accepted socket). `name` is the shard's
    address, as workers see it in errors. A connection may stay `hello_timeout_s` without a Hello. `access` says who may
    join, and may be replaced; `verbs` allows RDMA, `traces` records every job. The log says whom a collective waits for
    after `straggler_s`. A simulation brings its own `clock` and `selector`, and hands links to `adopt`.
    """

    def __init__(
        self,
        name: str,
        listeners: Sequence[tuple[socket.socket, MakeLink]],
        limits: Limits,
        *,
        drain_s: float,
        hello_timeout_s: float = 10.0,
        access: Access = ANYBODY,
        verbs: Verbs | None = None,
        straggler_s: float = WARN_AFTER_S,
        traces: ShardTraces | None = None,
        clock: Clock = time.monotonic,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self.name = name
        self._clock, self._drain_s, self.access = clock, drain_s, access
        self._make_job = partial(
            Job, clock=clock, on_end=self._job_ended, verbs=verbs, straggler_s=straggler_s, traces=traces
        )
        self._membership = Membership(limits, secrets.randbits(62), access.ticket_key)
        self._report = Report(name, clock)
        self._selector = selector or (traces.selector if traces else selectors.DefaultSelector())
        self._connections: set[Connection] = set()
        self._strangers, self._leavers = TimeLimit(hello_timeout_s), TimeLimit(LINGER_S)
        self._questions = Questions()
        self._jobs: dict[int, Job] = {}
        self._of_job: dict[int, list[Connection]] = {}
        self._drain_deadline: float | None = None
        self._listening = Listening(listeners, self._selector, clock, self._turn_away)

    def serve(self) -> None:
        """Run until `stop` was called and all jobs are over or out of time."""
        while not self.stopped:
            self.turn(60.0)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()
        self._listening.close()

    def stop(self) -> None:
        """Admit nobody any more, let running collectives finish for `drain_s`, then end."""
        if self._drain_deadline is None:
            self._drain_deadline = self._clock() + self._drain_s
            self._answer(self._membership.drain())

    @property
    def stopped(self) -> bool:
        return self._drain_deadline is not None and not self._connections

    def stop_when_readable(self, descriptor: int) -> None:
        """Stop as soon as `descriptor` becomes readable or its other end is closed."""

        def stop() -> None:
            self._selector.unregister(descriptor)
            self.stop()

        self._selector.register(descriptor, selectors.EVENT_READ, stop)

    def turn(self, longest_s: float) -> None:
        """Wait for events, at most `longest_s`, and deal with them."""
        touched: set[Job] = set()
        for key, mask in self._selector.select(self._patience(longest_s)):
            connection = key.data if isinstance(key.data, Connection) else None
            try:
                if connection is None:
                    self._accept(key.fileobj, key.data)
                elif connection in self._connections:  # an earlier event of this turn may have ended it
                    touched |= self._connection_ready(connection, mask)
            except Exception as error:  # no memory, or a bug: it may cost this client its job, not the others theirs
                self._contain(error, None if connection is None else connection.job, connection)
        now = self._clock()
        for job in list(self._jobs.values()):
            deadline = job.machine.deadline
            if job in touched or (deadline is not None and deadline <= now):
                try:
                    job.driver.advance()
                except Exception as error:  # as above
                    self._contain(error, job)
                for connection in self._of_job.get(job.generation, ()):
                    self._update_interest(connection)
        self._housekeeping(now)

    def _connection_ready(self, connection: Connection, mask: int) -> set[Job]:
        """Read from and write to one connection; return the job that should advance, if any."""
        if mask & selectors.EVENT_WRITE:
            connection.link.flush()
            self._update_interest(connection)
        events = connection.link.poll()
        if not connection.leaving and connection.job is None:
            events = self._newcomer(connection, events)
            self._update_interest(connection)
        if connection.leaving and connection.link.over:
            self._drop(connection)
        elif not connection.leaving and connection.job is not None:
            self._feed(connection, connection.job, events)
            return {connection.job}
        return set()

    def _patience(self, longest_s: float) -> float:
        now = self._clock()
        deadlines = [job.machine.deadline for job in self._jobs.values()]
        deadlines += [self._membership.deadline, self._drain_deadline if self._jobs else None]
        deadlines += [self._strangers.deadline, self._leavers.deadline, self._listening.again_at]
        deadlines += [now] if self._questions else []
        return max(0.0, min([longest_s] + [at - now for at in deadlines if at is not None]))

    # newcomers

    def _accept(self, source: object, data: Callable[..., Any]) -> None:
        if not isinstance(source, socket.socket):
            data()
            return
        link = self._listening.accept(source, data)
        if link is None:
            return
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if len(self._strangers) + len(self._leavers) >= min(MAX_STRANGERS, descriptors // 2):
            self._forget(max(self._strangers, self._leavers, key=len).oldest)
        if len(self._connections) < descriptors * 3 // 4:
            self.adopt(link)
        else:
            self._turn_away(link)

    def _turn_away(self, link: Link) -> None:
        count = len(self._connections)
        log.error("turned a connection away: %d are open", count, extra=tagged("turned_away", connections=count))
        link.poll()  # closed with something unread, a local connection would forget our answer
        link.send_control(encode_control(Refused(FULL, temporary=True)))
        link.close()

    def adopt(self, link: Link) -> None:
        """Serve a worker that has just connected."""
        connection = Connection(link, self.access.gate(link))
        self._connections.add(connection)
        self._strangers.add(connection, self._clock())
        self._selector.register(link, selectors.EVENT_READ, connection)

    def _newcomer(self, connection: Connection, events: Sequence[Event]) -> Sequence[Event]:
        """Deal with a newcomer's events; return those that came after its admission to a job."""
        for number, event in enumerate(events):
            if isinstance(event, Lost):
                if event.violation:
                    log.warning("dropped %s: %s", connection.link.peer, event.reason, extra=connection.about("dropped"))
                    connection.link.send_control(encode_control(Refused(event.reason)))
                self._forget(connection)
            elif not isinstance(event, Control) or not self._read_hello(connection, event.body):
                return events[number + 1 :]
        return ()

    def _read_hello(self, connection: Connection, body: bytes) -> bool:
        """Deal with a newcomer's control message; return whether to go on reading from it as a newcomer."""
        try:
            message = decode_control(body)
            self._questions.check(connection, message)
            answer = connection.gate.told(message)
            if answer is not None:
                connection.link.send_control(encode_control(answer))
                return True
            if connection.hello is not None and isinstance(message, Leave):
                self._forget(connection)
                return False
            if connection.hello is None and isinstance(message, StatusRequest):
                self._questions.ask(connection, message)
                return True
            if connection.hello is not None or not isinstance(message, Hello):
                raise ProtocolError(f"expected one Hello, got {type(message).__name__}")
        except ProtocolError as error:
            self._refuse(connection, str(error))
            self._membership.gone(connection, self._clock())
            return False
        connection.hello = hello = connection.gate.signed(message)
        log.debug("%s wants to join", connection.link.peer, extra=connection.about("hello"))
        self._strangers.discard(connection)
        self._answer(self._membership.hello(connection, hello, self._clock(), connection.gate.team.terms))
        return connection.job is None and not connection.leaving

    def _tell_status(self, now: float) -> None:
        for connection, request in self._questions.take():
            try:
                gathering = self._membership.gathering(now)
                count, team = len(self._connections), connection.gate.team.name
                page = self._report.page(request, self._jobs.values(), gathering, count, team)
                connection.link.send_control(encode_control(page))
                self._update_interest(connection)
            except Exception as error:  # a bug of ours
                self._contain(error, None, connection)

    def _answer(self, effects: Iterable[MembershipEffect]) -> None:
        for effect in list(effects):
            if isinstance(effect, Admit):
                self._start(effect)
                continue
            if isinstance(effect, Replace):
                self._jobs[effect.generation].abort(effect.cause, "left")
                continue
            if isinstance(effect, Announce):
                self._jobs[effect.generation].tell(Newcomers(effect.workers))
                continue
            connection = effect.key
            assert isinstance(connection, Connection)
            if isinstance(effect.message, Refused):
                self._refuse(connection, effect.message.reason, temporary=effect.message.temporary)
            else:
                connection.link.send_control(encode_control(effect.message))

    def _refuse(self, connection: Connection, reason: str, *, temporary: bool = False) -> None:
        self._report.refused += 1
        log.warning("refused %s: %s", connection.link.peer, shown(reason), extra=connection.about("refused"))
        connection.link.send_control(encode_control(Refused(reason, temporary)))
        self._leave(connection)

    def _forget(self, connection: Connection) -> None:
        self._drop(connection)
        self._membership.gone(connection, self._clock())

    # jobs

    def _start(self, admit: Admit) -> None:
        connections = [key for key in admit.keys if isinstance(key, Connection)]
        links = [connection.link for connection in connections]
        try:
            job = self._make_job(admit.generation, admit.job, links, admit.hellos)
        except Exception as error:  # whatever it is: else the ranks would wait, and the job count, for ever
            reason, temporary = why_not_started(error, admit.job)
            self._membership.finished(admit.generation, self._clock())
            self._membership.released(admit.generation)
            for connection in connections:
                self._refuse(connection, reason, temporary=temporary)
            return
        self._report.jobs_started += 1
        self._jobs[job.generation] = job
        self._of_job[job.generation] = connections
        for rank, connection in enumerate(connections):
            connection.job, connection.rank = job, rank
            if job.links[rank] is not connection.link:  # it goes on over RDMA, or is traced
                self._selector.unregister(connection.link)
                connection.link, connection.interest = job.links[rank], selectors.EVENT_READ
                self._selector.register(connection.link, selectors.EVENT_READ, connection)

    def _feed(self, connection: Connection, job: Job, events: Sequence[Event]) -> None:
        machine = job.machine  # the events may end the job, and close it
        job.driver.take(connection.rank, events)
        if machine.has_left(connection.rank):
            job.log.debug("%s: rank %d left", job, connection.rank, extra=tagged("rank_left", rank=connection.rank))
            self._membership.departed(job.generation, connection.rank)
            self._leave(connection)

    def _job_ended(self, job: Job, end: End) -> None:
        if end.cause is not None:
            culprit, reason = shown(end.cause.culprit), shown(end.cause.reason)
            ended = tagged("job_ended", cause=end.kind, rank=end.rank, culprit=culprit)
            job.log.warning("%s ended: %s: %s", job, culprit, reason, extra=ended)
        else:
            job.log.info("%s ended: all ranks left", job, extra=tagged("job_ended"))
        self._membership.finished(job.generation, self._clock())
        if self._jobs.pop(job.generation, None) is not None:
            self._report.job_ended(job, end)
        for connection in list(self._of_job.get(job.generation, ())):
            self._leave(connection)

    def _contain(self, error: Exception, job: Job | None, connection: Connection | None = None) -> None:
        """After an unexpected exception: end the job, or the newcomer's connection, and go on."""
        about, what = log if job is None else job.log, job or "a newcomer"
        reason = "internal error; its log has the details"
        if isinstance(error, MemoryError):
            reason = f"out of memory: {error}".rstrip(": ")
            about.error("out of memory while serving %s: %s", what, error, extra=tagged("out_of_memory"))
        else:
            about.exception("internal error while serving %s; please report it", what, extra=tagged("internal_error"))
        if connection is not None and job is None:
            self._forget(connection)
        elif job is not None and job.generation in self._jobs:
            cause = Cause(f"aggregator {self.name}", reason)
            job.tell(Aborted(cause))
            self._job_ended(job, End(cause, "internal"))

    # departures

    def _leave(self, connection: Connection) -> None:
        """Give the connection a moment to read our last words, then drop it."""
        if connection.link.over:
            self._drop(connection)
        elif connection in self._connections and not connection.leaving:
            connection.leaving = True
            self._stop_waiting(connection)
            self._leavers.add(connection, self._clock())
            self._update_interest(connection)

    def _stop_waiting(self, connection: Connection) -> None:
        """Whatever the connection waits for, or is waited for."""
        self._strangers.discard(connection)
        self._leavers.discard(connection)
        self._questions.withdraw(connection)

    def _drop(self, connection: Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._stop_waiting(connection)
        self._selector.unregister(connection.link)
        connection.link.drop()  # who had to read our last words has had the time
        if connection.job is not None:
            members = self._of_job[connection.job.generation]
            members.remove(connection)
            if not members:
                connection.job.close()
                self._membership.released(connection.job.generation)
                del self._of_job[connection.job.generation]

    def _update_interest(self, connection: Connection) -> None:
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.link.wants_write else 0)
        if connection.interest != wanted and connection in self._connections:
            connection.interest = wanted
            self._selector.modify(connection.link, wanted, connection)

    def _housekeeping(self, now: float) -> None:
        self._answer(self._membership.expire(now))
        self._tell_status(now)
        for connection in self._strangers.over(now):
            self._refuse(connection, f"no Hello within {self._strangers.limit_s:g} s")
        for connection in self._leavers.over(now):
            self._drop(connection)
        self._listening.resume(now)
        if self._drain_deadline is not None:
            self._drain(now >= self._drain_deadline)

    def _drain(self, overdue: bool) -> None:
        why = "shutting down"
        if overdue:
            why += f"; collectives did not finish within {self._drain_s:g} s"
        for job in list(self._jobs.values()):
            idle = job.machine.idle
            if overdue or idle:
                cause = Cause(f"aggregator {self.name}", why, orderly=idle)
                job.abort(cause, "shutdown")
        for connection in list(self._connections):
            if connection.job is None and not connection.leaving:
                self._forget(connection)
