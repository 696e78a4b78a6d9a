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
        of_team = [[other for other in others if other.team == hello.team] for others in (jobs, in_memory)]
        in_file = f", in {hello.team}.toml on the aggregator"
        return _exceeded(self, hello, jobs, in_memory, section="aggregator.") or _exceeded(
            terms, hello, *of_team, owner=f" of team '{hello.team}'", in_file=in_file
        )


def _exceeded(
    limits: Limits | TeamLimits, hello: Hello, jobs: Sequence[Hello], in_memory: Sequence[Hello],
    *, owner: str = "", section: str = "", in_file: str = "",
) -> str:  # fmt: skip
    """The limit that the job of `hello` would exceed beside these others, as a text; empty if there is room. `owner`,
    `section` and `in_file` are parts of that text: whose jobs they are, and where the limit is set."""
    advice = f"{in_file}: raise it, or wait"
    if len(jobs) >= limits.max_jobs:
        return f"{len(jobs)} jobs{owner} are here already, and {section}max_jobs is {limits.max_jobs}{advice}"
    taken_ranks, taken_bytes = total_demand(in_memory)
    for unit, taken, needed, key, limit in (
        ("ranks", taken_ranks, hello.world_size, "max_ranks", limits.max_ranks),
        ("bytes of slots and state", taken_bytes, memory_bytes(hello), "max_bytes", limits.max_bytes),
    ):
        if taken + needed > limit:
            demand = f"{taken} {unit} of other jobs{owner} and {needed} of this one"
            return f"{demand} are more than {section}{key}, {limit}{advice}"
    return ""
