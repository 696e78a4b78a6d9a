"""Scheduler of a shard: it serves jobs and connections in turn, none for long. Jobs are served in the order in which
they got work, connections outside jobs in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest
from operator import attrgetter
from typing import NamedTuple

from omnireduce.protocol.collective.reduction import Budget
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.connections import Connection
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.transport.base import EVERYTHING

POLL_WORK = 1 << 16  # work of one look at a connection, beside the bytes that it brings (see Budget)
JOBS_WORK = 64 << 20  # after this work a turn serves no further job
OTHERS_WORK = 4 << 20  # after this work a turn serves no further connection outside jobs
OTHERS_S = 0.002  # after this time in seconds, too
LATELY_S = 0.05  # jobs that had work within this time share the shard
BESIDE_OTHERS = 8  # beside other jobs, a turn does an eighth of the work
MIN_WORK = 1 << 20  # least work of one turn: with less, the cost of a turn itself would show
TURN_S = 0.002  # processor seconds that a job may take in one turn beside others; a job that is alone: ALONE_S
ALONE_S = 0.02
MIN_SLOW_WORK = 1 << 16  # least work of one turn, for a job whose work takes longer than its usual time
RECOVERY = 1.25  # the turns of such a job grow by this factor while they stay within their time
MIN_OUTPUT = 1 << 16  # the least limit on bytes to one rank in one turn

_age = attrgetter("number")


class Share(NamedTuple):
    """The limits of a job in one turn: `work`, as in Budget, and `output`, in bytes to each rank."""

    work: int
    output: int


ServeJob = Callable[[ShardJob, dict[Connection, int], Share], int]


class Scheduler:
    """Two queues: jobs, each with its connections that are ready, and connections that are in no job.

    A mask says for what a connection is ready, as with a selector. `processor_s`: a clock that stands still while other
    processes have the processor. Work is counted at its usual cost. Some values of elements cost far more; then the
    next turns of their job are shorter.
    """

    def __init__(self, clock: Clock, processor_s: Clock, budget: Budget) -> None:
        self._clock, self._processor_s = clock, processor_s
        self._budget, self._alone = budget, Share(budget.work, EVERYTHING)
        self._jobs: dict[ShardJob, dict[Connection, int]] = {}
        self._others: dict[Connection, int] = {}
        self._last, self._last_at = 0, clock() - LATELY_S  # the generation served last, and when
        self._shared_until = clock()

    @property
    def has_queued(self) -> bool:
        """Whether a job or connection is queued."""
        return bool(self._jobs or self._others)

    def ready(self, connection: Connection, mask: int) -> None:
        """Queue a connection that is ready, or the job that it belongs to."""
        if connection.job is None or connection.leaving:
            queue = self._others
        else:
            queue = self._jobs.setdefault(connection.job, {})
        queue[connection] = queue.get(connection, 0) | mask

    def queue_job(self, job: ShardJob) -> None:
        """Queue a job that can go on without news from a connection."""
        self._jobs.setdefault(job, {})

    def serve(self, serve_job: ServeJob, serve_other: Callable[[Connection, int], int]) -> None:
        """Serve the queues as they are now, in order, up to the work of one turn.

        The functions get the ready connections and return the work that they have done; `serve_job` also gets the job's
        share.
        """
        work, jobs, now = 0, len(self._jobs), self._clock()
        for _ in range(jobs):
            if work < JOBS_WORK:
                job = next(iter(self._jobs))
                work += self._serve_job(serve_job, job, self._share(job, jobs, now))
        if self._others:
            self._serve_others(serve_other)

    def _serve_job(self, serve_job: ServeJob, job: ShardJob, share: Share) -> int:
        """Give a job its turn, and set the limit of its next turn."""
        started_s = self._processor_s()
        work = serve_job(job, self._jobs.pop(job), share._replace(work=min(share.work, job.work_limit)))
        took_s, limit_s = self._processor_s() - started_s, ALONE_S if share is self._alone else TURN_S
        if took_s > limit_s:
            job.work_limit = max(MIN_SLOW_WORK, int(work * limit_s / took_s))
        elif job.work_limit < self._budget.work:
            job.work_limit = int(job.work_limit * RECOVERY)
        return work

    def _serve_others(self, serve_other: Callable[[Connection, int], int]) -> None:
        work, until = 0, self._clock() + OTHERS_S
        first = nsmallest(OTHERS_WORK // POLL_WORK, self._others, key=_age)  # by age: crowds come later
        for number, connection in enumerate(first):
            if number == 0 or (work < OTHERS_WORK and self._clock() < until):
                work += serve_other(connection, self._others.pop(connection))

    def _share(self, job: ShardJob, busy: int, now: float) -> Share:
        """The share of a job now. The shard counts as shared if another job had work lately."""
        if job.generation != self._last and now < self._last_at + LATELY_S:
            self._shared_until = now + LATELY_S
        self._last, self._last_at = job.generation, now
        shared = now < self._shared_until
        if busy == 1 and not shared:
            return self._alone
        return share(self._budget, len(job.links), busy, shared=shared)


def share(budget: Budget, ranks: int, busy: int, *, shared: bool) -> Share:
    """The share of a job with `ranks` ranks while `busy` jobs are queued. It is smaller if the shard is `shared`: other
    jobs may get work at any time. It is never so small that the cost of the turn itself shows."""
    part = budget.work // BESIDE_OTHERS if shared else budget.work
    work = max(part // busy, min(budget.work, MIN_WORK))
    if not shared:
        return Share(work, EVERYTHING)
    return Share(work, max(budget.output // (ranks * busy), min(budget.output, MIN_OUTPUT)))
