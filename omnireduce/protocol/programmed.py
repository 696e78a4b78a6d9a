"""Operands of a collective whose sums go through a block program, and the places for its results."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.layout import Layout
from omnireduce.protocol.operands import DenseTensor, Memory
from omnireduce.protocol.rows import RowSet


class Totals:
    """The totals that a program has added up on each shard that took part."""

    def __init__(self, count: int) -> None:
        self._of_shards, self._count = dict[int, Array](), count

    def take(self, shard: int, totals: Array) -> None:
        self._of_shards[shard] = totals.copy()

    @property
    def sums(self) -> Array:
        """Of all shards, in their order: float64 (totals,), the same on all ranks."""
        parts = [self._of_shards[shard] for shard in sorted(self._of_shards)]
        return np.sum(parts, axis=0) if parts else np.zeros(self._count)


class ProgrammedTensor(DenseTensor):
    """A tensor, `source`, whose sum goes through a program. The results go to `target`. Blocks without a result stay
    there as they are.

    Both are flat contiguous arrays of float32 of one size. `source` None contributes nothing; `drops`: this worker does
    not want the results. `results`: how many blocks come back, where that is known.
    """

    def __init__(
        self, source: Array | None, target: Array, layout: Layout, zero_mask: np.uint64, totals: Totals,
        *, drops: bool = False, results: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(source, target, layout, zero_mask)
        self.totals, self._drops, self._results, self._put = totals, drops, results, list[int]()
        blocks = self.blocks
        unwritten = blocks.target_tail.copy()
        self._scanned = blocks._replace(target=blocks.target[:0], target_tail=unwritten, in_place=True)

    @property
    def is_divisible(self) -> bool:
        return True

    def start(self, shard: int) -> int:
        return self.layout.blocks if self.blocks.silent else self.layout.first_block(shard)

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        self._put.append(indices.size)
        if not self._drops:
            super().put(rows, indices, unchanged, left_out)

    def take_totals(self, shard: int, totals: Array) -> None:
        self.totals.take(shard, totals)

    def finish(self) -> None:
        blocks = sum(self._put)
        if self._results not in (None, blocks):
            raise ProtocolError(f"results of a program with {blocks} blocks; expected {self._results}")
        if not self._drops:
            super().finish()


class ProgrammedRows(RowSet):
    """Rows whose sums go through a program. `out`, (n_rows, row length): the results are written there, too. `drops`:
    this worker does not want the results."""

    def __init__(
        self, numbers: Array, values: Array, layout: Layout, memory: Memory, totals: Totals,
        *, out: Array | None, drops: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(numbers, values, layout, memory)
        self.totals, self._out, self._drops = totals, out, drops

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        if not self._drops:
            super().put(rows, indices, unchanged, left_out)

    def take_totals(self, shard: int, totals: Array) -> None:
        self.totals.take(shard, totals)

    def finish(self) -> None:
        super().finish()
        if self._out is not None:
            numbers, rows = self.result
            row = np.dtype((np.void, self.block_bytes))  # one item: NumPy copies it as a whole
            self._out.reshape(-1).view(row)[numbers] = np.ascontiguousarray(rows).reshape(-1).view(row)
