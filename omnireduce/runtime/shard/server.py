"""Event loop of an aggregator shard: listeners, newcomers, jobs. It has a single thread. A slow or hostile peer harms
only itself.

A connection is a newcomer until its Hello is admitted, then a rank of a job. In the end it leaves: for a moment, its
last output is still being written.
"""

from __future__ import annotations

import math
import secrets
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from omnireduce.core.wire.control import Cause, Leave, Newcomers, encode_control
from omnireduce.kernels.codecs.table import BUILT_IN, Codecs
from omnireduce.protocol.collective.effects import End
from omnireduce.protocol.collective.reduction import Budget
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect, Admit, Announce, Replace
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.shard import BUDGET
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.access import ANYBODY, Access
from omnireduce.runtime.shard.admin_requests import Administration
from omnireduce.runtime.shard.connections import Connection, Connections
from omnireduce.runtime.shard.handshake_thread import HandshakeThread
from omnireduce.runtime.shard.job import (
    WARN_AFTER_S,
    JobFactory,
    JobUpstream,
    ShardJob,
    failure_text,
    start_failure_text,
)
from omnireduce.runtime.shard.listening import Listener, ListeningSockets
from omnireduce.runtime.shard.pending_connections import PendingConnections
from omnireduce.runtime.shard.relay_admission import Relaying, Upstream
from omnireduce.runtime.shard.scheduler import POLL_WORK, Scheduler, Share
from omnireduce.runtime.shard.status_requests import StatusPages, StatusRequests
from omnireduce.runtime.shard.teardown import Teardown
from omnireduce.runtime.shard.traced import ShardTraces
from omnireduce.support.config import Verbs
from omnireduce.support.logs import tagged
from omnireduce.transport.base import EVERYTHING, Event, Link

UNSETTLED = -math.inf  # there may be work outside jobs


class ShardServer:
    """Serves jobs until `stop`.

    `name`: its address in errors. A connection may stay `hello_timeout_s` without a Hello. `access` says who may join,
    and may be replaced; `verbs` allows RDMA, `traces` records every job. With an `upstream` this shard is a relay. The
    log says whom a collective waits for after `straggler_s`. `budget`: the work of one job in a turn. Jobs may use
    `codecs`. `shards`: the number of shards of the aggregator (0: unknown). A simulation passes `clock`, `processor_s`,
    `selector` and links.
    """

    def __init__(
        self,
        name: str,
        listeners: Sequence[Listener],
        limits: Limits,
        *,
        finish_s: float,
        hello_timeout_s: float = 10.0,
        access: Access = ANYBODY,
        upstream: Upstream | None = None,
        verbs: Verbs | None = None,
        straggler_s: float = WARN_AFTER_S,
        traces: ShardTraces | None = None,
        budget: Budget = BUDGET,
        codecs: Codecs = BUILT_IN,
        shards: int = 0,
        clock: Clock = time.monotonic,
        processor_s: Clock = time.thread_time,
        selector: selectors.BaseSelector | None = None,
    ) -> None:
        self.name = name
        self._clock, self._finish_s, self._wake_at = clock, finish_s, clock()
        self._make_job: JobFactory = partial(
            ShardJob,
            clock=clock,
            on_end=self._job_ended,
            verbs=verbs,
            straggler_s=straggler_s,
            traces=traces,
            budget=budget,
            codecs=codecs,
            shards=shards,
        )
        self._pages = StatusPages(name, clock)
        self._selector = selector or (traces.selector if traces else selectors.DefaultSelector())
        self._admission: Admission | Relaying
        if upstream is None:
            self._admission = Admission(limits, secrets.randbits(62), access.ticket_key)
        else:
            self._admission = Relaying(
                name, limits, upstream, selector=self._selector, clock=clock,
                answer=self._answer, secret_of=lambda team: self.access.secret_of(team),
            )  # fmt: skip
        self._connections = Connections(self._selector, clock, hello_timeout_s)
        self._status_requests, self._scheduler = StatusRequests(clock), Scheduler(clock, processor_s, budget)
        self._handshake_thread = HandshakeThread(self._selector, self._connections, self._scheduler)
        self._teardown = Teardown(self._connections, self._status_requests, self._admission, clock)
        self._jobs: dict[int, ShardJob] = {}
        self.administration = Administration(self._admission, self._jobs, self._answer, clock)
        self._pending_connections = PendingConnections(
            access=access, admission=self._admission, connections=self._connections, teardown=self._teardown,
            status_requests=self._status_requests, pages=self._pages, clock=clock, change=self._change,
            administration=self.administration,
        )  # fmt: skip
        self._settled_until = UNSETTLED  # until this time there is no work outside jobs
        self._stop_by: float | None = None
        self._stops_after_jobs = False
        self._listening = ListeningSockets(listeners, self._selector, clock, lambda: len(self._connections))

    @property
    def access(self) -> Access:
        """The rules of access to this shard."""
        return self._pending_connections.access

    @access.setter
    def access(self, access: Access) -> None:
        self._pending_connections.access = access

    def adopt(self, link: Link, *, of_monitor: bool = False) -> None:
        """Serve a worker that has just connected, or the daemon's monitor."""
        self._settled_until = UNSETTLED
        self._pending_connections.adopt(link, of_monitor=of_monitor)

    def serve(self, after_turn: Callable[[], None] = lambda: None, longest_s: float = 60.0) -> None:
        """Run until `stop` was called and all jobs have ended, or their time is over. Calls `after_turn` after each
        turn. A turn waits for at most `longest_s` seconds."""
        while not self.stopped:
            self.turn(longest_s)
            after_turn()
        for connection in self._connections:
            self._teardown.drop(connection)
        self._handshake_thread.close()
        self._admission.close()
        self._selector.close()
        self._listening.close()

    def stop(self) -> None:
        """Admit no more workers, let running collectives finish for `finish_s`, then end."""
        if self._stop_by is None:
            self._settled_until = UNSETTLED
            self._stop_by = self._clock() + self._finish_s
            self._pending_connections.answer(self._admission.turn_away())

    @property
    def stopped(self) -> bool:
        return self._stop_by is not None and not self._connections

    def stop_after_jobs_when_readable(self, descriptor: int) -> None:
        """Stop as soon as `descriptor` is readable, or its other end is closed, and no job runs any more."""

        def stop() -> None:
            self.ignore_when_readable(descriptor)
            self._stops_after_jobs = True

        self.call_when_readable(descriptor, stop)

    def call_when_readable(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call `call` whenever `descriptor` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, call)

    def ignore_when_readable(self, descriptor: int) -> None:
        """Stop looking at `descriptor`."""
        self._selector.unregister(descriptor)

    def turn(self, longest_s: float) -> None:
        """Wait for events, at most `longest_s`, and handle them within the budget of one turn."""
        for key, mask in self._selector.select(self._wait_limit_s(longest_s)):
            if isinstance(key.data, Connection) and not key.data.of_monitor:
                self._scheduler.ready(key.data, mask)
                continue
            self._settled_until = UNSETTLED
            if isinstance(key.data, Listener):
                self._pending_connections.open(key.data, self._listening, busy=bool(self._jobs))
            elif isinstance(key.data, Connection):
                self._serve(key.data, mask)
            else:
                key.data()
        now = self._clock()
        for job in self._jobs.values() if now >= self._wake_at else ():
            if job.machine.deadline is not None and job.machine.deadline <= now:
                self._scheduler.queue_job(job)
        self._scheduler.serve(self._serve_job, self._serve_other)
        if now >= self._settled_until:
            self._housekeeping(now)

    def _serve_job(self, job: ShardJob, ready: dict[Connection, int], share: Share) -> int:
        """Let a job read and advance until it has nothing to do or has used its turn; return the work."""
        work = 0
        if job.generation in self._jobs:  # otherwise it has no driver any more
            job.driver.flush_bytes, job.machine.quantum = share.output, share.work
        while ready and work < share.work:
            connection = next(iter(ready))
            work += self._serve(connection, ready.pop(connection))
        if job.generation in self._jobs:
            driver, machine = job.driver, job.machine
            try:
                driver.push() if ready else driver.advance()  # no timer after news: a rank with unread news is not late
            except Exception as error:  # as in `_serve`
                self._end_after_error(error, job)
            self._update_interests(job.generation)
            work += machine.spent
            if machine.more and job.generation in self._jobs:
                self._scheduler.queue_job(job)
        for connection, mask in ready.items():
            self._scheduler.ready(connection, mask)
        return work

    def _serve_other(self, connection: Connection, mask: int) -> int:
        """Serve a connection outside jobs; return the work. If it has just joined a job, the job is queued."""
        self._settled_until = UNSETTLED
        work = self._serve(connection, mask)
        if connection.job is not None and not connection.leaving:
            self._scheduler.queue_job(connection.job)
        return work

    def _serve(self, connection: Connection, mask: int) -> int:
        """Read from and write to one connection; return the work done."""
        link = connection.link
        if connection not in self._connections:  # the connection has ended meanwhile
            return 0
        before = link.counters.received_bytes
        try:
            self._connection_ready(connection, mask)
        except Exception as error:  # no memory, or a bug: only this client may lose its job
            self._end_after_error(error, connection.job, connection)
        return POLL_WORK + (link.counters.received_bytes - before if link.inline else 0)

    def _connection_ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            job = None if connection.leaving else connection.job
            connection.link.flush(EVERYTHING if job is None else job.driver.flush_bytes)
            self._connections.update_interest(connection)
        events = connection.link.poll()
        if not connection.leaving and connection.job is None:
            self._handshake_thread.start_task(connection)
            events = self._pending_connections.handle_events(connection, events)
            self._connections.update_interest(connection)
        if not connection.leaving and connection.job is not None:
            self._feed(connection, connection.job, events)
            return
        self._settled_until = UNSETTLED
        if connection.leaving and self._clock() < (self._stop_by or 0.0):
            self._teardown.handle_events(connection, events)
        if connection.leaving and (connection.link.over or connection.link.task is not None):
            self._teardown.drop(connection)  # no last messages before the end of the handshake, which is not awaited

    def _wait_limit_s(self, longest_s: float) -> float:
        """The seconds to wait for events. No deadline passes before `_wake_at`, the time when the wait ends."""
        now = self._wake_at = self._clock()
        if self._scheduler.has_queued:
            return 0.0
        others_at = self._idle_deadline() if self._settled_until == UNSETTLED else self._settled_until
        deadlines = [job.machine.deadline for job in self._jobs.values()]
        self._wake_at = min([now + longest_s, others_at, *(at for at in deadlines if at is not None)])
        return max(0.0, self._wake_at - now)

    def _idle_deadline(self) -> float:
        """The time of the next work outside jobs, if nothing happens before."""
        stopped_at = self._stop_by if self._jobs or self._connections.staying else None
        others = self._connections.unidentified, self._connections.closing, self._status_requests, self._listening
        deadlines = [self._admission.deadline, stopped_at, *(other.deadline for other in others)]
        return min([at for at in deadlines if at is not None], default=math.inf)

    def _tell_status(self) -> None:
        for connection, request in self._status_requests.take():
            try:
                pending_jobs, team = self._admission.pending_jobs(self._clock()), connection.gate.team.name
                page = self._pages.page(
                    request, self._jobs.values(), pending_jobs,
                    connections=len(self._connections), team=team, draining=self.administration.draining,
                    wants_secret=self.access.teams is not None,
                )  # fmt: skip
                self._connections.send(connection, page)
            except Exception as error:  # a bug
                self._end_after_error(error, None, connection)

    def _answer(self, effects: Iterable[AdmissionEffect]) -> None:
        """Carry out the decisions of an upstream."""
        self._settled_until = UNSETTLED
        self._pending_connections.answer(effects)

    # jobs

    def _change(self, effect: Admit | Replace | Announce) -> None:
        if isinstance(effect, Admit):
            self._start(effect)
        elif isinstance(effect, Replace):
            self._jobs[effect.generation].abort(effect.cause, "left")
        else:
            self._jobs[effect.generation].tell(Newcomers(effect.workers))
            self._update_interests(effect.generation)

    def _start(self, admit: Admit) -> None:
        connections = [key for key in admit.keys if isinstance(key, Connection)]
        links, relayed = [connection.link for connection in connections], admit.relayed
        uplinks = [link for link in relayed.uplinks if isinstance(link, Link)] if relayed is not None else []
        job_upstream = None if relayed is None else JobUpstream(relayed.address, relayed.welcomes, uplinks)
        try:
            job = self._make_job(admit.generation, admit.job, links, admit.hellos, job_upstream)
        except Exception as error:  # otherwise the ranks would wait for ever, and the job would still count
            reason, temporary = start_failure_text(error, admit.job)
            self._admission.finished(admit.generation, self._clock())
            self._admission.released(admit.generation)
            for connection in connections:
                self._pending_connections.refuse(connection, reason, temporary=temporary)
            for link in uplinks:
                link.send_control(encode_control(Leave(Cause(f"aggregator {self.name}", reason))))
                link.close()
            return
        self._pages.jobs_started += 1
        self._jobs[job.generation] = job
        connections += [self._connections.add_uplink(link, connections[member]) for member, link in enumerate(uplinks)]
        self._teardown.enter(job.generation, connections)
        for rank, connection in enumerate(connections):
            connection.job, connection.rank = job, rank
            if job.links[rank] is not connection.link:  # the rank goes on over RDMA, or is traced
                self._connections.replace_link(connection, job.links[rank])
        self._update_interests(job.generation)

    def _feed(self, connection: Connection, job: ShardJob, events: Sequence[Event]) -> None:
        machine = job.machine  # the events may end the job, and close it
        job.driver.take(connection.rank, events)
        if machine.has_left(connection.rank):
            job.log.debug("%s: rank %d left", job, connection.rank, extra=tagged("rank_left", rank=connection.rank))
            connection.has_left, self._settled_until = True, UNSETTLED
            self._admission.departed(job.generation, connection.rank)
            self._teardown.leave(connection)

    def _job_ended(self, job: ShardJob, end: End) -> None:
        self._settled_until = UNSETTLED
        job.log_end(end)
        self._admission.finished(job.generation, self._clock())
        if self._jobs.pop(job.generation, None) is not None:
            self._pages.job_ended(job, end)
        for connection in self._teardown.members(job.generation):
            self._teardown.leave(connection)

    def _end_after_error(self, error: Exception, job: ShardJob | None, connection: Connection | None = None) -> None:
        """After an unexpected exception: end the job, or the newcomer's connection, and go on."""
        self._settled_until = UNSETTLED
        reason = failure_text(error, job)
        if connection is not None and job is None:
            self._teardown.forget(connection)
        elif job is not None and job.generation in self._jobs:
            cause = Cause(f"aggregator {self.name}", reason)
            job.break_off(cause)
            self._job_ended(job, End(cause, "internal"))

    def _update_interests(self, generation: int) -> None:
        for connection in self._teardown.members(generation):
            self._connections.update_interest(connection)

    def _housekeeping(self, now: float) -> None:
        self._pending_connections.answer(self._admission.expire(now))
        self._tell_status()
        self._pending_connections.expire(now)
        for connection in self._connections.closing.expired(now):
            self._teardown.drop(connection)
        self._listening.resume(now)
        if self._stops_after_jobs and not self._jobs:
            self.stop()
        if self._stop_by is not None:
            self._finish(now >= self._stop_by)
        else:
            self._settled_until = self._idle_deadline()

    def _finish(self, overdue: bool) -> None:
        reason = "shutting down"
        if overdue:
            reason += f"; collectives did not finish within {self._finish_s:g} s"
            self._teardown.send_away(Cause(f"aggregator {self.name}", reason))
        for job in list(self._jobs.values()):
            idle = job.machine.idle
            if overdue or idle:
                cause = Cause(f"aggregator {self.name}", reason, orderly=idle)
                job.abort(cause, "shutdown")
        for connection in self._connections:
            if connection.job is None and not connection.leaving:
                self._teardown.forget(connection)
