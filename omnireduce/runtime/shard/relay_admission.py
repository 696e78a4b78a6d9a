"""Admission to the jobs of a relay. Its upstream decides.

A relay passes each Hello on, over a separate uplink for each worker, and passes the answers back. For the upstream, all
ranks that come through a relay contribute one sum. When the upstream has welcomed all of them, the relay begins the
job, too.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import selectors
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from omnireduce.core.status_messages import JobStatus
from omnireduce.core.wire.control import (
    MAX_RELAYS,
    NONCE_BYTES,
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
from omnireduce.errors import ProtocolError
from omnireduce.protocol.joining.admission import AdmissionEffect, Admit, Answer, Relayed
from omnireduce.protocol.joining.checks import job_family, malformed
from omnireduce.protocol.joining.intake import SHUTTING_DOWN, Intake
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.pending_job import FormationKey, member_name
from omnireduce.protocol.joining.worker_request import JoinRequest
from omnireduce.runtime.driver import Clock
from omnireduce.support.config.schema import TeamLimits
from omnireduce.support.logs import tagged
from omnireduce.support.secret import Secret
from omnireduce.support.teams import NO_LIMITS
from omnireduce.transport.base import Control, Link, Lost


@dataclass(eq=False)
class PendingUplink:
    """A worker that wants to join; `link` is its uplink."""

    key: Hashable
    hello: Hello
    address: str
    since: float
    link: Link | None = None
    request: JoinRequest | None = None  # on this link
    retry_at: float | None = None  # when to connect once more
    give_up: Callable[[], object] = lambda: None  # cancels the attempt to connect
    failure: str = ""  # why the upstream could not be reached

    @property
    def formation_key(self) -> FormationKey:
        return FormationKey.of(self.hello)

    @property
    def welcome(self) -> Welcome | None:
        return None if self.request is None else self.request.welcome

    @property
    def has_said_hello(self) -> bool:
        """The upstream may count on this worker."""
        return self.request is not None and self.request.has_said_hello


def assigned_rank(hello: Hello, welcome: Welcome) -> int:
    """The rank of a worker in its job. In an elastic job the upstream gives it."""
    return hello.rank if welcome.assignment is None else welcome.assignment.rank


def with_assigned_rank(hello: Hello, welcome: Welcome) -> Hello:
    """The hello with the rank and world size that the upstream gave."""
    size = hello.world_size if welcome.assignment is None else welcome.assignment.world_size
    return replace(hello, rank=assigned_rank(hello, welcome), world_size=size)


def status_of(uplinks: Sequence[PendingUplink], now: float) -> JobStatus:
    """The status of a job that gathers. `uplinks`: the uplinks of its workers that are here."""
    joined = [uplink for uplink in uplinks if not uplink.hello.compiling]
    first = (joined or uplinks)[0]
    pending = None if first.request is None else first.request.pending
    return JobStatus(
        name=first.hello.job, team=first.hello.team, generation=0, launch=first.hello.launch,
        world_size=first.hello.world_size, joined=len(joined), missing=[] if pending is None else pending.missing,
        age_s=now - first.since, upstream=first.address,
    )  # fmt: skip


log = logging.getLogger("omnireduce.aggregator")
UPSTREAM_OF = "the upstream of relay"
RETRY_S = 0.2  # pause between attempts to reach an upstream that is not up yet

Connected = Callable[[Link | str], None]  # gets the link, or the reason why there is none


class Upstream(NamedTuple):
    """The upstream of a relay: aggregator `addresses[s]` for shard s of a job. `connect(address, timeout_s, done)`
    begins to connect to an aggregator, and returns a function that cancels the attempt. Unless cancelled, it later
    calls `done` in the thread of the shard. `close` ends all attempts under way."""

    addresses: Sequence[str]
    connect: Callable[[str, float, Connected], Callable[[], object]]
    close: Callable[[], None] = lambda: None


class Relaying:
    """The admission of a relay called `name`. `answer` gets the upstream's decisions. `secret_of(team)`: the secret
    that the relay proves for a worker of this team."""

    descriptors_of_one = 2  # file descriptors for one worker: its connection, and its uplink

    def __init__(
        self, name: str, limits: Limits, upstream: Upstream,
        *, selector: selectors.BaseSelector, clock: Clock, answer: Callable[[Iterable[AdmissionEffect]], None],
        secret_of: Callable[[str], Secret | None],
    ) -> None:  # fmt: skip
        self._name, self._limits, self._upstream = name, limits, upstream
        self._key = secrets.token_bytes(TOKEN_BYTES)  # identifies this relay: hosts may have the same name
        self._selector, self._clock, self._answer, self._secret_of = selector, clock, answer, secret_of
        self._uplinks: dict[Hashable, PendingUplink] = {}
        self._pending_jobs: dict[FormationKey, dict[Hashable, PendingUplink]] = {}  # workers that want to join, by job
        self._welcome = Counter[tuple[FormationKey, int]]()  # the number of welcome workers, by generation
        self._running: dict[int, Hello] = {}
        self._in_memory: dict[int, Hello] = {}  # by generation until its memory is released
        self._next_generation = 1
        self.intake = Intake(limits.join_timeout_s)

    @property
    def deadline(self) -> float | None:
        """The time to call `expire`, if nothing happens before; None: never."""
        unconnected = [uplink for uplink in self._uplinks.values() if uplink.link is None]
        ends = [uplink.since + self._limits.join_timeout_s for uplink in unconnected]
        return min([*ends, *(uplink.retry_at for uplink in unconnected if uplink.retry_at is not None)], default=None)

    def hello(
        self, key: Hashable, hello: Hello, now: float, terms: TeamLimits = NO_LIMITS
    ) -> Iterator[AdmissionEffect]:
        """A worker asks to join. `terms`: the limits of its team."""
        wrong, temporary = self._objection(hello, terms)
        if not wrong and not hello.refuses:
            wrong, temporary = self.intake.objection(hello, now, gathers=FormationKey.of(hello) in self._pending_jobs)
        if wrong:
            yield Answer(key, Refused(wrong, temporary))
            return
        uplink = self._uplinks[key] = PendingUplink(key, hello, self._upstream.addresses[hello.shard], now)
        if not hello.refuses:
            self._pending_jobs.setdefault(uplink.formation_key, {})[key] = uplink
        self._connect(uplink)

    def _objection(self, hello: Hello, terms: TeamLimits) -> tuple[str, bool]:
        """The reason why `hello` is not passed on, and whether it may be later; empty if it is passed on."""
        wrong = other_version(hello.version) or malformed(hello) or self._limits.exceeded_alone(hello)
        upstream_count = len(self._upstream.addresses)
        if not wrong and hello.shards != upstream_count:
            wrong = (
                f"cluster.aggregators has {hello.shards} addresses, and aggregator.upstream of this relay has "
                f"{upstream_count}: expected as many, in the same order"
            )
        if not wrong and len(hello.relays) >= MAX_RELAYS:
            wrong = f"a chain of more than {MAX_RELAYS} relays: does aggregator.upstream lead in a circle?"
        if wrong:
            return wrong, False
        if FormationKey.of(hello) in self._pending_jobs or hello.refuses:
            return "", False
        jobs, in_memory = self._other_jobs(hello, self._running), self._other_jobs(hello, self._in_memory)
        return self._limits.exceeded_together(hello, terms, jobs, in_memory), True

    def _other_jobs(self, hello: Hello, jobs: Mapping[int, Hello]) -> list[Hello]:
        """`jobs` and the pending jobs, without the job of `hello`: if it is elastic, it takes the room of its last
        generation."""
        generations = [number for number, spec in jobs.items() if job_family(spec) == job_family(hello)]
        last = max(generations, default=0) if hello.min_ranks or hello.formation else 0
        gather = [
            next(iter(ranks.values())).hello
            for key, ranks in self._pending_jobs.items()
            if key != FormationKey.of(hello)
        ]
        return [*gather, *(spec for number, spec in jobs.items() if number != last)]

    def rival(self, hello: Hello) -> Hashable | None:
        """The connection that waits with the same rank for the same job; None when there is none."""
        waiting = self._pending_jobs.get(FormationKey.of(hello), {}).values()
        identity = hello.rank, hello.compiling
        return next((uplink.key for uplink in waiting if (uplink.hello.rank, uplink.hello.compiling) == identity), None)

    def connection_ended(self, key: Hashable, now: float, cause: Cause | None = None) -> None:
        """A connection that was not yet admitted is over, because of `cause`."""
        if key in self._uplinks:
            uplink = self._remove(key)
            self._hang_up(uplink, cause or Cause(member_name(uplink.hello), "connection closed"))

    def _remove(self, key: Hashable) -> PendingUplink:
        """Remove a worker that does not wait any more."""
        uplink = self._uplinks.pop(key)
        waiting = self._pending_jobs.get(uplink.formation_key, {})
        waiting.pop(key, None)  # a rank that refuses a group does not wait
        if not waiting:
            self._pending_jobs.pop(uplink.formation_key, None)
        if uplink.welcome is not None:
            key_and_generation = uplink.formation_key, uplink.welcome.generation
            self._welcome[key_and_generation] -= 1
            if not self._welcome[key_and_generation]:
                del self._welcome[key_and_generation]
        return uplink

    def departed(self, generation: int, rank: int) -> None:
        """A rank of a running generation has left."""

    def finished(self, generation: int, now: float) -> None:
        """A running generation is over; its ranks may still be leaving."""
        self._running.pop(generation, None)

    def released(self, generation: int) -> None:
        """A generation that is over has given back its memory and its connections."""
        self._in_memory.pop(generation, None)

    def expire(self, now: float) -> Iterator[AdmissionEffect]:
        """Time has passed: try once more to reach the upstream, or give up."""
        for uplink in [uplink for uplink in self._uplinks.values() if uplink.link is None]:
            if now - uplink.since >= self._limits.join_timeout_s:
                yield self._refuse(uplink, f"could not be reached: {uplink.failure or 'no answer'}", temporary=True)
            elif uplink.retry_at is not None and now >= uplink.retry_at:
                self._connect(uplink)

    @property
    def gathers(self) -> int:
        """The number of pending jobs."""
        return len(self._pending_jobs)

    def pending_jobs(self, now: float) -> list[JobStatus]:
        """The jobs whose ranks are not all here."""
        return [status_of(list(uplinks.values()), now) for uplinks in self._pending_jobs.values()]

    @property
    def hellos_in_memory(self) -> list[Hello]:
        """A hello of each job that runs, or whose ranks are still leaving."""
        return list(self._in_memory.values())

    def end(self, is_meant: Callable[[Hello], bool], reason: str, now: float) -> Iterator[AdmissionEffect]:
        """Jobs whose hellos match are ended: refuse the workers that wait for them, and workers that come again."""
        for hello in [*self._running.values(), *(uplink.hello for uplink in self._uplinks.values())]:
            if is_meant(hello):
                self.intake.end(hello, reason, now)
        for uplink in [uplink for uplink in self._uplinks.values() if is_meant(uplink.hello)]:
            yield from self._turn_away(uplink, reason)

    def turn_away(self) -> Iterator[AdmissionEffect]:
        """Admit nobody any more."""
        self.intake.close()
        for uplink in list(self._uplinks.values()):
            yield from self._turn_away(uplink, SHUTTING_DOWN, temporary=True)

    def _turn_away(self, uplink: PendingUplink, reason: str, *, temporary: bool = False) -> Iterator[AdmissionEffect]:
        yield Answer(uplink.key, Refused(reason, temporary))
        self.connection_ended(uplink.key, self._clock(), Cause(f"aggregator {self._name}", reason))

    def close(self) -> None:
        """The shard ends: stop all attempts to connect."""
        self._upstream.close()

    # uplinks

    def _connect(self, uplink: PendingUplink) -> None:
        uplink.retry_at = None
        done = partial(self._connected, uplink)
        uplink.give_up = self._upstream.connect(uplink.address, self._limits.join_timeout_s, done)

    def _connected(self, uplink: PendingUplink, outcome: Link | str) -> None:
        if self._uplinks.get(uplink.key) is not uplink:  # it has gone meanwhile
            if isinstance(outcome, Link):
                outcome.close()
            return
        if isinstance(outcome, str):
            self._try_again(uplink, outcome)
            return
        try:
            self._begin_uplink(uplink, outcome)
        except Exception as error:
            self._refuse_after_error(uplink, error)

    def _begin_uplink(self, uplink: PendingUplink, outcome: Link) -> None:
        uplink.link = outcome
        self._selector.register(outcome, selectors.EVENT_READ, partial(self._read_upstream, uplink))
        secret = self._secret_of(uplink.hello.team)
        if secret is not None and secret.team != uplink.hello.team:
            self._answer([self._refuse(uplink, f"cannot be asked: there is no team '{uplink.hello.team}' any more")])
        else:
            uplink.request = JoinRequest(self._upstream_hello(uplink.hello), secret, secrets.token_bytes(NONCE_BYTES))
            outcome.send_control(encode_control(uplink.request.first))

    def _try_again(self, uplink: PendingUplink, reason: str) -> None:
        """The upstream has not heard of this worker yet: connect once more, after a pause."""
        if uplink.link is not None:
            self._selector.unregister(uplink.link)
            uplink.link.close()
        uplink.link = uplink.request = None
        uplink.retry_at = self._clock() + RETRY_S
        if reason != uplink.failure:
            uplink.failure = reason
            note = f"aggregator {uplink.address}, the upstream of relay {self._name}, could not be reached: {reason}"
            log.warning("%s", note, extra=tagged("upstream_unreachable", upstream=uplink.address))
            self._answer([Answer(uplink.key, Pending([], 0, note[:TEXT_CHARACTERS]))])
        else:
            self._answer(())

    def _upstream_hello(self, hello: Hello) -> Hello:
        """The hello of a worker as the upstream gets it."""
        # Ranks that come through different relays must not count as one host, because a host sends a single sum.
        memory = hello.memory and hashlib.blake2b(hello.memory.encode(), key=self._key, digest_size=16).hexdigest()
        return replace(hello, verbs=None, team="", memory=memory, relays=(self._name, *hello.relays), relay=self._key)

    def _read_upstream(self, uplink: PendingUplink) -> None:
        """Handle messages of the upstream to a worker that has not been admitted here."""
        link = uplink.link
        assert link is not None
        try:
            for event in link.poll():
                if self._uplinks.get(uplink.key) is uplink:
                    self._answer(self._handle_event(uplink, event))
            if self._uplinks.get(uplink.key) is uplink and uplink.welcome is not None:
                self._answer(self._begin(uplink, uplink.welcome))
        except Exception as error:
            self._refuse_after_error(uplink, error)

    def _refuse_after_error(self, uplink: PendingUplink, error: Exception) -> None:
        """Refuse this worker after an unexpected error, such as no memory or a bug. Other workers keep their places."""
        log.exception("a worker behind this relay is refused: %s", error, extra=tagged("internal_error"))
        if self._uplinks.get(uplink.key) is uplink:
            self._answer([self._refuse(uplink, f"could not be served by the relay: {error!r}", temporary=True)])

    def _handle_event(self, uplink: PendingUplink, event: object) -> Iterator[AdmissionEffect]:
        try:
            if isinstance(event, Lost) and event.violation:
                raise ProtocolError(f"broke the rules: {event.reason}")
            if isinstance(event, Lost):
                yield from self._lost(uplink, event.reason)
                return
            if not isinstance(event, Control):
                raise ProtocolError("sent blocks before its welcome")
            yield from self._handle_control(uplink, decode_control(event.body))
        except ProtocolError as error:
            yield self._refuse(uplink, str(error))

    def _lost(self, uplink: PendingUplink, reason: str) -> Iterator[AdmissionEffect]:
        if not uplink.has_said_hello:
            self._try_again(uplink, f"{reason} before the hello")
        else:
            yield self._refuse(uplink, f"{reason} before it had admitted this worker", temporary=True)

    def _handle_control(self, uplink: PendingUplink, message: ControlMessage) -> Iterator[AdmissionEffect]:
        """Go on with the handshake, or pass on what the upstream says. Raises ProtocolError."""
        assert uplink.link is not None
        assert uplink.request is not None
        if uplink.has_said_hello and isinstance(message, Welcome) and not message.relayed:
            raise ProtocolError("does not know that this is a relay")
        answer = uplink.request.answer(message)
        if answer is not None:
            uplink.link.send_control(encode_control(answer))
        elif isinstance(message, Pending | Newcomers):
            yield Answer(uplink.key, message)
        elif isinstance(message, Waiting):
            yield Answer(uplink.key, message.with_sender(uplink.address))
        elif isinstance(message, Refused):
            yield self._refused(uplink, message)
        elif isinstance(message, Aborted):
            self.connection_ended(uplink.key, self._clock())
            yield Answer(uplink.key, message)
        elif isinstance(message, Welcome):
            self._welcome[uplink.formation_key, message.generation] += 1

    def _refused(self, uplink: PendingUplink, message: Refused) -> Answer:
        """The upstream refuses this worker. If it passes on the refusal of another aggregator, the message names that
        one already."""
        if f"{UPSTREAM_OF} " in message.reason:
            self.connection_ended(uplink.key, self._clock())
            return Answer(uplink.key, message)
        return self._refuse(uplink, f"refused: {message.reason}", temporary=message.temporary)

    def _begin(self, uplink: PendingUplink, welcome: Welcome) -> Iterator[AdmissionEffect]:
        """Begin the job if all workers that come through this relay are welcome."""
        if self._welcome[uplink.formation_key, welcome.generation] < welcome.relayed:
            return
        members = [
            (member, member_welcome, member.link)
            for member in self._pending_jobs[uplink.formation_key].values()
            if (member_welcome := member.welcome) is not None
            and member.link is not None
            and member_welcome.generation == welcome.generation
        ]
        members.sort(key=lambda entry: assigned_rank(entry[0].hello, entry[1]))
        hellos = [with_assigned_rank(member.hello, member_welcome) for member, member_welcome, _ in members]
        job_hello = replace(hellos[0], world_size=len(members))
        answers = {
            (member_welcome.relayed, member_welcome.whole_bytes, member_welcome.hosts)
            for _, member_welcome, _ in members
        }
        wrong = "told the ranks of one job different things"
        if len(answers) == 1 and len({hello.rank for hello in hellos}) == len(hellos) == welcome.relayed:
            wrong = self._limits.exceeded_alone(job_hello)
            wrong = wrong and f"has admitted more than this relay may take: {wrong}"
        if wrong:
            for member, *_ in members:
                yield self._refuse(member, wrong, temporary=True)
            return
        generation, self._next_generation = self._next_generation, self._next_generation + 1
        for member, _, link in members:
            self._remove(member.key)
            self._selector.unregister(link)
        self._running[generation] = self._in_memory[generation] = job_hello
        self.intake.job_begins(job_hello)
        relayed = Relayed(
            uplink.address, [member_welcome for _, member_welcome, _ in members], [link for *_, link in members]
        )
        yield Admit(generation, uplink.hello.job, [member.key for member, *_ in members], hellos, relayed)

    def _refuse(self, uplink: PendingUplink, reason: str, *, temporary: bool = False) -> Answer:
        self.connection_ended(
            uplink.key, self._clock(), Cause(f"aggregator {uplink.address}", reason[:TEXT_CHARACTERS])
        )
        text = f"aggregator {uplink.address}, {UPSTREAM_OF} {self._name}, {reason}"
        return Answer(uplink.key, Refused(text[:TEXT_CHARACTERS], temporary))

    def _hang_up(self, uplink: PendingUplink, cause: Cause) -> None:
        link = uplink.link
        uplink.give_up()
        if link is None:
            return
        if uplink.has_said_hello:  # the upstream may have begun the job
            link.send_control(encode_control(Leave(cause)))
        self._selector.unregister(link)
        link.close()
