"""Operands that are dense tensors. An operand is a rank's input to a collective, and the place for its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.chunk import NON_ZERO, RETURNED
from omnireduce.kernels.nonzero_blocks import list_blocks, list_noted, pack_blocks, pack_listed
from omnireduce.kernels.scatter import scatter_blocks

WORD = np.dtype(np.uint64)
SHARES = 8  # a host's sum goes to the shards in at most this many parts: they work on one while it sums the next
Memory = Callable[[int], Array]  # takes a number of bytes; gives a flat array of that size or more, with any content


class Packed(NamedTuple):
    """Blocks put into a message, where to go on, and the frontier that the message may promise."""

    block_count: int
    cursor: int
    frontier: int


class TensorBlocks(NamedTuple):
    """A dense tensor for the exchange inside a host: uint64 (full blocks, words per block), and the short last block,
    filled up with zeros, (0 or 1, words per block). Only `target` is written. A `silent` tensor contributes nothing;
    `mask` as in `ElementType.zero_mask`."""

    source: Array
    source_tail: Array
    target: Array
    target_tail: Array
    in_place: bool
    silent: bool
    mask: np.uint64


_NO_BLOCK, _NO_BYTES = np.zeros((0, 1), WORD), np.zeros(0, np.uint8)
# For tensors that every rank sends for itself: inside a host the ranks only check that all have begun the same.
AGREEMENT = TensorBlocks(_NO_BLOCK, _NO_BLOCK, _NO_BLOCK, _NO_BLOCK, in_place=True, silent=True, mask=np.uint64(0))


class RowBlocks(NamedTuple):
    """Rows for the exchange inside a host: their `numbers`, int64 (n,), strictly ascending, and `rows`, uint8 (n, row
    bytes). `hold` takes the row numbers of the union and returns memory for its rows, uint8 (m, row bytes). `memory`
    gives memory for rows on their way."""

    numbers: Array
    rows: Array
    hold: Callable[[Array], Array]
    memory: Memory


# Encodes blocks `source[where]`, float32 (blocks, block size), as blocks `part` of a message: (part, where, source)
EncodeBlocks = Callable[[slice, Array, Array], None]
# Writes blocks `part` of a result to `target[where]`, float32 (blocks, block size): (part, where, target)
WriteBlocks = Callable[[slice, Array, Array], None]


class Operand(Protocol):
    """One rank's part of one collective. Blocks are handled as rows of `row_dtype`; `nbytes` is the size of the
    tensor, or of the rows that this rank has. While it `is_divisible`, threads may call it for different shards at
    the same time."""

    @property
    def blocks(self) -> TensorBlocks | RowBlocks:
        """The blocks or rows that are exchanged inside a host."""

    @property
    def is_divisible(self) -> bool:
        """Whether threads may work for different shards at the same time: no two of them write to the same memory."""

    layout: Layout
    block_bytes: int
    nbytes: int
    row_dtype: np.dtype[Any]

    def start(self, shard: int) -> int:
        """The cursor from which to pack for `shard`."""

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        """Fill `rows` and `indices` with the shard's next non-zero blocks, looking at no more than `span` blocks."""

    def find(self, shard: int, cursor: int, span: int, indices: Array) -> Packed:
        """As `pack`, for a tensor that will be encoded: fill `indices` only."""

    def pack_found(self, indices: Array, encode: EncodeBlocks) -> None:
        """Let `encode` put the blocks that were found last, which are float32, into a message."""

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        """Take result blocks; `indices` ascend and are in range; `unchanged`: bool, this rank alone contributed.

        `left_out`: unchanged blocks have no row. Raises ProtocolError when this rank has not contributed them.
        """

    def put_encoded(self, indices: Array, write: WriteBlocks) -> None:
        """Take result blocks, which `write` writes as float32."""

    def take_totals(self, shard: int, totals: Array) -> None:
        """Take the totals that a program has added up on a shard, float64."""

    def finish(self) -> None:
        """All results are there. Raises ProtocolError when they cannot be what the ranks have sent."""


class _Unprotected:
    """Shows NumPy the memory of a read-only array as one that can be written."""

    def __init__(self, array: Array) -> None:
        self._array = array  # it owns the memory
        address = array.__array_interface__["data"][0]
        self.__array_interface__ = array.__array_interface__ | {"data": (address, False)}


def as_writable(array: Array) -> Array:
    """The same memory as a writable array, because kernels are compiled for those only. A caller whose kernel writes
    has checked that the array itself may be written."""
    return array if array.flags.writeable else np.asarray(_Unprotected(array))


class _Blocks:
    """A flat contiguous array seen as full blocks of 64-bit words, plus a zero-padded copy of a short last block."""

    def __init__(self, flat: Array, block_bytes: int) -> None:
        (full, short), width = divmod(flat.nbytes, block_bytes), block_bytes // WORD.itemsize
        self.short, self.tail = _NO_BYTES, _NO_BLOCK
        if short:
            data = flat.view(np.uint8)
            flat, self.short = data[:-short], data[-short:]
            self.tail = np.zeros((1, width), WORD)
            self.tail.view(np.uint8)[0, :short] = self.short
        self.full = as_writable(flat.view(WORD).reshape(full, width))

    def clear(self) -> None:
        self.full[:] = 0
        self.tail[:] = 0

    def store_tail(self) -> None:
        if self.short.size:
            self.short[:] = self.tail.view(np.uint8)[0, : self.short.size]


class _Tensor:
    """A dense tensor: how its short last block is packed, and where results go."""

    row_dtype = WORD

    def __init__(self, blocks: TensorBlocks, layout: Layout, block_bytes: int, nbytes: int) -> None:
        self.blocks, self.layout, self.block_bytes, self.nbytes = blocks, layout, block_bytes, nbytes
        self._scanned = blocks  # the scan clears its blocks of zeros

    @property
    def is_divisible(self) -> bool:
        return True

    def _find_tail(self, shard: int, count: int, indices: Array) -> tuple[int, int]:
        block, blocks = self.layout.full_blocks, self._scanned
        if self.layout.owner(block) == shard:
            if np.any(blocks.source_tail & blocks.mask):
                if count == indices.size:
                    return count, block
                indices[count] = block
                count += 1
            else:
                blocks.target_tail[:] = 0
        return count, block + 1

    def pack_found(self, indices: Array, encode: EncodeBlocks) -> None:
        self._call_for_parts(indices, encode, self.blocks.source, self.blocks.source_tail)

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        blocks = self.blocks
        if left_out and blocks.silent:
            raise ProtocolError("a result that leaves out blocks which this rank did not bring")
        if not blocks.in_place and not left_out:
            unchanged[:] = False
        if indices.size and indices[-1] == self.layout.full_blocks:
            self._put_tail(rows, unchanged, left_out)
            indices, unchanged = indices[:-1], unchanged[:-1]
        scatter_blocks(blocks.target, rows, indices, unchanged, left_out)
        if left_out and not blocks.in_place:
            unchanged_indices = indices[unchanged]
            blocks.target[unchanged_indices] = blocks.source[unchanged_indices]

    def put_encoded(self, indices: Array, write: WriteBlocks) -> None:
        self._call_for_parts(indices, write, self.blocks.target, self.blocks.target_tail)

    def take_totals(self, shard: int, totals: Array) -> None:
        raise AssertionError("no program has run")

    def _call_for_parts(self, indices: Array, call: EncodeBlocks | WriteBlocks, full: Array, tail: Array) -> None:
        """Call with the blocks of the tensor, and with the short last one."""
        count = indices.size
        if count and indices[-1] == self.layout.full_blocks:
            count -= 1
            call(slice(count, count + 1), np.zeros(1, np.int64), tail.view(np.float32))
        if count:
            call(slice(count), indices[:count], full.view(np.float32))

    def _put_tail(self, rows: Array, unchanged: Array, left_out: bool) -> None:
        if unchanged[-1]:
            self.blocks.target_tail[0] = self.blocks.source_tail[0]
        else:
            left_out_count = np.count_nonzero(unchanged) if left_out else 0
            self.blocks.target_tail[0] = rows[unchanged.size - 1 - left_out_count]


class DenseTensor(_Tensor):
    """A tensor of the user, whose non-zero blocks are found by scanning.

    `source` and `target` are flat contiguous arrays of one dtype and size, possibly the same one; `source` None
    contributes nothing. `layout.block_size` elements must be a multiple of 8 bytes. Raises nothing: callers have
    checked.
    """

    def __init__(self, source: Array | None, target: Array, layout: Layout, zero_mask: np.uint64) -> None:
        block_bytes, in_place = layout.block_size * target.itemsize, source is target
        self._target = result = _Blocks(target, block_bytes)
        source_blocks = result if source is None or in_place else _Blocks(source, block_bytes)
        blocks = TensorBlocks(
            source_blocks.full,
            source_blocks.tail,
            result.full,
            result.tail,
            in_place=in_place,
            silent=source is None,
            mask=zero_mask,
        )
        super().__init__(blocks, layout, block_bytes, target.nbytes)
        self._cleared = False

    @property
    def is_divisible(self) -> bool:
        return self._cleared or not self.blocks.silent  # a silent tensor is cleared by the first shard's `start`

    def start(self, shard: int) -> int:
        if not self.blocks.silent:
            return self.layout.first_block(shard)
        if not self._cleared:  # not earlier: the target may be written only once the collective is under way
            self._target.clear()
            self._cleared = True
        return self.layout.blocks

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        layout, blocks, full, count = self.layout, self._scanned, self.layout.full_blocks, 0
        if cursor < full:
            count, cursor = pack_blocks(
                blocks.source, blocks.target, in_place=blocks.in_place, mask=blocks.mask, cursor=cursor,
                span=span, stripe=layout.stripe_blocks, shards=layout.shards, rows=rows, indices=indices,
            )  # fmt: skip
        if cursor == full < layout.blocks:
            end, cursor = self._find_tail(shard, count, indices[: len(rows)])
            rows[count:end] = blocks.source_tail
            count = end
        return Packed(count, cursor, cursor)

    def find(self, shard: int, cursor: int, span: int, indices: Array) -> Packed:
        layout, blocks, full, count = self.layout, self._scanned, self.layout.full_blocks, 0
        if cursor < full:
            count, cursor = list_blocks(
                blocks.source, blocks.target, in_place=blocks.in_place, mask=blocks.mask, cursor=cursor,
                span=span, stripe=layout.stripe_blocks, shards=layout.shards, indices=indices,
            )  # fmt: skip
        if cursor == full < layout.blocks:
            count, cursor = self._find_tail(shard, count, indices)
        return Packed(count, cursor, cursor)

    def finish(self) -> None:
        self._target.store_tail()


class HostSum(_Tensor):
    """The sum of the ranks of a host, in the target of `operand`, the dense tensor of one of them. Shards get each
    block as soon as it is summed. Their results take its place. `notes`: uint8 (blocks,), the flags of each block that
    `kernels.chunk` defines."""

    def __init__(self, operand: Operand) -> None:
        rank_blocks = operand.blocks
        assert isinstance(rank_blocks, TensorBlocks)
        result = rank_blocks._replace(
            source=rank_blocks.target, source_tail=rank_blocks.target_tail, in_place=True, silent=False
        )
        super().__init__(result, operand.layout, operand.block_bytes, operand.nbytes)
        self._ready = -1  # not even an empty tensor is summed yet
        self.notes = np.zeros(operand.layout.blocks, np.uint8)
        # At i: how many blocks before block i are not 0
        self._non_zero_before = np.zeros(operand.layout.blocks + 1, np.int32)

    @property
    def ready(self) -> int:
        """The first block that is not summed yet, or -1. The notes of all blocks below it are written."""
        return self._ready

    @ready.setter
    def ready(self, ready: int) -> None:
        previous = max(0, self._ready)
        if ready > previous:
            new_counts = self._non_zero_before[previous + 1 : ready + 1]
            np.cumsum(self.notes[previous:ready] & NON_ZERO != 0, out=new_counts)
            new_counts += self._non_zero_before[previous]
        self._ready = ready

    def start(self, shard: int) -> int:
        return self.layout.first_block(shard)

    def is_worth_packing(self, cursor: int, span: int, max_blocks: int) -> bool:
        """Whether enough blocks behind this cursor are summed for a message: the rest of the tensor, a good part of it,
        `span` blocks, or `max_blocks` non-zero blocks of all shards together."""
        ready, blocks = self.ready, self.layout.blocks
        if ready == blocks or ready - cursor >= min(span, max(1, blocks // SHARES)):
            return True
        return cursor < ready and int(self._non_zero_before[ready] - self._non_zero_before[cursor]) >= max_blocks

    def pack(self, shard: int, cursor: int, span: int, rows: Array, indices: Array) -> Packed:
        packed = self.find(shard, cursor, span, indices[: len(rows)])
        count, full = packed.block_count, self.layout.full_blocks
        if count and indices[count - 1] == full:
            count -= 1
            rows[count] = self.blocks.source_tail[0]
        pack_listed(self.blocks.source, indices[:count], rows)
        return packed

    def find(self, shard: int, cursor: int, span: int, indices: Array) -> Packed:
        layout, full, count = self.layout, self.layout.full_blocks, 0
        if cursor < full:
            count, cursor = list_noted(
                self.notes, NON_ZERO, cursor=cursor, limit=min(self.ready, full),
                stripe=layout.stripe_blocks, shards=layout.shards, indices=indices,
            )  # fmt: skip
        if cursor == full < self.ready:
            count, cursor = self._find_tail(shard, count, indices)
        elif cursor == self.ready < full:
            cursor = min(layout.next_block(shard, self.ready), full)
        return Packed(count, cursor, cursor)

    def put(self, rows: Array, indices: Array, unchanged: Array, left_out: bool) -> None:
        super().put(rows, indices, unchanged, left_out)
        self.notes[indices] |= RETURNED

    def put_encoded(self, indices: Array, write: WriteBlocks) -> None:
        super().put_encoded(indices, write)
        self.notes[indices] |= RETURNED

    def finish(self) -> None:
        """The operand has the result."""
