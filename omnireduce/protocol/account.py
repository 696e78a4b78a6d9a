"""What a job did on one shard: collectives, blocks, and which ranks the others waited for. Nothing runs per block."""

from __future__ import annotations

from omnireduce.descriptor import Descriptor
from omnireduce.protocol.reduction import Reduction
from omnireduce.status import MOST, Late, Traffic


class Account:
    """The account that the aggregator's machine keeps of a job.

    `traffic` counts no bytes. Of each collective only the last rank to begin is late: by the time from the first
    message of any rank to its own first message.
    """

    def __init__(self, ranks: int) -> None:
        self.traffic = Traffic()
        self._late_s = [0.0] * ranks
        self._begun_at = 0.0
        self._to_join = 0

    def begin(self, now: float) -> None:
        """The first message of a collective is here."""
        self._begun_at, self._to_join = now, len(self._late_s)

    def join(self, rank: int, now: float) -> None:
        """The first message of `rank` is here."""
        self._to_join -= 1
        if not self._to_join:
            self._late_s[rank] += now - self._begun_at

    def complete(self, descriptor: Descriptor, done: Reduction) -> None:
        """The last result has been sent."""
        traffic, union = self.traffic, done.union
        traffic.collectives = min(traffic.collectives + 1, MOST)
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            blocks = union.shape.stripes.count(union.shape.blocks)
            traffic.blocks = min(traffic.blocks + blocks, MOST)
            traffic.rank_blocks = min(traffic.rank_blocks + blocks * len(self._late_s), MOST)
            traffic.own_blocks = min(traffic.own_blocks + union.received_blocks, MOST)
            traffic.union_blocks = min(traffic.union_blocks + done.sent_blocks, MOST)

    @property
    def late(self) -> list[Late]:
        """The ranks that others have waited for, longest first."""
        found = [Late(rank, seconds) for rank, seconds in enumerate(self._late_s) if seconds > 0]
        return sorted(found, key=lambda each: each.seconds, reverse=True)
