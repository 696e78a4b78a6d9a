"""Who has something to do on a shard: all in turn, in the order in which they came, and nobody for long."""

from __future__ import annotations

from collections.abc import Callable

from omnireduce.runtime.connection import Connection
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.job import Job

POLL_WORK = 1 << 16  # of one look at a connection, beside the bytes that it brings (see Budget)
JOBS_WORK = 64 << 20  # after which a turn serves no further job
OTHERS_WORK = 4 << 20  # the same of connections that are in no job
OTHERS_S = 0.002  # and so much time: a TLS handshake takes long, whatever it reads
REST = 3  # where jobs run, those outside rest so many times as long as they went beyond that


class Turns:
    """Two lines: of jobs, each with those of its connections that are ready, and of connections that are in none.

    What is ready is said as a selector says it, by a mask. Who is in a line already keeps his place.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._jobs: dict[Job, dict[Connection, int]] = {}
        self._others: dict[Connection, int] = {}
        self._others_at = 0.0  # when they may be served again

    @property
    def deadline(self) -> float | None:
        """When somebody can be served; None: nobody is in line."""
        if self._jobs:
            return 0.0
        return self._others_at if self._others else None

    def ready(self, connection: Connection, mask: int) -> None:
        """Something can be done for the connection."""
        if connection.job is None or connection.leaving:
            line = self._others
        else:
            line = self._jobs.setdefault(connection.job, {})
        line[connection] = line.get(connection, 0) | mask

    def due(self, job: Job) -> None:
        """The job can go on without news from a connection."""
        self._jobs.setdefault(job, {})

    def serve(
        self,
        serve_job: Callable[[Job, dict[Connection, int], int], int],
        serve_other: Callable[[Connection, int], int],
        *,
        shared: bool,
    ) -> None:
        """Serve those who are in the lines now, in order, until that was enough work for one turn. A function gets what
        is ready and returns the work that it was; one for a job also gets how many jobs are in line. `shared`: jobs
        run, and want most of the time."""
        work, jobs = 0, len(self._jobs)
        for _ in range(jobs):
            if work < JOBS_WORK:
                job = next(iter(self._jobs))
                work += serve_job(job, self._jobs.pop(job), jobs)
        began = self._clock()
        if not shared or began >= self._others_at:
            self._serve_others(serve_other, began)
            overtime_s = self._clock() - began - OTHERS_S
            self._others_at = self._clock() + REST * max(0.0, overtime_s)

    def _serve_others(self, serve: Callable[[Connection, int], int], began: float) -> None:
        work = 0
        for number in range(len(self._others)):
            if number == 0 or (work < OTHERS_WORK and self._clock() < began + OTHERS_S):
                connection = next(iter(self._others))
                work += serve(connection, self._others.pop(connection))
