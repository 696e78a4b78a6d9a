"""Who may join which job on one shard: a pure machine. Connections are opaque keys.

States of a job name: nobody → gathering (some ranks said hello) → running (all are here; one generation) → nobody. A
new generation may gather while the ranks of the last one are still leaving; a rank that is still there cannot join
twice.

Of an elastic job the first shard decides who is in it and what their ranks are. The workers tell the other shards, with
the generation that the first one gave it, the formation: those who come with different formations never meet.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from omnireduce.config_schema import JOB_ALLOWED, JOB_PATTERN
from omnireduce.protocol.gathering import Gathering, member_name
from omnireduce.status import JobStatus
from omnireduce.wire import SHOWN, Hello, Pending, Refused, other_version

NEWS_S = 1.0  # at most so often those who wait are told who is missing: telling all of each newcomer takes N² messages
HOST_CHARACTERS = 255
MAX_SLOTS = 64
MAX_SHARDS = 4096
MAX_STRIPE_BLOCKS = 1 << 20
MIN_TIMEOUT_S = 0.1
MAX_SETTLE_S = 3600
MIN_SLOT_BYTES, MAX_SLOT_BYTES, PAGE = 65536, 64 << 20, 4096


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


MembershipEffect = Answer | Admit | Announce


class _Running(NamedTuple):
    job: str
    ranks: dict[int, Hello]  # those that have not left
    elastic: bool
    formation: int


class Membership:
    """Admission to the jobs of one shard."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._gathering: dict[tuple[str, int], Gathering] = {}  # by job and formation
        self._waiting: dict[Hashable, Hello] = {}  # of each connection in them
        self._running: dict[int, _Running] = {}
        self._held: dict[int, Hello] = {}  # by generation, what its size and memory follow from, until it is released
        self._next_generation = 1
        self.draining = False

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called, if nothing happens before."""
        waiting = self._gathering.values()
        ends = [each.since + self._limits.join_timeout_s for each in waiting if not each.held]
        ends += [each.told_at + NEWS_S for each in waiting if each.is_news]
        ends += [at for at in (each.settles_at() for each in waiting) if at is not None]
        return min(ends, default=None)

    def hello(self, key: Hashable, hello: Hello, now: float) -> Iterator[MembershipEffect]:
        """A worker asks to join."""
        wrong, place = self._objection(hello), (hello.job, hello.formation)
        if wrong:
            yield Answer(key, Refused(wrong))
            if place in self._gathering and not _malformed(hello):
                waiting = self._gathering[place]
                waiting.refused = hello.rank, f"{member_name(hello)} was refused: {wrong}"
                waiting.is_news = True
            return
        if place not in self._gathering:
            held = hello.smallest > 0 and self._generation_of(hello.job) is not None
            self._gathering[place] = Gathering(hello, now, now, now, held)
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

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""
        if generation in self._running:
            self._running[generation].ranks.pop(rank, None)

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        over = self._running.pop(generation, None)
        if over is not None and self._generation_of(over.job) is None and (over.job, 0) in self._gathering:
            self._gathering[over.job, 0].release(now)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._held.pop(generation, None)

    def expire(self, now: float) -> Iterator[MembershipEffect]:
        """Time has passed: start jobs that have settled, refuse those that gather for too long, tell who is missing."""
        limit_s = self._limits.join_timeout_s
        for place, gathering in list(self._gathering.items()):
            if gathering.complete(now):
                yield self._admit(place)
            elif not gathering.held and now - gathering.since >= limit_s:
                del self._gathering[place]
                reason = gathering.too_late(limit_s)
                for key, _ in gathering.members.values():
                    del self._waiting[key]
                    yield Answer(key, Refused(reason))
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
                yield Answer(key, Refused("the aggregator is shutting down"))
        self._gathering.clear()
        self._waiting.clear()

    def _admit(self, place: tuple[str, int]) -> Admit:
        """Start a job with those who are here; who is left over waits for the next generation."""
        gathering = self._gathering[place]
        ranked = gathering.take()
        for key, _ in ranked:
            del self._waiting[key]
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        hellos = [hello for _, hello in ranked]
        self._running[generation] = _Running(
            gathering.spec.job, {each.rank: each for each in hellos}, gathering.spec.smallest > 0, place[1]
        )
        self._held[generation] = hellos[0]
        gathering.held = gathering.is_news = True
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
            yield Announce(generation, len(gathering.members))

    def _generation_of(self, job: str) -> int | None:
        """The newest generation of a job that runs on this shard as the first one."""
        found = [number for number, each in self._running.items() if each.job == job and not each.formation]
        return max(found, default=None)

    def _objection(self, hello: Hello) -> str:
        """Why `hello` cannot join; empty when it can."""
        limits = self._limits
        if self.draining:
            return "the aggregator is shutting down"
        return (
            other_version(hello.version)
            or _malformed(hello)
            or self._over_limit(hello, limits)
            or self._conflict(hello)
        )

    def _over_limit(self, hello: Hello, limits: Limits) -> str:
        if hello.world_size > limits.max_world_size:
            return f"world size {hello.world_size}; aggregator.max_world_size is {limits.max_world_size}: raise it"
        need = _slot_bytes(hello)
        if need > limits.max_job_bytes:
            return (
                f"the job needs {need} bytes of slots; aggregator.max_job_bytes is {limits.max_job_bytes}: "
                "raise it on the aggregator, or lower protocol.slots or protocol.slot_bytes"
            )
        return "" if (hello.job, hello.formation) in self._gathering else self._no_room(hello, limits)

    def _no_room(self, hello: Hello, limits: Limits) -> str:
        """Why there is no room for one more job; those that gather count as if they ran. An elastic job takes the room
        of its last generation, which may still be leaving."""
        leaving = hello.job if hello.smallest or hello.formation else ""
        gathering = [each.spec for each in self._gathering.values() if each.spec.job != leaving]
        if len(gathering) + sum(each.job != leaving for each in self._running.values()) >= limits.max_jobs:
            return f"{limits.max_jobs} jobs are here already, which is aggregator.max_jobs: raise it, or wait"
        others = gathering + [each for each in self._held.values() if each.job != leaving]
        ranks, held = sum(each.world_size for each in others), sum(map(_slot_bytes, others))
        if ranks + hello.world_size > limits.max_ranks:
            wanted = f"{ranks} ranks of other jobs and {hello.world_size} of this one"
            return f"{wanted} are more than aggregator.max_ranks, {limits.max_ranks}: raise it, or wait"
        if held + _slot_bytes(hello) > limits.max_bytes:
            wanted = f"{held} bytes of slots of other jobs and {_slot_bytes(hello)} of this one"
            return f"{wanted} are more than aggregator.max_bytes, {limits.max_bytes}: raise it, or wait"
        return ""

    def _conflict(self, hello: Hello) -> str:
        for running in self._running.values():
            if running.job != hello.job or running.formation != hello.formation or hello.smallest:
                continue
            if running.elastic:
                return f"job '{hello.job}' runs, and is elastic: {_ADVICE['smallest']}"
            if hello.rank in running.ranks:
                return _taken(running.ranks[hello.rank])
        gathering = self._gathering.get((hello.job, hello.formation))
        if gathering is None:
            return ""
        if hello.rank in gathering.members:
            return _taken(gathering.members[hello.rank][1])
        for name in _ADVICE:
            ours, theirs = getattr(gathering.spec, name), getattr(hello, name)
            if ours != theirs:
                what = f"{name} {theirs} differs from {ours} of {member_name(gathering.spec)} in job '{hello.job}'"
                return f"{what}: {_ADVICE[name]}"
        return ""


_SAME_LIST = "list cluster.aggregators in the same order on every worker"
_ADVICE = {  # for ranks that disagree, by the field of their hello
    "smallest": "give every worker the same elastic.enabled and elastic.smallest",
    "settle_s": "give every worker the same elastic.settle_s",
    "world_size": "start all ranks of a job with the same size, and different jobs under different names (cluster.job)",
    "shards": _SAME_LIST,
    "shard": _SAME_LIST,
    **{name: f"give every worker the same protocol.{name}" for name in ("slots", "slot_bytes", "stripe_blocks")},
}


def _taken(other: Hello) -> str:
    return f"{member_name(other)} is already in job '{other.job}'; choose another cluster.job"


def _slot_bytes(hello: Hello) -> int:
    """Slot memory of the job on this shard: receive slots for every rank, and the results."""
    return (hello.world_size + 1) * hello.slots * hello.slot_bytes


def _malformed(hello: Hello) -> str:
    if not re.match(JOB_PATTERN, hello.job):
        return f"job {hello.job[:SHOWN]!r}; expected {JOB_ALLOWED}"
    if len(hello.host) > HOST_CHARACTERS or not hello.host.isprintable():
        return f"host {hello.host[:SHOWN]!r}; expected at most {HOST_CHARACTERS} characters that can be printed"
    if hello.world_size < 1 or hello.rank < 0 or (hello.rank >= hello.world_size and not hello.smallest):
        return f"rank {hello.rank} of {hello.world_size} does not exist"
    if not 2 <= hello.slots <= MAX_SLOTS:
        return f"{hello.slots} slots; expected 2 to {MAX_SLOTS}"
    if not MIN_SLOT_BYTES <= hello.slot_bytes <= MAX_SLOT_BYTES or hello.slot_bytes % PAGE:
        expected = f"a multiple of {PAGE} from {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES}"
        return f"slots of {hello.slot_bytes} bytes; expected {expected}"
    if hello.verbs is not None and hello.verbs.address + hello.slots * hello.slot_bytes > 1 << 64:
        return f"slots from address {hello.verbs.address} on; expected them to end within 64 bits"
    if not hello.timeout_s >= MIN_TIMEOUT_S:
        return f"a time-out of {hello.timeout_s:g} s; expected at least {MIN_TIMEOUT_S:g}"
    return _malformed_shards(hello) or _malformed_elastic(hello)


def _malformed_shards(hello: Hello) -> str:
    if not 0 <= hello.shard < hello.shards:
        return f"shard {hello.shard} of {hello.shards} does not exist"
    if hello.shards > MAX_SHARDS:
        return f"{hello.shards} shards; expected at most {MAX_SHARDS}"
    if not 1 <= hello.stripe_blocks <= MAX_STRIPE_BLOCKS:
        return f"stripes of {hello.stripe_blocks} blocks; expected 1 to {MAX_STRIPE_BLOCKS}"
    return ""


def _malformed_elastic(hello: Hello) -> str:
    if not 0 <= hello.smallest <= hello.world_size:
        return f"an elastic job of {hello.smallest} to {hello.world_size} workers"
    if hello.formation < 0 or (hello.smallest and (hello.shard or hello.formation)):
        return f"an elastic hello on shard {hello.shard} for formation {hello.formation}; expected 0 and 0"
    if not 0 <= hello.settle_s <= MAX_SETTLE_S:
        return f"a job that settles after {hello.settle_s:g} s; expected 0 to {MAX_SETTLE_S}"
    return ""
