"""Who may join which job on one shard: a pure machine. Connections are opaque keys.

States of a job name: nobody → gathering (some ranks said hello) → running (all are here; one generation) → nobody. A
new generation may gather while the ranks of the last one are still leaving; a rank that is still there cannot join
twice.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from omnireduce.config_schema import JOB_ALLOWED, JOB_PATTERN
from omnireduce.status import LISTED, JobStatus
from omnireduce.wire import SHOWN, Hello, Pending, Refused, other_version

NEWS_S = 1.0  # at most so often those who wait are told who is missing: telling all of each newcomer takes N² messages
HOST_CHARACTERS = 255
MAX_SLOTS = 64
MAX_STRIPE_BLOCKS = 1 << 20
MIN_TIMEOUT_S = 0.1
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


MembershipEffect = Answer | Admit


@dataclass(slots=True)
class _Gathering:
    spec: Hello
    since: float
    told_at: float  # when all members were told last who is missing
    is_news: bool = False  # that has changed since
    members: dict[int, tuple[Hashable, Hello]] = field(default_factory=dict)
    refused: tuple[int, str] | None = None  # the rank that was refused last and a note of why, until it joins


def worker_name(rank: int, host: str, pid: int) -> str:
    """How errors call a worker."""
    return f"rank {rank} (host {host}, pid {pid})"


def member_name(hello: Hello) -> str:
    """How errors call the worker that said this."""
    return worker_name(hello.rank, hello.host, hello.pid)


class Membership:
    """Admission to the jobs of one shard."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._gathering: dict[str, _Gathering] = {}
        self._running: dict[int, tuple[str, dict[int, Hello]]] = {}
        self._held: dict[int, Hello] = {}  # by generation, what its size and memory follow from, until it is released
        self._next_generation = 1
        self.draining = False

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called, if nothing happens before."""
        ends = [each.since + self._limits.join_timeout_s for each in self._gathering.values()]
        ends += [each.told_at + NEWS_S for each in self._gathering.values() if each.is_news]
        return min(ends, default=None)

    def hello(self, key: Hashable, hello: Hello, now: float) -> Iterator[MembershipEffect]:
        """A worker asks to join."""
        wrong = self._objection(hello)
        if wrong:
            yield Answer(key, Refused(wrong))
            if hello.job in self._gathering and not _malformed(hello):
                waiting = self._gathering[hello.job]
                waiting.refused = hello.rank, f"{member_name(hello)} was refused: {wrong}"
                waiting.is_news = True
            return
        gathering = self._gathering.setdefault(hello.job, _Gathering(hello, now, now))
        gathering.members[hello.rank] = key, hello
        if gathering.refused is not None and gathering.refused[0] == hello.rank:
            gathering.refused = None
        if len(gathering.members) < hello.world_size:
            yield Answer(key, _pending(gathering))
            gathering.is_news = len(gathering.members) > 1
            return
        del self._gathering[hello.job]
        ranked = [gathering.members[rank] for rank in range(hello.world_size)]
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        self._running[generation] = hello.job, {each.rank: each for _, each in ranked}
        self._held[generation] = hello
        yield Admit(generation, hello.job, [key for key, _ in ranked], [each for _, each in ranked])

    def gone(self, key: Hashable) -> None:
        """A connection that was not yet admitted is over."""
        for job, gathering in list(self._gathering.items()):
            ranks = [rank for rank, (member, _) in gathering.members.items() if member == key]
            for rank in ranks:
                del gathering.members[rank]
            if not gathering.members:
                del self._gathering[job]
            elif ranks:
                gathering.is_news = True

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""
        if generation in self._running:
            self._running[generation][1].pop(rank, None)

    def finished(self, generation: int) -> None:
        """A running generation is over; its ranks may still be leaving."""
        self._running.pop(generation, None)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._held.pop(generation, None)

    def expire(self, now: float) -> Iterator[MembershipEffect]:
        """Time has passed: refuse jobs that gather for too long, tell the others who is missing."""
        for job, gathering in list(self._gathering.items()):
            if now - gathering.since >= self._limits.join_timeout_s:
                del self._gathering[job]
                missing = _missing(gathering)
                ranks = ", ".join(map(str, missing[:LISTED])) + (" …" if len(missing) > LISTED else "")
                reason = f"job '{job}' was still waiting for rank {ranks} after {self._limits.join_timeout_s:g} s"
                reason += f" ({_note(gathering)})" if gathering.refused else ""
                for key, _ in gathering.members.values():
                    yield Answer(key, Refused(reason))
            elif gathering.is_news and now - gathering.told_at >= NEWS_S:
                gathering.told_at, gathering.is_news = now, False
                for key, _ in gathering.members.values():
                    yield Answer(key, _pending(gathering))

    def gathering(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [
            JobStatus(
                name=job,
                generation=0,
                world_size=each.spec.world_size,
                joined=len(each.members),
                missing=_missing(each)[:LISTED],
                age_s=now - each.since,
            )
            for job, each in self._gathering.items()
        ]

    def drain(self) -> Iterator[MembershipEffect]:
        """Admit nobody any more."""
        self.draining = True
        for gathering in self._gathering.values():
            for key, _ in gathering.members.values():
                yield Answer(key, Refused("the aggregator is shutting down"))
        self._gathering.clear()

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
        return "" if hello.job in self._gathering else self._no_room(hello, limits)

    def _no_room(self, hello: Hello, limits: Limits) -> str:
        """Why there is no room for one more job; those that gather count as if they ran."""
        if len(self._gathering) + len(self._running) >= limits.max_jobs:
            return f"{limits.max_jobs} jobs are here already, which is aggregator.max_jobs: raise it, or wait"
        others = [*(each.spec for each in self._gathering.values()), *self._held.values()]
        ranks, held = sum(each.world_size for each in others), sum(map(_slot_bytes, others))
        if ranks + hello.world_size > limits.max_ranks:
            wanted = f"{ranks} ranks of other jobs and {hello.world_size} of this one"
            return f"{wanted} are more than aggregator.max_ranks, {limits.max_ranks}: raise it, or wait"
        if held + _slot_bytes(hello) > limits.max_bytes:
            wanted = f"{held} bytes of slots of other jobs and {_slot_bytes(hello)} of this one"
            return f"{wanted} are more than aggregator.max_bytes, {limits.max_bytes}: raise it, or wait"
        return ""

    def _conflict(self, hello: Hello) -> str:
        for job, ranks in self._running.values():
            if job == hello.job and hello.rank in ranks:
                return f"{member_name(ranks[hello.rank])} is already in job '{job}'; choose another cluster.job"
        gathering = self._gathering.get(hello.job)
        if gathering is None:
            return ""
        if hello.rank in gathering.members:
            other = gathering.members[hello.rank][1]
            return f"{member_name(other)} is already in job '{hello.job}'; choose another cluster.job"
        for name in _ADVICE:
            ours, theirs = getattr(gathering.spec, name), getattr(hello, name)
            if ours != theirs:
                what = f"{name} {theirs} differs from {ours} of {member_name(gathering.spec)} in job '{hello.job}'"
                return f"{what}: {_ADVICE[name]}"
        return ""


_SAME_LIST = "list cluster.aggregators in the same order on every worker"
_ADVICE = {  # for ranks that disagree, by the field of their hello
    "world_size": "start all ranks of a job with the same size, and different jobs under different names (cluster.job)",
    "shards": _SAME_LIST,
    "shard": _SAME_LIST,
    **{name: f"give every worker the same protocol.{name}" for name in ("slots", "slot_bytes", "stripe_blocks")},
}


def _pending(gathering: _Gathering) -> Pending:
    missing = _missing(gathering)
    return Pending(missing[:LISTED], len(missing), _note(gathering))


def _note(gathering: _Gathering) -> str:
    return "" if gathering.refused is None else gathering.refused[1]


def _missing(gathering: _Gathering) -> list[int]:
    return [rank for rank in range(gathering.spec.world_size) if rank not in gathering.members]


def _slot_bytes(hello: Hello) -> int:
    """Slot memory of the job on this shard: receive slots for every rank, and the results."""
    return (hello.world_size + 1) * hello.slots * hello.slot_bytes


def _malformed(hello: Hello) -> str:
    if not re.match(JOB_PATTERN, hello.job):
        return f"job {hello.job[:SHOWN]!r}; expected {JOB_ALLOWED}"
    if len(hello.host) > HOST_CHARACTERS or not hello.host.isprintable():
        return f"host {hello.host[:SHOWN]!r}; expected at most {HOST_CHARACTERS} characters that can be printed"
    if hello.world_size < 1 or not 0 <= hello.rank < hello.world_size:
        return f"rank {hello.rank} of {hello.world_size} does not exist"
    if hello.shards < 1 or not 0 <= hello.shard < hello.shards:
        return f"shard {hello.shard} of {hello.shards} does not exist"
    if not 2 <= hello.slots <= MAX_SLOTS:
        return f"{hello.slots} slots; expected 2 to {MAX_SLOTS}"
    if not MIN_SLOT_BYTES <= hello.slot_bytes <= MAX_SLOT_BYTES or hello.slot_bytes % PAGE:
        expected = f"a multiple of {PAGE} from {MIN_SLOT_BYTES} to {MAX_SLOT_BYTES}"
        return f"slots of {hello.slot_bytes} bytes; expected {expected}"
    if not 1 <= hello.stripe_blocks <= MAX_STRIPE_BLOCKS:
        return f"stripes of {hello.stripe_blocks} blocks; expected 1 to {MAX_STRIPE_BLOCKS}"
    if not hello.timeout_s >= MIN_TIMEOUT_S:
        return f"a time-out of {hello.timeout_s:g} s; expected at least {MIN_TIMEOUT_S:g}"
    return ""
