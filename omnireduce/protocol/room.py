"""Whether a shard has room for one more job beside those that it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnireduce.config.security import Terms
from omnireduce.protocol.allowance import beyond_allowance
from omnireduce.protocol.hello_checks import kin
from omnireduce.protocol.limits import Limits
from omnireduce.protocol.pending_job import FormationKey, PendingJob
from omnireduce.protocol.running_job import RunningJob
from omnireduce.wire.control import Hello


class Room:
    """The room for jobs of a membership: jobs that gather and run, and `held`, whose memory is not given back."""

    def __init__(
        self, limits: Limits, pending_job: Mapping[FormationKey, PendingJob], running: Mapping[int, RunningJob],
        held: Mapping[int, Hello],
    ) -> None:  # fmt: skip
        self._limits, self._pending_jobs, self._running, self._held = limits, pending_job, running, held

    def lacks(self, pending_job: PendingJob) -> bool:
        """Whether the job has to wait until the generation that it replaces has given back its memory.

        It need not wait where there is room for both. Room that is promised to others does not count: a job that
        gathers, and replaces no other one, will want room of its own.
        """
        if pending_job.replaces not in self._held:
            return False
        others = [other for other in self._pending_jobs.values() if other is not pending_job]
        jobs = [job.spec for job in self._running.values()]
        jobs += [other.spec for other in others if other.replaces not in self._running]
        held = [*self._held.values(), *(other.spec for other in others if other.replaces not in self._held)]
        return bool(self._too_much(pending_job.spec, pending_job.terms, jobs, held))

    def why_none(self, hello: Hello, terms: Terms, going: PendingJob | None) -> str:
        """Why there is no room for one more job in place of `going`; those that gather count as if they ran."""
        leaving = self.replaced_by(hello, going)
        gather = [other.spec for other in self._pending_jobs.values() if other is not going]
        jobs = gather + [job.spec for number, job in self._running.items() if number != leaving]
        held = gather + [spec for number, spec in self._held.items() if number != leaving]
        return self._too_much(hello, terms, jobs, held)

    def replaced_by(self, hello: Hello, going: PendingJob | None = None) -> int | None:
        """The generation whose room an elastic job takes: its last, unless a pending job other than `going` does."""
        if not hello.smallest and not hello.formation:
            return None
        mine = [number for number, spec in self._held.items() if kin(spec) == kin(hello)]
        last = max(mine, default=None)
        return (
            None if any(other.replaces == last for other in self._pending_jobs.values() if other is not going) else last
        )

    def _too_much(self, hello: Hello, terms: Terms, jobs: Sequence[Hello], held: Sequence[Hello]) -> str:
        """Why a job like this is too much beside `jobs`, and `held`, whose slots are taken; empty when it is not."""
        return self._limits.beyond(hello, len(jobs), held) or beyond_allowance(terms, hello, jobs, held)
