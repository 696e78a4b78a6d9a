"""Admission of workers to the jobs of one shard: a pure state machine. Connections are opaque keys.

States of a job name: nobody → pending (some ranks said hello) → running (all are here; one generation) → nobody. A
new generation may gather while the ranks of the last generation are still leaving. A rank cannot join before its
connection of the last generation is over.

Ranks of different launches never meet, even if their jobs have the same name.

In an elastic job the first shard decides who is in it, and their ranks. It gives this formation a number. The workers
tell the number to the other shards, where workers of different formations never meet. A ticket proves to the first
shard that a worker was in the last formation. Such a survivor goes before newcomers, and may end the last generation if
that still runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from omnireduce.core.status_messages import JobStatus
from omnireduce.core.wire.control import (
    Aborted,
    Cause,
    Hello,
    Newcomers,
    Pending,
    RankAssignment,
    Refused,
    Waiting,
    Welcome,
    other_version,
)
from omnireduce.core.wire.safe_text import listed
from omnireduce.protocol.host.local_ranks import JobRank, LocalRanks, hosts_of
from omnireduce.protocol.joining import tickets
from omnireduce.protocol.joining.checks import (
    ADVICE,
    SHAPE,
    difference,
    job_family,
    malformed,
    other_team_text,
    rank_taken_text,
    ranks_to_displace,
)
from omnireduce.protocol.joining.compiling import COMPILING_S, TOO_LONG, Compilers
from omnireduce.protocol.joining.failed_launches import FailedLaunches, fails_launch
from omnireduce.protocol.joining.intake import SHUTTING_DOWN, Intake
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.pending_job import Claim, FormationKey, JobKey, PendingJob, WaitingRank, member_name
from omnireduce.support.config.schema import TeamLimits
from omnireduce.support.teams import NO_LIMITS


class Answer(NamedTuple):
    """Send `message` to connection `key`; after Refused or Aborted the connection ends."""

    key: Hashable
    message: Refused | Pending | Waiting | Newcomers | Aborted


class Relayed(NamedTuple):
    """The job of a relay has begun on its upstream, the aggregator `address`. For each member: the upstream's Welcome,
    and the key of the member's uplink."""

    address: str
    welcomes: list[Welcome]
    uplinks: list[Hashable]


class Admit(NamedTuple):
    """All ranks of a job are here: start generation `generation` with these connections, in rank order. On a relay
    these are its members, and `relayed` describes the job on its upstream."""

    generation: int
    job: str
    keys: list[Hashable]
    hellos: list[Hello]
    relayed: Relayed | None = None


class Announce(NamedTuple):
    """Tell the ranks of running `generation` that `workers` others wait to join their job."""

    generation: int
    workers: int


class Replace(NamedTuple):
    """End running `generation` because of `cause`: survivors have waited long enough for the ranks still in it."""

    generation: int
    cause: Cause


AdmissionEffect = Answer | Admit | Announce | Replace


# Seconds between two news of who waits or is missing: to tell all ranks of each newcomer takes N² messages.
NEWS_S = 1.0


class Announcements:
    """Generations whose ranks know that workers wait. Workers that come and go before that are not announced."""

    def __init__(self) -> None:
        # By generation: how many workers it knows of, and since when.
        self._announced: dict[int, tuple[int, float]] = {}
        self._deserted: set[int] = set()  # generations for which no worker waits any more

    @property
    def deadline(self) -> float | None:
        """The time to call `withdrawn`, if no worker comes before; None: never."""
        return min((self._announced[generation][1] + NEWS_S for generation in self._deserted), default=None)

    def is_news(self, generation: int, workers: int, now: float) -> bool:
        """Whether the ranks have not heard yet that `workers` wait. From now on this counts as heard."""
        previous, _ = self._announced.pop(generation, (0, 0.0))
        if workers:
            self._announced[generation] = workers, now
        return workers != previous

    def nobody_waits(self, generation: int) -> None:
        """The last waiting worker has gone."""
        if generation in self._announced:
            self._deserted.add(generation)

    def somebody_waits(self, generation: int) -> None:
        """A worker has come."""
        self._deserted.discard(generation)

    def withdrawn(self, now: float) -> Iterator[int]:
        """The generations whose ranks must now hear that nobody waits any more."""
        for generation in [
            generation for generation in self._deserted if now >= self._announced[generation][1] + NEWS_S
        ]:
            self.forget(generation)
            yield generation

    def forget(self, generation: int) -> None:
        """The generation is over, or its ranks know that nobody waits."""
        self._announced.pop(generation, None)
        self._deserted.discard(generation)


class RunningJob(NamedTuple):
    """A job that has all its ranks. `spec`: the hello of its first worker. `formation`: a number that no other
    generation has. `ranks`: the ranks that have not left. `requested_ranks`: the ranks that its workers gave in their
    hellos, with those that have left."""

    formation_key: FormationKey
    spec: Hello
    formation: int
    ranks: dict[int, Hello]
    requested_ranks: frozenset[int]

    def has_group(self, hello: Hello) -> bool:
        """Whether one of its ranks has said this hello to join a group. The name of a group begins with the name of
        its job."""
        member, spec = self.ranks.get(hello.parent_rank), self.spec
        is_named = hello.job.startswith(f"{spec.job}+") and (hello.team, hello.launch) == (spec.team, spec.launch)
        return is_named and member is not None and (member.host, member.pid) == (hello.host, hello.pid)

    def objection(self, hello: Hello, claim: Claim) -> str:
        """The reason to refuse a hello to this job while it runs; empty if there is none."""
        if not hello.min_ranks:
            if self.spec.min_ranks:
                return f"job '{hello.job}' runs, and is elastic: {ADVICE['min_ranks']}"
            return rank_taken_text(self.ranks[hello.rank]) if hello.rank in self.ranks else ""
        return "" if claim else difference(self.spec, hello, SHAPE)


def welcomes_of(generation: int, hellos: Sequence[Hello], draw_token: Callable[[], bytes]) -> list[Welcome]:
    """The welcome of each rank, without the fields for its link; `hellos[r]` is the hello of rank r. `draw_token` gives
    random tokens. The ranks of a host find each other by such a token."""
    whole_bytes = min(hello.whole_bytes for hello in hellos)
    welcomes = [Welcome(generation, whole_bytes=whole_bytes) for _ in hellos]
    if hellos[0].shard == 0:
        welcomes = [
            replace(welcome, assignment=_assignment(rank, hellos[rank])) for rank, welcome in enumerate(welcomes)
        ]
    for host in hosts_of(hellos):
        token = draw_token() if hellos[0].shard == 0 else None  # the first shard tells the ranks
        for rank in host.ranks:
            welcomes[rank] = replace(
                welcomes[rank], host_token=token, local_ranks=host.ranks, host=host.host, hosts=host.hosts
            )
    return with_places(welcomes, hellos)


def with_places(welcomes: Sequence[Welcome], hellos: Sequence[Hello]) -> list[Welcome]:
    """The welcomes of the ranks that are connected here, in this order. Each gets its place, and the number of ranks
    of its relay."""
    relayed = Counter(hello.relay for hello in hellos if hello.relay)
    pairs = zip(welcomes, hellos, strict=True)
    return [replace(welcome, place=place, relayed=relayed[hello.relay]) for place, (welcome, hello) in enumerate(pairs)]


def members_of(welcomes: Sequence[Welcome], hellos: Sequence[Hello]) -> list[JobRank]:
    """The ranks that are connected here, in this order."""
    return [
        JobRank(
            hello.rank,
            hello.relay,
            LocalRanks(welcome.local_ranks, welcome.host, welcome.hosts) if welcome.local_ranks else None,
        )
        for welcome, hello in zip(welcomes, hellos, strict=True)
    ]


def _assignment(rank: int, hello: Hello) -> RankAssignment:
    return RankAssignment(rank, hello.world_size, hello.formation, hello.ticket)


class Room:
    """The room of a shard for jobs: those that gather, those that run, and those whose memory is in use."""

    def __init__(
        self, limits: Limits, pending_jobs: Mapping[FormationKey, PendingJob], running: Mapping[int, RunningJob],
        in_memory: Mapping[int, Hello],
    ) -> None:  # fmt: skip
        self._limits, self._pending_jobs, self._running, self._in_memory = limits, pending_jobs, running, in_memory

    def must_wait(self, pending_job: PendingJob) -> bool:
        """Whether the job has to wait until the generation that it replaces has given back its memory.

        It need not wait if there is room for both. Room that other pending jobs will need does not count, unless they
        replace a generation themselves.
        """
        if pending_job.replaces not in self._in_memory:
            return False
        others = [other for other in self._pending_jobs.values() if other is not pending_job]
        jobs = [job.spec for job in self._running.values()]
        jobs += [other.spec for other in others if other.replaces not in self._running]
        in_memory = [*self._in_memory.values()]
        in_memory += [other.spec for other in others if other.replaces not in self._in_memory]
        return bool(self._limits.exceeded_together(pending_job.spec, pending_job.terms, jobs, in_memory))

    def reason_of_no_room(self, hello: Hello, terms: TeamLimits, displaced: PendingJob | None) -> str:
        """The reason why there is no room for one more job in place of `displaced`; empty if there is room. Pending
        jobs count like running jobs."""
        leaving = self.generation_replaced_by(hello, displaced)
        gather = [other.spec for other in self._pending_jobs.values() if other is not displaced]
        jobs = gather + [job.spec for number, job in self._running.items() if number != leaving]
        in_memory = gather + [spec for number, spec in self._in_memory.items() if number != leaving]
        return self._limits.exceeded_together(hello, terms, jobs, in_memory)

    def generation_replaced_by(self, hello: Hello, displaced: PendingJob | None = None) -> int | None:
        """The generation whose room an elastic job takes over: its last generation, unless a pending job other than
        `displaced` takes it."""
        if not hello.min_ranks and not hello.formation:
            return None
        generations = [number for number, spec in self._in_memory.items() if job_family(spec) == job_family(hello)]
        last = max(generations, default=None)
        return (
            None
            if any(other.replaces == last for other in self._pending_jobs.values() if other is not displaced)
            else last
        )


NEWS_AT_ONCE = 64  # workers of one job that are told in one turn


class Admission:
    """Admission to the jobs of one shard."""

    descriptors_of_one = 1  # file descriptors for one worker: its connection

    def __init__(self, limits: Limits, salt: int = 0, key: bytes = b"") -> None:
        """`salt` differs between processes, so that the numbers of their formations differ, too. `key` is for tickets.
        It is secret; a process that takes the place of this process has the same key."""
        self._limits, self._salt, self._key = limits, salt, key
        self._pending_jobs: dict[FormationKey, PendingJob] = {}
        self._by_name: dict[tuple[str, str, int], list[PendingJob]] = {}  # pending jobs by team, job and formation
        self._waiting: dict[Hashable, Hello] = {}  # the hello of each connection in a pending job
        self._running: dict[int, RunningJob] = {}
        # By generation, until it is released: a hello, from which size and memory follow.
        self._in_memory: dict[int, Hello] = {}
        self._room = Room(limits, self._pending_jobs, self._running, self._in_memory)
        self._compilers = Compilers(limits)
        self._next_generation = 1
        self._announced = Announcements()
        self._failed_launches = FailedLaunches(limits.join_timeout_s)
        self._has_freed_room = False
        self.intake = Intake(limits.join_timeout_s)

    @property
    def deadline(self) -> float | None:
        """The time to call `expire`, if nothing happens before; None: never."""
        others = [at for at in (self._announced.deadline, self._compilers.deadline) if at is not None]
        if not self._pending_jobs:  # nearly always true
            return min(others, default=None)
        waiting = self._pending_jobs.values()
        ends = others + [self._ends_at(job) for job in waiting if not job.is_held_back]
        ends += [job.informed_at + NEWS_S for job in waiting if self._has_news(job)]
        ends += [at for job in waiting if not self._room.must_wait(job) and (at := job.settles_at()) is not None]
        ends += [0.0] if any(job.uninformed for job in waiting) else []
        # a job that replaces a generation may have waited for room, no matter which job had it
        ends += [0.0] if self._has_freed_room and any(job.replaces is not None for job in waiting) else []
        return min(ends, default=None)

    def hello(
        self, key: Hashable, hello: Hello, now: float, terms: TeamLimits = NO_LIMITS
    ) -> Iterator[AdmissionEffect]:
        """A worker asks to join. `terms`: the limits of its team."""
        formation_key, claim, displaced = FormationKey.of(hello), Claim.NEWCOMER, dict[int, str]()
        # first: nothing may depend on numbers without bounds
        wrong, temporary = other_version(hello.version) or malformed(hello) or self._limits.exceeded_alone(hello), False
        if not wrong and hello.refuses:
            yield from self._decline(key, hello, formation_key, now)
            return
        if not wrong:
            claim = self._claim_of(hello, formation_key)
            pending_job = self._pending_jobs.get(formation_key)
            displaced = (
                ranks_to_displace(pending_job, hello) if pending_job is not None and claim is Claim.SURVIVOR else {}
            )
            # a worker that compiles hears of the failure when it comes to join
            wrong = "" if hello.compiling else self._failed_launches.reason_for(hello, now)
        if not wrong:
            wrong, temporary = self.intake.objection(hello, now, gathers=formation_key in self._pending_jobs)
        if not wrong and hello.compiling:
            wrong, temporary = self._compilers.objection(hello, terms, self._pending_jobs.get(formation_key)), True
        elif not wrong:
            wrong, temporary = self._objection(hello, formation_key, claim, terms, displaced)
        if wrong:
            yield Answer(key, Refused(wrong, temporary))
            yield from self._tell_of_refusal(formation_key, hello, wrong, now)
            return
        if hello.compiling:
            self._compilers.add(key, hello, now)
            yield Answer(key, Pending([], 0))
            return
        yield from self._displace_ranks(hello, formation_key, claim, displaced, now)
        if formation_key not in self._pending_jobs:
            self._open(formation_key, hello, now, terms)
        pending_job = self._pending_jobs[formation_key]
        pending_job.add(WaitingRank(key, hello, claim), now)
        self._compilers.joined(hello)
        self._waiting[key] = hello
        if self._may_start(pending_job, now):
            yield self._admit(formation_key)
        else:
            yield Answer(key, self._pending(pending_job, now))

    def rival(self, hello: Hello) -> Hashable | None:
        """The connection that waits with the same rank for the same job; None when there is none."""
        pending_job = self._pending_jobs.get(FormationKey.of(hello))
        rival = None if pending_job is None else pending_job.waiting_ranks.get(hello.rank)
        return None if rival is None else rival.key

    def connection_ended(self, key: Hashable, now: float, cause: Cause | None = None) -> None:
        """A connection that was not yet admitted is over, because of `cause`, which is not needed here."""
        job_key = self._compilers.remove(key)
        if (
            job_key is not None
            and job_key.formation_key in self._pending_jobs
            and self._pending_jobs[job_key.formation_key].job_key == job_key
        ):
            self._pending_jobs[job_key.formation_key].since = now  # time to join begins anew
        hello = self._waiting.pop(key, None)
        if hello is not None:
            formation_key = FormationKey.of(hello)
            pending_job = self._pending_jobs[formation_key]
            pending_job.remove(hello.rank, now)
            if not pending_job.waiting_ranks:
                self._close(formation_key)
                generation = self._generation_of(formation_key)
                if pending_job.is_held_back and generation is not None:
                    self._announced.nobody_waits(generation)

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""
        if generation in self._running:
            self._running[generation].ranks.pop(rank, None)

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        job = self._running.pop(generation, None)
        self._announced.forget(generation)
        if (
            job is not None
            and job.formation_key in self._pending_jobs
            and self._generation_of(job.formation_key) is None
        ):
            self._pending_jobs[job.formation_key].release(now)
        self._has_freed_room |= bool(self._pending_jobs)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._in_memory.pop(generation, None)
        self._has_freed_room |= bool(self._pending_jobs)

    def expire(self, now: float) -> Iterator[AdmissionEffect]:
        """Time has passed: start jobs that have settled, refuse jobs that gather for too long, tell who is missing."""
        limit_s, self._has_freed_room = self._limits.join_timeout_s, False
        for key in self._compilers.expired(now):
            self.connection_ended(key, now)
            yield Answer(key, Refused(TOO_LONG, temporary=True))
        for generation in self._announced.withdrawn(now):
            yield Announce(generation, 0)
        for formation_key, pending_job in list(self._pending_jobs.items()):
            if self._may_start(pending_job, now):
                yield self._admit(formation_key)
            elif not pending_job.is_held_back and now >= self._ends_at(pending_job):
                yield from self._disband(formation_key, pending_job.timeout_text(limit_s), temporary=True)
            elif pending_job.is_held_back and pending_job.has_settled(now):
                yield from self._replace(formation_key, pending_job, now)
            elif pending_job.uninformed or (self._has_news(pending_job) and now - pending_job.informed_at >= NEWS_S):
                yield from self._tell_news(formation_key, pending_job, now)

    @property
    def gathers(self) -> int:
        """The number of pending jobs."""
        return len(self._pending_jobs)

    def pending_jobs(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [pending_job.status(now) for pending_job in self._pending_jobs.values()]

    @property
    def hellos_in_memory(self) -> list[Hello]:
        """A hello of each job that runs, or whose ranks are still leaving."""
        return list(self._in_memory.values())

    def end(self, is_meant: Callable[[Hello], bool], reason: str, now: float) -> Iterator[AdmissionEffect]:
        """Jobs whose hellos match are ended: refuse the workers that wait for them, and workers that come again."""
        self.intake.end_survivors(is_meant, reason, now, self._salt + self._next_generation)
        for job in self._running.values():
            if is_meant(job.spec):
                self.intake.end(job.spec, reason, now)
        for formation_key, pending_job in list(self._pending_jobs.items()):
            if is_meant(pending_job.spec):
                self.intake.end(pending_job.spec, reason, now)
                yield from self._disband(formation_key, reason)

    def turn_away(self) -> Iterator[AdmissionEffect]:
        """Admit nobody any more."""
        self.intake.close()
        for formation_key in list(self._pending_jobs):
            yield from self._disband(formation_key, SHUTTING_DOWN, temporary=True)
        for key in self._compilers.keys:
            yield Answer(key, Refused(SHUTTING_DOWN, temporary=True))

    def close(self) -> None:
        """The shard ends. There is nothing to close here."""

    # pending jobs

    def _ends_at(self, pending_job: PendingJob) -> float:
        """The time when its ranks have waited long enough for the others."""
        until = max(pending_job.since, self._compilers.until(pending_job.job_key))
        return min(until, pending_job.begun + COMPILING_S) + self._limits.join_timeout_s

    def _has_news(self, pending_job: PendingJob) -> bool:
        return pending_job.is_news or self._compilers.until(pending_job.job_key) > 0

    def _pending(self, pending_job: PendingJob, now: float) -> Pending:
        """The news for the waiting ranks: which ranks are missing, and whose kernels compile."""
        ranks = self._compilers.ranks(pending_job.job_key) if now < pending_job.begun + COMPILING_S else []
        return replace(pending_job.pending(), compiling=ranks)

    def _open(self, formation_key: FormationKey, hello: Hello, now: float, terms: TeamLimits) -> None:
        """Begin to gather. If ranks of another launch wait under the same name, both launches are told."""
        generation = self._generation_of(formation_key) if hello.min_ranks else None
        last = frozenset[int]()
        if generation is not None:
            self._announced.somebody_waits(generation)
            last = self._running[generation].requested_ranks
        pending_job = PendingJob(
            hello, terms, since=now, begun=now, informed_at=now, changed_at=now,
            is_held_back=generation is not None, expected=last, replaces=self._room.generation_replaced_by(hello),
        )  # fmt: skip
        pending_job.namesakes = self._by_name.setdefault((hello.team, formation_key.job, formation_key.formation), [])
        for other in pending_job.namesakes[:1]:
            other.is_news = True
        pending_job.namesakes.append(pending_job)
        self._pending_jobs[formation_key] = pending_job

    def _tell_of_refusal(
        self, formation_key: FormationKey, hello: Hello, wrong: str, now: float
    ) -> Iterator[AdmissionEffect]:
        """Tell the ranks that wait for a refused rank. If it can never join, they are refused, too."""
        pending_job = self._pending_jobs.get(formation_key)
        if pending_job is None or malformed(hello) or other_team_text(pending_job.spec, hello):
            return
        if fails_launch(pending_job, hello, wrong, self._limits.exceeded_alone(hello)):
            yield from self._disband(formation_key, self._failed_launches.add(pending_job, hello, wrong, now))
        else:
            pending_job.refused = hello.rank, f"{member_name(hello)} was refused: {wrong}"
            pending_job.is_news = True

    def _decline(
        self, key: Hashable, hello: Hello, formation_key: FormationKey, now: float
    ) -> Iterator[AdmissionEffect]:
        """A rank refuses to come to a group. Only a rank of a job that runs here can, and only for groups of this
        job."""
        if not any(job.has_group(hello) for job in self._running.values()):
            yield Answer(key, Refused("a refusal from outside the job; expected it from one of its ranks"))
            return
        yield Answer(key, Refused(hello.refuses))
        waiting = self._pending_jobs.get(formation_key)
        pending_job = waiting if waiting is not None and waiting.job_key == JobKey.of(hello) else None
        reason = self._failed_launches.decline(hello, pending_job, now)
        if pending_job is not None and reason:
            yield from self._disband(formation_key, reason)

    def _disband(
        self, formation_key: FormationKey, reason: str, *, temporary: bool = False
    ) -> Iterator[AdmissionEffect]:
        """Refuse all ranks of a pending job."""
        pending_job = self._pending_jobs[formation_key]
        self._close(formation_key)
        for key, *_ in pending_job.waiting_ranks.values():
            del self._waiting[key]
            yield Answer(key, Refused(reason, temporary))

    def _close(self, formation_key: FormationKey) -> None:
        pending_job = self._pending_jobs.pop(formation_key)
        pending_job.namesakes.remove(pending_job)
        name = pending_job.spec.team, formation_key.job, formation_key.formation
        if not pending_job.namesakes:
            del self._by_name[name]
        self._has_freed_room |= bool(self._pending_jobs)

    def _may_start(self, pending_job: PendingJob, now: float) -> bool:
        return pending_job.complete(now) and not self._room.must_wait(pending_job)

    def _admit(self, formation_key: FormationKey) -> Admit:
        """Start a job with the workers that are here. Workers that are left over wait for the next generation."""
        pending_job = self._pending_jobs[formation_key]
        ranks_before = frozenset(pending_job.waiting_ranks)
        admitted = pending_job.take()
        for key, _ in admitted:
            del self._waiting[key]
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        formation, hellos = formation_key.formation, [hello for _, hello in admitted]
        if not formation:  # this is the first shard: the job may be formed anew
            formation = self._salt + generation
            ticket = tickets.ticket(self._key, pending_job.spec, formation)
            hellos = [replace(hello, formation=formation, ticket=ticket) for hello in hellos]
        requested_ranks = ranks_before - pending_job.waiting_ranks.keys()
        ranks = {hello.rank: hello for hello in hellos}
        self._running[generation] = RunningJob(formation_key, pending_job.spec, formation, ranks, requested_ranks)
        self._in_memory[generation] = replace(hellos[0], formation=formation_key.formation)
        self.intake.job_begins(pending_job.spec)
        pending_job.is_held_back, pending_job.expected, pending_job.is_news = True, requested_ranks, True
        pending_job.replaces = generation
        if not pending_job.waiting_ranks:
            self._close(formation_key)
        return Admit(generation, pending_job.spec.job, [key for key, _ in admitted], hellos)

    def _tell_news(self, formation_key: FormationKey, pending_job: PendingJob, now: float) -> Iterator[AdmissionEffect]:
        """Tell some of the waiting workers who is missing. When all know, and the job is held back, tell the running
        ranks how many wait."""
        if not pending_job.uninformed:
            pending_job.informed_at, pending_job.is_news = now, False
            pending_job.uninformed = {key: None for key, *_ in pending_job.waiting_ranks.values()}
        pending = self._pending(pending_job, now)
        for key in list(islice(pending_job.uninformed, NEWS_AT_ONCE)):
            del pending_job.uninformed[key]
            yield Answer(key, pending)
        generation = self._generation_of(formation_key)
        if pending_job.is_held_back and generation is not None and not pending_job.uninformed:
            running = self._running[generation]
            room = (
                running.spec.world_size - len(running.requested_ranks)
                if running.spec.min_ranks
                else len(pending_job.waiting_ranks)
            )
            workers = min(len(pending_job.waiting_ranks), room)
            if self._announced.is_news(generation, workers, now):
                yield Announce(generation, workers)

    def _replace(self, formation_key: FormationKey, pending_job: PendingJob, now: float) -> Iterator[AdmissionEffect]:
        """End the generation that still runs: the survivors that have left it have waited long enough."""
        pending_job.changed_at = now
        generation = self._generation_of(formation_key)
        assert generation is not None
        late = listed([f"rank {rank}" for rank in sorted(self._running[generation].ranks)])
        reason = "had not left when the others had waited long enough to form the job anew"
        yield Replace(generation, Cause(late, reason))

    def _generation_of(self, formation_key: FormationKey) -> int | None:
        """The newest running generation of a job, if this is the job's first shard; else None."""
        if formation_key.formation:
            return None
        return max(
            (number for number, job in self._running.items() if job.formation_key == formation_key), default=None
        )

    # claims and objections

    def _claim_of(self, hello: Hello, formation_key: FormationKey) -> Claim:
        """The claim of a worker with a valid hello. While a generation runs, only its members are survivors."""
        if not hello.survived:
            return Claim.NEWCOMER
        generation, has_ticket = self._generation_of(formation_key), tickets.is_valid(self._key, hello)
        if generation is None:
            pending_job = self._pending_jobs.get(formation_key)
            is_known = pending_job is not None and pending_job.has_proven_survivor
            return Claim.SURVIVOR if has_ticket else Claim.NEWCOMER if is_known else Claim.CLAIMANT
        is_member = has_ticket and hello.survived == self._running[generation].formation
        return Claim.SURVIVOR if is_member else Claim.NEWCOMER

    def _displace_ranks(
        self, hello: Hello, formation_key: FormationKey, claim: Claim, displaced: dict[int, str], now: float
    ) -> Iterator[AdmissionEffect]:
        """Nothing is wrong with `hello`. If it comes from a survivor, refuse the ranks that are in its way."""
        pending_job = self._pending_jobs.get(formation_key)
        if pending_job is None or claim is not Claim.SURVIVOR:
            return
        for rank, wrong in displaced.items():
            key, _, others_claim = pending_job.waiting_ranks[rank]
            self.connection_ended(key, now)
            yield Answer(key, Refused(wrong, temporary=others_claim is Claim.CLAIMANT))
        if not pending_job.has_proven_survivor:
            pending_job.compare_with(hello)

    def _objection(
        self, hello: Hello, formation_key: FormationKey, claim: Claim, terms: TeamLimits, displaced: dict[int, str]
    ) -> tuple[str, bool]:
        """The reason why `hello` cannot join beside the ranks that are here, except the ranks `displaced`, and whether
        it might later; empty when it can join."""
        wrong, temporary = self._conflict(hello, formation_key, claim, displaced)
        pending_job = self._pending_jobs.get(formation_key)
        stays = pending_job is not None and len(pending_job.waiting_ranks) > len(displaced)
        no_room = "" if wrong or stays else self._room.reason_of_no_room(hello, terms, pending_job)
        return wrong or no_room, temporary or bool(no_room) or claim is Claim.CLAIMANT

    def _conflict(
        self, hello: Hello, formation_key: FormationKey, claim: Claim, displaced: dict[int, str]
    ) -> tuple[str, bool]:
        for running in self._running.values():
            if running.formation_key == formation_key:
                wrong = other_team_text(running.spec, hello) or running.objection(hello, claim)
                if wrong:
                    return wrong, False
        pending_job = self._pending_jobs.get(formation_key)
        if pending_job is None:
            return "", False
        if other_team_text(pending_job.spec, hello):
            return other_team_text(pending_job.spec, hello), False
        if hello.rank in pending_job.waiting_ranks and hello.rank not in displaced:
            return rank_taken_text(pending_job.waiting_ranks[hello.rank].hello), False
        is_survivor, count = claim is Claim.SURVIVOR, len(pending_job.waiting_ranks) - len(displaced)
        spec = hello if is_survivor and not pending_job.has_proven_survivor else pending_job.spec
        if hello.min_ranks and count >= spec.world_size * (2 if is_survivor else 1):  # with newcomers that they replace
            wrong = f"{count} workers wait to join job '{hello.job}' already; it has no place for more"
            return wrong, hello.survived > 0  # a worker that survived has as much right to a place as those that wait
        return difference(spec, hello), False
