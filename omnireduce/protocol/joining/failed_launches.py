"""Launches and groups that cannot start, because one of their ranks was refused for good, or has refused to come.

Those of their ranks that wait are refused at once, and those that come later when they come.

Where a rank was refused, a launch cannot start. Only who could have joined the job can do that to it: the hello is in
order, of the same team, job and launch, and gives a rank that is missing. A job that is not elastic starts with all its
ranks or not at all. Only a launch with an id can fail, or a group: its name says to which generation of which job
it belongs. Otherwise the refused rank may be of another job of the same name, or started again by hand with other
settings. A rank that knows and comes again is of another start of the launch: then the shard forgets.

A rank of a job that runs may itself refuse to come to a group of ranks of this job. The ranks go on afterwards, and may
form a group of the same name at their next attempt. So each rank hears once of each attempt that was refused, unless it
has refused, too; of several in their order.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from omnireduce.core.wire.control import Hello, other_version
from omnireduce.protocol.joining.checks import difference
from omnireduce.protocol.joining.pending_job import JobKey, PendingJob, member_name

MAX_FAILED_LAUNCHES = 64  # launches and attempts of which a shard remembers that they cannot start


@dataclass(slots=True, eq=False)
class _FailedLaunch:
    place: JobKey
    reason: str
    until: float
    told: set[int]  # the ranks that know; of a group, by their numbers in its job
    by_itself: bool  # a rank refuses
    world_size: int = 0  # when so many ranks know, all do: the largest that those gave who have come,
    guessed_size: int = 0  # or, until one has, who has refused, who may have it wrong


class FailedLaunches:
    """Launches and groups that cannot start. A shard remembers each for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._failed: deque[_FailedLaunch] = deque(maxlen=MAX_FAILED_LAUNCHES)  # the oldest first

    def add(self, pending_job: PendingJob, refused: Hello, wrong: str, now: float) -> str:
        """The launch that gathers cannot start, because `refused` cannot join; return what to tell its ranks."""
        reason = f"job '{refused.job}' cannot start: {member_name(refused)} was refused: {wrong}"
        self._remember(refused, pending_job, reason, now, by_itself=False)
        return reason

    def decline(self, hello: Hello, pending_job: PendingJob | None, now: float) -> str:
        """The rank of `hello` refuses to come to a group; return what to tell the ranks that gather. Empty if they
        gather for a later attempt than the refused one."""
        if self.why(hello, now):
            return ""
        reason = f"group '{hello.job}' cannot start: {member_name(hello)} has refused: {hello.refuses}"
        self._remember(hello, pending_job, reason, now, by_itself=True)
        return reason

    def why(self, hello: Hello, now: float) -> str:
        """Why the launch or group of a worker cannot start; empty if it may, or was started again."""
        place, rank = JobKey.of(hello), _number(hello)
        for failed in [failed for failed in self._failed if failed.place == place]:
            if now >= failed.until or (rank in failed.told and not failed.by_itself):
                self._failed.remove(failed)
            elif rank not in failed.told:
                self._tell(failed, [hello])
                return failed.reason
        return ""

    def _remember(
        self, hello: Hello, pending_job: PendingJob | None, reason: str, now: float, *, by_itself: bool
    ) -> None:
        for old in [old for old in self._failed if now >= old.until]:
            self._failed.remove(old)
        failed = _FailedLaunch(JobKey.of(hello), reason, now + self._limit_s, set(), by_itself)
        self._failed.append(failed)
        here = () if pending_job is None else pending_job.waiting_ranks.values()
        self._tell(failed, [hello, *(waiting.hello for waiting in here)])

    def _tell(self, failed: _FailedLaunch, hellos: list[Hello]) -> None:
        for hello in hellos:
            failed.told.add(_number(hello))
            if hello.refuses:
                failed.guessed_size = max(failed.guessed_size, hello.world_size)
            else:
                failed.world_size = max(failed.world_size, hello.world_size)
        if len(failed.told) >= (failed.world_size or failed.guessed_size):
            self._failed.remove(failed)


def _number(hello: Hello) -> int:
    """A number that tells the ranks of a group apart, even where a rank does not know which ranks the group has."""
    return hello.rank if hello.parent_rank < 0 else hello.parent_rank


def fails_launch(pending_job: PendingJob, hello: Hello, wrong: str, over: str) -> bool:
    """Whether the other ranks wait in vain, now that `hello` was refused because it is `wrong`.

    `over`: the limit of this shard that it exceeds, if any. A duplicate of a rank, here or in a generation that still
    runs, is refused for another reason.
    """
    spec = pending_job.spec
    is_missing = hello.rank < spec.world_size and hello.rank not in pending_job.waiting_ranks
    is_elastic = spec.min_ranks or spec.formation  # a formation is part of an elastic job
    is_group = min(hello.parent_rank, spec.parent_rank) >= 0
    if is_elastic or not (hello.launch or is_group) or not is_missing:
        return False
    return wrong in (other_version(hello.version), over, difference(spec, hello))
