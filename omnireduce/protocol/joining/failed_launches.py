"""Launches and groups that cannot start, because one of their ranks was refused for good, or has refused to come.

Their ranks that wait are refused at once. Their ranks that come later are refused when they come.

A refused rank makes its launch fail, because a job that is not elastic starts with all its ranks or not at all. Only a
worker that could have joined the job can make it fail: its hello is valid, names the same team, job and launch, and
gives a rank that is missing. And only a launch with an id can fail, or a group, whose name says to which generation of
which job it belongs. Without an id, the refused rank may belong to another job of the same name, or was started again
by hand with other settings. If a rank that knows of the failure comes again, the launch was started again, and the
shard forgets the failure.

A rank of a running job may itself refuse to come to a group of ranks of this job. The ranks go on afterwards, and may
form a group of the same name at their next attempt. So each rank hears once of each refused attempt, in their order,
unless it has refused this attempt, too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from omnireduce.core.wire.control import Hello, other_version
from omnireduce.protocol.joining.checks import difference
from omnireduce.protocol.joining.pending_job import JobKey, PendingJob, member_name

MAX_FAILED_LAUNCHES = 64  # the launches and attempts that a shard remembers


@dataclass(slots=True, eq=False)
class _FailedLaunch:
    job_key: JobKey
    reason: str
    until: float
    informed: set[int]  # the ranks that know; for a group, by their numbers in its job
    is_refusal: bool  # a rank refuses to come, and was not refused
    world_size: int = 0  # the largest that ranks have given; when this many ranks know, all know
    guessed_size: int = 0  # the same from ranks that refuse, which may not know it; used until another rank has come


class FailedLaunches:
    """Launches and groups that cannot start. A shard remembers each for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._failed: deque[_FailedLaunch] = deque(maxlen=MAX_FAILED_LAUNCHES)  # the oldest first

    def add(self, pending_job: PendingJob, refused: Hello, wrong: str, now: float) -> str:
        """The launch of a pending job cannot start, because `refused` cannot join; return the text for its ranks."""
        reason = f"job '{refused.job}' cannot start: {member_name(refused)} was refused: {wrong}"
        self._remember(refused, pending_job, reason, now, is_refusal=False)
        return reason

    def decline(self, hello: Hello, pending_job: PendingJob | None, now: float) -> str:
        """The rank of `hello` refuses to come to a group; return the text for the ranks that gather. Empty if they
        gather for a later attempt."""
        if self.reason_for(hello, now):
            return ""
        reason = f"group '{hello.job}' cannot start: {member_name(hello)} has refused: {hello.refuses}"
        self._remember(hello, pending_job, reason, now, is_refusal=True)
        return reason

    def reason_for(self, hello: Hello, now: float) -> str:
        """The reason why the launch or group of a worker cannot start; empty if it may, or was started again."""
        job_key, rank = JobKey.of(hello), _number_in_parent_job(hello)
        for failed in [failed for failed in self._failed if failed.job_key == job_key]:
            if now >= failed.until or (rank in failed.informed and not failed.is_refusal):
                self._failed.remove(failed)
            elif rank not in failed.informed:
                self._inform(failed, [hello])
                return failed.reason
        return ""

    def _remember(
        self, hello: Hello, pending_job: PendingJob | None, reason: str, now: float, *, is_refusal: bool
    ) -> None:
        for expired in [expired for expired in self._failed if now >= expired.until]:
            self._failed.remove(expired)
        failed = _FailedLaunch(JobKey.of(hello), reason, now + self._limit_s, set(), is_refusal)
        self._failed.append(failed)
        waiting_ranks = () if pending_job is None else pending_job.waiting_ranks.values()
        self._inform(failed, [hello, *(waiting.hello for waiting in waiting_ranks)])

    def _inform(self, failed: _FailedLaunch, hellos: list[Hello]) -> None:
        for hello in hellos:
            failed.informed.add(_number_in_parent_job(hello))
            if hello.refuses:
                failed.guessed_size = max(failed.guessed_size, hello.world_size)
            else:
                failed.world_size = max(failed.world_size, hello.world_size)
        if len(failed.informed) >= (failed.world_size or failed.guessed_size):
            self._failed.remove(failed)


def _number_in_parent_job(hello: Hello) -> int:
    """A number that tells the ranks of a group apart, even if a rank does not know which ranks the group has."""
    return hello.rank if hello.parent_rank < 0 else hello.parent_rank


def fails_launch(pending_job: PendingJob, hello: Hello, wrong: str, exceeded_limit: str) -> bool:
    """Whether the other ranks wait in vain, now that `hello` was refused because it is `wrong`.

    `exceeded_limit`: the limit of this shard that it exceeds, if any. They do not wait in vain if `hello` was refused
    as a duplicate of a rank, of the pending job or of a generation that still runs.
    """
    reference = pending_job.spec
    is_missing = hello.rank < reference.world_size and hello.rank not in pending_job.waiting_ranks
    is_elastic = reference.min_ranks or reference.formation  # a formation is part of an elastic job
    is_group = min(hello.parent_rank, reference.parent_rank) >= 0
    if is_elastic or not (hello.launch or is_group) or not is_missing:
        return False
    return wrong in (other_version(hello.version), exceeded_limit, difference(reference, hello))
