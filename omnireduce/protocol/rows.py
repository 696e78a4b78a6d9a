"""Rows of a large sparse matrix as a worker's part of a collective."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.pack import pack_rows
from omnireduce.layout import Layout
from omnireduce.protocol.operands import Memory, Packed, RowBlocks, as_writable


class RowSet:
    """Rows of a large sparse matrix, contributed without a scan; collects the rows of the union.

    `numbers`: int64 (n,), strictly ascending; `values`: (n, row length). After `finish`, `result` holds the union's row
    numbers, int64 (m,), ascending, and their sums, (m, row length), in arrays that `memory` gives.
    """

    row_dtype = BYTES

    def __init__(self, numbers: Array, values: Array, layout: Layout, memory: Memory) -> None:
        self.layout = layout
        self.block_bytes = layout.block_size * values.itemsize
        self.nbytes = values.nbytes
        self._numbers = as_writable(numbers)
        self._dtype = values.dtype
        self._bytes = as_writable(values.view(np.uint8).reshape(len(numbers), self.block_bytes))
        self._memory = memory
        self._count = 0
        self._union_numbers, self._union = np.empty(0, np.int64), np.empty((0, self.block_bytes), np.uint8)
        self.result: tuple[Array, Array] = (numbers[:0], values[:0])

    @property
    def blocks(self) -> RowBlocks:
        return RowBlocks(self._numbers, self._bytes, self._hold)

    def _hold(self, numbers: Array) -> Array:
        """The union is known: make room for its rows."""
        self._count, self._union_numbers = numbers.size, numbers
        self._union = self._rows_of(self._memory(numbers.size * self.block_bytes))[: numbers.size]
        return self._union

    def start(self, shard: int) -> int:
        return 0

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        layout = self.layout
        count, cursor = pack_rows(
            self._numbers, self._bytes,
            position=cursor, stripe=layout.stripe_blocks, shards=layout.shards, shard=shard, rows=rows, indices=indices,
        )  # fmt: skip
        frontier = layout.blocks if cursor == len(self._numbers) else int(self._numbers[cursor])
        return Packed(count, cursor, frontier)

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        start, stop = self._count, self._count + indices.size
        if stop > len(self._union_numbers):
            self._reserve(max(stop, 2 * start, min(2 * len(self._numbers), self.layout.blocks)))
        self._union_numbers[start:stop] = indices
        if left_out:
            self._put_own(self._union[start:stop], indices, unchanged)
            self._union[start:stop][~unchanged] = rows[: indices.size - np.count_nonzero(unchanged)]
        else:
            self._union[start:stop] = rows[: indices.size]
        self._count = stop

    def _put_own(self, union: Array, indices: Array, own: Array) -> None:
        """Take the `own` rows from what this worker brought. Raises ProtocolError."""
        wanted = indices[own]
        places = np.searchsorted(self._numbers, wanted)
        if places.size and (places[-1] == len(self._numbers) or np.any(self._numbers[places] != wanted)):
            raise ProtocolError("a result that leaves out rows which this worker does not have")
        union[own] = self._bytes[places]

    def _reserve(self, count: int) -> None:
        """Make room for `count` rows of the union, or more."""
        union = self._rows_of(self._memory(count * self.block_bytes))
        numbers = np.empty(len(union), np.int64)
        numbers[: self._count], union[: self._count] = self._union_numbers[: self._count], self._union[: self._count]
        self._union_numbers, self._union = numbers, union

    def _rows_of(self, memory: Array) -> Array:
        return memory[: memory.size // self.block_bytes * self.block_bytes].reshape(-1, self.block_bytes)

    def finish(self) -> None:
        numbers, union = self._union_numbers[: self._count], self._union[: self._count]
        if np.any(numbers[1:] < numbers[:-1]):  # stripes of several shards
            order = np.argsort(numbers, kind="stable")
            ordered = self._rows_of(self._memory(union.nbytes))[: self._count]
            numbers, union = numbers[order], np.take(union, order, axis=0, out=ordered, mode="clip")
        self.result = numbers, union.view(self._dtype)
