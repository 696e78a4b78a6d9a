"""What a rank counts of its exchanges in memory."""

from __future__ import annotations

from typing import Any

from omnireduce.descriptor import Descriptor

MOST_LATE_S = 3600.0  # in one collective


class HostAccount:
    """Totals, as in `Report`, and for how long the others waited for each rank of the host."""

    def __init__(self) -> None:
        self.totals = {"collectives": 0, "blocks": 0, "own_blocks": 0, "union_blocks": 0}
        self.late_s: dict[int, float] = {}

    def count(self, s: Any, descriptor: Descriptor) -> None:
        """A collective is complete; `s` is an element of STATE."""
        totals = self.totals
        if s["late_ns"] > 0 and s["me"] == 0:  # one rank says it for all; a rank can write any time into its region
            last = int(s["last"])
            self.late_s[last] = min(self.late_s.get(last, 0.0) + min(int(s["late_ns"]) / 1e9, MOST_LATE_S), 1e9)
        totals["collectives"] += 1
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            totals["blocks"] += descriptor.layout.blocks
            totals["own_blocks"] += int(s["staged_blocks"] + s["own_blocks"])
            totals["union_blocks"] += int(s["result_blocks"])
