"""The aggregator's machine: one job on one shard. Takes the ranks' messages in order, merges, sends results to all."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnireduce.descriptor import Descriptor, decode_descriptor, told_apart
from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.layout import ALL_STRIPES, Stripes
from omnireduce.protocol.account import Account, Wait
from omnireduce.protocol.effects import ALL, AbortKind, Effect, End, Return, Send, Tell, Warn
from omnireduce.protocol.reduction import Budget, MakeReduction, Reduction
from omnireduce.wire.blocks import Header, capacity, message_extra, read_header, room_for
from omnireduce.wire.control import Aborted, Cause, ControlMessage, Goodbye, Leave, Report, Waiting
from omnireduce.wire.words import listed, shown

BUDGET = Budget()
WHAT_CHARACTERS = 500  # of what a rank says about the collective under way
LONGEST_PAUSE_S = 60.0  # between two warnings of waits that ranks report
ROUND_WORK, RANK_WORK = 1 << 16, 1 << 10  # work of one look at all ranks: a fixed part, and one for each rank


@dataclass(slots=True)
class _Rank:
    """What the machine knows of one worker."""

    name: str
    inbox: deque[tuple[int, Header]] = field(default_factory=deque)
    open_row: int = -1  # arena row of the message in use, -1 for none
    joined: bool = False  # has sent its first message of the current collective


class AggregatorMachine:
    """One generation of one job.

    `members[r]` names rank r in errors. `arena`: uint8 (ranks × slots, slot bytes), rank r's receive slots in rows r ×
    slots onwards. `results`: uint8 (slots, slot bytes), the send slots, shared by all ranks. The blocks of a result
    take no more than `message_bytes` together (None: no more than fit in a slot), unless one block alone takes more.
    `stripes`: the stripes of this shard, in tensors of more than `whole_bytes`. Ranks in `inline` get results as bytes,
    not in slots that all ranks share: their results leave out what they have already.

    When no result leaves for `warn_after_s`, all ranks are told whom they wait for. They are told again each time that
    the wait has doubled. So a rank that hears nothing for longer knows that the aggregator hangs.

    `account` counts what the job does. `budget` bounds one call of `advance`; `quantum` can bound the next call
    further. `more`: there is more to do at once. `spent`: the work of the last call. `reduction` makes the work space:
    `Reduction`, or a class that observes one.
    """

    def __init__(
        self,
        members: Sequence[str],
        arena: Array,
        results: Array,
        *,
        message_bytes: int | None = None,
        stripes: Stripes = ALL_STRIPES,
        whole_bytes: int = 0,
        inline: Iterable[int] = (),
        warn_after_s: float = 1.0,
        budget: Budget = BUDGET,
        reduction: MakeReduction = Reduction,
    ) -> None:
        self._ranks = [_Rank(name) for name in members]
        self._gone: set[int] = set()  # ranks that have left
        self._arena, self._results = arena, results
        self._slot_count, self._stripes, self._whole_bytes = len(results), stripes, whole_bytes
        self._message_bytes = results.shape[1] if message_bytes is None else message_bytes
        shape = self._slot_count, min(results.shape[1], room_for(self._message_bytes))
        self._shorter = {rank: np.empty(shape, np.uint8) for rank in inline}  # costs nothing until it is used
        self._free = list(range(self._slot_count))
        self._readers: list[set[int]] = [set() for _ in range(self._slot_count)]
        self._filling = -1  # the result slot being filled, -1 for none
        self._reduction = reduction(len(members), arena, results, self._message_bytes, budget)
        self._current: Reduction | None = None  # `_reduction`, while a collective is under way
        self.quantum, self._round_work = budget.work, ROUND_WORK + RANK_WORK * len(members)
        self.spent, self.more = 0, False
        self._descriptor: Descriptor | None = None
        self._first: tuple[int, bytes] = (0, b"")  # who opened the current collective, with which descriptor
        self._number = 0  # of the current collective, or the lowest that may follow: this shard has no part in some
        self._warn_after_s = warn_after_s
        self._quiet_since = 0.0
        self._warned_at = self._warn_again_at = 0.0
        self.account = Account(len(members))
        self.ended: End | None = None

    @property
    def idle(self) -> bool:
        """No collective is under way on any rank."""
        return self._current is None and not any(rank.inbox for rank in self._ranks)

    @property
    def deadline(self) -> float | None:
        """When `timer` must be called, if nothing happens before."""
        if self._current is None or self.ended is not None:
            return None
        return self._quiet_since + max(self._warn_after_s, 2 * (self._warned_at - self._quiet_since))

    def waiting(self, now: float) -> Wait | None:
        """Whom the collective under way waits for; None when no collective is under way."""
        if self.ended is not None:
            return None
        if self._current is None:
            wait = self.account.waiting(now)
            names = [] if wait is None else [self._ranks[rank].name for rank in wait.ranks]
            return wait and wait._replace(what=shown(wait.what[:WHAT_CHARACTERS]), who=listed(names))
        ranks = [] if self.more else self._waited_for(self._current)
        who = listed([self._ranks[rank].name for rank in ranks]) or "the aggregator, which is busy"
        return Wait(f"collective {self._number} ({self._descriptor})", ranks, len(ranks), who, now - self._quiet_since)

    @property
    def slots_in_use(self) -> tuple[int, int]:
        """Receive slots with messages that are still needed; result slots being filled, or not yet read by all."""
        held = sum(len(rank.inbox) + (rank.open_row >= 0) for rank in self._ranks)
        return held, self._slot_count - len(self._free)

    def name_of(self, rank: int) -> str:
        """What errors call a rank."""
        return self._ranks[rank].name

    def has_left(self, rank: int) -> bool:
        """The rank has said that it leaves, cleanly."""
        return rank in self._gone

    # events

    def received(self, rank: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]:
        """A block message arrived in receive slot `slot` of `rank`."""
        row = rank * self._slot_count + slot
        try:
            header = read_header(self._arena[row], nbytes)
        except ProtocolError as error:
            yield from self._violation(rank, error)
            return
        self._ranks[rank].inbox.append((row, header))

    def credited(self, rank: int, slot: int, now: float) -> Iterator[Effect]:
        """`rank` has read result slot `slot`."""
        self._release(rank, slot)
        return iter(())

    def told(self, rank: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        """A control message arrived from `rank`."""
        if isinstance(message, Report):
            yield from self._reported(rank, message, now)
        elif not isinstance(message, Leave):
            yield from self._violation(rank, ProtocolError(f"unexpected {type(message).__name__}"))
        elif message.cause is not None:
            own = message.cause.culprit == self._ranks[rank].name
            kind: AbortKind = "worker" if own else "relayed"
            if message.cause.timeout or message.cause.mismatch:
                kind = "timeout" if message.cause.timeout else "mismatch"
            yield from self.abort(message.cause, kind, rank if own else None)
        else:
            yield from self._left(rank)

    def _reported(self, rank: int, report: Report, now: float) -> Iterator[Effect]:
        if self.ended is not None:
            return
        try:
            self.account.report(rank, report, now)
        except ProtocolError as error:
            yield from self._violation(rank, error)
            return
        wait = self.waiting(now)
        if wait is not None and now >= self._warn_again_at:  # one warning for all ranks that wait
            self._warn_again_at = now + max(self._warn_after_s, min(wait.seconds, LONGEST_PAUSE_S))
            yield Warn(f"{wait.what} waits for {wait.who} since {wait.seconds:.0f} s")

    def heard(self, rank: int, now: float) -> None:
        """A part of a message came from `rank`. The machine cannot use it yet."""

    def lost(self, rank: int, reason: str, now: float) -> Iterator[Effect]:
        """The link to `rank` is over."""
        if rank not in self._gone:
            yield from self.abort(Cause(self._ranks[rank].name, reason), "lost", rank)

    def violated(self, rank: int, reason: str, now: float) -> Iterator[Effect]:
        """`rank` broke the rules of its link, or sent what cannot be decoded; the link may be over."""
        if rank not in self._gone:
            yield from self._violation(rank, ProtocolError(reason))

    def timer(self, now: float) -> Iterator[Effect]:
        """Time has passed. If no result left for long, tell all ranks whom they wait for."""
        deadline, wait = self.deadline, self.waiting(now)
        if deadline is None or now < deadline or wait is None:
            return
        self._warned_at = now
        yield Warn(f"{wait.what} waits for {wait.who} since {wait.seconds:.0f} s")
        yield Tell(ALL, Waiting(wait.what, wait.who, wait.seconds))

    def abort(self, cause: Cause, kind: AbortKind, rank: int | None = None) -> Iterator[Effect]:
        """End the job on every rank."""
        if self.ended is None:
            self.ended = End(cause, kind, rank)
            yield Tell(ALL, Aborted(cause))
            yield self.ended

    # progress

    def advance(self, now: float) -> Iterator[Effect]:
        """Merge and send what the messages at hand allow, until that is done or the budget of one turn is spent."""
        if self._current is None:
            self._quiet_since = now
        self.spent, self.more, moved = 0, False, True
        while moved and self.ended is None:
            if self.spent >= self.quantum:
                self.more = True
                return
            self.spent += self._round_work
            try:
                taken = self._take_messages(now)
            except _BrokenRuleError as broken:
                yield from self._violation(broken.rank, broken.error)
                return
            if self._current is None:
                return
            if self._gone:
                yield from self.abort(self._ranks_gone_cause(), "left")
                return
            if taken and self.spent >= self.quantum:
                continue
            # Messages that were taken are merged now, or wait for other ranks: they alone need no other round.
            moved = self._merge(self._current)
            moved |= yield from self._return_used(self._current)
            if self._worth_sending(self._current, moved):
                moved, self._quiet_since = True, now
                yield self._emit(self._current)

    def _take_messages(self, now: float) -> bool:
        """Open the next messages, and go on with long ones; return whether there were any. Raises _BrokenRuleError."""
        moved, union = False, self._reduction.union
        for rank, state in enumerate(self._ranks):
            if (state.inbox and state.open_row < 0) or rank in union.hungry:
                try:
                    if rank in union.hungry:
                        self.spent += union.feed(rank)
                        moved = True
                    else:
                        moved |= self._open_next(rank, state, now)
                except ProtocolError as error:
                    raise _BrokenRuleError(rank, error) from error
                if moved and self.spent >= self.quantum:
                    break
        return moved

    def _open_next(self, rank: int, state: _Rank, now: float) -> bool:
        """Open the rank's next message if it belongs to the current collective. Raises ProtocolError."""
        row, header = state.inbox[0]
        if self._current is None:
            self._begin(rank, row, header)
            self.account.begin(now)
        elif not state.joined:
            self._compare(rank, row, header)
        elif self._current.union.ended(rank):
            return False  # a later collective's
        elif header.extra_bytes:
            raise ProtocolError(f"a second descriptor for collective {self._number}")
        if header.collective != self._number:
            raise ProtocolError(f"a message of collective {header.collective} during {self._number}")
        state.inbox.popleft()
        self.spent += self._reduction.union.open(rank, row, header)
        state.open_row = row
        if not state.joined:
            state.joined = True
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
        shard, shards, stripe_blocks = self._stripes
        layout = descriptor.layout.dealt(shards, stripe_blocks, self._whole_bytes, descriptor.block_bytes)
        self._reduction.begin(descriptor, layout.stripes(shard))
        self._current, self._descriptor, self._number = self._reduction, descriptor, header.collective
        self._first = rank, extra

    def _compare(self, rank: int, row: int, header: Header) -> None:
        """All ranks must submit the same collective in the same place. Raises ProtocolError."""
        extra = message_extra(self._arena[row], header)
        first, expected = self._first
        number = header.collective
        if (number, extra) != (self._number, expected):
            assert self._descriptor is not None
            words = told_apart(self._descriptor, decode_descriptor(extra))
            sides = sorted(zip((first, rank), (self._number, number), words, strict=True))
            place = " as number {}" if number != self._number else ""
            said = "; ".join(f"rank {each} called {what}{place.format(at)}" for each, at, what in sides)
            raise _MismatchError(f"collective {self._number}: {said}")

    def _merge(self, current: Reduction) -> bool:
        if self._filling < 0:
            if not self._free:
                return False
            self._filling = self._free.pop()
        work = 0 if current.full else current.merge(self._filling, self.quantum - self.spent)
        self.spent += work
        return work > 0

    def _return_used(self, current: Reduction) -> Generator[Effect, None, bool]:
        """Give back the slots that are used up; return whether there were any. Other messages may wait behind them."""
        returned = False
        for rank, state in enumerate(self._ranks):
            if state.open_row >= 0 and current.union.exhausted(rank):
                yield Return(rank, state.open_row - rank * self._slot_count)
                state.open_row, returned = -1, True
        return returned

    def _worth_sending(self, current: Reduction, moved: bool) -> bool:
        """Send full slots and the end at once; a half-full slot only while no input waits."""
        if self._filling < 0:
            return False
        return current.full or current.union.complete or (not moved and current.half_full)

    def _emit(self, current: Reduction) -> Send:
        slot, self._filling = self._filling, -1
        complete = current.union.complete
        memories = {rank: memory[slot] for rank, memory in self._shorter.items()}
        nbytes, shorter = current.seal(slot, self._number, memories)
        self.spent += nbytes * (len(memories) or 1)
        self._readers[slot] = set(range(len(self._ranks)))
        if complete:
            assert self._descriptor is not None
            self.account.complete(self._descriptor, current)
            self._current = self._descriptor = None
            self._number += 1
            for state in self._ranks:
                state.joined = False
        return Send(ALL, slot, nbytes, shorter)

    def _release(self, rank: int, slot: int) -> None:
        readers = self._readers[slot]
        if rank in readers:
            readers.remove(rank)
            if not readers:
                self._free.append(slot)

    def _waited_for(self, current: Reduction) -> list[int]:
        """The ranks that have not read their results, if no result slot is free; else those with the lowest
        frontier."""
        if self._filling < 0 and not self._free:
            return sorted(set().union(*self._readers))
        return current.union.laggards

    # departures

    def _left(self, rank: int) -> Iterator[Effect]:
        if rank in self._gone:
            yield from self._violation(rank, ProtocolError("left twice"))
            return
        self._gone.add(rank)
        for slot in range(self._slot_count):
            self._release(rank, slot)
        yield Tell(rank, Goodbye())
        if len(self._gone) == len(self._ranks) and self.ended is None:
            self.ended = End(None)
            yield self.ended

    def _ranks_gone_cause(self) -> Cause:
        gone = listed([self._ranks[rank].name for rank in sorted(self._gone)])
        return Cause(gone, f"had shut down when collective {self._number} ({self._descriptor}) began")

    def _violation(self, rank: int, error: ProtocolError) -> Iterator[Effect]:
        if isinstance(error, _MismatchError):
            low, high = sorted((self._first[0], rank))
            return self.abort(Cause(f"ranks {low} and {high}", f"submitted different collectives: {error}"), "mismatch")
        return self.abort(Cause(self._ranks[rank].name, f"protocol error: {error}"), "violation", rank)


class _BrokenRuleError(Exception):
    """`rank` broke the protocol."""

    def __init__(self, rank: int, error: ProtocolError) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error


class _MismatchError(ProtocolError):
    """Two ranks submitted different collectives in the same place."""
