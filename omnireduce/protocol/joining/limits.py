"""Limits on the jobs of a shard: on each job by itself, on all jobs together, and on those of one team."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnireduce.core.wire.control import Hello
from omnireduce.protocol.joining.checks import memory_bytes, total_demand
from omnireduce.support.config.schema import TeamLimits


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one shard: the number of jobs at once; ranks, and bytes of slots and state, of one job; the seconds
    that a job may wait for its ranks; ranks, and bytes of slots and state, of all jobs together."""

    max_jobs: int
    max_world_size: int
    max_job_bytes: int
    join_timeout_s: float
    max_ranks: int = 1 << 62
    max_bytes: int = 1 << 62

    def exceeded_alone(self, hello: Hello) -> str:
        """The limit that the job of `hello` exceeds by itself, as a text; empty if it exceeds none."""
        if hello.min_ranks and hello.last_call_s >= self.join_timeout_s:
            limit = f"aggregator.join_timeout_s, {self.join_timeout_s:g} s"
            return f"elastic.last_call_s is {hello.last_call_s:g} s, expected less than {limit}"
        if hello.world_size > self.max_world_size:
            return f"world size {hello.world_size}; aggregator.max_world_size is {self.max_world_size}: raise it"
        needed_bytes = memory_bytes(hello)
        if needed_bytes > self.max_job_bytes:
            return (
                f"the job needs {needed_bytes} bytes of slots and state; aggregator.max_job_bytes is "
                f"{self.max_job_bytes}: raise it on the aggregator, or lower protocol.slots, protocol.slot_bytes or "
                "protocol.state_bytes"
            )
        return ""

    def exceeded_together(
        self, hello: Hello, terms: TeamLimits, jobs: Sequence[Hello], in_memory: Sequence[Hello]
    ) -> str:
        """The limit, of the shard or of a team with `terms`, that the job of `hello` would exceed, as a text; empty if
        there is room.

        `jobs` has a hello of every other job that gathers or runs, `in_memory` one of every job whose slots are taken.
        """
        if len(jobs) >= self.max_jobs:
            return f"{self.max_jobs} jobs are here already, which is aggregator.max_jobs: raise it, or wait"
        ranks, taken_bytes = total_demand(in_memory)
        if ranks + hello.world_size > self.max_ranks:
            demand_text = f"{ranks} ranks of other jobs and {hello.world_size} of this one"
            return f"{demand_text} are more than aggregator.max_ranks, {self.max_ranks}: raise it, or wait"
        if taken_bytes + memory_bytes(hello) > self.max_bytes:
            demand_text = f"{taken_bytes} bytes of slots and state of other jobs and {memory_bytes(hello)} of this one"
            return f"{demand_text} are more than aggregator.max_bytes, {self.max_bytes}: raise it, or wait"
        of_team = [[other for other in others if other.team == hello.team] for others in (jobs, in_memory)]
        return _exceeded_team_limit(terms, hello, len(of_team[0]), of_team[1])


def _exceeded_team_limit(terms: TeamLimits, hello: Hello, jobs: int, in_memory: Sequence[Hello]) -> str:
    """The limit of its team that one more job would exceed beside `jobs` others of the team, as a text; empty if there
    is room."""
    team, where = f"team '{hello.team}'", f"{hello.team}.toml on the aggregator: raise it, or wait"
    if jobs >= terms.max_jobs:
        return f"{jobs} jobs of {team} are here already, and max_jobs is {terms.max_jobs} in {where}"
    ranks, taken_bytes = total_demand(in_memory)
    if ranks + hello.world_size > terms.max_ranks:
        demand_text = f"{ranks} ranks of other jobs of {team} and {hello.world_size} of this one"
        return f"{demand_text} are more than max_ranks, {terms.max_ranks}, in {where}"
    if taken_bytes + memory_bytes(hello) > terms.max_bytes:
        demand_text = (
            f"{taken_bytes} bytes of slots and state of other jobs of {team} and {memory_bytes(hello)} of this one"
        )
        return f"{demand_text} are more than max_bytes, {terms.max_bytes}, in {where}"
    return ""
