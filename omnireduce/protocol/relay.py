"""The machine of a relay: an aggregator that is itself a member of another one, its upstream.

    up     the members' blocks are merged as on any shard; the sums go to the upstream, as one rank would send them
    down   the results of the upstream go to the members as they are, out of the slots into which they have come

For each member the relay has a connection to the upstream, the member's uplink. It carries the control messages of the
member both ways. The uplink of the first member carries the sums and the results, too. If tensors must not be summed on
the way, each member's messages go through its own uplink as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from omnireduce.core.dtypes import Array
from omnireduce.core.status_messages import LISTED
from omnireduce.core.wire.blocks import Header, read_header
from omnireduce.core.wire.control import (
    Aborted,
    Cause,
    ControlMessage,
    Goodbye,
    Leave,
    Newcomers,
    Report,
    Waiting,
)
from omnireduce.errors import ProtocolError
from omnireduce.kernels.codecs.draws import SUM
from omnireduce.protocol.collective.combining import NO_HEADER
from omnireduce.protocol.collective.effects import AbortKind, Effect, End, ReturnCredit, Send, SendControl, Warn
from omnireduce.protocol.collective.reduction import Reduction
from omnireduce.protocol.counters import Wait
from omnireduce.protocol.shard import Inbox, ResultSlots, ShardMachine

REPORTS_AT_ONCE, REPORTS_PER_S = 100.0, 10.0  # reports of one member: an honest member sends a few in a second
SILENT = 0.75  # the silent part of a wait: an upstream that waits says so each time that its wait has doubled
NOTHING_YET = -1  # the frontier of a collective before its first message or result


@dataclass(slots=True)
class _PendingResult:
    """A collective that has sent something up, and waits for results from the upstream."""

    number: int
    blocks: int
    readers: Sequence[int]
    sent: int = NOTHING_YET  # the frontier of the messages that have gone up
    returned: int = NOTHING_YET  # the frontier of the results that have come back
    total_bytes: int = 0  # the length of the program's totals behind the last result


class RelayMachine(ShardMachine):
    """One generation of one job on a relay.

    Peers 0 to m - 1 are the members, in the order of their ranks, and m to 2m - 1 their uplinks, in the same order.
    `results`: uint8 (slots, slot bytes), the receive slots for results of aggregator `upstream`. `sums`, of the same
    shape, are the send slots of the first uplink. Every other uplink sends from the receive slots of its member.
    `in_memory`: the ranks exchange everything in memory, and no blocks come here. The options are the same as for the
    aggregator's machine.
    """

    def __init__(
        self, members: Sequence[str], arena: Array, results: Array, sums: Array,
        *, upstream: str, in_memory: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(members, arena, sums, divisor=1, **options)  # the last aggregator on the way up divides
        self._senders.states = None  # programs work on sums of all ranks
        self._address, self._upstream, self._upstream_results = upstream, f"aggregator {upstream}", results
        self._member_count = len(members)  # the number of members; also the first uplink
        self._down_slots = ResultSlots(len(results))  # slots with results that members still read
        self._headers = [NO_HEADER] * len(members)  # the header of each member's open message
        self._encodes_as = SUM + 1 + self._numbers[0]
        self._is_passed_on = False  # the current collective is not summed here
        self.passing: list[set[int]] = [set() for _ in members]  # receive slots whose messages are on their way up
        self._awaited: deque[_PendingResult] = deque()
        self._confirmed: set[int] = set()  # members whose Leave the upstream has dealt with
        self._heard_at = 0.0  # when the upstream was heard last
        self._in_memory, self._leaves_later = in_memory, False
        self._report_allowance: dict[int, tuple[float, float]] = {}  # reports that each member may send, and since when
        self._reported_wait: Wait | None = None  # the upstream believes that members are late
        self._reports: dict[int, tuple[Report, float]] = {}  # the last report of each member, and when it came

    @property
    def idle(self) -> bool:
        return not self._awaited and super().idle

    def has_left(self, peer: int) -> bool:
        return peer % self._member_count in self._confirmed and not (peer == self._member_count and self._leaves_later)

    def names_of(self, ranks: Iterable[int]) -> str:
        ranks = list(ranks)
        below = [rank for rank in ranks if rank < self._member_count]
        return super().names_of(below) if below or not ranks else self._upstream

    # events from below

    def control_received(self, peer: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        if peer >= self._member_count:
            yield from self._control_from_upstream(peer - self._member_count, message, now)
        elif isinstance(message, Report):
            yield from self._pass_report_on(peer, message, now)
        else:
            yield from super().control_received(peer, message, now)

    def _pass_report_on(self, peer: int, report: Report, now: float) -> Iterator[Effect]:
        """Pass a rank's report on to the upstream. A report of a relay below is only about a wait, and stays here: it
        says whom this relay waits for."""
        level, at = self._report_allowance.get(peer, (REPORTS_AT_ONCE, now))
        level = min(REPORTS_AT_ONCE, level + (now - at) * REPORTS_PER_S) - 1
        self._report_allowance[peer] = level, now
        if level < 0:
            yield from self._violation(peer, ProtocolError(f"more than {REPORTS_PER_S:g} reports a second"))
            return
        self._reports[peer] = report, now
        if self._in_memory:
            yield from self._take_report(peer, report, now)
        if self._ranks_report:
            yield SendControl(self._member_count + peer, report if peer else self._report())

    @property
    def _ranks_report(self) -> bool:
        """Whether ranks share memory, and report their exchanges there."""
        return self._senders.has_hosts or self._in_memory

    def _release_rank(self, rank: int) -> Iterator[Effect]:
        unfinished = next((awaited for awaited in self._awaited if rank in awaited.readers), None)
        if unfinished is not None:  # its results would find nobody, and others would wait for its credit
            reason = f"had shut down when collective {unfinished.number} was under way"
            yield from self.abort(Cause(self._inboxes[rank].name, reason), "left")
            return
        if rank == 0 and not self.idle:
            self._leaves_later = True  # its uplink carries the sums of others, which are not done yet
        else:
            yield SendControl(self._member_count + rank, Leave())  # the Goodbye comes from above
        yield from (ReturnCredit(self._member_count, slot) for slot in self._down_slots.release_all(rank))

    def lost(self, peer: int, reason: str, now: float) -> Iterator[Effect]:
        if peer >= self._member_count:
            yield from self._upstream_lost(peer - self._member_count, reason, "lost")
        elif peer in self._departed:
            yield from self._confirm(peer)  # this member does not wait for the Goodbye
        else:
            yield from super().lost(peer, reason, now)

    def violated(self, peer: int, reason: str, now: float) -> Iterator[Effect]:
        if peer >= self._member_count:
            yield from self._upstream_lost(peer - self._member_count, f"protocol error: {reason}", "violation")
        elif peer in self._departed:
            yield from self._confirm(peer)
        else:
            yield from super().violated(peer, reason, now)

    def abort(self, cause: Cause, kind: AbortKind, rank: int | None = None) -> Iterator[Effect]:
        """End the job on every rank. The upstream tells the ranks that do not come through this relay."""
        if self.ended is None:
            yield from (
                SendControl(self._member_count + member, Leave(cause))
                for member in range(self._member_count)
                if member not in self._departed
            )
        yield from super().abort(cause, kind, rank)

    def _rank_left(self, rank: int, cause: Cause | None) -> Iterator[Effect]:
        if cause is not None and rank not in self._departed:
            yield SendControl(self._member_count + rank, Leave(cause))
        yield from super()._rank_left(rank, cause)

    # events from above

    def received(self, peer: int, slot: int, nbytes: int, now: float) -> Iterator[Effect]:
        if peer < self._member_count:
            yield from super().received(peer, slot, nbytes, now)
            return
        self._heard_at = now
        try:
            readers = self._admit_result(peer, read_header(self._upstream_results[slot], nbytes))
        except ProtocolError as error:
            yield from self.violated(peer, str(error), now)
            return
        self._stalls.begin(now)
        yield from self._withdraw_wait()
        self._down_slots.free.remove(slot)
        self._down_slots.send(slot, readers)
        yield Send(readers, slot, nbytes)
        if self._leaves_later and self.idle:
            self._leaves_later = False
            yield SendControl(self._member_count, Leave())

    def _admit_result(self, peer: int, header: Header) -> Sequence[int]:
        """The members that get a result. Raises ProtocolError for an invalid result."""
        if peer != self._member_count:
            raise ProtocolError("a result for a rank that gets none here")
        awaited = self._awaited[0] if self._awaited else None
        if awaited is None or header.collective != awaited.number:
            raise ProtocolError(f"a result out of order: {header}")
        if header.extra_bytes != (awaited.total_bytes if header.frontier == awaited.blocks else 0):
            raise ProtocolError(f"a result with totals that do not belong to its program: {header}")
        if header.left_out or not max(0, awaited.returned) <= header.frontier <= awaited.sent:
            raise ProtocolError(f"a result that does not fit its collective: {header}")
        awaited.returned = header.frontier
        if header.frontier == awaited.blocks:
            self._awaited.popleft()
        return awaited.readers

    def credited(self, peer: int, slot: int, now: float) -> Iterator[Effect]:
        if peer > self._member_count:
            self._heard_at = now
            self.passing[peer - self._member_count].discard(slot)
            yield ReturnCredit(peer - self._member_count, slot)
        elif peer == self._member_count:
            self._heard_at = now
            self._slots.release(peer, slot)
        elif self._down_slots.release(peer, slot):
            yield from self._withdraw_wait()
            yield ReturnCredit(self._member_count, slot)

    def _control_from_upstream(self, rank: int, message: ControlMessage, now: float) -> Iterator[Effect]:
        self._heard_at = now
        if isinstance(message, Goodbye) and rank in self._departed:
            yield SendControl(rank, message)
            yield from self._confirm(rank)
        elif isinstance(message, Aborted):
            if self.ended is None:
                self.ended = End(message.cause, "relayed")
                yield from self._tell_all(message)
                yield self.ended
        elif isinstance(message, Waiting):
            yield SendControl(rank, message.with_sender(self._address))
        elif isinstance(message, Newcomers):
            yield SendControl(rank, message)
        else:
            yield from self.violated(self._member_count + rank, f"unexpected {type(message).__name__}", now)

    def _confirm(self, rank: int) -> Iterator[Effect]:
        """The upstream knows that this member has left."""
        self._confirmed.add(rank)
        if len(self._confirmed) == self._member_count and self.ended is None:
            self.ended = End(None)
            yield self.ended

    def _upstream_lost(self, rank: int, reason: str, kind: AbortKind) -> Iterator[Effect]:
        if not self.has_left(self._member_count + rank):
            yield from self.abort(Cause(self._upstream, reason), kind)

    # waiting

    def waiting(self, now: float) -> Wait | None:
        if not self._awaited or self.ended is not None:
            return super().waiting(now)
        collective = f"collective {self._awaited[0].number}"
        if not self._down_slots.free:  # members have not read the last results
            return self._wait(collective, self._late_members(self._down_slots.readers), now)
        if self._current is None or self._awaited[0].number < self._number:  # late members may wait for this result
            return Wait(collective, [], 0, self._upstream, now - self._stalls.since)
        return super().waiting(now)

    def _wait(self, what: str, ranks: list[int], now: float) -> Wait:
        if self._member_count in ranks:  # the upstream has not read the last sums
            return Wait(what, [], 0, self._upstream, now - self._stalls.since)
        return super()._wait(what, ranks, now)

    def _awaited_ranks(self, current: Reduction) -> list[int]:
        ranks = super()._awaited_ranks(current)
        if max(ranks, default=0) >= self._member_count or any(self.passing[rank] for rank in ranks):
            return [self._member_count]  # the upstream has not read the last messages
        return self._late_members(ranks)

    def _late_members(self, members: Iterable[int]) -> list[int]:
        """The late members: those of `members` that wait for nobody, and those that the others wait for."""
        return sorted({late for member in members for late in self._awaited_by(member) or [member]})

    def _awaited_by(self, rank: int) -> list[int]:
        """The members that this member waits for, as its report says: it is a relay below, or a rank that shares
        memory. A member that has reported since is not late."""
        report, came_at = self._reports.get(rank, (Report(), 0.0))
        latest = {member: at for member, (_, at) in self._reports.items() if at > came_at}
        return [
            member
            for member in range(self._member_count)
            if self._numbers[member] in report.behind and member not in latest
        ]

    def _report(self) -> Report:
        """The first member's report, with the wait of this relay, if the upstream was told of one."""
        totals = self._reports[0][0] if self._ranks_report and 0 in self._reports else Report()
        wait = self._reported_wait
        if wait is None:
            return totals
        behind = wait.ranks[:LISTED]
        return replace(totals, what=wait.what, behind=behind, total=wait.total, waited_s=wait.seconds)

    def timer(self, now: float) -> Iterator[Effect]:
        """Time has passed. The upstream learns of a wait for members, too. During a wait for the upstream, it tells the
        members itself whom it waits for. If it says nothing for long, this relay tells them that."""
        wait = None if self.idle else self.waiting(now)
        if wait is None or not self._stalls.is_due(now):
            return
        yield Warn(f"{wait.what} waits for {wait.who} since {wait.seconds:.0f} s")
        if wait.ranks:
            self._reported_wait = wait
            yield SendControl(self._member_count, self._report())
        is_silent = now - self._heard_at > SILENT * wait.seconds and wait.seconds >= 2 * self._stalls.after_s
        if wait.who != self._upstream or is_silent:
            yield from self._tell_all(Waiting(wait.what, wait.who, wait.seconds))

    def _tell_all(self, message: ControlMessage) -> Iterator[Effect]:
        return (SendControl(rank, message) for rank in range(self._member_count))

    # progress

    def advance(self, now: float) -> Iterator[Effect]:
        for effect in super().advance(now):
            if isinstance(effect, Send):
                yield from self._withdraw_wait()
            yield effect

    def _withdraw_wait(self) -> Iterator[Effect]:
        """Work goes on: tell the upstream that nobody is late any more, if it was told so."""
        if self._reported_wait is not None:
            self._reported_wait = None
            yield SendControl(self._member_count, self._report())

    def _begin(self, rank: int, row: int, header: Header) -> None:
        super()._begin(rank, row, header)
        assert self._descriptor is not None
        blocks, self._is_passed_on = self._descriptor.layout.blocks, not self._descriptor.summed_by_host
        sent = blocks if self._is_passed_on else NOTHING_YET
        program = self._descriptor.program
        totals_bytes = 0 if program is None else program.total_bytes
        self._awaited.append(
            _PendingResult(self._number, blocks, self._senders.readers, sent, total_bytes=totals_bytes)
        )
        self._senders.readers, self._extra = (self._member_count,), self._first_call[1]

    def _open_next(self, rank: int, state: Inbox, now: float) -> bool:
        header = state.messages[0][1]
        is_open = super()._open_next(rank, state, now)
        if is_open:
            self._headers[rank] = header
        return is_open

    def _emit(self, current: Reduction) -> Send:
        send = super()._emit(current)
        self._awaited[-1].sent, self._extra = current.sealed, b""
        return send

    def _merge(self, current: Reduction) -> bool:
        return not self._is_passed_on and super()._merge(current)

    def _should_send(self, current: Reduction, moved: bool) -> bool:
        return not self._is_passed_on and super()._should_send(current, moved)

    def _return_credits(self, current: Reduction) -> Generator[Effect, None, bool]:
        if not self._is_passed_on:
            return (yield from super()._return_credits(current))
        moved = False
        for rank, state in enumerate(self._inboxes):
            if state.open_row >= 0 and (rank or self._slots.free):
                yield from self._pass_on(rank, state.open_row)
                current.union.skip(rank)
                state.open_row, moved = -1, True
        if current.union.complete and all(state.open_row < 0 for state in self._inboxes):
            self._complete(current)
        return moved

    def _pass_on(self, rank: int, row: int) -> Iterator[Effect]:
        """Send a member's message up. It is sent from its receive slot, and the member's credit returns with that of
        the uplink. Only the uplink of the first member has its own send slots."""
        slot, header = row - rank * self._slot_count, self._headers[rank]
        nbytes = header.list_stop + header.extra_bytes
        self.spent += nbytes
        if rank:
            self.passing[rank].add(slot)
            yield Send((self._member_count + rank,), slot, nbytes)
            return
        own_slot = self._slots.free.pop()
        self._results[own_slot, :nbytes] = self._arena[row, :nbytes]
        self._slots.send(own_slot, (self._member_count,))
        yield Send((self._member_count,), own_slot, nbytes)
        yield ReturnCredit(rank, slot)
