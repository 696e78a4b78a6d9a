"""The ranks of one job that wait for the others, on one shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import msgspec

from omnireduce.core.status_messages import LISTED, JobStatus
from omnireduce.core.wire.control import Hello, Pending
from omnireduce.core.wire.safe_text import shown
from omnireduce.support.config.schema import TeamLimits


def worker_name(rank: int, host: str, pid: int) -> str:
    """The name of a worker in errors."""
    return f"rank {rank} (host {host}, pid {pid})"


THROUGH, RELAYS_CHARACTERS = " through relay ", 200  # bounded: the names of several workers must fit one text


def member_name(hello: Hello) -> str:
    """The name in errors of the worker that sent this hello, with the relays through which it came."""
    through = THROUGH + shown(", ".join(hello.relays)[:RELAYS_CHARACTERS]) if hello.relays else ""
    return worker_name(hello.rank, hello.host, hello.pid) + through


class FormationKey(NamedTuple):
    """The key of one formation of a job: only workers with the same job, launch and formation meet."""

    job: str
    launch: str
    formation: int

    @classmethod
    def of(cls, hello: Hello) -> FormationKey:
        return cls(hello.job, hello.launch, hello.formation)


class JobKey(NamedTuple):
    """A formation key with its team: workers of other teams must not influence it."""

    team: str
    formation_key: FormationKey

    @classmethod
    def of(cls, hello: Hello) -> JobKey:
        return cls(hello.team, FormationKey.of(hello))


class Claim(IntEnum):
    """The claim of a worker to a place in an elastic job."""

    NEWCOMER = 0
    CLAIMANT = 1  # says that it was in the job, but this shard cannot know, as after a restart of the daemon
    SURVIVOR = 2  # has the ticket of the last formation


class WaitingRank(NamedTuple):
    """A worker that waits for the others. `key`: its connection."""

    key: Hashable
    hello: Hello
    claim: Claim


@dataclass(slots=True, eq=False)
class PendingJob:
    """The workers of one job that said hello, by the rank that they gave; `spec` is the hello of the first one.

    A job that is not elastic starts when all its ranks are here.

    An elastic job (`spec.min_ranks` > 0) is held back while its last generation still runs: a job that works is not
    stopped for newcomers. It starts at once when `spec.world_size` workers are here, with all of `expected` among them.
    These are the ranks that the workers of the last generation gave. When no survivor has come or gone for
    `spec.last_call_s`, it starts without waiting for `expected`. Then it may even start with fewer workers, but at
    least `spec.min_ranks`, if one of them has proved, or only claims, that it was in the last generation.

    The job may take the room of generation `replaces`, once that has given it back. `terms`: the limits of its team.
    """

    spec: Hello
    terms: TeamLimits
    since: float  # the time to join counts from here on; moved when a rank has compiled
    begun: float  # when the job began to gather; not moved when a rank has compiled
    informed_at: float  # when all waiting ranks were told last who is missing
    changed_at: float
    is_held_back: bool = False
    expected: frozenset[int] = frozenset()
    replaces: int | None = None
    is_news: bool = False  # the missing ranks have changed since
    waiting_ranks: dict[int, WaitingRank] = field(default_factory=dict)
    refused: tuple[int, str] | None = None  # the rank that was refused last and the reason, until it joins
    namesakes: list[PendingJob] = field(default_factory=list)  # all pending jobs of this name, with this job itself
    uninformed: dict[Hashable, None] = field(default_factory=dict)  # connections that still have to hear the last news
    _first_missing: int = 0  # all ranks below it are here
    _in_world: int = 0  # waiting ranks whose rank is below the world size
    _claims: Counter[Claim] = field(default_factory=Counter)

    def add(self, waiting_rank: WaitingRank, now: float) -> None:
        rank = waiting_rank.hello.rank
        self._in_world += rank < self.spec.world_size
        self._claims[waiting_rank.claim] += 1
        self.waiting_ranks[rank] = waiting_rank
        if waiting_rank.claim is Claim.SURVIVOR or len(self.waiting_ranks) == 1:
            self.changed_at = now  # newcomers that come and go do not make the others wait longer
        self.is_news = self.is_held_back or len(self.waiting_ranks) > 1
        if self.refused is not None and self.refused[0] == rank:
            self.refused = None

    def remove(self, rank: int, now: float) -> None:
        """The connection of the worker that gave this rank is over."""
        waiting_rank = self.waiting_ranks.pop(rank)
        self._in_world -= rank < self.spec.world_size
        self._claims[waiting_rank.claim] -= 1
        self._first_missing = min(self._first_missing, rank)
        self.is_news = True
        self.uninformed.pop(waiting_rank.key, None)
        if waiting_rank.claim is Claim.SURVIVOR:
            self.changed_at = now

    def compare_with(self, survivor: Hello) -> None:
        """Compare hellos with the hello of this survivor from now on. Workers that only say that they survived become
        newcomers."""
        self.spec = survivor
        self._make_newcomers()

    def _make_newcomers(self) -> None:
        for rank, (key, hello, _) in self.waiting_ranks.items():
            self.waiting_ranks[rank] = WaitingRank(key, hello, Claim.NEWCOMER)
        self._first_missing = 0
        self._in_world = sum(rank < self.spec.world_size for rank in self.waiting_ranks)
        self._claims = Counter(waiting_rank.claim for waiting_rank in self.waiting_ranks.values())

    def release(self, now: float) -> None:
        """The last generation is over: the time to join counts from now on."""
        self.is_held_back, self.since, self.begun, self.changed_at = False, now, now, now

    @property
    def job_key(self) -> JobKey:
        return JobKey.of(self.spec)

    @property
    def has_survivors(self) -> bool:
        return self._claims[Claim.SURVIVOR] + self._claims[Claim.CLAIMANT] > 0

    @property
    def has_proven_survivor(self) -> bool:
        """A worker is here that has proved that it was in the job."""
        return self._claims[Claim.SURVIVOR] > 0

    @property
    def is_full(self) -> bool:
        return len(self.waiting_ranks) >= self.spec.world_size

    def settles_at(self) -> float | None:
        """The time when the workers here have waited long enough for others, or for the last generation; None:
        never."""
        enough = self.is_held_back or len(self.waiting_ranks) >= self.spec.min_ranks
        ready = (self.has_survivors and enough) or (self.is_full and not self.is_held_back)
        return self.changed_at + self.spec.last_call_s if self.spec.min_ranks and ready else None

    def has_settled(self, now: float) -> bool:
        settles_at = self.settles_at()
        return settles_at is not None and now >= settles_at

    def complete(self, now: float) -> bool:
        """Whether the job starts with the workers that are here."""
        if self.is_held_back:
            return False
        return (self.is_full and self.expected <= self.waiting_ranks.keys()) or self.has_settled(now)

    def take(self) -> list[tuple[Hashable, Hello]]:
        """Take out the workers that the job starts with, in rank order, with the ranks that they get. If there are too
        many, survivors go first. Workers that stay are not in this generation, so for its ranks they are newcomers."""
        order = sorted(self.waiting_ranks, key=lambda rank: (-self.waiting_ranks[rank].claim, rank))
        chosen = [self.waiting_ranks.pop(rank) for rank in sorted(order[: self.spec.world_size])]
        self._make_newcomers()
        self.uninformed.clear()
        return [
            (waiting_rank.key, msgspec.structs.replace(waiting_rank.hello, rank=rank, world_size=len(chosen)))
            for rank, waiting_rank in enumerate(chosen)
        ]

    def missing(self) -> list[int]:
        """The first ranks that are not here, at most LISTED: a peer may have given any world size."""
        missing: list[int] = []
        while self._first_missing in self.waiting_ranks:
            self._first_missing += 1
        for rank in range(self._first_missing, self.spec.world_size):
            if rank not in self.waiting_ranks:
                missing.append(rank)
                if len(missing) == LISTED:
                    break
        return missing

    @property
    def total_missing(self) -> int:
        return self.spec.world_size - self._in_world

    def pending(self) -> Pending:
        return Pending(self.missing(), self.total_missing, self.note)

    @property
    def note(self) -> str:
        if self.refused is not None:
            return self.refused[1]
        rival = next((namesake for namesake in self.namesakes if namesake is not self), None)
        return "" if rival is None else _rival_text(rival.spec, self.spec)

    def timeout_text(self, limit_s: float) -> str:
        """The text for workers that have waited for the others for longer than `limit_s`."""
        missing = self.missing()
        missing_text = "rank " + ", ".join(map(str, missing)) + (" …" if self.total_missing > len(missing) else "")
        if not missing:
            missing_text = "its last generation to give back its memory"
        reason = f"job '{self.spec.job}' was still waiting for {missing_text} after {limit_s:g} s"
        return reason + (f" ({self.note})" if self.note else "")

    def status(self, now: float) -> JobStatus:
        return JobStatus(
            name=self.spec.job,
            team=self.spec.team,
            generation=0,
            launch=self.spec.launch,
            world_size=self.spec.world_size,
            joined=len(self.waiting_ranks),
            missing=self.missing(),
            age_s=now - self.since,
        )


def _rival_text(rival: Hello, hello: Hello) -> str:
    """The text for a worker if `rival`, of another launch, waits under the same name. They may belong together."""
    launches = " and ".join(shown(worker.launch or "none") for worker in (hello, rival))
    return (
        f"{member_name(rival)} waits for a job of this name, too, but in another launch ({launches}): "
        "give all their workers the same cluster.launch if they belong together, else another cluster.job"
    )
