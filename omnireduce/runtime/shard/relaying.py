"""Admission to the jobs of a relay, which its upstream decides.

A relay passes each Hello on, by an uplink for that worker alone, and passes the answers back. To the upstream the ranks
that come through one relay are one contributor. When it has welcomed all of them, the relay begins the job, too.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import selectors
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from omnireduce.config.security import Terms
from omnireduce.errors import ProtocolError
from omnireduce.logs import tagged
from omnireduce.protocol.admissions import Admit, Answer, MembershipEffect, Relayed
from omnireduce.protocol.allowance import beyond_allowance
from omnireduce.protocol.gathering import Meeting, member_name
from omnireduce.protocol.handshake import Candidate
from omnireduce.protocol.hello_checks import kin, malformed
from omnireduce.protocol.intake import SHUTTING_DOWN, Intake
from omnireduce.protocol.limits import Limits
from omnireduce.runtime.driver import Clock
from omnireduce.runtime.shard.visitor import Visitor, rank_of, seated, status_of
from omnireduce.secret import NONCE_BYTES, Secret
from omnireduce.status import JobStatus
from omnireduce.teams import FREE
from omnireduce.transport.base import Control, Link, Lost
from omnireduce.wire.control import (
    MOST_RELAYS,
    TEXT_CHARACTERS,
    TOKEN_BYTES,
    Aborted,
    Cause,
    ControlMessage,
    Hello,
    Leave,
    Newcomers,
    Pending,
    Refused,
    Waiting,
    Welcome,
    decode_control,
    encode_control,
    other_version,
)

log = logging.getLogger("omnireduce.aggregator")
UPSTREAM_OF = "the upstream of relay"
RETRY_S = 0.2  # between attempts to reach an upstream that is not up yet

Connected = Callable[[Link | str], None]  # gets the link, or why there is none


class Upstream(NamedTuple):
    """Shard s of a job has aggregator `addresses[s]` above it. `connect(address, timeout_s, done)` connects to one, and
    returns a function that cancels the attempt. Unless cancelled, it later calls `done` in the thread of the shard.
    `close` ends attempts that are under way."""

    addresses: Sequence[str]
    connect: Callable[[str, float, Connected], Callable[[], object]]
    close: Callable[[], None] = lambda: None


class Relaying:
    """The membership of a relay called `name`. `answer` gets the upstream's decisions. `secret_of(team)`: the secret
    that the relay proves for a worker of that team."""

    descriptors_of_one = 2  # worker: its connection, and its uplink

    def __init__(
        self, name: str, limits: Limits, upstream: Upstream,
        *, selector: selectors.BaseSelector, clock: Clock, answer: Callable[[Iterable[MembershipEffect]], None],
        secret_of: Callable[[str], Secret | None],
    ) -> None:  # fmt: skip
        self._name, self._limits, self._upstream = name, limits, upstream
        self._key = secrets.token_bytes(TOKEN_BYTES)  # hosts may have the same name
        self._selector, self._clock, self._answer, self._secret_of = selector, clock, answer, secret_of
        self._visitors: dict[Hashable, Visitor] = {}
        self._gathering: dict[Meeting, dict[Hashable, Visitor]] = {}  # those that want to join, by job
        self._welcome = Counter[tuple[Meeting, int]]()  # how many of a generation are
        self._running: dict[int, Hello] = {}
        self._held: dict[int, Hello] = {}  # by generation until its memory is released
        self._next_generation = 1
        self.intake = Intake(limits.join_timeout_s)

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called, if nothing happens before."""
        unconnected = [each for each in self._visitors.values() if each.link is None]
        ends = [each.since + self._limits.join_timeout_s for each in unconnected]
        return min([*ends, *(each.again_at for each in unconnected if each.again_at is not None)], default=None)

    def hello(self, key: Hashable, hello: Hello, now: float, terms: Terms = FREE) -> Iterator[MembershipEffect]:
        """A worker asks to join. `terms` are those of its team."""
        wrong, temporary = self._objection(hello, terms)
        if not wrong and not hello.refuses:
            wrong, temporary = self.intake.objection(hello, now, gathers=Meeting.of(hello) in self._gathering)
        if wrong:
            yield Answer(key, Refused(wrong, temporary))
            return
        visitor = self._visitors[key] = Visitor(key, hello, self._upstream.addresses[hello.shard], now)
        if not hello.refuses:
            self._gathering.setdefault(visitor.meeting, {})[key] = visitor
        self._call(visitor)

    def _objection(self, hello: Hello, terms: Terms) -> tuple[str, bool]:
        """Why `hello` is not passed on, and whether it may be later; empty when it is."""
        wrong = other_version(hello.version) or malformed(hello) or self._limits.over(hello)
        above = len(self._upstream.addresses)
        if not wrong and hello.shards != above:
            wrong = (
                f"cluster.aggregators has {hello.shards} addresses, and aggregator.upstream of this relay has {above}: "
                "expected as many, in the same order"
            )
        if not wrong and len(hello.relays) >= MOST_RELAYS:
            wrong = f"more than {MOST_RELAYS} relays one above the other: does aggregator.upstream lead in a circle?"
        if wrong:
            return wrong, False
        if Meeting.of(hello) in self._gathering or hello.refuses:
            return "", False
        jobs, held = self._jobs_beside(hello, self._running), self._jobs_beside(hello, self._held)
        return self._limits.beyond(hello, len(jobs), held) or beyond_allowance(terms, hello, jobs, held), True

    def _jobs_beside(self, hello: Hello, jobs: Mapping[int, Hello]) -> list[Hello]:
        """These jobs and those that gather, without the job of `hello`: if it is elastic, it takes the room of its last
        generation."""
        mine = [number for number, each in jobs.items() if kin(each) == kin(hello)]
        last = max(mine, default=0) if hello.smallest or hello.formation else 0
        gather = [next(iter(each.values())).hello for at, each in self._gathering.items() if at != Meeting.of(hello)]
        return [*gather, *(each for number, each in jobs.items() if number != last)]

    def rival(self, hello: Hello) -> Hashable | None:
        """The connection that waits with the same rank for the same job; None when there is none."""
        waiting = self._gathering.get(Meeting.of(hello), {}).values()
        mine = hello.rank, hello.compiling
        return next((each.key for each in waiting if (each.hello.rank, each.hello.compiling) == mine), None)

    def gone(self, key: Hashable, now: float, cause: Cause | None = None) -> None:
        """A connection that was not yet admitted is over, because of `cause`."""
        if key in self._visitors:
            visitor = self._take_out(key)
            self._hang_up(visitor, cause or Cause(member_name(visitor.hello), "connection closed"))

    def _take_out(self, key: Hashable) -> Visitor:
        """This worker waits no more."""
        visitor = self._visitors.pop(key)
        waiting = self._gathering.get(visitor.meeting, {})
        waiting.pop(key, None)  # one that refuses a group does not wait
        if not waiting:
            self._gathering.pop(visitor.meeting, None)
        if visitor.welcome is not None:
            place = visitor.meeting, visitor.welcome.generation
            self._welcome[place] -= 1
            if not self._welcome[place]:
                del self._welcome[place]
        return visitor

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        self._running.pop(generation, None)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._held.pop(generation, None)

    def expire(self, now: float) -> Iterator[MembershipEffect]:
        """Time has passed: try once more to reach the upstream, or give up."""
        for visitor in [each for each in self._visitors.values() if each.link is None]:
            if now - visitor.since >= self._limits.join_timeout_s:
                yield self._refuse(visitor, f"could not be reached: {visitor.why or 'no answer'}", temporary=True)
            elif visitor.again_at is not None and now >= visitor.again_at:
                self._call(visitor)

    @property
    def gathers(self) -> int:
        """How many jobs wait for ranks."""
        return len(self._gathering)

    def gathering(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [status_of(list(visitors.values()), now) for visitors in self._gathering.values()]

    @property
    def here(self) -> list[Hello]:
        """A hello of each job that runs, or whose ranks are still leaving."""
        return list(self._held.values())

    def end(self, is_meant: Callable[[Hello], bool], reason: str, now: float) -> Iterator[MembershipEffect]:
        """Jobs that match these hellos are ended: refuse workers that wait for one, and those that come again."""
        for hello in [*self._running.values(), *(each.hello for each in self._visitors.values())]:
            if is_meant(hello):
                self.intake.end(hello, reason, now)
        for visitor in [each for each in self._visitors.values() if is_meant(each.hello)]:
            yield from self._turn_away(visitor, reason)

    def turn_away(self) -> Iterator[MembershipEffect]:
        """Admit nobody any more."""
        self.intake.close()
        for visitor in list(self._visitors.values()):
            yield from self._turn_away(visitor, SHUTTING_DOWN, temporary=True)

    def _turn_away(self, visitor: Visitor, reason: str, *, temporary: bool = False) -> Iterator[MembershipEffect]:
        yield Answer(visitor.key, Refused(reason, temporary))
        self.gone(visitor.key, self._clock(), Cause(f"aggregator {self._name}", reason))

    def close(self) -> None:
        """The shard ends: connect to nobody any more."""
        self._upstream.close()

    # uplinks

    def _call(self, visitor: Visitor) -> None:
        visitor.again_at = None
        done = partial(self._connected, visitor)
        visitor.give_up = self._upstream.connect(visitor.address, self._limits.join_timeout_s, done)

    def _connected(self, visitor: Visitor, found: Link | str) -> None:
        if self._visitors.get(visitor.key) is not visitor:  # it has gone meanwhile
            if isinstance(found, Link):
                found.close()
            return
        if isinstance(found, str):
            self._try_again(visitor, found)
            return
        try:
            self._begin_uplink(visitor, found)
        except Exception as error:
            self._contain(visitor, error)

    def _begin_uplink(self, visitor: Visitor, found: Link) -> None:
        visitor.link = found
        self._selector.register(found, selectors.EVENT_READ, partial(self._hear, visitor))
        secret = self._secret_of(visitor.hello.team)
        if secret is not None and secret.team != visitor.hello.team:
            self._answer([self._refuse(visitor, f"is told of no team '{visitor.hello.team}': there is none any more")])
        elif secret is None:
            self._say_hello(visitor)
        else:
            visitor.candidate = Candidate(secret, secrets.token_bytes(NONCE_BYTES))
            found.send_control(encode_control(visitor.candidate.greeting))

    def _try_again(self, visitor: Visitor, why: str) -> None:
        """The upstream has not heard of this worker yet: connect once more, after a pause."""
        if visitor.link is not None:
            self._selector.unregister(visitor.link)
            visitor.link.close()
        visitor.link = visitor.candidate = None
        visitor.again_at = self._clock() + RETRY_S
        if why != visitor.why:
            visitor.why = why
            note = f"aggregator {visitor.address}, the upstream of relay {self._name}, could not be reached: {why}"
            log.warning("%s", note, extra=tagged("upstream_unreachable", upstream=visitor.address))
            self._answer([Answer(visitor.key, Pending([], 0, note[:TEXT_CHARACTERS]))])
        else:
            self._answer(())

    def _say_hello(self, visitor: Visitor) -> None:
        assert visitor.link is not None
        hello = visitor.hello
        # a host sends one sum, so ranks that come through different relays must not count as one host
        memory = hello.memory and hashlib.blake2b(hello.memory.encode(), key=self._key, digest_size=16).hexdigest()
        own = replace(hello, verbs=None, team="", memory=memory, relays=(self._name, *hello.relays), relay=self._key)
        visitor.link.send_control(encode_control(own))

    def _hear(self, visitor: Visitor) -> None:
        """Deal with what the upstream says to a worker that has not been admitted here."""
        link = visitor.link
        assert link is not None
        try:
            for event in link.poll():
                if self._visitors.get(visitor.key) is visitor:
                    self._answer(self._deal(visitor, event))
            if self._visitors.get(visitor.key) is visitor and visitor.welcome is not None:
                self._answer(self._begin(visitor, visitor.welcome))
        except Exception as error:
            self._contain(visitor, error)

    def _contain(self, visitor: Visitor, error: Exception) -> None:
        """No memory, or a bug: it may cost this worker its place, not others theirs."""
        log.exception("a worker behind this relay is refused: %s", error, extra=tagged("internal_error"))
        if self._visitors.get(visitor.key) is visitor:
            self._answer([self._refuse(visitor, f"could not be dealt with: {error!r}", temporary=True)])

    def _deal(self, visitor: Visitor, event: object) -> Iterator[MembershipEffect]:
        try:
            if isinstance(event, Lost) and event.violation:
                raise ProtocolError(f"broke the rules: {event.reason}")
            if isinstance(event, Lost):
                yield from self._lost(visitor, event.reason)
                return
            if not isinstance(event, Control):
                raise ProtocolError("sent blocks before its welcome")
            message = decode_control(event.body)
            if visitor.candidate is None or isinstance(message, Refused):
                yield from self._told(visitor, message)
            else:
                self._prove(visitor, visitor.candidate, message)
        except ProtocolError as error:
            yield self._refuse(visitor, str(error))

    def _lost(self, visitor: Visitor, reason: str) -> Iterator[MembershipEffect]:
        if visitor.candidate is not None:
            self._try_again(visitor, f"{reason} before the hello")
        else:
            yield self._refuse(visitor, f"{reason} before it had admitted this worker", temporary=True)

    def _prove(self, visitor: Visitor, candidate: Candidate, message: ControlMessage) -> None:
        """Go on with the handshake. Raises ProtocolError."""
        answer = candidate.told(message)
        if answer is None:
            visitor.candidate = None
            self._say_hello(visitor)
        else:
            assert visitor.link is not None
            visitor.link.send_control(encode_control(answer))

    def _told(self, visitor: Visitor, message: ControlMessage) -> Iterator[MembershipEffect]:
        """Pass on what the upstream says. Raises ProtocolError."""
        if isinstance(message, Pending):
            visitor.pending = message
            yield Answer(visitor.key, message)
        elif isinstance(message, Waiting):
            yield Answer(visitor.key, message.heard_from(visitor.address))
        elif isinstance(message, Newcomers):
            yield Answer(visitor.key, message)
        elif isinstance(message, Refused):
            yield self._refused(visitor, message)
        elif isinstance(message, Aborted):
            self.gone(visitor.key, self._clock())
            yield Answer(visitor.key, message)
        elif isinstance(message, Welcome) and visitor.welcome is None:
            if not message.relayed:
                raise ProtocolError("does not know that this is a relay")
            visitor.welcome = message
            self._welcome[visitor.meeting, message.generation] += 1
        else:
            raise ProtocolError(f"answered the hello with {type(message).__name__}")

    def _refused(self, visitor: Visitor, message: Refused) -> Answer:
        """The upstream refuses this worker. If it only passes that on, the message says already whose refusal it is."""
        if f"{UPSTREAM_OF} " in message.reason:
            self.gone(visitor.key, self._clock())
            return Answer(visitor.key, message)
        return self._refuse(visitor, f"refused: {message.reason}", temporary=message.temporary)

    def _begin(self, visitor: Visitor, welcome: Welcome) -> Iterator[MembershipEffect]:
        """Begin the job if all that come through this relay are welcome."""
        if self._welcome[visitor.meeting, welcome.generation] < welcome.relayed:
            return
        members = [
            (each, own, each.link)
            for each in self._gathering[visitor.meeting].values()
            if (own := each.welcome) is not None and each.link is not None and own.generation == welcome.generation
        ]
        members.sort(key=lambda each: rank_of(each[0].hello, each[1]))
        hellos = [seated(each.hello, own) for each, own, _ in members]
        needs = replace(hellos[0], world_size=len(members))
        same = {(own.relayed, own.whole_bytes, own.hosts) for _, own, _ in members}
        wrong = "told the ranks of one job different things"
        if len(same) == 1 and len({hello.rank for hello in hellos}) == len(hellos) == welcome.relayed:
            wrong = self._limits.over(needs)
            wrong = wrong and f"has admitted more than this relay may take: {wrong}"
        if wrong:
            for each, *_ in members:
                yield self._refuse(each, wrong, temporary=True)
            return
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        for each, _, link in members:
            self._take_out(each.key)
            self._selector.unregister(link)
        self._running[generation] = self._held[generation] = needs
        self.intake.begins(needs)
        relayed = Relayed(visitor.address, [own for _, own, _ in members], [link for *_, link in members])
        yield Admit(generation, visitor.hello.job, [each.key for each, *_ in members], hellos, relayed)

    def _refuse(self, visitor: Visitor, why: str, *, temporary: bool = False) -> Answer:
        self.gone(visitor.key, self._clock(), Cause(f"aggregator {visitor.address}", why[:TEXT_CHARACTERS]))
        reason = f"aggregator {visitor.address}, {UPSTREAM_OF} {self._name}, {why}"
        return Answer(visitor.key, Refused(reason[:TEXT_CHARACTERS], temporary))

    def _hang_up(self, visitor: Visitor, cause: Cause) -> None:
        link = visitor.link
        visitor.give_up()
        if link is None:
            return
        if visitor.candidate is None:  # the upstream may have begun the job
            link.send_control(encode_control(Leave(cause)))
        self._selector.unregister(link)
        link.close()
