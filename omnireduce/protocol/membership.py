"""Admission of workers to the jobs of one shard: a pure state machine. Connections are opaque keys.

States of a job name: nobody → gathering (some ranks said hello) → running (all are here; one generation) → nobody. A
new generation may gather while the ranks of the last one are still leaving; a rank that is still there cannot join
twice.

Ranks of different launches never meet, even where they give their jobs the same name.

In an elastic job the first shard decides who is in it and what their ranks are. It gives this formation a number. The
workers tell the number to the other shards, where workers of different formations never meet. A ticket proves to the
first shard that a worker was in the last formation. Such a survivor goes before newcomers, and may end the last
generation if that still runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice

import msgspec

from omnireduce.config.security import Terms
from omnireduce.protocol import tickets
from omnireduce.protocol.admissions import Admit, Announce, Answer, MembershipEffect, Replace
from omnireduce.protocol.announcements import NEWS_S, Announcements
from omnireduce.protocol.compilers import COMPILING_S, TOO_LONG, Compilers
from omnireduce.protocol.failed_launches import FailedLaunches, fails_launch
from omnireduce.protocol.hello_checks import difference, in_the_way, malformed, of_another_team, taken
from omnireduce.protocol.intake import SHUTTING_DOWN, Intake
from omnireduce.protocol.limits import Limits
from omnireduce.protocol.pending_job import FormationKey, JobKey, MembershipClaim, PendingJob, WaitingRank, member_name
from omnireduce.protocol.room import Room
from omnireduce.protocol.running_job import RunningJob
from omnireduce.status import JobStatus
from omnireduce.teams import FREE
from omnireduce.wire.control import Cause, Hello, Pending, Refused, other_version
from omnireduce.wire.words import listed

NEWS_AT_ONCE = 64  # workers of one job that are told in one turn


class Membership:
    """Admission to the jobs of one shard."""

    descriptors_of_one = 1  # worker: its connection

    def __init__(self, limits: Limits, salt: int = 0, key: bytes = b"") -> None:
        """`salt` differs between processes, so that the numbers of their formations differ, too. `key` is for tickets:
        nobody else knows it, and a process that takes the place of this one has the same."""
        self._limits, self._salt, self._key = limits, salt, key
        self._gathering: dict[FormationKey, PendingJob] = {}
        self._of_name: dict[tuple[str, str, int], list[PendingJob]] = {}  # the same by team, job and formation
        self._waiting: dict[Hashable, Hello] = {}  # the hello of each connection in a gathering
        self._running: dict[int, RunningJob] = {}
        self._held: dict[int, Hello] = {}  # by generation until it is released: size and memory follow from this
        self._room, self._compilers = Room(limits, self._gathering, self._running, self._held), Compilers(limits)
        self._next_generation = 1
        self._announced = Announcements()
        self._failed_launches = FailedLaunches(limits.join_timeout_s)
        self._has_freed_room = False
        self.intake = Intake(limits.join_timeout_s)

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called, if nothing happens before."""
        others = [at for at in (self._announced.deadline, self._compilers.deadline) if at is not None]
        if not self._gathering:  # as nearly always
            return min(others, default=None)
        waiting = self._gathering.values()
        ends = others + [self._ends_at(each) for each in waiting if not each.held]
        ends += [each.told_at + NEWS_S for each in waiting if self._has_news(each)]
        ends += [at for each in waiting if not self._room.lacks(each) and (at := each.settles_at()) is not None]
        ends += [0.0] if any(each.untold for each in waiting) else []
        # a formation that replaces one may have waited for the room, whosever it was
        ends += [0.0] if self._has_freed_room and any(each.replaces is not None for each in waiting) else []
        return min(ends, default=None)

    def hello(self, key: Hashable, hello: Hello, now: float, terms: Terms = FREE) -> Iterator[MembershipEffect]:
        """A worker asks to join. `terms` are those of its team."""
        meeting, standing, going = FormationKey.of(hello), MembershipClaim.NEWCOMER, dict[int, str]()
        # first: nothing may depend on numbers without bounds
        wrong, temporary = other_version(hello.version) or malformed(hello) or self._limits.over(hello), False
        if not wrong and hello.refuses:
            yield from self._decline(key, hello, meeting, now)
            return
        if not wrong:
            standing = self._standing(hello, meeting)
            here = self._gathering.get(meeting)
            going = in_the_way(here, hello) if here is not None and standing is MembershipClaim.SURVIVOR else {}
            wrong = (
                "" if hello.compiling else self._failed_launches.why(hello, now)
            )  # who compiles hears it when it comes
        if not wrong:
            wrong, temporary = self.intake.objection(hello, now, gathers=meeting in self._gathering)
        if not wrong and hello.compiling:
            wrong, temporary = self._compilers.objection(hello, terms, self._gathering.get(meeting)), True
        elif not wrong:
            wrong, temporary = self._objection(hello, meeting, standing, terms, going)
        if wrong:
            yield Answer(key, Refused(wrong, temporary))
            yield from self._tell_of_refusal(meeting, hello, wrong, now)
            return
        if hello.compiling:
            self._compilers.add(key, hello, now)
            yield Answer(key, Pending([], 0))
            return
        yield from self._make_way(hello, meeting, standing, going, now)
        if meeting not in self._gathering:
            self._open(meeting, hello, now, terms)
        gathering = self._gathering[meeting]
        gathering.add(WaitingRank(key, hello, standing), now)
        self._compilers.came(hello)
        self._waiting[key] = hello
        if self._may_start(gathering, now):
            yield self._admit(meeting)
        else:
            yield Answer(key, self._pending(gathering, now))

    def rival(self, hello: Hello) -> Hashable | None:
        """The connection that waits with the same rank for the same job; None when there is none."""
        gathering = self._gathering.get(FormationKey.of(hello))
        rival = None if gathering is None else gathering.attendees.get(hello.rank)
        return None if rival is None else rival.key

    def gone(self, key: Hashable, now: float, cause: Cause | None = None) -> None:
        """A connection that was not yet admitted is over, because of `cause`: nobody needs to know it here."""
        place = self._compilers.remove(key)
        if place is not None and place.meeting in self._gathering and self._gathering[place.meeting].place == place:
            self._gathering[place.meeting].since = now  # time to join begins anew
        hello = self._waiting.pop(key, None)
        if hello is not None:
            meeting = FormationKey.of(hello)
            gathering = self._gathering[meeting]
            gathering.remove(hello.rank, now)
            if not gathering.attendees:
                self._close(meeting)
                generation = self._generation_of(meeting)
                if gathering.held and generation is not None:
                    self._announced.nobody_waits(generation)

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""
        if generation in self._running:
            self._running[generation].ranks.pop(rank, None)

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        over = self._running.pop(generation, None)
        self._announced.forget(generation)
        if over is not None and over.meeting in self._gathering and self._generation_of(over.meeting) is None:
            self._gathering[over.meeting].release(now)
        self._has_freed_room |= bool(self._gathering)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._held.pop(generation, None)
        self._has_freed_room |= bool(self._gathering)

    def expire(self, now: float) -> Iterator[MembershipEffect]:
        """Time has passed: start jobs that have settled, refuse those that gather for too long, tell who is missing."""
        limit_s, self._has_freed_room = self._limits.join_timeout_s, False
        for key in self._compilers.over(now):
            self.gone(key, now)
            yield Answer(key, Refused(TOO_LONG, temporary=True))
        for generation in self._announced.taken_back(now):
            yield Announce(generation, 0)
        for meeting, gathering in list(self._gathering.items()):
            if self._may_start(gathering, now):
                yield self._admit(meeting)
            elif not gathering.held and now >= self._ends_at(gathering):
                yield from self._disband(meeting, gathering.too_late(limit_s), temporary=True)
            elif gathering.held and gathering.has_settled(now):
                yield from self._replace(meeting, gathering, now)
            elif gathering.untold or (self._has_news(gathering) and now - gathering.told_at >= NEWS_S):
                yield from self._tell_news(meeting, gathering, now)

    @property
    def gathers(self) -> int:
        """How many jobs wait for ranks."""
        return len(self._gathering)

    def gathering(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [each.status(now) for each in self._gathering.values()]

    @property
    def here(self) -> list[Hello]:
        """A hello of each job that runs, or whose ranks are still leaving."""
        return list(self._held.values())

    def end(self, is_meant: Callable[[Hello], bool], reason: str, now: float) -> Iterator[MembershipEffect]:
        """Jobs that match these hellos are ended: refuse workers that wait for one, and those that come again."""
        self.intake.end_survivors(is_meant, reason, now, self._salt + self._next_generation)
        for each in self._running.values():
            if is_meant(each.spec):
                self.intake.end(each.spec, reason, now)
        for meeting, gathering in list(self._gathering.items()):
            if is_meant(gathering.spec):
                self.intake.end(gathering.spec, reason, now)
                yield from self._disband(meeting, reason)

    def turn_away(self) -> Iterator[MembershipEffect]:
        """Admit nobody any more."""
        self.intake.close()
        for meeting in list(self._gathering):
            yield from self._disband(meeting, SHUTTING_DOWN, temporary=True)
        for key in self._compilers.keys:
            yield Answer(key, Refused(SHUTTING_DOWN, temporary=True))

    def close(self) -> None:
        """The shard ends. Nothing of this machine has to."""

    # gatherings

    def _ends_at(self, gathering: PendingJob) -> float:
        """When its ranks have waited long enough for the others."""
        until = max(gathering.since, self._compilers.until(gathering.place))
        return min(until, gathering.begun + COMPILING_S) + self._limits.join_timeout_s

    def _has_news(self, gathering: PendingJob) -> bool:
        return gathering.is_news or self._compilers.until(gathering.place) > 0

    def _pending(self, gathering: PendingJob, now: float) -> Pending:
        """The news for those who wait: who is missing, and whose kernels compile."""
        ranks = self._compilers.ranks(gathering.place) if now < gathering.begun + COMPILING_S else []
        return msgspec.structs.replace(gathering.pending(), compiling=ranks)

    def _open(self, meeting: FormationKey, hello: Hello, now: float, terms: Terms) -> None:
        """Begin to gather. Where ranks of another launch wait under the same name, both are told."""
        generation = self._generation_of(meeting) if hello.smallest else None
        last = frozenset[int]()
        if generation is not None:
            self._announced.somebody_waits(generation)
            last = self._running[generation].asked
        gathering = PendingJob(
            hello, terms, since=now, begun=now, told_at=now, changed_at=now,
            held=generation is not None, expected=last, replaces=self._room.replaced_by(hello),
        )  # fmt: skip
        gathering.namesakes = self._of_name.setdefault((hello.team, meeting.job, meeting.formation), [])
        for other in gathering.namesakes[:1]:
            other.is_news = True
        gathering.namesakes.append(gathering)
        self._gathering[meeting] = gathering

    def _tell_of_refusal(
        self, meeting: FormationKey, hello: Hello, wrong: str, now: float
    ) -> Iterator[MembershipEffect]:
        """Those who wait for a rank that was refused learn it. They are refused, too, if it can never join."""
        gathering = self._gathering.get(meeting)
        if gathering is None or malformed(hello) or of_another_team(gathering.spec, hello):
            return
        if fails_launch(gathering, hello, wrong, self._limits.over(hello)):
            yield from self._disband(meeting, self._failed_launches.add(gathering, hello, wrong, now))
        else:
            gathering.refused = hello.rank, f"{member_name(hello)} was refused: {wrong}"
            gathering.is_news = True

    def _decline(self, key: Hashable, hello: Hello, meeting: FormationKey, now: float) -> Iterator[MembershipEffect]:
        """A rank refuses by itself to come to a group. Only one of a job that runs here can, and of its own groups."""
        if not any(each.has_group(hello) for each in self._running.values()):
            yield Answer(key, Refused("a refusal from outside of the job; expected one of its ranks"))
            return
        yield Answer(key, Refused(hello.refuses))
        here = self._gathering.get(meeting)
        gathering = here if here is not None and here.place == JobKey.of(hello) else None
        reason = self._failed_launches.decline(hello, gathering, now)
        if gathering is not None and reason:
            yield from self._disband(meeting, reason)

    def _disband(self, meeting: FormationKey, reason: str, *, temporary: bool = False) -> Iterator[MembershipEffect]:
        """Refuse all who gather."""
        gathering = self._gathering[meeting]
        self._close(meeting)
        for key, *_ in gathering.attendees.values():
            del self._waiting[key]
            yield Answer(key, Refused(reason, temporary))

    def _close(self, meeting: FormationKey) -> None:
        gathering = self._gathering.pop(meeting)
        gathering.namesakes.remove(gathering)
        name = gathering.spec.team, meeting.job, meeting.formation
        if not gathering.namesakes:
            del self._of_name[name]
        self._has_freed_room |= bool(self._gathering)

    def _may_start(self, gathering: PendingJob, now: float) -> bool:
        return gathering.complete(now) and not self._room.lacks(gathering)

    def _admit(self, meeting: FormationKey) -> Admit:
        """Start a job with the workers that are here. Those who are left over wait for the next generation."""
        gathering = self._gathering[meeting]
        before = frozenset(gathering.attendees)
        ranked = gathering.take()
        for key, _ in ranked:
            del self._waiting[key]
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        formation, hellos = meeting.formation, [hello for _, hello in ranked]
        if not formation:  # this is the first shard: the job may be formed anew
            formation = self._salt + generation
            entry = tickets.ticket(self._key, gathering.spec, formation)
            hellos = [msgspec.structs.replace(each, formation=formation, ticket=entry) for each in hellos]
        asked = before - gathering.attendees.keys()
        ranks = {each.rank: each for each in hellos}
        self._running[generation] = RunningJob(meeting, gathering.spec, formation, ranks, asked)
        self._held[generation] = msgspec.structs.replace(hellos[0], formation=meeting.formation)
        self.intake.begins(gathering.spec)
        gathering.held, gathering.expected, gathering.is_news = True, asked, True
        gathering.replaces = generation
        if not gathering.attendees:
            self._close(meeting)
        return Admit(generation, gathering.spec.job, [key for key, _ in ranked], hellos)

    def _tell_news(self, meeting: FormationKey, gathering: PendingJob, now: float) -> Iterator[MembershipEffect]:
        """Tell some of the waiting workers who is missing. When all are told and the job is held back, tell the running
        ranks how many wait."""
        if not gathering.untold:
            gathering.told_at, gathering.is_news = now, False
            gathering.untold = {key: None for key, *_ in gathering.attendees.values()}
        pending = self._pending(gathering, now)
        for key in list(islice(gathering.untold, NEWS_AT_ONCE)):
            del gathering.untold[key]
            yield Answer(key, pending)
        generation = self._generation_of(meeting)
        if gathering.held and generation is not None and not gathering.untold:
            running = self._running[generation]
            room = running.spec.world_size - len(running.asked) if running.spec.smallest else len(gathering.attendees)
            workers = min(len(gathering.attendees), room)
            if self._announced.is_news(generation, workers, now):
                yield Announce(generation, workers)

    def _replace(self, meeting: FormationKey, gathering: PendingJob, now: float) -> Iterator[MembershipEffect]:
        """End the generation that still runs: the survivors who left it have waited long enough."""
        gathering.changed_at = now
        generation = self._generation_of(meeting)
        assert generation is not None
        late = listed([f"rank {rank}" for rank in sorted(self._running[generation].ranks)])
        why = "had not left when the others had waited long enough to form the job anew"
        yield Replace(generation, Cause(late, why))

    def _generation_of(self, meeting: FormationKey) -> int | None:
        """The newest generation that runs of a job, if this is the job's first shard; else None."""
        if meeting.formation:
            return None
        return max((number for number, each in self._running.items() if each.meeting == meeting), default=None)

    # who may come

    def _standing(self, hello: Hello, meeting: FormationKey) -> MembershipClaim:
        """The standing of a worker, whose hello is in order, in its job. While a generation runs, only its members are
        survivors."""
        if not hello.survived:
            return MembershipClaim.NEWCOMER
        generation, has_ticket = self._generation_of(meeting), tickets.is_valid(self._key, hello)
        if generation is None:
            gathering = self._gathering.get(meeting)
            is_known = gathering is not None and gathering.is_led
            return (
                MembershipClaim.SURVIVOR
                if has_ticket
                else MembershipClaim.NEWCOMER
                if is_known
                else MembershipClaim.CLAIMANT
            )
        is_member = has_ticket and hello.survived == self._running[generation].formation
        return MembershipClaim.SURVIVOR if is_member else MembershipClaim.NEWCOMER

    def _make_way(
        self, hello: Hello, meeting: FormationKey, standing: MembershipClaim, going: dict[int, str], now: float
    ) -> Iterator[MembershipEffect]:
        """Nothing is wrong with `hello`. If a survivor said it, those who are in its way are refused in its place."""
        gathering = self._gathering.get(meeting)
        if gathering is None or standing is not MembershipClaim.SURVIVOR:
            return
        for rank, wrong in going.items():
            key, _, others_standing = gathering.attendees[rank]
            self.gone(key, now)
            yield Answer(key, Refused(wrong, temporary=others_standing is MembershipClaim.CLAIMANT))
        if not gathering.is_led:
            gathering.lead(hello)

    def _objection(
        self, hello: Hello, meeting: FormationKey, standing: MembershipClaim, terms: Terms, going: dict[int, str]
    ) -> tuple[str, bool]:
        """Why `hello` cannot join beside those who are here, except the ranks `going`, and whether it might later;
        empty when it can."""
        wrong, temporary = self._conflict(hello, meeting, standing, going)
        here = self._gathering.get(meeting)
        stays = here is not None and len(here.attendees) > len(going)
        full = "" if wrong or stays else self._room.why_none(hello, terms, here)
        return wrong or full, temporary or bool(full) or standing is MembershipClaim.CLAIMANT

    def _conflict(
        self, hello: Hello, meeting: FormationKey, standing: MembershipClaim, going: dict[int, str]
    ) -> tuple[str, bool]:
        for running in self._running.values():
            if running.meeting == meeting:
                wrong = of_another_team(running.spec, hello) or running.objection(hello, standing)
                if wrong:
                    return wrong, False
        gathering = self._gathering.get(meeting)
        if gathering is None:
            return "", False
        if of_another_team(gathering.spec, hello):
            return of_another_team(gathering.spec, hello), False
        if hello.rank in gathering.attendees and hello.rank not in going:
            return taken(gathering.attendees[hello.rank].hello), False
        is_survivor, count = standing is MembershipClaim.SURVIVOR, len(gathering.attendees) - len(going)
        spec = hello if is_survivor and not gathering.is_led else gathering.spec
        if hello.smallest and count >= spec.world_size * (2 if is_survivor else 1):  # with newcomers that they replace
            wrong = f"{count} workers wait to join job '{hello.job}' already; it has no place for more"
            return wrong, hello.survived > 0  # those who wait have no more right to a place
        return difference(spec, hello), False
