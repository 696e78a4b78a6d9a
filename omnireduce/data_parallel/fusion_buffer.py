"""Buffer in which small arrays travel together, with a mark by which a rank can spoil the exchange.

`operations.fused` decides which arrays share a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from omnireduce.core.dtypes import Array

# With these operations the mark of a rank that spoils is 1, and the mark of others 0. With other operations it is the
# other way round.
ONE_SPOILS = ("sum", "mean", "max", "any")


class Buffer:
    """Arrays of one dtype that are combined by `op` in one exchange, on a rank that may spoil it.

    `sizes`: elements of each array, in a list for each request. `parts`: the memory of each array, in the same lists.

    The mark is a block of its own. In a sum it is zero unless a rank spoils the exchange, so it does not travel.
    """

    def __init__(self, memory: Array, sizes: Sequence[Sequence[int]], op: str, block_size: int) -> None:
        ends = np.cumsum([0, *(size for part_sizes in sizes for size in part_sizes)]).tolist()
        start = -(-ends[-1] // block_size) * block_size
        slices = (memory[a:b] for a, b in pairwise(ends))
        self.parts = [list(islice(slices, len(part_sizes))) for part_sizes in sizes]
        self.whole, self._filled = memory[: start + block_size], memory[: ends[-1]]
        self._mark, self._spare = self.whole[start:], self.whole[ends[-1] : start]
        self._fair = 0 if op in ONE_SPOILS else 1

    @staticmethod
    def elements(sizes: Sequence[Sequence[int]], block_size: int) -> int:
        """The number of elements that a buffer of these sizes has."""
        return (-(-sum(map(sum, sizes)) // block_size) + 1) * block_size

    def fill(self, arrays: Sequence[Array]) -> None:
        """Bring these flat arrays, one for each part."""
        if arrays:
            np.concatenate(arrays, out=self._filled)
        self._spare[:], self._mark[:] = 0, self._fair

    def spoil(self, rank: int) -> None:
        """Bring nothing but the mark."""
        self.whole[:], self._mark[:] = 0, self._fair
        self.mark(rank)

    def mark(self, rank: int) -> None:
        """Bring the mark, too. It differs between ranks: marks of 256 ranks would add up to 0 in int8."""
        self._mark[rank % len(self._mark)] = 1 - self._fair

    @property
    def is_spoiled(self) -> bool:
        """Whether some rank has brought the mark."""
        return bool(np.any(self._mark != self._fair))
