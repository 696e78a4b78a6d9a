"""One generation of a job on an aggregator shard: its slot memory, its links, its machine and their driver."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from omnireduce.config import Verbs
from omnireduce.dtypes import Array
from omnireduce.errors import TransportError
from omnireduce.logs import BoundLog, tagged
from omnireduce.protocol.aggregator import BUDGET, AggregatorMachine
from omnireduce.protocol.effects import AbortKind, End, Warn
from omnireduce.protocol.gathering import member_name
from omnireduce.protocol.hosts import Dealing, hosts_of
from omnireduce.protocol.lengths import Lengths
from omnireduce.protocol.reduction import Budget, Reduction
from omnireduce.runtime.driver import Clock, Driver
from omnireduce.runtime.reserve import NO_DESCRIPTORS
from omnireduce.runtime.shard.traced import ShardTraces
from omnireduce.status import LISTED, JobKey, JobStatus, Stragglers, Traffic
from omnireduce.transport.base import NO_SLOTS, Link
from omnireduce.transport.memory import Region
from omnireduce.transport.shm import ShmLink
from omnireduce.transport.tcp import TcpLink
from omnireduce.wire.control import (
    TOKEN_BYTES,
    Cause,
    ControlMessage,
    Endpoint,
    Hello,
    Seat,
    Welcome,
    encode_control,
)
from omnireduce.wire.words import shown

if TYPE_CHECKING:
    from omnireduce.transport.verbs.link import VerbsLink

log = logging.getLogger("omnireduce.aggregator")
WARN_AFTER_S = 1.0  # how long a collective may stand still before all ranks are told whom they wait for


def why_not_started(error: Exception, job: str) -> tuple[str, bool]:
    """What to tell the ranks of a job that could not be made, and whether it may be possible later."""
    if isinstance(error, OSError | MemoryError):
        what = "descriptors" if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS else "memory"
        return f"the aggregator has no {what} for this job: {error}", True
    failed = tagged("internal_error", job=job)
    log.exception("internal error at the start of a job; please report it", extra=failed)
    return "internal error; the log of the aggregator has the details", False


def why_broken_off(error: Exception, job: Job | None) -> str:
    """What to tell the ranks of a job, or a newcomer, whose service failed; the log gets the details."""
    about, what = log if job is None else job.log, job or "a newcomer"
    if isinstance(error, MemoryError):
        about.error("out of memory while serving %s: %s", what, error, extra=tagged("out_of_memory"))
        return f"out of memory: {error}".rstrip(": ")
    about.exception("internal error while serving %s; please report it", what, extra=tagged("internal_error"))
    return "internal error; its log has the details"


class JobFactory(Protocol):
    """How a server makes a job of what differs between its jobs. Raises OSError and MemoryError."""

    def __call__(self, generation: int, name: str, links: Sequence[Link], hellos: Sequence[Hello], /) -> Job: ...


class Job:
    """Made when all ranks are there; tells each rank so, once nothing can fail any more. `links[r]` and `hellos[r]`
    belong to rank r. Raises OSError and MemoryError.

    After `straggler_s` without a result the log names the ranks that a collective waits for.
    """

    def __init__(
        self,
        generation: int,
        name: str,
        links: Sequence[Link],
        hellos: Sequence[Hello],
        *,
        clock: Clock,
        on_end: Callable[[Job, End], None],
        verbs: Verbs | None = None,
        straggler_s: float = WARN_AFTER_S,
        traces: ShardTraces | None = None,
        budget: Budget = BUDGET,
    ) -> None:
        self.log = BoundLog(
            logging.getLogger("omnireduce.aggregator"), job=name, generation=generation, team=hellos[0].team or None
        )
        self._clock, self._straggler_s, self._budget = clock, straggler_s, budget
        self.generation, self.name, self.links = generation, name, list(links)
        self._since, self._spec = clock(), hellos[0]
        self._whole_bytes = min(hello.whole_bytes for hello in hellos)
        slots, slot_bytes, ranks = self._spec.slots, self._spec.slot_bytes, len(links)
        self._hosts = hosts_of(hellos)
        self._host_of = {rank: host for host in self._hosts for rank in host.ranks}
        meet = self._hosts if self._spec.shard == 0 else []  # the first shard tells the ranks where
        self._meetings = {host.host: secrets.token_bytes(TOKEN_BYTES) for host in meet}
        with ExitStack() as undo:
            self._trace = None if traces is None else undo.enter_context(traces.begin(name, hellos[0]))
            self._arena = undo.enter_context(closing(Region(ranks * slots, slot_bytes)))
            self._results = undo.enter_context(closing(Region(slots, slot_bytes)))
            welcomes = [self._attach(rank, hello, verbs, undo) for rank, hello in enumerate(hellos)]
            attached = self.links
            if self._trace is not None:
                self.links = self._trace.links(attached)
            self.machine = self._make_machine(hellos)
            self.driver = Driver(
                self.machine, self.links, clock, on_end=lambda end: on_end(self, end), on_warn=self._warn
            )
            undo.pop_all()
        for link, welcome in zip(attached, welcomes, strict=True):
            self._welcome(link, welcome)
        self.transport = "+".join(sorted({link.kind for link in self.links}))
        started = tagged("job_started", world_size=ranks, transport=self.transport)
        self.log.info("%s: %d ranks joined by %s", self, ranks, self.transport, extra=started)

    def _make_machine(self, hellos: Sequence[Hello]) -> AggregatorMachine:
        over_tcp = [
            hello.tcp_message_bytes for link, hello in zip(self.links, hellos, strict=True) if link.kind == "tcp"
        ]
        spec, hosts = self._spec, len(self._hosts)
        return AggregatorMachine(
            [member_name(hello) for hello in hellos],
            self._arena.slots,
            self._results.slots,
            lengths=Lengths.up_to(min(over_tcp)) if over_tcp else None,
            shard=spec.shard,
            dealing=Dealing.among(hosts, spec.shards, spec.stripe_blocks, self._whole_bytes, spec.slot_bytes),
            delegates=[host.delegate(spec.shard) for host in self._hosts] if hosts > 1 else (),
            inline=[rank for rank, link in enumerate(self.links) if link.inline],
            warn_after_s=min([WARN_AFTER_S, *(hello.timeout_s / 2 for hello in hellos)]),
            budget=self._budget,
            reduction=Reduction if self._trace is None else self._trace.reduction,
        )

    def _attach(self, rank: int, hello: Hello, verbs: Verbs | None, undo: ExitStack) -> Welcome:
        """Give the rank's link its slots, over RDMA if both ends can; return what to say to the rank."""
        link, welcome = self.links[rank], Welcome(self.generation, whole_bytes=self._whole_bytes)
        if hello.shard == 0:
            welcome = replace(welcome, seat=Seat(rank, hello.world_size, hello.formation, hello.ticket))
        if rank in self._host_of:
            ranks, host, hosts = self._host_of[rank]
            welcome = replace(welcome, meeting=self._meetings.get(host), neighbours=ranks, host=host, hosts=hosts)
        send_slots = self._results.slots
        receive_slots = self._arena.slots[rank * len(send_slots) : (rank + 1) * len(send_slots)]
        if hello.verbs is not None and isinstance(link, TcpLink):
            try:
                endpoint, over_verbs = _by_verbs(link, hello.verbs, verbs, send_slots, receive_slots)
                undo.callback(over_verbs.release)  # not closed: by its control connection the rank hears the reason
                self.links[rank] = over_verbs
                return replace(welcome, verbs=endpoint)
            except TransportError as error:
                self.log.info(
                    "%s: rank %d by tcp, not verbs: %s", self, rank, error, extra=tagged("no_verbs", rank=rank)
                )
                welcome = replace(welcome, note=str(error))
        link.attach(send_slots, receive_slots)
        undo.callback(link.attach, NO_SLOTS, NO_SLOTS)
        return welcome

    def _welcome(self, link: Link, welcome: Welcome) -> None:
        """Tell the rank that all are here."""
        if isinstance(link, ShmLink):
            link.send_control_with_memory(encode_control(welcome), self._arena.fd, self._results.fd)
        else:
            link.send_control(encode_control(welcome))

    def _warn(self, warning: Warn) -> None:
        wait = self.machine.waiting(self._clock())
        if warning.still_s >= self._straggler_s:
            still = tagged("stood_still", seconds=round(warning.still_s, 1))
            self.log.warning("%s: %s", self, warning.text, extra=still)
        elif not warning.still_s and wait is not None and wait.seconds >= self._straggler_s:
            who: dict[str, object] = {"rank": wait.ranks[0]} if len(wait.ranks) == 1 else {"ranks": wait.ranks[:LISTED]}
            waiting = tagged("waiting", **who, seconds=round(wait.seconds, 1))
            self.log.warning("%s: %s", self, warning.text, extra=waiting)

    def log_end(self, end: End) -> None:
        """Say why the job is over."""
        if end.cause is None:
            self.log.info("%s ended: all ranks left", self, extra=tagged("job_ended"))
            return
        culprit, reason = shown(end.cause.culprit), shown(end.cause.reason)
        ended = tagged("job_ended", cause=end.kind, rank=end.rank, culprit=culprit)
        self.log.warning("%s ended: %s: %s", self, culprit, reason, extra=ended)

    def abort(self, cause: Cause, kind: AbortKind) -> None:
        """End the job on every rank."""
        self.driver.perform(self.machine.abort(cause, kind))

    def tell(self, message: ControlMessage) -> None:
        """Say something to all ranks, but to those that have long read nothing."""
        for link in self.links:
            if not link.clogged:
                link.send_control(encode_control(message))

    @property
    def team(self) -> str:
        return self._spec.team

    @property
    def traffic(self) -> Traffic:
        """Totals since the job began."""
        found = self.machine.account.total()
        found.received_bytes += sum(link.counters.received_bytes for link in self.links)
        found.sent_bytes += sum(link.counters.sent_bytes for link in self.links)
        return found

    @property
    def key(self) -> JobKey:
        """That of its status."""
        return self.name, self.generation, self._spec.launch

    def status(self, now: float) -> JobStatus:
        """How the job is doing."""
        machine, spec = self.machine, self._spec
        present = [rank for rank in range(spec.world_size) if not machine.has_left(rank)]
        in_use, results_in_use = machine.slots_in_use
        wait = machine.waiting(now)
        return JobStatus(
            name=self.name,
            team=self.team,
            generation=self.generation,
            launch=spec.launch,
            world_size=spec.world_size,
            joined=len(present),
            age_s=now - self._since,
            transport=self.transport,
            traffic=self.traffic,
            slots=spec.slots * spec.world_size,
            slots_in_use=in_use,
            results=spec.slots,
            results_in_use=results_in_use,
            waiting=wait and Stragglers(wait.what, wait.ranks[:LISTED], wait.total, wait.who, wait.seconds),
            late=machine.account.late[:LISTED],
        )

    def __str__(self) -> str:
        return f"job '{self.name}' generation {self.generation}"

    def close(self) -> None:
        """Close the links, give the memory back and write the trace, if there is one."""
        for link in self.links:
            link.drop()
        self._arena.close()
        self._results.close()
        if self._trace is not None:
            self._trace.close()
        # They refer to this job: without this the slots would wait for the cycle collector.
        del self.driver, self.machine


def _by_verbs(
    control: TcpLink, offered: Endpoint, settings: Verbs | None, send_slots: Array, receive_slots: Array
) -> tuple[Endpoint, VerbsLink]:
    """Answer a worker's offer of RDMA. Raises TransportError, and OSError when there are no descriptors left."""
    if settings is None:
        raise TransportError("the aggregator's transport.kind does not allow verbs")
    from omnireduce.transport.verbs.connect import answer  # needs pyverbs

    return answer(control, settings, offered, send_slots, receive_slots)
