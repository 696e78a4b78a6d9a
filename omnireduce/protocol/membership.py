"""Who may join which job on one shard: a pure machine. Connections are opaque keys.

States of a job name: nobody → gathering (some ranks said hello) → running (all are here; one generation) → nobody. A
new generation may gather while the ranks of the last one are still leaving; a rank that is still there cannot join
twice.

Of an elastic job the first shard decides who is in it and what their ranks are, and gives this formation a number. The
workers tell it the other shards: those who come with different formations never meet.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from omnireduce.config_security import Terms
from omnireduce.protocol.allowance import beyond_allowance
from omnireduce.protocol.gathering import Gathering, member_name
from omnireduce.protocol.hello_checks import ADVICE, SHAPE, difference, malformed, of_another_team, slot_bytes, taken
from omnireduce.status import JobStatus
from omnireduce.teams import FREE
from omnireduce.wire import Cause, Hello, Pending, Refused, listed, other_version

NEWS_S = 1.0  # at most so often those who wait are told who is missing: telling all of each newcomer takes N² messages


@dataclass(frozen=True, slots=True)
class Limits:
    """What one shard allows: jobs at once, ranks and bytes of slots of one job, seconds to gather; ranks and bytes of
    all jobs together."""

    max_jobs: int
    max_world_size: int
    max_job_bytes: int
    join_timeout_s: float
    max_ranks: int = 1 << 62
    max_bytes: int = 1 << 62


class Answer(NamedTuple):
    """Send `message` to connection `key`; after a Refused the connection ends."""

    key: Hashable
    message: Refused | Pending


class Admit(NamedTuple):
    """All ranks of a job are here: start generation `generation` with these connections, in rank order."""

    generation: int
    job: str
    keys: list[Hashable]
    hellos: list[Hello]


class Announce(NamedTuple):
    """Tell the ranks of running `generation` that `workers` others wait to join their job."""

    generation: int
    workers: int


class Replace(NamedTuple):
    """End running `generation` because of `cause`: survivors have waited long enough for those who are still in it."""

    generation: int
    cause: Cause


MembershipEffect = Answer | Admit | Announce | Replace


class _Running(NamedTuple):
    spec: Hello  # of the first who said hello
    ranks: dict[int, Hello]  # those that have not left, with the ranks that they have
    asked: frozenset[int]  # the ranks that all of them, also who left, gave in their hellos

    @property
    def place(self) -> tuple[str, int]:
        return self.spec.job, self.spec.formation


class Membership:
    """Admission to the jobs of one shard."""

    def __init__(self, limits: Limits, salt: int = 0) -> None:
        """`salt`: another one in every process, so that formations of different ones differ."""
        self._limits, self._salt = limits, salt
        self._gathering: dict[tuple[str, int], Gathering] = {}  # by job and formation
        self._waiting: dict[Hashable, Hello] = {}  # of each connection in them
        self._running: dict[int, _Running] = {}
        self._held: dict[int, Hello] = {}  # by generation, what its size and memory follow from, until it is released
        self._next_generation = 1
        self._deserted: set[int] = set()  # generations whose newcomers have gone
        self.draining = False

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called, if nothing happens before."""
        waiting = self._gathering.values()
        ends = [each.since + self._limits.join_timeout_s for each in waiting if not each.held]
        ends += [each.told_at + NEWS_S for each in waiting if each.is_news]
        ends += [at for at in (each.settles_at() for each in waiting) if at is not None]
        ends += [0.0] if self._deserted else []
        return min(ends, default=None)

    def hello(self, key: Hashable, hello: Hello, now: float, terms: Terms = FREE) -> Iterator[MembershipEffect]:
        """A worker asks to join, of a team on these terms."""
        yield from self._make_way(hello, now)
        (wrong, temporary), place = self._objection(hello, terms), (hello.job, hello.formation)
        if wrong:
            yield Answer(key, Refused(wrong, temporary))
            waiting = self._gathering.get(place)
            if waiting is not None and not malformed(hello) and not of_another_team(waiting.spec, hello):
                waiting.refused = hello.rank, f"{member_name(hello)} was refused: {wrong}"
                waiting.is_news = True
            return
        if place not in self._gathering:
            generation = self._generation_of(hello.job) if hello.smallest else None
            last = frozenset[int]() if generation is None else self._running[generation].asked
            self._gathering[place] = Gathering(hello, now, now, now, generation is not None, last)
        gathering = self._gathering[place]
        gathering.add(key, hello, now)
        self._waiting[key] = hello
        if gathering.complete(now):
            yield self._admit(place)
        else:
            yield Answer(key, gathering.pending())

    def gone(self, key: Hashable, now: float) -> None:
        """A connection that was not yet admitted is over."""
        hello = self._waiting.pop(key, None)
        if hello is not None:
            place = hello.job, hello.formation
            gathering = self._gathering[place]
            gathering.remove(hello.rank, now)
            if not gathering.members:
                del self._gathering[place]
                generation = self._generation_of(hello.job)
                if gathering.held and generation is not None:
                    self._deserted.add(generation)

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""
        if generation in self._running:
            self._running[generation].ranks.pop(rank, None)

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        over = self._running.pop(generation, None)
        self._deserted.discard(generation)
        if over is not None and over.place in self._gathering and self._generation_of(over.spec.job) is None:
            self._gathering[over.place].release(now)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._held.pop(generation, None)

    def expire(self, now: float) -> Iterator[MembershipEffect]:
        """Time has passed: start jobs that have settled, refuse those that gather for too long, tell who is missing."""
        limit_s = self._limits.join_timeout_s
        while self._deserted:
            yield Announce(self._deserted.pop(), 0)
        for place, gathering in list(self._gathering.items()):
            if gathering.complete(now):
                yield self._admit(place)
            elif not gathering.held and now - gathering.since >= limit_s:
                del self._gathering[place]
                reason = gathering.too_late(limit_s)
                for key, _ in gathering.members.values():
                    del self._waiting[key]
                    yield Answer(key, Refused(reason, temporary=True))
            elif gathering.held and gathering.has_settled(now):
                yield from self._replace(gathering, now)
            elif gathering.is_news and now - gathering.told_at >= NEWS_S:
                yield from self._tell_news(gathering, now)

    def gathering(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [each.status(now) for each in self._gathering.values()]

    def drain(self) -> Iterator[MembershipEffect]:
        """Admit nobody any more."""
        self.draining = True
        for gathering in self._gathering.values():
            for key, _ in gathering.members.values():
                yield Answer(key, Refused("the aggregator is shutting down", temporary=True))
        self._gathering.clear()
        self._waiting.clear()

    def _admit(self, place: tuple[str, int]) -> Admit:
        """Start a job with those who are here; who is left over waits for the next generation."""
        gathering = self._gathering[place]
        before = frozenset(gathering.members)
        ranked = gathering.take()
        for key, _ in ranked:
            del self._waiting[key]
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        hellos = [hello for _, hello in ranked]
        if gathering.spec.smallest:
            hellos = [msgspec.structs.replace(each, formation=self._salt + generation) for each in hellos]
        asked = before - gathering.members.keys()
        self._running[generation] = _Running(gathering.spec, {each.rank: each for each in hellos}, asked)
        self._held[generation] = hellos[0]
        gathering.held, gathering.expected, gathering.is_news = True, asked, True
        if not gathering.members:
            del self._gathering[place]
        return Admit(generation, gathering.spec.job, [key for key, _ in ranked], hellos)

    def _tell_news(self, gathering: Gathering, now: float) -> Iterator[MembershipEffect]:
        gathering.told_at, gathering.is_news = now, False
        pending = gathering.pending()
        for key, _ in gathering.members.values():
            yield Answer(key, pending)
        generation = self._generation_of(gathering.spec.job)
        if gathering.held and generation is not None:
            running = self._running[generation]
            room = running.spec.world_size - len(running.asked) if running.spec.smallest else len(gathering.members)
            yield Announce(generation, min(len(gathering.members), room))

    def _replace(self, gathering: Gathering, now: float) -> Iterator[MembershipEffect]:
        """Survivors wait, and the generation that they left still runs."""
        gathering.changed_at = now
        generation = self._generation_of(gathering.spec.job)
        assert generation is not None
        late = listed([f"rank {rank}" for rank in sorted(self._running[generation].ranks)])
        why = "had not left when the others had waited long enough to form the job anew"
        yield Replace(generation, Cause(late, why))

    def _generation_of(self, job: str) -> int | None:
        """The newest generation of a job that runs on this shard as the first one."""
        return max((number for number, each in self._running.items() if each.place == (job, 0)), default=None)

    def _make_way(self, hello: Hello, now: float) -> Iterator[MembershipEffect]:
        """Survivors go first: newcomers who disagree with one, or gave his rank, are refused, not he."""
        place = hello.job, hello.formation
        gathering = self._gathering.get(place)
        if gathering is None or not hello.survivor or gathering.has_survivors or malformed(hello):
            return
        if of_another_team(gathering.spec, hello):
            return
        for key, other in list(gathering.members.values()):
            wrong = taken(hello) if other.rank == hello.rank else difference(hello, other)
            if wrong:
                self.gone(key, now)
                yield Answer(key, Refused(wrong))
        gathering.accept(hello)

    def _objection(self, hello: Hello, terms: Terms) -> tuple[str, bool]:
        """Why `hello` cannot join, and whether it might later; empty when it can."""
        limits = self._limits
        if self.draining:
            return "the aggregator is shutting down", True
        wrong = (
            other_version(hello.version) or malformed(hello) or self._over_limit(hello, limits) or self._conflict(hello)
        )
        full = "" if wrong or (hello.job, hello.formation) in self._gathering else self._no_room(hello, limits, terms)
        return wrong or full, bool(full)

    def _over_limit(self, hello: Hello, limits: Limits) -> str:
        if hello.smallest and hello.settle_s >= limits.join_timeout_s:
            limit = f"aggregator.join_timeout_s, {limits.join_timeout_s:g} s"
            return f"elastic.settle_s is {hello.settle_s:g} s, expected less than {limit}"
        if hello.world_size > limits.max_world_size:
            return f"world size {hello.world_size}; aggregator.max_world_size is {limits.max_world_size}: raise it"
        need = slot_bytes(hello)
        if need > limits.max_job_bytes:
            return (
                f"the job needs {need} bytes of slots; aggregator.max_job_bytes is {limits.max_job_bytes}: "
                "raise it on the aggregator, or lower protocol.slots or protocol.slot_bytes"
            )
        return ""

    def _no_room(self, hello: Hello, limits: Limits, terms: Terms) -> str:
        """Why there is no room for one more job; those that gather count as if they ran."""
        leaving = self._replaced_by(hello)
        gather = [each.spec for each in self._gathering.values()]
        jobs = gather + [each.spec for number, each in self._running.items() if number != leaving]
        if len(jobs) >= limits.max_jobs:
            return f"{limits.max_jobs} jobs are here already, which is aggregator.max_jobs: raise it, or wait"
        others = gather + [each for number, each in self._held.items() if number != leaving]
        ranks, held = sum(each.world_size for each in others), sum(map(slot_bytes, others))
        if ranks + hello.world_size > limits.max_ranks:
            wanted = f"{ranks} ranks of other jobs and {hello.world_size} of this one"
            return f"{wanted} are more than aggregator.max_ranks, {limits.max_ranks}: raise it, or wait"
        if held + slot_bytes(hello) > limits.max_bytes:
            wanted = f"{held} bytes of slots of other jobs and {slot_bytes(hello)} of this one"
            return f"{wanted} are more than aggregator.max_bytes, {limits.max_bytes}: raise it, or wait"
        return beyond_allowance(terms, hello, jobs, others)

    def _replaced_by(self, hello: Hello) -> int | None:
        """The one generation whose room an elastic job takes: its last one, which may still be leaving."""
        if not hello.smallest and not hello.formation:
            return None
        last = [number for number, each in self._held.items() if each.job == hello.job]
        return max(last, default=None)

    def _conflict(self, hello: Hello) -> str:
        for running in self._running.values():
            if running.place == (hello.job, hello.formation):
                wrong = of_another_team(running.spec, hello) or _wrong_beside(running, hello)
                if wrong:
                    return wrong
        gathering = self._gathering.get((hello.job, hello.formation))
        if gathering is None:
            return ""
        if of_another_team(gathering.spec, hello):
            return of_another_team(gathering.spec, hello)
        if hello.rank in gathering.members:
            return taken(gathering.members[hello.rank][1])
        if hello.smallest and not hello.survivor and gathering.is_full:
            return f"{len(gathering.members)} workers wait to join job '{hello.job}' already; it has no place for more"
        return difference(gathering.spec, hello)


def _wrong_beside(running: _Running, hello: Hello) -> str:
    """What is wrong with a hello to a job that runs."""
    if not hello.smallest:
        if running.spec.smallest:
            return f"job '{hello.job}' runs, and is elastic: {ADVICE['smallest']}"
        return taken(running.ranks[hello.rank]) if hello.rank in running.ranks else ""
    return "" if hello.survivor else difference(running.spec, hello, SHAPE)
