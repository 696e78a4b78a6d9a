"""Ranks whose kernels compile: they have said who they are, and will join later.

The other ranks wait for them meanwhile, and that does not count as time to join. The wait is bounded: it ends when the
rank has joined, and no job waits for longer than COMPILING_S in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import takewhile
from typing import NamedTuple

from omnireduce.core.status_messages import LISTED
from omnireduce.core.wire.control import Hello
from omnireduce.protocol.joining.checks import difference, rank_taken_text
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.pending_job import JobKey, PendingJob
from omnireduce.support.config.schema import TeamLimits

COMPILING_S = 1800.0  # the longest wait: a process that has been stopped cannot say so
TOO_LONG = f"the kernels were not ready after {COMPILING_S:g} s"


class _Compiler(NamedTuple):
    job_key: JobKey
    rank: int
    until: float


class Compilers:
    """Ranks that compile, by connection. A connection lasts until the rank is ready. Each rank counts towards the
    limits on ranks of the shard and of its team."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_connection: dict[Hashable, _Compiler] = {}  # by connection, the oldest first
        self._last_connections: dict[JobKey, dict[int, Hashable]] = {}  # each rank's last connection, the oldest first
        self._team_counts = Counter[str]()

    @property
    def keys(self) -> list[Hashable]:
        """Their connections."""
        return list(self._by_connection)

    @property
    def deadline(self) -> float | None:
        """The time when the wait for the oldest of them ends; None without any."""
        return next((compiler.until for compiler in self._by_connection.values()), None)

    def expired(self, now: float) -> list[Hashable]:
        """The connections of ranks whose time is over."""
        return [key for key, _ in takewhile(lambda item: item[1].until <= now, self._by_connection.items())]

    def objection(self, hello: Hello, terms: TeamLimits, pending_job: PendingJob | None) -> str:
        """The reason not to wait for the worker of `hello`; empty if the others are to wait. `pending_job`: the pending
        job that it wants to join."""
        wrong = ""
        if pending_job is not None and pending_job.job_key == JobKey.of(hello) and not hello.min_ranks:
            wrong = (
                rank_taken_text(hello)
                if hello.rank in pending_job.waiting_ranks
                else difference(pending_job.spec, hello)
            )
        team = self._team_counts[hello.team]
        if not wrong and len(self._by_connection) >= self._limits.max_ranks:
            wrong = (
                f"{len(self._by_connection)} ranks compile already, which is aggregator.max_ranks: raise it, or wait"
            )
        if not wrong and hello.team and team >= terms.max_ranks:
            where = f"max_ranks in {hello.team}.toml on the aggregator: raise it, or wait"
            wrong = f"{team} ranks of team '{hello.team}' compile already, which is {where}"
        return wrong

    def add(self, key: Hashable, hello: Hello, now: float) -> None:
        """A worker compiles its kernels."""
        job_key = JobKey.of(hello)
        self._by_connection[key] = _Compiler(job_key, hello.rank, now + COMPILING_S)
        self._team_counts[hello.team] += 1
        ranks = self._last_connections.setdefault(job_key, {})
        ranks.pop(hello.rank, None)
        ranks[hello.rank] = key

    def remove(self, key: Hashable) -> JobKey | None:
        """A connection is over. Return the job that its rank was going to join; None for an unknown connection."""
        compiler = self._by_connection.pop(key, None)
        if compiler is None:
            return None
        self._team_counts[compiler.job_key.team] -= 1
        if not self._team_counts[compiler.job_key.team]:
            del self._team_counts[compiler.job_key.team]
        if self._last_connections.get(compiler.job_key, {}).get(compiler.rank) == key:
            self._forget(compiler.job_key, compiler.rank)
        return compiler.job_key

    def joined(self, hello: Hello) -> None:
        """The worker of `hello` has joined: it compiles no more."""
        if hello.rank in self._last_connections.get(JobKey.of(hello), {}):
            self._forget(JobKey.of(hello), hello.rank)

    def _forget(self, job_key: JobKey, rank: int) -> None:
        del self._last_connections[job_key][rank]
        if not self._last_connections[job_key]:
            del self._last_connections[job_key]

    def until(self, job_key: JobKey) -> float:
        """The time until which a pending job waits for its ranks that compile; 0 without any."""
        last = next(reversed(self._last_connections.get(job_key, {}).values()), None)
        return 0.0 if last is None else self._by_connection[last].until

    def ranks(self, job_key: JobKey) -> list[int]:
        """The lowest ranks of a pending job that compile, ascending."""
        return sorted(self._last_connections.get(job_key, ()))[:LISTED]
