"""Operands that are rows of a large sparse matrix: a rank's rows, or the sums of a host's rows."""

from __future__ import annotations

import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.nonzero_blocks import deal_rows, pack_rows
from omnireduce.protocol.collective.dense_operands import (
    EncodeBlocks,
    Memory,
    Operand,
    Packed,
    RowBlocks,
    WriteBlocks,
    as_writable,
)


class NumberedRows:
    """Numbered rows, which are packed without a scan; collects the rows of the union.

    `numbers`: int64 (n,), strictly ascending; `rows`: uint8 (n, row bytes). `memory` gives arrays for the collected
    rows.
    """

    row_dtype = BYTES

    def __init__(self, numbers: Array, rows: Array, layout: Layout, memory: Memory) -> None:
        self.layout, self.block_bytes = layout, rows.shape[1]
        self.numbers, self._rows, self._memory = numbers, rows, memory
        self._order: list[Array] = []  # the indices in `rows` of each shard's rows
        self._count = 0
        self._union_numbers, self._union = np.empty(0, np.int64), np.empty((0, self.block_bytes), np.uint8)

    @property
    def is_divisible(self) -> bool:
        return False  # the rows of all shards are collected one behind the other

    def room_for(self, count: int) -> Array:
        """Memory for `count` rows: uint8 (count, row bytes)."""
        return self._rows_of(self._memory(count * self.block_bytes))[:count]

    def start(self, shard: int) -> int:
        return 0

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        order = (self._order or self._deal())[shard]
        count = pack_rows(self.numbers, self._rows, order, cursor, rows, indices)
        cursor += count
        frontier = self.layout.blocks if cursor == len(order) else int(self.numbers[order[cursor]])
        return Packed(count, cursor, frontier)

    def _deal(self) -> list[Array]:
        """Find the rows of each shard."""
        shards, order = self.layout.shards, np.empty(len(self.numbers), np.int64)
        starts = np.empty(shards + 1, np.int64)
        deal_rows(self.numbers, self.layout.stripe_blocks, shards, order, starts)
        self._order = np.split(order, starts[1:-1])
        return self._order

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        start, stop = self._count, self._count + indices.size
        if stop > len(self._union_numbers):
            self._reserve(max(stop, 2 * start, min(2 * len(self.numbers), self.layout.blocks)))
        self._union_numbers[start:stop] = indices
        if left_out:
            self._union[start:stop][unchanged] = self._rank_rows(indices[unchanged])
            self._union[start:stop][~unchanged] = rows[: indices.size - np.count_nonzero(unchanged)]
        else:
            self._union[start:stop] = rows[: indices.size]
        self._count = stop

    def find(self, shard: int, cursor: int, span: int, indices: Array) -> Packed:
        raise AssertionError("rows have no codec")

    def pack_found(self, indices: Array, encode: EncodeBlocks) -> None:
        raise AssertionError("rows have no codec")

    def put_encoded(self, indices: Array, write: WriteBlocks) -> None:
        raise AssertionError("rows have no codec")

    def take_totals(self, shard: int, totals: Array) -> None:
        raise AssertionError("no program has run")

    def _rank_rows(self, numbers: Array) -> Array:
        """This rank's rows of these numbers. Raises ProtocolError when it lacks one of them."""
        positions = np.searchsorted(self.numbers, numbers)
        if positions.size and (positions[-1] == len(self.numbers) or np.any(self.numbers[positions] != numbers)):
            raise ProtocolError("a result that leaves out rows which this rank does not have")
        return self._rows[positions]

    def _reserve(self, count: int) -> None:
        """Make room for `count` rows of the union, or more."""
        union = self._rows_of(self._memory(count * self.block_bytes))
        numbers = np.empty(len(union), np.int64)
        numbers[: self._count], union[: self._count] = self._union_numbers[: self._count], self._union[: self._count]
        self._union_numbers, self._union = numbers, union

    def _rows_of(self, memory: Array) -> Array:
        return memory[: memory.size // self.block_bytes * self.block_bytes].reshape(-1, self.block_bytes)

    def collected(self) -> tuple[Array, Array]:
        """The collected rows: their numbers, int64 (m,), ascending, and rows, uint8 (m, row bytes)."""
        numbers, union = self._union_numbers[: self._count], self._union[: self._count]
        if np.any(numbers[1:] < numbers[:-1]):  # stripes of several shards
            order = np.argsort(numbers, kind="stable")
            numbers, union = numbers[order], np.take(union, order, axis=0, out=self.room_for(len(union)), mode="clip")
        return numbers, union


class RowSet(NumberedRows):
    """Rows that a rank contributes.

    `numbers`: int64 (n,), strictly ascending; `values`: (n, row length). After `finish`, `result` holds the union's row
    numbers, int64 (m,), ascending, and their sums, (m, row length), in arrays that `memory` gives.
    """

    def __init__(self, numbers: Array, values: Array, layout: Layout, memory: Memory) -> None:
        rows = as_writable(values.view(np.uint8).reshape(len(numbers), layout.block_size * values.itemsize))
        super().__init__(as_writable(numbers), rows, layout, memory)
        self.nbytes, self._dtype = values.nbytes, values.dtype
        self.result: tuple[Array, Array] = (numbers[:0], values[:0])

    @property
    def blocks(self) -> RowBlocks:
        return RowBlocks(self.numbers, self._rows, self._hold, self._memory)

    def _hold(self, numbers: Array) -> Array:
        self._count, self._union_numbers, self._union = numbers.size, numbers, self.room_for(numbers.size)
        return self._union

    def finish(self) -> None:
        numbers, union = self.collected()
        self.result = numbers, union.view(self._dtype)


class RowsInto(RowSet):
    """Rows that a rank contributes. Their sums go to their places in `out`, (rows, row length); others become 0."""

    def __init__(self, numbers: Array, values: Array, layout: Layout, memory: Memory, *, out: Array) -> None:
        super().__init__(numbers, values, layout, memory)
        self._row = np.dtype((np.void, self.block_bytes))  # one item: NumPy copies it as a whole
        self._out = out.reshape(-1).view(self._row)
        self._cleared = False

    @property
    def is_divisible(self) -> bool:
        return self._cleared  # the first result clears `out`

    def _clear(self) -> None:
        """Set `out` to zeros. This happens with the first result, when this rank's rows are already on their way."""
        if not self._cleared:
            self._out.view(BYTES)[:] = 0
            self._cleared = True

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        if left_out:
            unchanged_numbers = indices[unchanged]
            self._scatter(unchanged_numbers, self._rank_rows(unchanged_numbers))
            indices = indices[~unchanged]
        self._scatter(indices, rows[: indices.size])

    def _scatter(self, numbers: Array, rows: Array) -> None:
        self._clear()
        self._out[numbers] = rows.reshape(-1).view(self._row)

    def finish(self) -> None:
        self._scatter(*self.collected())  # rows that the exchange in memory has put into the union


class RowSum(NumberedRows):
    """The summed rows of all ranks of a host. Shards get them in place of the rows of `operand`, which belong to this
    rank. It shares the results of the shards with its host."""

    def __init__(self, operand: Operand) -> None:
        rank_blocks = operand.blocks
        assert isinstance(rank_blocks, RowBlocks)
        super().__init__(rank_blocks.numbers[:0], rank_blocks.rows[:0], operand.layout, rank_blocks.memory)
        self.nbytes, self._rank_blocks = operand.nbytes, rank_blocks
        self.ready = -1  # the number of blocks once the rows are summed

    @property
    def blocks(self) -> RowBlocks:
        """This rank's rows, for the sums of the host."""
        return self._rank_blocks._replace(hold=self._hold)

    def _hold(self, numbers: Array) -> Array:
        self.numbers, self._rows, self._order = numbers, self.room_for(numbers.size), []
        return self._rows

    def returned(self) -> RowBlocks:
        """The results that shards have returned to this rank. The sums are not needed any more."""
        numbers, rows = self.collected()
        self.numbers, self._rows = np.empty(0, np.int64), np.empty((0, self.block_bytes), np.uint8)
        self._union = self._rows  # `collected` may have copied it: free its memory
        return self._rank_blocks._replace(numbers=numbers, rows=rows)

    def is_worth_packing(self, cursor: int, span: int, max_blocks: int) -> bool:
        """Whether the rows are summed."""
        return self.ready == self.layout.blocks

    def finish(self) -> None:
        """The operand has the result."""
