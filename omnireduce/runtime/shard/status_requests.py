"""Answers to status requests of a shard: its totals since the start, and its jobs page by page."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice

import msgspec

from omnireduce.core.status_messages import JobKey, JobStatus, Status, StatusRequest, Traffic
from omnireduce.core.wire.control import ControlMessage, other_version
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.effects import ABORT_KINDS, End
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.connections import Connection
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.support.version import __version__

STATUSES = 4  # requests that are answered in one turn: the jobs come first
SHARE = 10  # answers take at most a tenth of the time
PAUSE_S = 0.5  # longest pause after answers: their time may include a wait for a processor
MAX_REQUESTS = 1024  # the most requests that may wait


class StatusRequests:
    """Requests, at most one for each connection. Requests of the daemon's own monitor go first, the others in the order
    in which they came."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[Connection, StatusRequest] = {}
        self._next_answers_at = clock()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def deadline(self) -> float | None:
        """The time of the next answer; None without requests."""
        return self._next_answers_at if self._waiting else None

    def check(self, connection: Connection, message: ControlMessage) -> None:
        """Raise ProtocolError for a message of a connection whose request has not been answered yet."""
        if connection in self._waiting:
            raise ProtocolError(f"{type(message).__name__} before a StatusRequest was answered")

    def ask(self, connection: Connection, request: StatusRequest) -> None:
        """Take note of a request, or raise ProtocolError."""
        wrong = other_version(request.version)
        if not wrong and connection.link.wants_write:
            wrong = "a StatusRequest before the last answer was read"
        if not wrong and len(self._waiting) >= MAX_REQUESTS and not connection.of_monitor:
            wrong = f"{MAX_REQUESTS} status requests wait for an answer already: ask again later"
        if wrong:
            raise ProtocolError(wrong)
        self._waiting[connection] = request

    def withdraw(self, connection: Connection) -> None:
        """Drop the request of a connection."""
        self._waiting.pop(connection, None)

    def take(self) -> Iterator[tuple[Connection, StatusRequest]]:
        """Take out the requests to be answered in this turn, one by one. It measures the time of the answers."""
        if not self._waiting:
            return
        started = self._clock()
        chosen = [connection for connection in self._waiting if connection.of_monitor]
        if started >= self._next_answers_at:
            chosen += islice((connection for connection in self._waiting if not connection.of_monitor), STATUSES)
        for connection in chosen:
            request = self._waiting.pop(connection, None)
            if request is not None:
                yield connection, request
        pause_s = min(SHARE * (self._clock() - started), PAUSE_S)
        self._next_answers_at = max(self._next_answers_at, started + pause_s)


MAX_USERS = 16  # users whose refusals are counted separately: a user namespace can have many users
PAGE_BYTES = 48 * 1024  # the jobs of one page; a control message holds more


class StatusPages:
    """Totals of the shard `name`, and the pages of its status."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock, self._since = name, clock, clock()
        self._ended = Traffic()  # the traffic of jobs that are over
        self._aborts = dict.fromkeys(ABORT_KINDS, 0)
        self.jobs_started = self.jobs_ended = self._refused = 0
        self._refused_users: dict[str, int] = {}

    def refuse(self, user: int | None) -> None:
        """Count a refused connection. `user`: the local user, if the kernel knows it."""
        self._refused += 1
        if user is not None:
            counts, name = self._refused_users, str(user)
            name = name if name in counts or len(counts) < MAX_USERS else "others"
            counts[name] = counts.get(name, 0) + 1

    def job_ended(self, job: ShardJob, end: End) -> None:
        """A job is over."""
        self.jobs_ended += 1
        self._ended.add(job.traffic)
        if end.kind is not None:
            self._aborts[end.kind] += 1

    def page(
        self,
        request: StatusRequest,
        running: Collection[ShardJob],
        pending_jobs: Collection[JobStatus],
        *,
        connections: int,
        team: str = "",
        draining: bool = False,
        wants_secret: bool = False,
    ) -> Status:
        """The answer to a request. A peer that has proved the secret of `team` sees its jobs; "" may see all jobs."""
        now, traffic = self._clock(), Traffic()
        for subtotal in (self._ended, *(job.traffic for job in running)):
            traffic.add(subtotal)
        status_makers: dict[JobKey, Callable[[], JobStatus]] = {
            job.key: partial(job.status, now) for job in running if team in ("", job.team)
        }
        status_makers |= {job.key: partial(_unchanged, job) for job in pending_jobs if team in ("", job.team)}
        jobs, more = _fill_page(status_makers, request.after)
        return Status(
            shard=self._name,
            pid=os.getpid(),
            version=__version__,
            uptime_s=now - self._since,
            connections=connections,
            running=len(running),
            gathering=len(pending_jobs),
            traffic=traffic,
            jobs_started=self.jobs_started,
            jobs_ended=self.jobs_ended,
            aborts=self._aborts,
            refused=self._refused,
            refused_users=self._refused_users,
            jobs=jobs,
            more=more,
            draining=draining,
            wants_secret=wants_secret,
        )


def _unchanged(job: JobStatus) -> JobStatus:
    return job


def _fill_page(status_makers: Mapping[JobKey, Callable[[], JobStatus]], after: JobKey) -> tuple[list[JobStatus], bool]:
    """The jobs behind `after`, in the order of their keys, that fit one page, and whether there are more."""
    jobs: list[JobStatus] = []
    room = PAGE_BYTES
    for key in sorted(key for key in status_makers if key > after):
        job = status_makers[key]()
        room -= len(msgspec.msgpack.encode(job))
        if jobs and room < 0:
            return jobs, True
        jobs.append(job)
    return jobs, False
