"""Rows inside a host: memory for the numbers of all ranks' rows, for their union, and for its sums.

The sizes are known only when all ranks have begun, so the kernels ask for this memory: see
`kernels.exchange_row_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.exchange_row_steps import FIRST, STOP
from omnireduce.protocol.collective.dense_operands import RowBlocks
from omnireduce.protocol.host.faults import ShortageError
from omnireduce.protocol.sharding import chunk_bytes

CHUNK_BYTES = 1 << 18  # chunk of a large union
NO_NUMBERS, NO_ROWS = np.empty(0, np.int64), np.empty((0, 1), np.uint8)


class HostRows:
    """Work space for rows: the arrays of `kernels.exchange_row_steps`. It serves one collective after the other.
    `names`: the names of the ranks of the host, for errors."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self.lists = names, np.zeros((5, len(names)), np.int64)
        self.clear()

    def clear(self) -> None:
        """Release the rows."""
        self.listed, self.union, self.result = NO_NUMBERS, NO_NUMBERS, NO_ROWS

    def make_room(self, state: Array, rows: RowBlocks) -> None:
        """Make the arrays that the kernels want. Raises ShortageError when there is no memory for them."""
        s, total = state[0], int(self.lists[STOP, -1])
        try:
            if s["is_listing"]:
                self.listed, self.union = (np.empty(total, np.int64) for _ in range(2))
            else:
                self.union = self.union[: s["union"]]
                self.result = rows.hold(self.union)
                self._cut_into_chunks(s)
        except MemoryError as error:
            needed = f"the numbers of {total} rows" if s["is_listing"] else f"a result of {len(self.union)} rows"
            brought = self.lists[STOP] - self.lists[FIRST]
            largest_rank = int(np.argmax(brought))  # a rank that writes a false number is named in the same way
            raise ShortageError(
                f"{needed}, of which {self._names[largest_rank]} handed over {brought[largest_rank]}"
            ) from error
        s["wants_room"] = 0

    def _cut_into_chunks(self, s: Array) -> None:
        """Cut the union into chunks, each of which fits a slot."""
        rows, row_bytes = self.result.shape
        chunk_size = chunk_bytes(self.result.nbytes, CHUNK_BYTES)
        s["chunk_blocks"] = max(1, min(chunk_size, int(s["slot_words"]) * 8) // row_bytes)
        s["chunks"] += -(-rows // s["chunk_blocks"])
