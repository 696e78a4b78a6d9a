"""Summary of each job of the aggregators, with its shards added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from omnireduce.core.status_messages import JobRelay, JobStatus, LateRank, Status, Stragglers, Traffic
from omnireduce.support.printing import carriers_text, duration

SHORTEST_WAIT_S = 0.1  # each look meets some collective under way: a shorter wait is normal

Answers = Mapping[str, Status | Exception]


class JobSummary(NamedTuple):
    """A job on all shards that have answered.

    `gathers`: it still waits for ranks, of which `missing` names some; then nothing is said of what it does. `late`:
    the rank that was waited for most, all in all. `wait`: whom a collective waits for now, and long. `upstream`: of the
    first shard of a relay; `relays`: those below the first shard.
    """

    name: str
    team: str
    gathers: bool
    joined: int
    world_size: int
    missing: Sequence[int]
    carriers: str
    age_s: float
    traffic: Traffic
    slots_in_use: int
    slots: int
    late: LateRank | None
    wait: Stragglers | None
    upstream: str
    relays: Sequence[JobRelay]

    @property
    def key(self) -> tuple[str, str, bool]:
        """The same at each look: generations count by shard."""
        return self.name, self.team, not self.gathers


def summarize_jobs(answers: Answers) -> list[JobSummary]:
    """The jobs of all shards, by name; those that gather come before those of their name that run."""
    jobs = [job for answer in answers.values() if isinstance(answer, Status) for job in answer.jobs]
    return [_sum_shards(list(parts)) for _, parts in groupby(sorted(jobs, key=_job_key), key=_job_key)]


def _job_key(job: JobStatus) -> tuple[str, str, bool]:
    """A key that is the same for a job on all shards: each shard counts generations by itself."""
    return job.name, job.team, job.generation > 0


def _sum_shards(shards: Sequence[JobStatus]) -> JobSummary:
    first, traffic = shards[0], Traffic()
    for shard in shards:
        traffic.add(shard.traffic)
    traffic.collectives = max(shard.traffic.collectives for shard in shards)  # the first shard takes part in all
    late = [delay for shard in shards for delay in shard.late if delay.seconds >= SHORTEST_WAIT_S]
    waits = [shard.waiting for shard in shards if shard.waiting and shard.waiting.seconds >= SHORTEST_WAIT_S]
    return JobSummary(
        name=first.name,
        team=first.team,
        gathers=not first.generation,
        joined=min(shard.joined for shard in shards),
        world_size=first.world_size,
        missing=first.missing,
        carriers=carriers_text(sum((Counter(shard.carried) for shard in shards), Counter[str]())),
        age_s=max(shard.age_s for shard in shards),
        traffic=traffic,
        slots_in_use=sum(shard.slots_in_use for shard in shards),
        slots=sum(shard.slots for shard in shards),
        late=max(late, key=lambda delay: delay.seconds, default=None),
        wait=max(waits, key=lambda wait: wait.seconds, default=None),
        upstream=first.upstream,
        relays=first.relays,
    )


def waits_for(wait: Stragglers | None) -> str:
    """The ranks that a collective waits for, in few words."""
    if wait is None:
        return ""
    ranks_text = f"rank {wait.ranks[0]}" if wait.total == 1 and wait.ranks else f"{wait.total} ranks"
    ranks_text = ranks_text if wait.total else "an aggregator"
    return f"{ranks_text} {duration(wait.seconds)}"
