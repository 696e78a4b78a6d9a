"""The aggregator's machine: one job on one shard. Takes the ranks' messages in order, merges, sends results to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnireduce.core.descriptor import Descriptor, decode_descriptor
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import Header, capacity, message_extra, read_header, slot_bytes_for
from omnireduce.core.wire.control import Aborted, Cause, ControlMessage, Goodbye, Leave, Report, Waiting
from omnireduce.core.wire.safe_text import listed, shown
from omnireduce.errors import ProtocolError
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.draws import SUM
from omnireduce.kernels.codecs.table import BUILT_IN, Codecs
from omnireduce.protocol.collective.block_programs import ProgramRun, ShardStates
from omnireduce.protocol.collective.codecs import codec_and_key
from omnireduce.protocol.collective.effects import (
    ALL,
    AbortKind,
    Effect,
    End,
    ReturnCredit,
    Send,
    SendControl,
    Warn,
    kind_of,
)
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.mismatches import BegunCall, MismatchError, check_different_calls
from omnireduce.protocol.collective.reduction import Budget, MakeReduction, Reduction
from omnireduce.protocol.counters import Account, Wait
from omnireduce.protocol.joining.pending_job import THROUGH
from omnireduce.protocol.sharding import Sharding
from omnireduce.protocol.stalls import BUSY, STOOD_STILL, StallDetector


class BrokenRuleError(Exception):
    """`rank` broke the protocol."""

    def __init__(self, rank: int, error: ProtocolError) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error


@dataclass(slots=True)
class Inbox:
    """The messages of rank `name`, each with its arena row, in the order in which they came."""

    name: str
    messages: deque[tuple[int, Header]] = field(default_factory=deque)
    open_row: int = -1  # arena row of the message in use, -1 for none
    joined: bool = False  # has sent its first message of the current collective


class ResultSlots:
    """`count` slots."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count))
        self._readers: list[set[int]] = [set() for _ in range(count)]

    def send(self, slot: int, ranks: Iterable[int]) -> None:
        """A result has been sent to these ranks."""
        self._readers[slot] = set(ranks)

    def release(self, rank: int, slot: int) -> bool:
        """`rank` has read the result in `slot`; return whether no other rank has to read it."""
        readers = self._readers[slot]
        if rank not in readers:
            return False
        readers.remove(rank)
        if not readers:
            self.free.append(slot)
        return not readers

    def release_all(self, rank: int) -> list[int]:
        """`rank` reads nothing any more; return the slots that only `rank` still had to read."""
        return [slot for slot in range(len(self._readers)) if self.release(rank, slot)]

    @property
    def readers(self) -> list[int]:
        """The ranks that have not read something."""
        return sorted(set().union(*self._readers))


class Senders:
    """The `ranks` that send blocks to shard `shard` in the current collective, the `reduction` that has a place for
    each, and the `readers` of its results.

    If hosts or relays send sums, the ranks `delegates` send them. In a collective that must not be summed on the way,
    every rank sends for itself, and `readers` get the results. `waits`: hosts wait for each result to go on, as for
    tensors. `make_reduction` gives the work space for a number of ranks. `states`: the states of programs on this
    shard; None on a relay, which only passes sums on. `running`: the program of the current collective.
    """

    def __init__(
        self,
        ranks: int,
        delegates: Sequence[int],
        sharding: Sharding,
        shard: int,
        make_reduction: Callable[[int], Reduction],
        *,
        readers: Sequence[int] | None = None,
        states: ShardStates | None = None,
    ) -> None:
        self._all_ranks, self.delegates = tuple(range(ranks)), tuple(delegates)
        self._readers, self._marks_single_senders = tuple(readers or self._all_ranks), readers is None
        self._sharding, self._shard = sharding, shard
        self.has_hosts = sharding.slot_bytes > 0
        self.states = states
        self.running: ProgramRun | None = None
        self._rank_reduction = make_reduction(ranks)
        self._host_reduction = make_reduction(len(delegates)) if delegates else self._rank_reduction
        self.ranks, self.readers, self.reduction = self._all_ranks, self._readers, self._rank_reduction
        self.positions = {rank: rank for rank in self.ranks}  # the place of each sender in the reduction
        self.waits = False

    def begin(self, descriptor: Descriptor, codec: Codec | None = None, key: int = 0) -> Reduction:
        """Begin a collective. `codec` encodes its blocks; `key`: the key of the codec's random numbers for sums. Raises
        CodecError, and ProtocolError when there is no room for the state of a program."""
        by_host = self.delegates != () and descriptor.summed_by_host
        self.waits = by_host and not descriptor.has_rows and self.has_hosts
        self.ranks = self.delegates if by_host else self._all_ranks
        self.readers = self.delegates if by_host else self._readers
        self.positions = {rank: position for position, rank in enumerate(self.ranks)}
        self.reduction = self._host_reduction if by_host else self._rank_reduction
        stripes = self._sharding.layout(descriptor).stripes(self._shard)
        self.running = None
        if descriptor.program is not None and self.states is not None:
            self.running = self.states.begin(descriptor, descriptor.program, stripes)
        self.reduction.begin(
            descriptor,
            stripes,
            codec=codec,
            key=key,
            marks_single_senders=self._marks_single_senders,
            running=self.running,
        )
        return self.reduction

    def end(self) -> bytes:
        """The program of the current collective has run on all blocks. Returns its totals."""
        assert self.running is not None
        assert self.states is not None
        ended_run, self.running = self.running, None
        if ended_run.program.drops:
            self.states.drop(ended_run.program.state)
        return ended_run.totals.tobytes()


BUDGET = Budget()
ONE_SHARD = Sharding()
WAIT_TEXT_CHARACTERS = 500  # the longest text of a rank about the collective under way that is shown
ROUND_WORK, RANK_WORK = 1 << 16, 1 << 10  # work of one look at all ranks: a fixed part, and one for each rank


class ShardMachine:
    """One generation of one job.

    `members[r]` names rank r in errors; on a relay `numbers[r]` is its rank in the job. `arena`: uint8 (ranks × slots,
    slot bytes), rank r's receive slots in rows r × slots onwards. `results`: uint8 (slots, slot bytes), the send slots
    that all ranks share. Results are as long as `sizing` says (None: as long as a slot). `sharding` distributes tensors
    among shards; this is shard number `shard`. A mean is a sum divided by `divisor` (None: by the number of members).

    If hosts or relays send sums, the ranks `delegates` send them. With relays, `readers` get the results of collectives
    in which every rank sends for itself. Ranks in `inline` get results as bytes, not in slots that all ranks share:
    these results leave out blocks that the rank has already. `codecs`: the codecs that blocks may be encoded with.
    `states`: the states of programs on this shard.

    When no result leaves for `warn_after_s`, all ranks are told whom they wait for. They are told again each time that
    the wait has doubled. So a rank that hears nothing for longer knows that the aggregator hangs.

    `account` has the statistics of the job. `budget` bounds one call of `advance`; `quantum` can bound the next call
    further. `more`: there is more to do at once. `spent`: the work of the last call. `make_reduction` makes the
    work space.
    """

    def __init__(
        self, members: Sequence[str], arena: Array, results: Array,
        *, sizing: MessageSizing | None = None, shard: int = 0, sharding: Sharding = ONE_SHARD,
        delegates: Sequence[int] = (),
        readers: Sequence[int] | None = None, inline: Iterable[int] = (), warn_after_s: float = 1.0,
        budget: Budget = BUDGET, make_reduction: MakeReduction = Reduction, numbers: Sequence[int] | None = None,
        divisor: int | None = None, codecs: Codecs = BUILT_IN, states: ShardStates | None = None,
    ) -> None:  # fmt: skip
        self._inboxes, self._numbers = [Inbox(name) for name in members], numbers or range(len(members))
        self._departed = set[int]()  # ranks that have left
        self._arena, self._results, self._slot_count = arena, results, len(results)
        sizing = sizing or MessageSizing(results.shape[1], results.shape[1])
        shape = self._slot_count, min(results.shape[1], slot_bytes_for(sizing.longest))
        self._short_results = {rank: np.empty(shape, np.uint8) for rank in inline}  # costs nothing until it is used
        self._slots = ResultSlots(self._slot_count)
        self._filling_slot = -1  # the result slot being filled, -1 for none
        work_space = divisor or len(members), arena, results, sizing, budget
        self._senders = Senders(
            len(members), delegates, sharding, shard, lambda count: make_reduction(count, *work_space),
            readers=readers, states=states or ShardStates(0),
        )  # fmt: skip
        # Delegates first: if there are any, only they can begin a collective
        reading_order = dict.fromkeys([*delegates, *range(len(members))])
        self._reading_order = [(rank, self._inboxes[rank]) for rank in reading_order]
        self._current: Reduction | None = None  # while a collective is under way
        self.quantum, self.spent, self.more = budget.work, 0, False
        self._round_work = ROUND_WORK + RANK_WORK * len(members)
        self._descriptor: Descriptor | None = None
        self._first_call = 0, b""  # the rank that opened the current collective, and its encoded descriptor
        self._number = 0  # number of the current collective, or the lowest that may follow: some skip this shard
        self._extra = b""  # the bytes behind the blocks of the next result
        self._awaited: Collection[object] = ()  # collectives whose results come from elsewhere
        self._stalls, self.account, self._codecs = StallDetector(warn_after_s), Account(self._numbers), codecs
        self._encodes_as = SUM  # seeds the random numbers of codecs here, so that they differ from those of any rank
        self.ended: End | None = None

    @property
    def idle(self) -> bool:
        """No collective is under way on any rank."""
        return self._current is None and not any(inbox.messages for inbox in self._inboxes)

    @property
    def deadline(self) -> float | None:
        """The time to call `timer`, if nothing happens before; None: never."""
        if self.idle or self.ended is not None:
            return None
        return self._stalls.deadline

    def waiting(self, now: float) -> Wait | None:
        """The wait of the collective under way, or a wait that a rank has reported; None when nobody waits."""
        if self.ended is not None:
            return None
        if self._current is None and not self.idle:
            late = [rank for rank in self._senders.delegates if not self._inboxes[rank].messages]
            return self._wait(self._current_name, late, now)
        if self._current is None:
            wait = self.account.waiting(now)
            return wait and wait._replace(what=shown(wait.what[:WAIT_TEXT_CHARACTERS]), who=self.names_of(wait.ranks))
        ranks = [] if self.more else self.account.late_ranks_of(self._awaited_ranks(self._current))
        return self._wait(self._current_name, ranks, now)

    @property
    def _current_name(self) -> str:
        return f"collective {self._number} ({self._descriptor})" if self._current else "the next collective"

    def _wait(self, what: str, ranks: list[int], now: float) -> Wait:
        numbers = [self._numbers[rank] for rank in ranks]
        return Wait(what, numbers, len(ranks), self.names_of(ranks) or BUSY, now - self._stalls.since)

    @property
    def slots_in_use(self) -> tuple[int, int]:
        """Receive slots with messages that are still needed; result slots being filled, or not yet read by all."""
        held = sum(len(inbox.messages) + (inbox.open_row >= 0) for inbox in self._inboxes)
        return held, self._slot_count - len(self._slots.free)

    def names_of(self, ranks: Iterable[int]) -> str:
        """The names of these ranks, for errors."""
        return listed([self._inboxes[rank].name for rank in ranks])

    def has_left(self, rank: int) -> bool:
        """The rank has said that it leaves."""
        return rank in self._departed

    def received(self, rank: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]:
        """A block message arrived in receive slot `slot` of `rank`."""
        row = rank * self._slot_count + slot
        if self._current is None and self._senders.delegates and self.idle:
            self._stalls.begin(now)  # no result was awaited before
        try:
            self._inboxes[rank].messages.append((row, read_header(self._arena[row], nbytes)))
        except ProtocolError as error:
            yield from self._violation(rank, error)

    def credited(self, rank: int, slot: int, now: float) -> Iterator[Effect]:
        """`rank` has read result slot `slot`."""
        self._slots.release(rank, slot)
        return iter(())

    def control_received(self, rank: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        """A control message arrived from `rank`."""
        if isinstance(message, Report):
            yield from self._take_report(rank, message, now)
        elif not isinstance(message, Leave):
            yield from self._violation(rank, ProtocolError(f"unexpected {type(message).__name__}"))
        else:
            yield from self._rank_left(rank, message.cause)

    def _take_report(self, rank: int, report: Report, now: float) -> Iterator[Effect]:
        if self.ended is not None:
            return
        try:
            self.account.report(rank, report, now)
        except ProtocolError as error:
            yield from self._violation(rank, error)
            return
        wait = self.waiting(now)
        if wait is not None and self._stalls.may_warn(wait.seconds, now):
            yield Warn(f"{wait.what} waits for {wait.who} since {wait.seconds:.0f} s")

    def heard(self, rank: int, now: float) -> None:
        """A part of a message came from `rank`. The machine cannot use it yet."""

    def lost(self, rank: int, reason: str, now: float) -> Iterator[Effect]:
        """The link to `rank` is over."""
        if rank not in self._departed:
            yield from self.abort(Cause(self._inboxes[rank].name, reason), "lost", rank)

    def violated(self, rank: int, reason: str, now: float) -> Iterator[Effect]:
        """`rank` broke the rules of its link, or sent a message that cannot be decoded; the link may be over."""
        if rank not in self._departed:
            yield from self._violation(rank, ProtocolError(reason))

    def timer(self, now: float) -> Iterator[Effect]:
        """Time has passed. If no result left for long, tell all ranks whom they wait for, or waited for in vain."""
        wait = None if self.idle else self.waiting(now)
        if wait is not None and self._stalls.is_due(now):
            yield Warn(f"{wait.what} waits for {wait.who} since {wait.seconds:.0f} s")
            yield from self._tell_all(Waiting(wait.what, wait.who, wait.seconds))

    def _tell_all(self, message: ControlMessage) -> Iterator[Effect]:
        yield SendControl(ALL, message)

    def abort(self, cause: Cause, kind: AbortKind, rank: int | None = None) -> Iterator[Effect]:
        """End the job on every rank."""
        if self.ended is None:
            self.ended = End(cause, kind, None if rank is None else self._numbers[rank])
            yield from self._tell_all(Aborted(cause))
            yield self.ended

    # progress

    def advance(self, now: float) -> Iterator[Effect]:
        """Merge and send the blocks that the messages at hand allow, within the budget of one turn."""
        if self._current is None and not (self._senders.delegates or self._awaited):
            self._stalls.begin(now)
        elif (still_s := self._stalls.turn(now)) and not self.idle and (wait := self.waiting(now)):
            yield Warn(f"this shard stood still for {still_s:.1f} s during {wait.what}: was it stopped?", still_s)
            yield from self._tell_all(Waiting(wait.what, STOOD_STILL, still_s))
        self.spent, self.more, moved = 0, False, True
        while moved and self.ended is None:
            if self.spent >= self.quantum:
                self.more = True
                return
            self.spent += self._round_work
            try:
                taken = self._take_messages(now)
            except BrokenRuleError as broken:
                yield from self._violation(broken.rank, broken.error)
                return
            departed = self._departed_but_needed if self._departed else []
            if departed:
                yield from self.abort(
                    Cause(self.names_of(departed), f"had shut down when {self._current_name} began"), "left"
                )
                return
            if self._current is None:
                return
            if taken and self.spent >= self.quantum:
                continue
            # Messages that were taken are merged now, or wait for other ranks: they are no reason for another round.
            moved = self._merge(self._current)
            moved |= yield from self._return_credits(self._current)
            if self._current is not None and self._should_send(self._current, moved):
                moved = True
                self._stalls.begin(now)
                yield self._emit(self._current)

    def _take_messages(self, now: float) -> bool:
        """Open the next messages, and go on with long ones; return whether there were any. Raises BrokenRuleError."""
        moved, senders = False, self._senders
        for rank, inbox in self._reading_order:
            union = senders.reduction.union
            awaits_window = union.awaiting_window and senders.positions.get(rank) in union.awaiting_window
            if (inbox.messages and inbox.open_row < 0) or awaits_window:
                try:
                    if awaits_window:
                        self.spent += union.feed(senders.positions[rank])
                        moved = True
                    else:
                        moved |= self._open_next(rank, inbox, now)
                except ProtocolError as error:
                    raise BrokenRuleError(rank, error) from error
                if moved and self.spent >= self.quantum:
                    break
        return moved

    def _open_next(self, rank: int, inbox: Inbox, now: float) -> bool:
        """Open the rank's next message if it belongs to the current collective. Raises ProtocolError."""
        row, header = inbox.messages[0]
        senders = self._senders
        if self._current is None:
            if senders.delegates and rank not in senders.delegates:
                return False  # this rank has no part in some collectives: only a delegate knows the next number
            self._begin(rank, row, header)
            self.account.begin(len(senders.ranks), now)
        elif not inbox.joined:
            if not self._compare(rank, row, header):
                return False
        elif senders.reduction.union.ended(senders.positions[rank]):
            return False  # the message belongs to a later collective
        elif header.extra_bytes:
            raise ProtocolError(f"a second descriptor for collective {self._number}")
        if header.collective != self._number:
            raise ProtocolError(f"a message of collective {header.collective} during {self._number}")
        inbox.messages.popleft()
        self.spent += senders.reduction.union.open(senders.positions[rank], row, header)
        inbox.open_row = row
        if not inbox.joined:
            inbox.joined = True
            self.account.join(rank, now)
        return True

    def _begin(self, rank: int, row: int, header: Header) -> None:
        extra = message_extra(self._arena[row], header)
        descriptor = decode_descriptor(extra)
        if capacity(self._results.shape[1], descriptor.block_bytes) == 0:
            raise ProtocolError(
                f"blocks of {descriptor.block_bytes} bytes do not fit slots of {self._results.shape[1]}"
            )
        if header.collective < self._number:
            raise ProtocolError(f"a message of collective {header.collective}, expected {self._number} or later")
        coding = (
            codec_and_key(descriptor, self._codecs, header.collective, self._encodes_as) if descriptor.codec else ()
        )
        self._current = self._senders.begin(descriptor, *coding)
        self._descriptor, self._number = descriptor, header.collective
        self._first_call = rank, extra

    def _compare(self, rank: int, row: int, header: Header) -> bool:
        """Check that the rank has begun the same collective as the first rank. Returns False if it has no part in this
        collective, and has begun a later one. Raises ProtocolError."""
        if rank not in self._senders.positions and header.collective > self._number:
            return False
        extra = message_extra(self._arena[row], header)
        if (header.collective, extra) != (self._number, self._first_call[1]):
            check_different_calls(
                self._begun_call(*self._first_call, self._number), self._begun_call(rank, extra, header.collective)
            )
        if rank not in self._senders.positions:
            raise ProtocolError(f"a message of collective {self._number}; another rank sends the sum of its host")
        return True

    def _begun_call(self, rank: int, encoded: bytes, number: int) -> BegunCall:
        return BegunCall(self._numbers[rank], self._inboxes[rank].name, number, decode_descriptor(encoded))

    def _merge(self, current: Reduction) -> bool:
        if self._filling_slot < 0:
            if not self._slots.free:
                return False
            self._filling_slot = self._slots.free.pop()
        work = 0 if current.full else current.merge(self._filling_slot, self.quantum - self.spent)
        self.spent += work
        return work > 0

    def _return_credits(self, current: Reduction) -> Generator[Effect, None, bool]:
        """Return the credits of messages that are used up; return whether there were any. Other messages may wait
        behind them."""
        returned = False
        for rank, position in self._senders.positions.items():
            inbox = self._inboxes[rank]
            if inbox.open_row >= 0 and current.union.exhausted(position):
                yield ReturnCredit(rank, inbox.open_row - rank * self._slot_count)
                inbox.open_row, returned = -1, True
        return returned

    def _should_send(self, current: Reduction, moved: bool) -> bool:
        """Whether to send the result slot now: when it is full or the last one; when it is half full and no input
        waits; and, if hosts wait for results, when it has any news and no input waits."""
        if self._filling_slot < 0:
            return False
        if current.union.complete or current.full:
            return True
        return not moved and (current.has_news if self._senders.waits else current.half_full)

    def _emit(self, current: Reduction) -> Send:
        slot, self._filling_slot = self._filling_slot, -1
        complete = current.union.complete
        senders = self._senders.ranks
        memories = {
            self._senders.positions[rank]: self._short_results[rank][slot]
            for rank in senders
            if rank in self._short_results
        }
        readers = self._senders.readers
        extra = self._extra if not complete or self._senders.running is None else self._senders.end()
        nbytes, shorter = current.seal(slot, self._number, memories, extra)
        self.spent += nbytes * (len(memories) or 1)
        self._slots.send(slot, readers)
        if complete:
            self._complete(current)
        return Send(readers, slot, nbytes, shorter and {senders[position]: shorter[position] for position in shorter})

    def _complete(self, current: Reduction) -> None:
        assert self._descriptor is not None
        self.account.complete(self._descriptor, current)
        self._current = self._descriptor = None
        self._number += 1
        for inbox in self._inboxes:
            inbox.joined = False

    def _awaited_ranks(self, current: Reduction) -> list[int]:
        """The ranks that have not read their results, if no result slot is free; else those with the lowest
        frontier."""
        if self._filling_slot < 0 and not self._slots.free:
            return self._slots.readers
        return [self._senders.ranks[position] for position in current.union.laggards]

    # departures

    def _rank_left(self, rank: int, cause: Cause | None) -> Iterator[Effect]:
        if rank in self._departed:
            yield from self._violation(rank, ProtocolError("left twice"))
            return
        self._departed.add(rank)
        if cause is not None:
            blames_itself = cause.culprit == self._inboxes[rank].name.partition(THROUGH)[0]
            yield from self.abort(cause, kind_of(cause, blames_itself=blames_itself), rank if blames_itself else None)
            return
        yield from self._release_rank(rank)

    def _release_rank(self, rank: int) -> Iterator[Effect]:
        """The rank leaves in order."""
        self._slots.release_all(rank)
        yield SendControl(rank, Goodbye())
        if len(self._departed) == len(self._inboxes) and self.ended is None:
            self.ended = End(None)
            yield self.ended

    @property
    def _departed_but_needed(self) -> list[int]:
        """The ranks that have left, though their blocks are needed. Only the delegates bring sums of hosts."""
        needed = self._senders.delegates if self._current is None else self._senders.ranks
        return [] if self.idle else [rank for rank in needed if rank in self._departed]

    def _violation(self, rank: int, error: ProtocolError) -> Iterator[Effect]:
        if isinstance(error, MismatchError):
            return self.abort(error.cause, "mismatch")
        return self.abort(Cause(self._inboxes[rank].name, f"protocol error: {error}"), "violation", rank)
