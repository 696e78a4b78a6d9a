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
from omnireduce.protocol.joining.checks import difference, taken
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.pending_job import JobKey, PendingJob
from omnireduce.support.config.schema import TeamLimits

COMPILING_S = 1800.0  # the longest wait: a process that has been stopped cannot say so
TOO_LONG = f"the kernels were not ready after {COMPILING_S:g} s"


class _Compiler(NamedTuple):
    place: JobKey
    rank: int
    until: float


class Compilers:
    """Ranks that compile, by connection. A connection lasts until the rank is ready. Each rank counts towards the
    limits on ranks of the shard and of its team."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._all: dict[Hashable, _Compiler] = {}  # by connection, the oldest first
        self._waited_for: dict[JobKey, dict[int, Hashable]] = {}  # each rank's last connection, the oldest first
        self._of_team = Counter[str]()

    @property
    def keys(self) -> list[Hashable]:
        """Their connections."""
        return list(self._all)

    @property
    def deadline(self) -> float | None:
        """The time when the wait for the oldest of them ends; None without any."""
        return next((compiler.until for compiler in self._all.values()), None)

    def over(self, now: float) -> list[Hashable]:
        """The connections of ranks whose time is over."""
        return [key for key, _ in takewhile(lambda item: item[1].until <= now, self._all.items())]

    def objection(self, hello: Hello, terms: TeamLimits, here: PendingJob | None) -> str:
        """The reason not to wait for the worker of `hello`; empty if the others are to wait. `here`: the pending job
        that it wants to join."""
        wrong = ""
        if here is not None and here.place == JobKey.of(hello) and not hello.min_ranks:
            wrong = taken(hello) if hello.rank in here.waiting_ranks else difference(here.spec, hello)
        team = self._of_team[hello.team]
        if not wrong and len(self._all) >= self._limits.max_ranks:
            wrong = f"{len(self._all)} ranks compile already, which is aggregator.max_ranks: raise it, or wait"
        if not wrong and hello.team and team >= terms.max_ranks:
            where = f"max_ranks in {hello.team}.toml on the aggregator: raise it, or wait"
            wrong = f"{team} ranks of team '{hello.team}' compile already, which is {where}"
        return wrong

    def add(self, key: Hashable, hello: Hello, now: float) -> None:
        """A worker compiles its kernels."""
        place = JobKey.of(hello)
        self._all[key] = _Compiler(place, hello.rank, now + COMPILING_S)
        self._of_team[hello.team] += 1
        ranks = self._waited_for.setdefault(place, {})
        ranks.pop(hello.rank, None)
        ranks[hello.rank] = key

    def remove(self, key: Hashable) -> JobKey | None:
        """A connection is over. Return the job that its rank was going to join; None for an unknown connection."""
        known = self._all.pop(key, None)
        if known is None:
            return None
        self._of_team[known.place.team] -= 1
        if not self._of_team[known.place.team]:
            del self._of_team[known.place.team]
        if self._waited_for.get(known.place, {}).get(known.rank) == key:
            self._forget(known.place, known.rank)
        return known.place

    def came(self, hello: Hello) -> None:
        """The worker of `hello` has joined: it compiles no more."""
        if hello.rank in self._waited_for.get(JobKey.of(hello), {}):
            self._forget(JobKey.of(hello), hello.rank)

    def _forget(self, place: JobKey, rank: int) -> None:
        del self._waited_for[place][rank]
        if not self._waited_for[place]:
            del self._waited_for[place]

    def until(self, place: JobKey) -> float:
        """The time until which a pending job waits for its ranks that compile; 0 without any."""
        last = next(reversed(self._waited_for.get(place, {}).values()), None)
        return 0.0 if last is None else self._all[last].until

    def ranks(self, place: JobKey) -> list[int]:
        """The lowest ranks of a pending job that compile, ascending."""
        return sorted(self._waited_for.get(place, ()))[:LISTED]
