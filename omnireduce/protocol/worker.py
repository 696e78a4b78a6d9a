"""The worker's machine: packs tensors into messages for every shard, scatters results, keeps collectives in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.merge import admit_marked
from omnireduce.protocol.effects import Effect, End, Finish, Return, Send, Tell, Warn
from omnireduce.protocol.operands import Operand
from omnireduce.wire.blocks import block_rows, largest_block, message_extra, message_indices, read_header, seal
from omnireduce.wire.control import Aborted, Cause, ControlMessage, Goodbye, Leave, Newcomers, Waiting
from omnireduce.wire.words import listed, shown

LATE = 0.05  # part of the time limit: a worker so much late was stopped, or waited for a processor


@dataclass(slots=True)
class Collective:
    """One collective under way on this worker."""

    number: int
    descriptor: Descriptor
    operand: Operand
    shards_left: int


class _Stream:
    """This worker's exchange with one shard: at most one collective is packed, and one received, at a time."""

    def __init__(
        self, shard: int, send_slots: Array, receive_slots: Array, rank: int, scan_span: int, message_bytes: int
    ) -> None:
        self.shard, self._message_bytes = shard, message_bytes
        self._rank = rank
        self._send_slots, self._receive_slots = send_slots, receive_slots
        self._free = list(range(len(send_slots)))
        self._span = scan_span
        self._outgoing: deque[Collective] = deque()
        self._incoming: deque[Collective] = deque()
        self._cursor = -1  # where the first outgoing collective goes on; -1 before its first message
        self._sent_frontier = 0
        self._result_frontier = 0
        self.heard_at = 0.0  # when anything came
        self.waiting: Waiting | None = None  # the last Waiting; None if work has gone on since
        self._indices, self._unchanged = np.empty(0, np.int64), np.empty(0, np.bool_)

    def submit(self, collective: Collective) -> None:
        self._outgoing.append(collective)
        self._incoming.append(collective)

    def credited(self, slot: int) -> None:
        self._free.append(slot)

    def heard(self, now: float, waiting: Waiting | None = None) -> None:
        """Something came from this shard: a sign of work, or the message `waiting`."""
        self.heard_at, self.waiting = now, waiting

    def hangs(self, now: float, since: float, timeout_s: float) -> bool:
        """Whether this shard has been quiet for longer than a shard that works. A shard that sends no result says
        Waiting at the latest after half of the time limit, and again each time that the wait has doubled."""
        waited_s = 0.0 if self.waiting is None else self.waiting.seconds
        return now - max(self.heard_at, since) >= max(timeout_s / 2, 2 * waited_s)

    def owes(self, collective: Collective) -> bool:
        """Whether results of the oldest collective under way are still to come from this shard."""
        return bool(self._incoming) and self._incoming[0] is collective

    def pack(self) -> Send | None:
        """Pack and seal one message, if there is something to send and a slot to send it in."""
        if not self._outgoing or not self._free:
            return None
        collective, slot = self._outgoing[0], self._free.pop()
        operand, extra = collective.operand, b""
        if self._cursor < 0:
            self._cursor, extra = operand.start(self.shard), collective.descriptor.encoded
        memory = self._send_slots[slot]
        rows = block_rows(memory, operand.block_bytes, operand.row_dtype)
        rows = rows[: max(1, self._message_bytes // operand.block_bytes)]
        indices = self._scratch(len(rows))
        count, self._cursor, frontier = operand.pack(self.shard, self._cursor, self._span, rows, indices)
        nbytes = seal(memory, collective.number, frontier, indices[:count], operand.block_bytes, extra)
        self._sent_frontier = frontier
        if frontier == operand.layout.blocks:
            self._outgoing.popleft()
            self._cursor, self._sent_frontier = -1, 0
        return Send(self.shard, slot, nbytes)

    def received(self, slot: int, nbytes: int) -> Collective | None:
        """Place a result message; return the collective if this shard has now delivered all of it."""
        memory = self._receive_slots[slot]
        header = read_header(memory, nbytes)
        if not self._incoming or header.collective != self._incoming[0].number or message_extra(memory, header):
            raise ProtocolError(f"a result out of order: {header}")
        collective = self._incoming[0]
        operand = collective.operand
        blocks = operand.layout.blocks
        packed = self._sent_frontier if self._outgoing and self._outgoing[0] is collective else blocks
        if header.block_bytes != operand.block_bytes or not self._result_frontier <= header.frontier <= packed:
            raise ProtocolError(f"a result that does not fit {collective.descriptor}: {header}")
        indices = self._scratch(header.block_count)[: header.block_count]
        unchanged = self._unchanged[: header.block_count]
        low, high, stripes = self._result_frontier, header.frontier, operand.layout.stripes(self.shard)
        fitting = admit_marked(
            message_indices(memory, header), self._rank, low, high, shard=stripes.shard, shards=stripes.shards,
            stripe_blocks=stripes.stripe_blocks, own=indices, unchanged=unchanged,
        )  # fmt: skip
        if fitting < indices.size:
            raise ProtocolError(f"a result with {stripes.misfit(indices[fitting], low, high)}: {header}")
        if header.left_out and header.left_out != np.count_nonzero(unchanged):
            raise ProtocolError(f"a result that leaves out other blocks than those of this rank alone: {header}")
        rows = block_rows(memory, operand.block_bytes, operand.row_dtype)
        operand.put(rows, indices, unchanged, header.left_out > 0)
        self._result_frontier = header.frontier
        if header.frontier < blocks:
            return None
        self._result_frontier = 0
        return self._incoming.popleft()

    def _scratch(self, size: int) -> Array:
        if self._indices.size < size:
            self._indices, self._unchanged = np.empty(size, np.int64), np.empty(size, np.bool_)
        return self._indices


class WorkerMachine:
    """All collectives of one worker, over all shards, in the order of submission.

    `slots[i]` are the send and receive slots of shard i, each uint8 (slots, slot bytes); `addresses[i]` names the shard
    in errors; `me` names this worker, whose number is `rank`. The blocks of a message to shard i take no more than
    `message_bytes[i]` together (nothing given: no more than fit in a slot), unless one block alone takes more. A
    collective that takes longer than `timeout_s` ends the job.
    """

    def __init__(
        self,
        slots: Sequence[tuple[Array, Array]],
        addresses: Sequence[str],
        me: str,
        *,
        rank: int,
        scan_span: int,
        timeout_s: float,
        message_bytes: Sequence[int] = (),
    ) -> None:
        most = message_bytes or [send.shape[1] for send, _ in slots]
        self._streams = [_Stream(i, send, receive, rank, scan_span, most[i]) for i, (send, receive) in enumerate(slots)]
        self._slot_bytes = min(send.shape[1] for send, _ in slots)
        self._addresses, self._me, self._timeout_s = addresses, me, timeout_s
        self._under_way: deque[Collective] = deque()
        self._oldest_since = 0.0
        self._late_s = 0.0  # how long after its time limit this was noticed; 0: in time
        self._longest: Waiting | None = None  # the longest wait during the oldest collective
        self._next = 0
        self._waiting_for = ""
        self._warned_at_s = 0.0
        self._goodbyes: set[int] = set()
        self._retired: dict[int, Cause] = {}  # shards that stopped between two collectives
        self.newcomers = 0  # workers that wait to join the job, as a shard said last
        self.ended: End | None = None

    def fits(self, block_bytes: int) -> bool:
        """Whether at least one block of this size fits in a slot."""
        return block_bytes <= self.largest_block_bytes

    @property
    def largest_block_bytes(self) -> int:
        """The size of the largest block that fits in a slot."""
        return largest_block(self._slot_bytes)

    @property
    def submitted(self) -> int:
        """How many collectives there were so far."""
        return self._next

    @property
    def under_way(self) -> int:
        """How many collectives are unfinished."""
        return len(self._under_way)

    @property
    def deadline(self) -> float | None:
        """When `timer` must be called, if nothing happens before."""
        if not self._under_way or self.ended is not None:
            return None
        grace_s = self._late_s + LATE * self._timeout_s if self._late_s else 0.0
        return self._oldest_since + self._timeout_s + grace_s

    @property
    def said_goodbye(self) -> bool:
        """Every shard has confirmed that this worker left."""
        return len(self._goodbyes) == len(self._streams)

    def submit(self, descriptor: Descriptor, operand: Operand, now: float) -> int:
        """Queue a collective and return its number."""
        assert self.ended is None, "submit after the end"
        taking_part = [stream for stream in self._streams if operand.layout.takes_part(stream.shard)]
        collective = Collective(self._next, descriptor, operand, len(taking_part))
        self._next += 1
        if not self._under_way:
            self._oldest_since, self._late_s, self._longest = now, 0.0, None
        for stream in taking_part:
            stream.submit(collective)
            if not self._under_way:
                stream.waiting = None  # that wait was most likely for this worker
        self._under_way.append(collective)
        return collective.number

    def advance(self, now: float) -> Iterator[Effect]:
        """Pack and send as long as there are free slots, shard by shard in turn."""
        busy = self.ended is None
        while busy:
            busy = False
            for stream in self._streams:
                message = stream.pack()
                if message is not None:
                    busy = True
                    yield message

    def received(self, shard: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]:
        """A result message arrived in receive slot `slot` of `shard`."""
        if self.ended is not None:
            return
        try:
            done = self._streams[shard].received(slot, nbytes)
        except ProtocolError as error:
            yield from self.violated(shard, str(error), now)
            return
        self._streams[shard].heard(now)
        self._waiting_for = ""
        yield Return(shard, slot)
        if done is not None:
            done.shards_left -= 1
        while self._under_way and self._under_way[0].shards_left == 0:
            collective = self._under_way[0]
            try:
                collective.operand.finish()
            except ProtocolError as error:
                yield from self.violated(shard, str(error), now)
                return
            self._under_way.popleft()
            self._oldest_since, self._late_s, self._longest, self._waiting_for = now, 0.0, None, ""
            yield Finish(collective.number)
        if self._retired:
            yield from self._end_if_retired()

    def credited(self, shard: int, slot: int, now: float) -> Iterator[Effect]:
        """Send slot `slot` of `shard` is free again."""
        self._streams[shard].credited(slot)
        self._streams[shard].heard(now)
        return iter(())

    def told(self, shard: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        """A control message arrived from `shard`."""
        if isinstance(message, Goodbye):
            self._goodbyes.add(shard)
        elif self.ended is not None:
            return
        elif isinstance(message, Aborted) and message.cause.orderly:
            self._retired[shard] = message.cause
            yield from self._end_if_retired()
        elif isinstance(message, Aborted):
            yield from self._end(message.cause, told_by=shard)
        elif isinstance(message, Waiting):
            stream = self._streams[shard]
            stream.heard(now, message)
            about_oldest = self._under_way and stream.owes(self._under_way[0])
            if about_oldest and (self._longest is None or message.seconds > self._longest.seconds):
                self._longest = message
            news = message.who != self._waiting_for or message.seconds >= 1.5 * self._warned_at_s
            self._waiting_for = message.who
            if news and self._me not in message.who:  # one warning for all shards, and none about ourselves
                self._warned_at_s = message.seconds
                yield Warn(f"{shown(message.what)}: waiting for {shown(message.who)} since {message.seconds:.1f} s")
        elif isinstance(message, Newcomers):
            self.newcomers = message.count
        else:
            yield from self.violated(shard, f"unexpected {type(message).__name__}", now)

    def heard(self, shard: int, now: float) -> None:
        """A part of a message came from `shard`."""
        self._streams[shard].heard(now)

    def lost(self, shard: int, reason: str, now: float) -> Iterator[Effect]:
        """The link to `shard` is over. That shard is told, too: where RDMA failed, control messages may still pass."""
        if self.ended is None and shard not in self._retired:
            yield from self._end(Cause(f"aggregator {self._addresses[shard]}", reason))

    def violated(self, shard: int, reason: str, now: float) -> Iterator[Effect]:
        """`shard` broke the protocol: by a message, on its link, or by bytes that cannot be decoded."""
        if self.ended is None:
            yield from self._end(Cause(f"aggregator {self._addresses[shard]}", f"protocol error: {reason}"))

    def timer(self, now: float) -> Iterator[Effect]:
        """Time has passed; end the job if its oldest collective is overdue.

        A worker that was stopped waits for a moment first: messages may have come meanwhile that it has not read.
        """
        deadline = self.deadline
        if deadline is None or now < deadline:
            return
        if not self._late_s and now - deadline >= LATE * self._timeout_s:
            self._late_s = now - deadline
        else:
            yield from self._end(self._overdue(now))

    def leave(self, reason: str = "") -> Iterator[Effect]:
        """Leave the job, because of `reason` or, without a reason, because the work is done."""
        if self.ended is not None:
            return
        if not reason and self._under_way:
            many = "a collective" if self.under_way == 1 else f"{self.under_way} collectives"
            reason = f"shut down with {many} under way"
        yield from self._end(Cause(self._me, reason) if reason else None)

    def _overdue(self, now: float) -> Cause:
        """Whose fault it is that the oldest collective takes so long: shards that hang, or ranks that come late."""
        oldest = self._under_way[0]
        reason = f"collective {oldest.number} ({oldest.descriptor}) not complete after {self._timeout_s:g} s"
        owing = [stream for stream in self._streams if stream.owes(oldest)]
        hanging = [each for each in owing if each.hangs(now, self._oldest_since, self._timeout_s)]
        waits = [each.waiting for each in owing if each.waiting is not None]
        if hanging:
            silent_s = now - max(self._oldest_since, *(each.heard_at for each in hanging))
            reason += f"; nothing came from there for {silent_s:.1f} s: is it stopped or overloaded?"
            return Cause(
                listed([f"aggregator {self._addresses[each.shard]}" for each in hanging]), reason, timeout=True
            )
        long_wait = self._longest is not None and self._longest.seconds >= self._timeout_s / 2
        if self._late_s and not long_wait:  # what this worker reads now may be old: it cannot judge others
            reason += f"; it noticed that {self._late_s:.1f} s late: was it stopped or overloaded?"
            return Cause(self._me, reason, timeout=True)
        if waits:
            return Cause(max(waits, key=lambda each: each.seconds).who, reason, timeout=True)
        if self._longest is not None and long_wait:
            return Cause(self._longest.who, f"{reason}; {self._longest.seconds:.1f} s of it all waited", timeout=True)
        return Cause(self._me, f"{reason}, though it moves on; raise cluster.timeout_s", timeout=True)

    def _end_if_retired(self) -> Iterator[Effect]:
        """End as soon as a shard that has stopped is needed: for the oldest collective, or for the next one."""
        for shard, cause in self._retired.items():
            if not self._under_way or self._streams[shard].owes(self._under_way[0]):
                yield from self._end(cause, told_by=shard)
                return

    def _end(self, cause: Cause | None, told_by: int | None = None) -> Iterator[Effect]:
        self.ended = End(cause)
        for stream in self._streams:
            if stream.shard != told_by:
                yield Tell(stream.shard, Leave(cause))
        yield self.ended
