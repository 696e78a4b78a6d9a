"""What a rank counts of its exchanges in memory."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.descriptor import Descriptor

MOST_LATE_S = 3600.0  # in one collective


class Done(NamedTuple):
    """What came of a collective: so many fields of STATE, in this order. Blocks are those of this rank."""

    staged_blocks: int
    own_blocks: int
    result_blocks: int
    collected_blocks: int
    taken: int
    last: int
    late_ns: int


class HostAccount:
    """Totals, as in `Report`, and for how long the others waited for each rank of the host."""

    def __init__(self) -> None:
        self.totals = {"collectives": 0, "blocks": 0, "own_blocks": 0, "union_blocks": 0}
        self.late_s: dict[int, float] = {}

    def count(self, done: Done, descriptor: Descriptor, *, says_who_is_late: bool) -> None:
        """A collective is complete."""
        totals = self.totals
        if done.late_ns > 0 and says_who_is_late:  # a rank can write any time into its region
            last = done.last
            self.late_s[last] = min(self.late_s.get(last, 0.0) + min(done.late_ns / 1e9, MOST_LATE_S), 1e9)
        totals["collectives"] += 1
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            totals["blocks"] += descriptor.layout.blocks
            totals["own_blocks"] += done.staged_blocks + done.own_blocks
            totals["union_blocks"] += done.result_blocks
