"""The rank's machine: packs tensors into messages for every shard, scatters results, keeps collectives in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import largest_block
from omnireduce.core.wire.control import Aborted, Cause, ControlMessage, Goodbye, Leave, Newcomers, Waiting
from omnireduce.core.wire.safe_text import listed
from omnireduce.errors import ProtocolError
from omnireduce.kernels.codecs.base import Codec
from omnireduce.protocol.collective.collective import Collective, sum_of_host
from omnireduce.protocol.collective.dense_operands import Operand
from omnireduce.protocol.collective.effects import Effect, End, Finish, ReturnCredit, SendControl, Wake, Warn
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.mismatches import MismatchError
from omnireduce.protocol.collective.shard_threads import ShardThreads, ThreadPool
from omnireduce.protocol.collective.stream import ShardStream
from omnireduce.protocol.host.exchange import BY_ITSELF, FAILED, RETIRED, HostExchange
from omnireduce.protocol.host.faults import HostError, ShortageError
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.rank_deadline import CollectiveDeadline
from omnireduce.protocol.stalls import wait_text

WARN_AFTER_S = 1.0  # a wait in memory of this length makes this rank say whom it waits for
REPORT_S = 1.0  # the least time between two reports of finished collectives


class RankMachine:
    """All collectives of one rank, over all shards, in the order of submission.

    `slots[i]` are the send and receive slots of shard i, each uint8 (slots, slot bytes); `addresses[i]` names the shard
    in errors; `me` names this rank, whose number is `rank`. `sizing[i]`: the length of messages to shard i; without
    it they are as long as a slot. A collective that takes longer than `timeout_s` ends the job.

    `host`: the exchange of tensors in memory with the other ranks of this host, `local_ranks`. If the job has no other
    ranks, shards get no tensors. Else one rank of each host sends the sum of the host. `threads` work for the shards.
    """

    def __init__(
        self, slots: Sequence[tuple[Array, Array]], addresses: Sequence[str], me: str,
        *,
        rank: int,
        scan_span: int,
        timeout_s: float,
        sizing: Sequence[MessageSizing] = (),
        host: HostExchange | None = None,
        local_ranks: LocalRanks | None = None,
        threads: ThreadPool | None = None,
    ) -> None:  # fmt: skip
        message_sizes = sizing or [MessageSizing(send.shape[1], send.shape[1]) for send, _ in slots]
        self._streams = [ShardStream(i, *both, scan_span, message_sizes[i]) for i, both in enumerate(slots)]
        self.rank, self.host = rank, host
        self._local_ranks = local_ranks or LocalRanks((rank,))
        largest = [largest_block(send.shape[1]) for send, _ in slots]
        self.largest_block_bytes = min([*largest, *([host.largest_block_bytes] if host is not None else [])])
        self._addresses, self._me, self.timeout_s = addresses, me, timeout_s
        self._collective_deadline = CollectiveDeadline(me, addresses, timeout_s)
        self._under_way: deque[Collective] = deque()
        self.shard_threads = ShardThreads(threads, self._streams, self._under_way) if threads is not None else None
        self._next_number, self._waiting_for = 0, ""
        self._warned_at_s = self._wait_reported_at = self._report_at = self._fault_at = 0.0
        self._was_summed_by_host = True  # the ranks of each host summed the collective before the oldest one first
        # The last report said whom this rank waits for: when the wait ends, it reports again.
        self._reported_wait = False
        self._fault: Cause | None = None  # the reason to end the job that the memory of the host shows
        self._goodbyes: set[int] = set()
        self._retired: dict[int, Cause] = {}  # shards that stopped between two collectives
        self._unlinked: set[int] = set()  # the retired shards whose link is over
        self.newcomers = 0  # workers that wait to join the job, by the last message of a shard
        self.ended: End | None = None

    @property
    def submitted(self) -> int:
        """The number of collectives submitted so far."""
        return self._next_number

    @property
    def under_way(self) -> int:
        """The number of unfinished collectives."""
        return len(self._under_way)

    @property
    def deadline(self) -> float | None:
        """The time to call `timer`, if nothing happens before; None: never."""
        if not self._under_way or self.ended is not None:
            return None
        if self._ends_for_fault:
            return self._fault_at
        return (
            self._collective_deadline.ends_at
            if self.host is None
            else min(self._collective_deadline.ends_at, self._warn_at(self.host))
        )

    @property
    def _ends_for_fault(self) -> bool:
        """Whether this rank ends the job for the fault in `_fault`: no other rank of the host has ended it yet."""
        return self._fault is not None and not self._host_has_ended_job

    def _warn_at(self, host: HostExchange) -> float:
        """The time to say whom this rank waits for. It says so again each time that the wait has doubled."""
        if not host.is_busy:
            return self._collective_deadline.ends_at
        return host.moved_at + max(min(WARN_AFTER_S, self.timeout_s / 2), 2 * (self._wait_reported_at - host.moved_at))

    @property
    def said_goodbye(self) -> bool:
        """Every shard has confirmed that this rank left."""
        return len(self._goodbyes) == len(self._streams)

    def submit(self, descriptor: Descriptor, operand: Operand, now: float, codec: Codec | None = None) -> int:
        """Queue a collective, whose blocks are encoded by `codec`, and return its number."""
        assert self.ended is None, "submit after the end"
        collective = self._new_collective(descriptor, operand)
        if codec is not None:
            collective.use(codec)
        streams = self._streams_for(collective)
        collective.parts_left = len(streams) + (0 if self.host is None else self.host.submit(collective, now))
        self._next_number += 1
        if not self._under_way:
            self._collective_deadline.begin(now)
        for stream in self._streams if not self._under_way else ():
            # The shard's last wait is over, or was most likely for the collective that begins here.
            stream.waiting = None
        for stream in streams:
            stream.submit(collective)
        self._under_way.append(collective)
        return collective.number

    def _new_collective(self, descriptor: Descriptor, operand: Operand) -> Collective:
        if self._local_ranks.hosts == 1 or not descriptor.summed_by_host:
            return Collective(self._next_number, descriptor, operand, self.rank)
        host_sum = None if self.host is None else sum_of_host(operand)
        return Collective(self._next_number, descriptor, operand, self._local_ranks.host, host_sum=host_sum)

    def _streams_for(self, collective: Collective) -> list[ShardStream]:
        """The shards that this rank sends blocks to. All of them hear of a refusal, so that each knows the reason. None
        if all ranks are on one host."""
        if self.host is not None and self._local_ranks.hosts == 1:
            return []
        layout, refused = collective.operand.layout, collective.descriptor.refused
        streams = [stream for stream in self._streams if refused or layout.takes_part(stream.shard)]
        sums, delegate = collective.host_sum is not None, self._local_ranks.delegate
        return [stream for stream in streams if delegate(stream.shard) == self.rank] if sums else streams

    def advance(self, now: float) -> Iterator[Effect]:
        """Take the steps that the other ranks of this host allow. Pack and send as long as there are free slots, shard
        by shard in turn."""
        if self.host is not None and self.ended is None and self._fault is None:
            yield from self._exchange(self.host, now)
        if self.shard_threads is not None and self.ended is None and self.shard_threads.is_on:
            yield from self.shard_threads.pack()
        busy = self.ended is None
        while busy:
            busy = False
            for stream in self._streams:
                if (message := stream.pack()) is not None:
                    busy = True
                    yield message

    def _exchange(self, host: HostExchange, now: float) -> Iterator[Effect]:
        """Take the steps that the other ranks of this host allow."""
        is_done = False
        try:
            self._hand_over(host)
            for outcome in host.advance(now):
                if isinstance(outcome, Wake):
                    yield outcome
                else:
                    outcome.parts_left -= 1
                    is_done = True
                    if outcome.host_sum is not None:
                        outcome.host_sum.ready = outcome.operand.layout.blocks
            self._hand_over(host)
        except MismatchError as error:
            self._note_fault(error.cause, now)
        except HostError as error:
            self._note_fault(Cause(host.names[error.rank], "protocol error: its shared memory is not in order"), now)
        except ShortageError as error:
            self._note_fault(Cause(self._me, str(error)), now)
        if is_done and self.ended is None:
            yield from self._complete(now)
        if self.ended is not None:
            return
        if (is_done and now >= self._report_at) or (self._reported_wait and host.moved_at >= now):
            yield from self._report(host, now)
        yield from self._end_if_deserted(host, now)

    def _hand_over(self, host: HostExchange) -> None:
        """Give the sums of this host to the shards, and the results to the other ranks of the host, if the job has
        several hosts."""
        current = host.current
        if current is not None and current.host_sum is not None:
            current.host_sum.ready = host.summed_blocks
            streams = self._streams_for(current)
            host.results_arrived(
                min([shard.missing_from(current) for shard in streams], default=current.operand.layout.blocks)
            )

    def _note_fault(self, cause: Cause, now: float) -> None:
        """End the job because of a fault that memory shows, unless another rank of this host has ended it before."""
        assert self.host is not None
        self._fault, self._fault_at = cause, now
        self.host.stop()

    def _end_if_deserted(self, host: HostExchange, now: float) -> Iterator[Effect]:
        """End when the collective under way waits for ranks that have left."""
        if departed_ranks := host.departed(BY_ITSELF):
            self._note_fault(
                Cause(self._names_of(departed_ranks), f"had shut down when {self._under_way[0]} began"), now
            )
        elif self._retired and host.departed(RETIRED):
            shard, cause = next(iter(self._retired.items()))
            yield from self._end(cause, reported_by=shard)

    def received(self, shard: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]:
        """A result message arrived in receive slot `slot` of `shard`."""
        if self.ended is not None:
            return
        try:
            completed = self._streams[shard].received(slot, nbytes)
        except ProtocolError as error:
            yield from self.violated(shard, str(error), now)
            return
        self._streams[shard].heard(now)
        self._waiting_for = ""
        yield ReturnCredit(shard, slot)
        if completed is not None:
            completed.parts_left -= 1
        if completed is not None or self._retired:
            yield from self._complete(now, shard)

    def _complete(self, now: float, shard: int | None = None) -> Iterator[Effect]:
        """Finish the collectives whose results are complete, in order. The last result came from `shard`, or from the
        other ranks of this host."""
        while self._under_way and self._under_way[0].parts_left == 0:
            collective = self._under_way[0]
            try:
                collective.operand.finish()
            except ProtocolError as error:
                yield from self._end(Cause(self._sender(shard), f"protocol error: {error}"))
                return
            self._under_way.popleft()
            self._collective_deadline.begin(now)
            self._waiting_for, self._was_summed_by_host = "", collective.descriptor.summed_by_host
            yield Finish(collective.number)
        if self._retired:
            yield from self._end_if_retired()

    def credited(self, shard: int, slot: int, now: float) -> Iterator[Effect]:
        """Send slot `slot` of `shard` is free again."""
        self._streams[shard].credited(slot)
        self._streams[shard].heard(now)
        return iter(())

    def control_received(self, shard: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        """A control message arrived from `shard`."""
        if isinstance(message, Goodbye):
            self._goodbyes.add(shard)
        elif self.ended is not None:
            return
        elif isinstance(message, Aborted) and message.cause.orderly:
            yield from self._retire(shard, message.cause, now)
        elif isinstance(message, Aborted):
            yield from self._end(message.cause, reported_by=shard)
        elif isinstance(message, Waiting):
            is_news = message.who != self._waiting_for or message.seconds >= 1.5 * self._warned_at_s
            self._waiting_for = message.who
            message = message.with_sender(self._addresses[shard])
            self._streams[shard].heard(now, message)
            if self._under_way and self._streams[shard].owes(self._under_way[0]):
                self._collective_deadline.heard(message, now)
            if is_news and self._me not in message.who:  # one warning for all shards, and none about this rank itself
                self._warned_at_s = message.seconds
                yield Warn(wait_text(message))
        elif isinstance(message, Newcomers):
            self.newcomers = message.count
        else:
            yield from self.violated(shard, f"unexpected {type(message).__name__}", now)

    def _retire(self, shard: int, cause: Cause, now: float) -> Iterator[Effect]:
        """`shard` is stopping: it takes part in no collectives but those that it already knows."""
        self._retired[shard] = cause
        yield from self._end_if_retired()
        if self.ended is None and self.host is not None:
            self.host.fatal_reasons = [BY_ITSELF, RETIRED]
            if self.host.is_busy:
                # The stopping shard waits a while for collectives in memory. Only this report tells it of them.
                yield SendControl(shard, self.host.report(now))

    def heard(self, shard: int, now: float) -> None:
        """A part of a message came from `shard`."""
        self._streams[shard].heard(now)

    def lost(self, shard: int, reason: str, now: float) -> Iterator[Effect]:
        """The link to `shard` is over. This shard also gets the Leave: if only RDMA failed, control
        messages may still arrive."""
        if self.ended is None and shard not in self._retired:
            yield from self._end(Cause(f"aggregator {self._addresses[shard]}", reason))
        elif self.ended is None:
            self._unlinked.add(shard)
            yield from self._end_if_retired()

    def violated(self, shard: int, reason: str, now: float) -> Iterator[Effect]:
        """`shard` broke the protocol: by a message, on its link, or by bytes that cannot be decoded."""
        if self.ended is None:
            yield from self._end(Cause(self._sender(shard), f"protocol error: {reason}"))

    def _sender(self, shard: int | None) -> str:
        """The name of the sender of results: a shard; or, without one, the other ranks of this host. With several hosts
        these have results from shards, so the shards are named, too."""
        if shard is not None:
            return f"aggregator {self._addresses[shard]}"
        assert self.host is not None
        shards = [f"aggregator {address}" for address in self._addresses if self._local_ranks.hosts > 1]
        return listed([*shards, *(name for rank, name in enumerate(self.host.names) if rank != self.host.me)])

    def timer(self, now: float) -> Iterator[Effect]:
        """Time has passed; end the job if its oldest collective is overdue.

        A rank whose process was stopped waits for a moment first: it may not have read messages that came meanwhile.
        """
        deadline = self.deadline
        if deadline is None or now < deadline:
            return
        deadline = self._collective_deadline.ends_at
        if self._ends_for_fault:
            yield from self._end(self._fault)
        elif self.host is not None and now < deadline:
            yield from self._report_wait(self.host, now)
        elif self.host is not None and self._collective_deadline.compiled(min(now, self.host.compiled_at())):
            return
        elif not self._collective_deadline.late_s and (
            now - deadline >= self._collective_deadline.moment_s or self._host_has_ended_job
        ):
            self._collective_deadline.late_s = max(now - deadline, 1e-6)
        elif not self._collective_deadline.defer(self._moments_to_wait(cause := self._overdue(now), now)):
            yield from self._end(cause)

    def _moments_to_wait(self, cause: Cause, now: float) -> int:
        """The number of `moment_s` to wait, so that ranks that know more can name the cause first."""
        if self._local_ranks.hosts == 1:
            return 0 if self.host is not None else self._collective_deadline.moments_before(cause)
        oldest, sees_late_rank = self._under_way[0], self.host is not None and bool(self.host.awaited_ranks())
        owing = [stream for stream in self._streams if stream.owes(oldest)]
        return self._collective_deadline.moments_of_hosts(now, sees_late_rank, owing, self._was_summed_by_host)

    @property
    def _host_has_ended_job(self) -> bool:
        """Another rank of this host has ended the job already: the aggregator will say why."""
        return self.host is not None and self.host.has_failed

    def _report_wait(self, host: HostExchange, now: float) -> Iterator[Effect]:
        """Warn the user, and name the ranks that this rank waits for."""
        self._wait_reported_at = now
        if self._fault is not None:
            host.stop()  # another rank has ended the job since
        yield from self._report(host, now)
        if late := host.awaited_ranks():
            yield Warn(f"{self._under_way[0]}: waiting for {self._names_of(late)} since {now - host.moved_at:.1f} s")

    def _report(self, host: HostExchange, now: float) -> Iterator[Effect]:
        """Report exchanges in memory to the first shard, which cannot see them. With several hosts all shards get a
        report."""
        report = host.report(now)
        self._report_at, self._reported_wait = now + REPORT_S, report.total > 0
        yield SendControl(0, report)
        yield from (
            SendControl(stream.shard, report.for_other_shards)
            for stream in self._streams[1:]
            if self._local_ranks.hosts > 1
        )

    def _names_of(self, ranks: Sequence[int]) -> str:
        assert self.host is not None
        return listed([self.host.names[rank] for rank in ranks])

    def leave(self, reason: str | Cause = "") -> Iterator[Effect]:
        """Leave the job. `reason`: the fault of this rank, or a cause elsewhere; empty if the work is done."""
        if self.ended is not None:
            return
        if not reason and self._under_way:
            count_text = "a collective" if self.under_way == 1 else f"{self.under_way} collectives"
            reason = f"shut down with {count_text} under way"
        yield from self._end(reason if isinstance(reason, Cause) else Cause(self._me, reason) if reason else None)

    def _overdue(self, now: float) -> Cause:
        """The cause of the delay of the oldest collective: shards that hang, or ranks that come late."""
        oldest = self._under_way[0]
        reason = f"{oldest} not complete after {self.timeout_s:g} s"
        if late := self.host and self.host.awaited_ranks(except_departed=FAILED):
            return Cause(self._names_of(late), reason, timeout=True)
        if self._host_has_ended_job:  # no rank is late, and the first aggregator hangs
            reason += (
                "; another rank of this host has ended the job, and this aggregator does not say why: is it stopped?"
            )
            return Cause(f"aggregator {self._addresses[0]}", reason, timeout=True)
        owing = [stream for stream in self._streams if stream.owes(oldest)]
        if oldest.host_sum is not None and not owing:
            assert self.host is not None
            others = self._names_of(self.host.delayed_by_shards()) or self._sender(None)
            return self._collective_deadline.cause_behind(reason, self._streams, others)
        return self._collective_deadline.cause(now, reason, owing)

    def _end_if_retired(self) -> Iterator[Effect]:
        """End as soon as a shard that has stopped is needed, for the oldest collective or for the next one. A
        collective in memory goes on as long as the link to the shard lasts."""
        for shard, cause in self._retired.items():
            is_lost = self.host is not None and shard in self._unlinked
            if not self._under_way or is_lost or self._streams[shard].owes(self._under_way[0]):
                yield from self._end(cause, reported_by=shard)
                return

    def _end(self, cause: Cause | None, reported_by: int | None = None) -> Iterator[Effect]:
        self.ended = End(cause)
        if self.host is not None and cause is None:
            yield SendControl(0, self.host.report(self.host.moved_at))
        if self.host is not None:
            yield from self.host.leave(BY_ITSELF if cause is None else RETIRED if cause.orderly else FAILED)
        for stream in self._streams:
            # A shard that stops in order gets the Leave, too: it shows that this rank is alive.
            if stream.shard != reported_by or (cause is not None and cause.orderly):
                yield SendControl(stream.shard, Leave(cause))
        yield self.ended
