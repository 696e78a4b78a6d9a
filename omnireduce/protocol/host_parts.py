"""What of a collective goes through the memory of a host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.protocol.collective import Collective
from omnireduce.protocol.host_preset import Form
from omnireduce.protocol.operands import AGREEMENT, RowBlocks, TensorBlocks
from omnireduce.protocol.rows import RowSum

_NO_NOTES = np.zeros(0, np.uint8)


class Part(NamedTuple):
    """One exchange. `notes`: of a sum, what is known of each block, as in `HostSum`. `owed`: the ranks, counted within
    the host, that may have to wait for a shard before they begin."""

    collective: Collective
    blocks: TensorBlocks | RowBlocks
    form: Form
    notes: Array = _NO_NOTES
    owed: frozenset[int] = frozenset()


def parts_of(collective: Collective, ranks: int, hosts: int) -> list[Part]:
    """The exchanges of a collective among the `ranks` of one of `hosts`, in turn."""
    blocks, host_sum = collective.operand.blocks, collective.host_sum
    if isinstance(host_sum, RowSum):
        layout = host_sum.layout
        owed = frozenset(shard % ranks for shard in range(layout.shards) if layout.takes_part(shard))
        return [
            Part(collective, host_sum.brought, "sums of rows"),
            Part(collective, host_sum.brought, "returned rows", owed=owed),  # until it is known what comes back
        ]
    if host_sum is not None:
        return [Part(collective, blocks, "sum", host_sum.notes)]
    if hosts > 1:
        return [Part(collective, AGREEMENT, "agreement")]
    return [Part(collective, blocks, "rows" if isinstance(blocks, RowBlocks) else "tensor")]
