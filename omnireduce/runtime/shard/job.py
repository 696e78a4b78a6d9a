"""A generation of a job on an aggregator shard: its slot memory, its links, its machine and their driver."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from omnireduce.core.dtypes import Array
from omnireduce.core.status_messages import LISTED, MAX_TOTAL, JobKey, JobRelay, JobStatus, Stragglers, Traffic
from omnireduce.core.wire.control import (
    TOKEN_BYTES,
    Aborted,
    Cause,
    ControlMessage,
    Hello,
    Leave,
    Welcome,
    encode_control,
)
from omnireduce.core.wire.safe_text import shown
from omnireduce.errors import CodecError, TransportError
from omnireduce.kernels.codecs.table import BUILT_IN, Codecs
from omnireduce.protocol.collective.block_programs import ShardStates
from omnireduce.protocol.collective.effects import AbortKind, End, Warn
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.reduction import Budget, Reduction
from omnireduce.protocol.host.local_ranks import delegates_of, readers_of
from omnireduce.protocol.joining.admission import members_of, welcomes_of, with_places
from omnireduce.protocol.joining.pending_job import member_name
from omnireduce.protocol.relay import RelayMachine
from omnireduce.protocol.shard import BUDGET, ShardMachine
from omnireduce.protocol.sharding import Sharding
from omnireduce.runtime.driver import Clock, Driver
from omnireduce.runtime.file_descriptors import NO_DESCRIPTORS
from omnireduce.runtime.shard.traced import ShardTraces
from omnireduce.support.config import Verbs
from omnireduce.support.logs import BoundLog, tagged
from omnireduce.transport.base import NO_SLOTS, Link
from omnireduce.transport.rdma_offer import take_offer
from omnireduce.transport.slot_memory import Region

log = logging.getLogger("omnireduce.aggregator")
WARN_AFTER_S = 1.0  # if a collective stands still for longer, all ranks are told whom they wait for


def start_failure_text(error: Exception, job: str) -> tuple[str, bool]:
    """The text for the ranks of a job that could not be made, and whether it may be possible later."""
    if isinstance(error, OSError | MemoryError):
        lack = "descriptors" if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS else "memory"
        return f"the aggregator has no {lack} for this job: {error}", True
    fields = tagged("internal_error", job=job)
    log.exception("internal error at the start of a job; please report it", extra=fields)
    return "internal error; the log of the aggregator has the details", False


def failure_text(error: Exception, job: ShardJob | None) -> str:
    """The text for the ranks of a job, or for a newcomer, after an unexpected error; the log gets the details."""
    logger, subject = log if job is None else job.log, job or "a newcomer"
    if isinstance(error, MemoryError):
        logger.error("out of memory while serving %s: %s", subject, error, extra=tagged("out_of_memory"))
        return f"out of memory: {error}".rstrip(": ")
    if isinstance(error, CodecError):
        logger.error("%s: %s", subject, error, exc_info=error.__cause__, extra=tagged("codec_failed"))
        return str(error)
    logger.exception("internal error while serving %s; please report it", subject, extra=tagged("internal_error"))
    return "internal error; its log has the details"


class JobUpstream(NamedTuple):
    """The upstream of a relay's job: its address, the Welcome of each member, and the member's uplink."""

    address: str
    welcomes: Sequence[Welcome]
    uplinks: Sequence[Link]


# Makes a job on a server from its generation, name, links, hellos and upstream. Raises OSError and MemoryError.
JobFactory = Callable[[int, str, Sequence[Link], Sequence[Hello], JobUpstream | None], "ShardJob"]


class ShardJob:
    """A job whose ranks are all there. It tells each rank so, once nothing can fail any more. `links[r]` and
    `hellos[r]` belong to rank r. On a relay they belong to its member r, and `upstream` is its upstream: the uplinks
    follow in `links`. Raises OSError and MemoryError.

    `shards`: the number of shards of the daemon. After `straggler_s` without a result the log names the ranks that a
    collective waits for. Blocks may travel by `codecs`.
    """

    def __init__(
        self,
        generation: int,
        name: str,
        links: Sequence[Link],
        hellos: Sequence[Hello],
        upstream: JobUpstream | None = None,
        *,
        clock: Clock,
        on_end: Callable[[ShardJob, End], None],
        verbs: Verbs | None = None,
        straggler_s: float = WARN_AFTER_S,
        traces: ShardTraces | None = None,
        budget: Budget = BUDGET,
        codecs: Codecs = BUILT_IN,
        shards: int = 0,
    ) -> None:
        self._codecs = codecs
        self.log = BoundLog(
            logging.getLogger("omnireduce.aggregator"), job=name, generation=generation, team=hellos[0].team or None
        )
        self._clock, self._straggler_s, self._budget = clock, straggler_s, budget
        self.work_limit = budget.work  # the limit for its next turn: see `Scheduler`
        self.generation, self.name, self.links, self._members = generation, name, list(links), len(links)
        self._since, self._spec, self._upstream = clock(), hellos[0], upstream
        relays = Counter(hello.relays[0] for hello in hellos if hello.relays)
        self._relays = [JobRelay(*relay) for relay in list(relays.items())[:LISTED]]
        if upstream is None:
            welcomes = welcomes_of(generation, hellos, partial(secrets.token_bytes, TOKEN_BYTES))
            welcomes = [replace(welcome, shards=shards) for welcome in welcomes]
        else:
            welcomes = with_places(
                [replace(welcome, verbs=None, note="", shards=0) for welcome in upstream.welcomes], hellos
            )
        slots, slot_bytes, ranks = self._spec.slots, self._spec.slot_bytes, len(links)
        with ExitStack() as undo:
            self._trace = None if traces is None else undo.enter_context(traces.begin(name, hellos[0]))
            self._arena = undo.enter_context(closing(Region(ranks * slots, slot_bytes)))
            self._results = undo.enter_context(closing(Region(slots, slot_bytes)))
            welcomes = [self._attach(rank, hello, verbs, welcomes[rank], undo) for rank, hello in enumerate(hellos)]
            attached = self.links
            if self._trace is not None:
                self.links = self._trace.links(attached)
            self.machine = self._make_machine(hellos, welcomes, undo)
            self.driver = Driver(
                self.machine, self.links, clock, on_end=lambda end: on_end(self, end), on_warn=self._warn
            )
            undo.pop_all()
        for link, welcome in zip(attached, welcomes, strict=True):  # all ranks are there
            link.send_welcome(encode_control(welcome), self._arena, self._results)
        transport = "+".join(sorted({link.kind for link in self.links[:ranks]}))  # tensors may go through memory
        started = tagged("job_started", world_size=ranks, transport=transport)
        self.log.info("%s: %d ranks joined by %s", self, ranks, transport, extra=started)

    def _make_machine(self, hellos: Sequence[Hello], welcomes: Sequence[Welcome], undo: ExitStack) -> ShardMachine:
        over_tcp = [
            hello.tcp_message_bytes
            for link, hello in zip(self.links, hellos, strict=True)
            if link.inline or self._upstream is not None
        ]
        spec, members = self._spec, members_of(welcomes, hellos)
        hosts = max(1 if member.host is None else member.host.hosts for member in members)
        has_relays = self._upstream is not None or any(hello.relay for hello in hellos)
        make = partial(
            ShardMachine if self._upstream is None else self._relay_machine_maker(self._upstream, undo),
            [member_name(hello) for hello in hellos], self._arena.slots, self._results.slots,
        )  # fmt: skip
        return make(
            sizing=MessageSizing.for_network(min(over_tcp)) if over_tcp else None,
            shard=spec.shard,
            sharding=Sharding.among(hosts, spec.shards, spec.stripe_blocks, welcomes[0].whole_bytes, spec.slot_bytes),
            delegates=delegates_of(members, spec.shard),
            readers=readers_of(members) if has_relays else None,
            inline=[] if has_relays else [rank for rank, link in enumerate(self.links) if link.inline],
            warn_after_s=min([WARN_AFTER_S, *(hello.timeout_s / 2 for hello in hellos)]),
            budget=self._budget,
            make_reduction=Reduction if self._trace is None else self._trace.reduction,
            numbers=[hello.rank for hello in hellos],
            codecs=self._codecs,
            states=ShardStates(spec.state_bytes),
        )

    def _relay_machine_maker(self, upstream: JobUpstream, undo: ExitStack) -> Callable[..., ShardMachine]:
        """Give the uplinks their slots; return the function that makes the machine of a relay."""
        self._sums = undo.enter_context(closing(Region(*self._results.slots.shape)))
        for member, link in enumerate(upstream.uplinks):
            slots = (self._rows_of(member), NO_SLOTS) if member else (self._sums.slots, self._results.slots)
            link.attach(*slots)
            undo.callback(link.attach, NO_SLOTS, NO_SLOTS)
        self.links = [*self.links, *upstream.uplinks]
        first_welcome = upstream.welcomes[0]
        in_memory = bool(first_welcome.local_ranks) and first_welcome.hosts == 1
        return partial(RelayMachine, sums=self._sums.slots, upstream=upstream.address, in_memory=in_memory)

    def _attach(self, rank: int, hello: Hello, verbs: Verbs | None, welcome: Welcome, undo: ExitStack) -> Welcome:
        """Give the rank's link its slots, over RDMA if both ends can; return the welcome for the rank."""
        link = self.links[rank]
        send_slots = self._results.slots
        receive_slots = self._rows_of(rank)
        if hello.verbs is not None:
            try:
                endpoint, over_verbs = take_offer(link, hello.verbs, verbs, send_slots, receive_slots)
                undo.callback(over_verbs.release)  # not closed: by its control connection the rank hears the reason
                self.links[rank] = over_verbs
                return replace(welcome, verbs=endpoint)
            except TransportError as error:
                self.log.info(
                    "%s: rank %d by %s, not verbs: %s",
                    self,
                    rank,
                    link.kind,
                    error,
                    extra=tagged("no_verbs", rank=rank),
                )
                welcome = replace(welcome, note=str(error))
        link.attach(send_slots, receive_slots)
        undo.callback(link.release)
        return welcome

    def _rows_of(self, rank: int) -> Array:
        """The receive slots of a rank."""
        slots: Array = self._arena.slots[rank * self._spec.slots : (rank + 1) * self._spec.slots]
        return slots

    def _warn(self, warning: Warn) -> None:
        wait = self.machine.waiting(self._clock())
        if warning.still_s >= self._straggler_s:
            fields = tagged("stood_still", seconds=round(warning.still_s, 1))
            self.log.warning("%s: %s", self, warning.text, extra=fields)
        elif not warning.still_s and wait is not None and wait.seconds >= self._straggler_s:
            awaited: dict[str, object] = (
                {"rank": wait.ranks[0]} if len(wait.ranks) == 1 else {"ranks": wait.ranks[:LISTED]}
            )
            fields = tagged("waiting", **awaited, seconds=round(wait.seconds, 1))
            self.log.warning("%s: %s", self, warning.text, extra=fields)

    def log_end(self, end: End) -> None:
        """Log why the job is over."""
        if end.cause is None:
            self.log.info("%s ended: all ranks left", self, extra=tagged("job_ended", carried=self.carried))
            return
        culprit, reason = shown(end.cause.culprit), shown(end.cause.reason)
        ended = tagged("job_ended", cause=end.kind, rank=end.rank, culprit=culprit, carried=self.carried)
        self.log.warning("%s ended: %s: %s", self, culprit, reason, extra=ended)

    def abort(self, cause: Cause, kind: AbortKind) -> None:
        """End the job on every rank."""
        self.driver.perform(self.machine.abort(cause, kind))

    def tell(self, message: ControlMessage) -> None:
        """Send a message to all ranks, except ranks that have not read for long."""
        for link in self.links[: self._members]:
            if not link.clogged:
                link.send_control(encode_control(message))

    def is_member(self, peer: int) -> bool:
        """Whether this peer is a rank, and not an uplink."""
        return peer < self._members

    def break_off(self, cause: Cause) -> None:
        """Tell all peers that the job is over, without the machine."""
        self.tell(Aborted(cause))
        for link in self.links[self._members :]:
            link.send_control(encode_control(Leave(cause)))

    @property
    def team(self) -> str:
        return self._spec.team

    @property
    def traffic(self) -> Traffic:
        """Totals since the job began."""
        traffic, members = self.machine.account.total(), self._members
        traffic.received_bytes += sum(link.counters.received_bytes for link in self.links[:members])
        traffic.sent_bytes += sum(link.counters.sent_bytes for link in self.links[:members])
        traffic.up_received_bytes += sum(link.counters.received_bytes for link in self.links[members:])
        traffic.up_sent_bytes += sum(link.counters.sent_bytes for link in self.links[members:])
        return traffic

    @property
    def carried(self) -> dict[str, int]:
        """Bytes of tensors since the job began, by the kind that carried them."""
        carried = Counter(memory=min(self.machine.account.memory_bytes, MAX_TOTAL))
        for link in self.links[: self._members]:
            carried[link.kind] += link.counters.message_bytes
        return dict(+carried)

    @property
    def key(self) -> JobKey:
        """The key of its status."""
        return self.name, self.generation, self._spec.launch

    def status(self, now: float) -> JobStatus:
        """The status of the job."""
        machine, spec = self.machine, self._spec
        present = [rank for rank in range(self._members) if not machine.has_left(rank)]
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
            carried=self.carried,
            traffic=self.traffic,
            slots=spec.slots * self._members,
            slots_in_use=in_use,
            results=spec.slots,
            results_in_use=results_in_use,
            waiting=wait and Stragglers(wait.what, wait.ranks[:LISTED], wait.total, wait.who, wait.seconds),
            late=machine.account.late[:LISTED],
            upstream="" if self._upstream is None else self._upstream.address,
            relays=self._relays,
        )

    def __str__(self) -> str:
        return f"job '{self.name}' generation {self.generation}"

    def close(self) -> None:
        """Close the links, give the memory back and write the trace, if there is one."""
        for link in self.links:
            link.drop()
        self._arena.close()
        self._results.close()
        if self._upstream is not None:
            self._sums.close()
        if self._trace is not None:
            self._trace.close()
        # They refer to this job: otherwise the cycle collector would have to free the slots.
        del self.driver, self.machine
