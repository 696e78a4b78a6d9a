"""Limits on all jobs of one team together, on one shard."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.config.security import Terms
from omnireduce.protocol.hello_checks import demand, memory_bytes
from omnireduce.wire.control import Hello


def beyond_allowance(terms: Terms, hello: Hello, jobs: Sequence[Hello], held: Sequence[Hello]) -> str:
    """Why one more job is too much for the team of `hello`; empty when it is not.

    `jobs` has a hello of every other job that gathers or runs, `held` one of every job whose slots are taken.
    """
    team, where = f"team '{hello.team}'", f"{hello.team}.toml on the aggregator: raise it, or wait"
    count = sum(other.team == hello.team for other in jobs)
    if count >= terms.max_jobs:
        return f"{count} jobs of {team} are here already, and max_jobs is {terms.max_jobs} in {where}"
    ranks, taken = demand(other for other in held if other.team == hello.team)
    if ranks + hello.world_size > terms.max_ranks:
        wanted = f"{ranks} ranks of other jobs of {team} and {hello.world_size} of this one"
        return f"{wanted} are more than max_ranks, {terms.max_ranks}, in {where}"
    if taken + memory_bytes(hello) > terms.max_bytes:
        wanted = f"{taken} bytes of slots and state of other jobs of {team} and {memory_bytes(hello)} of this one"
        return f"{wanted} are more than max_bytes, {terms.max_bytes}, in {where}"
    return ""
