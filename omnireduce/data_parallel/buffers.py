"""Several arrays in one, with a mark behind them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

import numpy as np

from omnireduce.dtypes import Array

ONE_SPOILS = (
    "sum",
    "mean",
    "max",
    "any",
)  # with other operations the mark of a rank that spoils is 0, and that of others 1


class Buffer:
    """Arrays of one dtype that are combined by `op` in one exchange, on a rank that may spoil it.

    `sizes`: for each request, of each of its arrays. `parts`: so, too, the memory of each.

    The mark is a block of its own. That of a sum is zero unless a rank spoils it: so it does not travel.
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
        """How much memory it takes."""
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
