"""Counters of a rank's exchanges in memory."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.descriptor import Descriptor

MOST_LATE_S = 3600.0  # in one collective


class Counts(NamedTuple):
    """Counters of one collective. The fields have the names and the order of those of STATE. Blocks are those of this
    rank."""

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

    def count(self, counts: Counts, descriptor: Descriptor, *, says_who_is_late: bool) -> None:
        """A collective is complete."""
        totals = self.totals
        if counts.late_ns > 0 and says_who_is_late:  # a rank can write any time into its region
            last = counts.last
            self.late_s[last] = min(self.late_s.get(last, 0.0) + min(counts.late_ns / 1e9, MOST_LATE_S), 1e9)
        totals["collectives"] += 1
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            totals["blocks"] += descriptor.layout.blocks
            totals["own_blocks"] += counts.staged_blocks + counts.own_blocks
            totals["union_blocks"] += counts.result_blocks
