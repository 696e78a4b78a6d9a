"""The ranks of one job that wait for the others, on one shard."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field

import msgspec

from omnireduce.status import LISTED, JobStatus
from omnireduce.wire import Hello, Pending


def worker_name(rank: int, host: str, pid: int) -> str:
    """How errors call a worker."""
    return f"rank {rank} (host {host}, pid {pid})"


def member_name(hello: Hello) -> str:
    """How errors call the worker that said this."""
    return worker_name(hello.rank, hello.host, hello.pid)


@dataclass(slots=True)
class Gathering:
    """Those of one job who said hello, by the rank that they gave; `spec` is the hello of the first.

    An elastic job (`spec.smallest` > 0) of which the last generation still runs is held back: nobody leaves a job that
    is well. It starts at once when `spec.world_size` workers are here and all of `expected`, the ranks that the workers
    of the last generation gave. When no survivor has come or gone for `spec.settle_s`, it starts with fewer, if there
    is one among them, or without those who were expected. Every other job starts when all are here.
    """

    spec: Hello
    since: float
    told_at: float  # when all members were told last who is missing
    changed_at: float
    held: bool = False
    expected: frozenset[int] = frozenset()
    is_news: bool = False  # who is missing has changed since
    members: dict[int, tuple[Hashable, Hello]] = field(default_factory=dict)
    refused: tuple[int, str] | None = None  # the rank that was refused last and a note of why, until it joins
    missing: list[int] = field(init=False)  # ascending: each newcomer is told of the first few

    def __post_init__(self) -> None:
        self.missing = list(range(self.spec.world_size))

    def add(self, key: Hashable, hello: Hello, now: float) -> None:
        self.members[hello.rank] = key, hello
        at = bisect_left(self.missing, hello.rank)
        if at < len(self.missing) and self.missing[at] == hello.rank:
            del self.missing[at]
        if hello.survivor or len(self.members) == 1:
            self.changed_at = now  # newcomers, who may come and go as they like, keep nobody waiting
        self.is_news = self.held or len(self.members) > 1
        if self.refused is not None and self.refused[0] == hello.rank:
            self.refused = None

    def remove(self, rank: int, now: float) -> None:
        """The connection of this one is over."""
        _, hello = self.members.pop(rank)
        if rank < self.spec.world_size:
            insort(self.missing, rank)
        self.is_news = True
        if hello.survivor:
            self.changed_at = now

    def accept(self, spec: Hello) -> None:
        """From now on this is what the others are compared with."""
        self.spec = spec
        self.missing = [rank for rank in range(spec.world_size) if rank not in self.members]

    def release(self, now: float) -> None:
        """The last generation is over: time counts from now on."""
        self.held, self.since, self.changed_at = False, now, now

    @property
    def has_survivors(self) -> bool:
        return any(hello.survivor for _, hello in self.members.values())

    @property
    def is_full(self) -> bool:
        return len(self.members) >= self.spec.world_size

    def settles_at(self) -> float | None:
        """When those who are here have waited long enough for others, or for the last generation; None: never."""
        enough = self.held or len(self.members) >= self.spec.smallest
        ready = (self.has_survivors and enough) or (self.is_full and not self.held)
        return self.changed_at + self.spec.settle_s if self.spec.smallest and ready else None

    def has_settled(self, now: float) -> bool:
        settles_at = self.settles_at()
        return settles_at is not None and now >= settles_at

    def complete(self, now: float) -> bool:
        """Whether the job starts with those who are here."""
        if self.held:
            return False
        return (self.is_full and self.expected <= self.members.keys()) or self.has_settled(now)

    def take(self) -> list[tuple[Hashable, Hello]]:
        """Take out those with whom the job starts, in rank order, with the ranks that they get: where there are too
        many, survivors first."""
        order = sorted(self.members, key=lambda rank: (not self.members[rank][1].survivor, rank))
        taken = [self.members.pop(rank) for rank in sorted(order[: self.spec.world_size])]
        self.missing = [rank for rank in range(self.spec.world_size) if rank not in self.members]
        return [
            (key, msgspec.structs.replace(hello, rank=rank, world_size=len(taken)))
            for rank, (key, hello) in enumerate(taken)
        ]

    def pending(self) -> Pending:
        return Pending(self.missing[:LISTED], len(self.missing), self.note)

    @property
    def note(self) -> str:
        return "" if self.refused is None else self.refused[1]

    def too_late(self, limit_s: float) -> str:
        """What to say to those who have waited for the others for longer than this."""
        ranks = ", ".join(map(str, self.missing[:LISTED])) + (" …" if len(self.missing) > LISTED else "")
        reason = f"job '{self.spec.job}' was still waiting for rank {ranks} after {limit_s:g} s"
        return reason + (f" ({self.note})" if self.note else "")

    def status(self, now: float) -> JobStatus:
        return JobStatus(
            name=self.spec.job,
            team=self.spec.team,
            generation=0,
            world_size=self.spec.world_size,
            joined=len(self.members),
            missing=self.missing[:LISTED],
            age_s=now - self.since,
        )
