"""Legs of a collective, its passes through the memory of a host: one or two."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.protocol.collective import Collective
from omnireduce.protocol.host_preset import PassKind
from omnireduce.protocol.operands import AGREEMENT, RowBlocks, TensorBlocks
from omnireduce.protocol.rows import RowSum

_NO_NOTES = np.zeros(0, np.uint8)


class MemoryPass(NamedTuple):
    """One pass of `blocks` through memory. `notes`: for a sum, what is known of each block, as in `HostSum`. `owed`:
    the ranks, counted within the host, that have to wait for a shard before they begin."""

    collective: Collective
    blocks: TensorBlocks | RowBlocks
    form: PassKind
    notes: Array = _NO_NOTES
    owed: frozenset[int] = frozenset()


def passes_of(collective: Collective, ranks: int, hosts: int) -> list[MemoryPass]:
    """The legs of a collective among the `ranks` of one host, in a job on so many `hosts`."""
    blocks, host_sum = collective.operand.blocks, collective.host_sum
    if isinstance(host_sum, RowSum):
        layout, nothing_yet = host_sum.layout, host_sum.returned()
        owed = frozenset(shard % ranks for shard in range(layout.shards) if layout.takes_part(shard))
        return [
            MemoryPass(collective, host_sum.blocks, "sums of rows"),
            MemoryPass(collective, nothing_yet, "returned rows", owed=owed),
        ]
    if host_sum is not None:
        return [MemoryPass(collective, blocks, "sum", host_sum.notes)]
    if hosts > 1:
        return [MemoryPass(collective, AGREEMENT, "agreement")]
    return [MemoryPass(collective, blocks, "rows" if isinstance(blocks, RowBlocks) else "tensor")]
