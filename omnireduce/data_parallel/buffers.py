"""Several arrays in one, with a mark behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.dtypes import Array

ONE_SPOILS = ("sum", "mean", "max")  # with other operations the mark of a rank that spoils is 0, and that of others 1


class Buffer:
    """Arrays of one dtype that are combined by `op` in one exchange, on a rank that may spoil it.

    The mark is a block of its own. That of a sum is zero unless a rank spoils it: so it does not travel.
    """

    def __init__(self, memory: Array, sizes: Sequence[int], op: str, block_size: int) -> None:
        ends = np.cumsum([0, *sizes])
        start = -(-int(ends[-1]) // block_size) * block_size
        self._parts = [slice(int(a), int(b)) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self.whole = memory[: start + block_size]
        self._mark, self._spare = self.whole[start:], self.whole[int(ends[-1]) : start]
        self._fair = 0 if op in ONE_SPOILS else 1

    @staticmethod
    def elements(sizes: Sequence[int], block_size: int) -> int:
        """How much memory it takes."""
        return (-(-sum(sizes) // block_size) + 1) * block_size

    def fill(self, arrays: Sequence[Array]) -> None:
        """Bring these arrays."""
        for part, each in zip(self._parts, arrays, strict=True):
            self.whole[part] = each.reshape(-1)
        self._spare[:], self._mark[:] = 0, self._fair

    def spoil(self) -> None:
        """Bring nothing but the mark."""
        self.whole[:], self._mark[:] = 0, 1 - self._fair

    @property
    def is_spoiled(self) -> bool:
        """Whether some rank has spoiled what was combined."""
        return bool(np.any(self._mark != self._fair))

    def parts(self) -> list[Array]:
        """What the arrays are now, flat."""
        return [self.whole[each] for each in self._parts]
