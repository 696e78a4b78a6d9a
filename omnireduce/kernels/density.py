"""Which blocks are non-zero: the scan without the copy."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.jit import kernel


@kernel
def nonzero_blocks(words: Array, mask: np.uint64, found: Array) -> int:
    """Set `found[b]` for every non-zero row of `words` (uint64, blocks x words per block); return how many there
    are."""
    total = 0
    for block in range(words.shape[0]):
        row = words[block]
        seen = np.uint64(0)
        for i in range(row.size):
            seen |= row[i]
        found[block] = seen & mask != 0
        if found[block]:
            total += 1
    return total
