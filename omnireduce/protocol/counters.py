"""Statistics of one job on one shard: collectives, blocks, and the ranks that kept others waiting. Nothing runs per
block.

Ranks report what they exchange in memory: this shard sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import NamedTuple

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.status_messages import MAX_TOTAL, LateRank, Traffic
from omnireduce.core.wire.control import Report
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.reduction import Reduction

NOTHING = Report()
TOTALS = ("collectives", "blocks", "own_blocks", "union_blocks", "sent_bytes", "received_bytes")


class Wait(NamedTuple):
    """A collective, which `what` describes, waits for `total` ranks. `ranks` lists some of them, and `who` names those.
    No result has left for `seconds`.

    Without ranks it waits for the aggregator itself, which has more work than fits into one turn.
    """

    what: str
    ranks: list[int]
    total: int
    who: str
    seconds: float


class Account:
    """Statistics of a job, kept by the aggregator's machine. `numbers[i]` is the rank of member i.

    `traffic` counts no bytes. In each collective only the last rank to begin is late: by the time from the first
    message of any rank to its own first message.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self.traffic = Traffic()
        self._numbers = numbers
        self._late_s = [0.0] * len(numbers)
        self._begun_at = 0.0
        self._senders = self._ranks_to_begin = 0
        self._reports: dict[int, tuple[Report, float]] = {}  # the last report of each rank, and when it came

    def begin(self, senders: int, now: float) -> None:
        """The first message of a collective is here. `senders`: the number of ranks that bring blocks to it."""
        self._begun_at = now
        self._senders = self._ranks_to_begin = senders

    def join(self, rank: int, now: float) -> None:
        """The first message of `rank` is here."""
        self._ranks_to_begin -= 1
        if not self._ranks_to_begin:
            self._late_s[rank] += now - self._begun_at

    def complete(self, descriptor: Descriptor, reduction: Reduction) -> None:
        """The last result has been sent."""
        traffic, union = self.traffic, reduction.union
        traffic.collectives = min(traffic.collectives + 1, MAX_TOTAL)
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            blocks = union.shape.stripes.count(union.shape.blocks)
            traffic.blocks = min(traffic.blocks + blocks, MAX_TOTAL)
            traffic.rank_blocks = min(traffic.rank_blocks + blocks * self._senders, MAX_TOTAL)
            traffic.own_blocks = min(traffic.own_blocks + union.received_blocks, MAX_TOTAL)
            traffic.union_blocks = min(traffic.union_blocks + reduction.sent_blocks, MAX_TOTAL)

    def report(self, rank: int, report: Report, now: float) -> None:
        """Take the report of a rank about its exchanges in memory. Raises ProtocolError for impossible numbers."""
        previous, ranks = self._reports.get(rank, (NOTHING, now))[0], len(self._late_s)
        if any(getattr(report, name) < getattr(previous, name) for name in TOTALS):
            raise ProtocolError(f"a report with totals that have become smaller: {report} after {previous}")
        if max(report.own_blocks, report.union_blocks) > report.blocks:
            raise ProtocolError(f"a report of more blocks than there were: {report}")
        if max([*report.late, *report.behind], default=0) >= ranks or len(report.late) != len(report.late_s):
            raise ProtocolError(f"a report about ranks that do not exist: {report}")
        self._reports[rank] = report, now

    def late_ranks_of(self, ranks: Iterable[int]) -> list[int]:
        """The ranks that `ranks` wait for, as their last reports say. A rank whose report names nobody is late itself.
        A named rank is not late if it has reported since: the rank that named it may have stopped."""
        late = set[int]()
        for rank in ranks:
            report, came_at = self._reports.get(rank, (Report(), 0.0))
            behind = [other for other in report.behind if self._reports.get(other, (report, came_at))[1] <= came_at]
            late.update(behind or (rank,))
        return sorted(late)

    def waiting(self, now: float) -> Wait | None:
        """The longest wait for ranks that a rank has reported."""
        waits = [
            Wait(report.what, report.behind, report.total, "", report.waited_s + now - came_at)
            for report, came_at in self._reports.values()
            if report.total
        ]
        return max(waits, key=lambda wait: wait.seconds, default=None)

    def total(self) -> Traffic:
        """Everything, with the bytes that were exchanged in memory."""
        total = copy(self.traffic)
        reports = [report for report, _ in self._reports.values()]
        if reports:  # they were made at different moments: the rank that is ahead has the totals of the job
            collectives, blocks = (
                max(getattr(report, name) for report in reports) for name in ("collectives", "blocks")
            )
            total.add(Traffic(collectives=collectives, blocks=blocks))
        for report in reports:
            total.add(
                Traffic(
                    rank_blocks=report.blocks,
                    own_blocks=report.own_blocks,
                    union_blocks=report.union_blocks,
                    received_bytes=report.sent_bytes,
                    sent_bytes=report.received_bytes,
                )
            )
        return total

    @property
    def memory_bytes(self) -> int:
        """Bytes that ranks have put into memory that they share, and taken from it."""
        return sum(report.sent_bytes + report.received_bytes for report, _ in self._reports.values())

    @property
    def late(self) -> list[LateRank]:
        """The ranks that others have waited for, longest first."""
        late_s = list(self._late_s)
        for report, _ in self._reports.values():
            for rank, seconds in zip(report.late, report.late_s, strict=True):
                late_s[rank] += seconds
        late_ranks = [
            LateRank(rank, seconds) for rank, seconds in zip(self._numbers, late_s, strict=True) if seconds > 0
        ]
        return sorted(late_ranks, key=lambda late: late.seconds, reverse=True)
