"""Answers to status requests of a shard: its totals since the start, and its jobs page by page."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from omnireduce.protocol.collective.effects import ABORT_KINDS, End
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.job import Job
from omnireduce.status import JobKey, JobStatus, Status, StatusRequest, Traffic
from omnireduce.version import __version__

MOST_USERS = 16  # whose refusals are counted each by itself: a user may have many more in a namespace of his own
PAGE_BYTES = 48 * 1024  # of jobs; a control message holds more


class StatusPages:
    """Counts what happens on the shard `name`."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._name, self._clock, self._since = name, clock, clock()
        self._ended = Traffic()  # of jobs that are over
        self._aborts = dict.fromkeys(ABORT_KINDS, 0)
        self.jobs_started = self.jobs_ended = self._refused = 0
        self._refused_users: dict[str, int] = {}

    def refuse(self, user: int | None) -> None:
        """A connection is refused; of this `user` of the host, if the kernel says so."""
        self._refused += 1
        if user is not None:
            known, name = self._refused_users, str(user)
            name = name if name in known or len(known) < MOST_USERS else "others"
            known[name] = known.get(name, 0) + 1

    def job_ended(self, job: Job, end: End) -> None:
        """A job is over."""
        self.jobs_ended += 1
        self._ended.add(job.traffic)
        if end.kind is not None:
            self._aborts[end.kind] += 1

    def page(
        self,
        request: StatusRequest,
        running: Collection[Job],
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
        makers: dict[JobKey, Callable[[], JobStatus]] = {
            job.key: partial(job.status, now) for job in running if team in ("", job.team)
        }
        makers |= {job.key: partial(_same, job) for job in pending_jobs if team in ("", job.team)}
        jobs, more = _fill(makers, request.after)
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


def _same(job: JobStatus) -> JobStatus:
    return job


def _fill(makers: Mapping[JobKey, Callable[[], JobStatus]], after: JobKey) -> tuple[list[JobStatus], bool]:
    """As many jobs beyond `after` as fit one page, in the order of their keys, and whether there are more."""
    jobs: list[JobStatus] = []
    room = PAGE_BYTES
    for key in sorted(key for key in makers if key > after):
        job = makers[key]()
        room -= len(msgspec.msgpack.encode(job))
        if jobs and room < 0:
            return jobs, True
        jobs.append(job)
    return jobs, False
