"""Non-zero blocks of a tensor: find them, alone or with a copy into a message. Rows of a sparse matrix likewise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from omnireduce.core.dtypes import Array, ElementType, number_type
from omnireduce.kernels.compiling.jit import inlined, inner, kernel
from omnireduce.kernels.instructions import LINE_BYTES, prefetch, prefetch_to_write, row_of

LINE = LINE_BYTES // 8  # words
AHEAD = 1024  # words between what is scanned and what is fetched: the processor alone looks less far
NEAR = 512  # the same for what is written: the aggregator has read it, so it lies in another core's cache


@inlined
def _clear(target: Array, block: int, bits: np.uint64, in_place: bool) -> None:
    """Set a zero block of `target` to +0: in place only if it has a -0, otherwise always. A `target` without rows stays
    as it is."""
    if (bits != 0 or not in_place) and block < target.shape[0]:
        target[block, :] = 0


@inner
def _pack_run(
    source: Array,
    target: Array,
    in_place: bool,
    mask: np.uint64,
    start: int,
    stop: int,
    skip: int,
    rows: Array,
    indices: Array,
    count: int,
) -> tuple[int, int]:
    """Pack blocks start…stop-1 until `rows` is full; return (blocks in `rows`, first block not dealt with).

    Every block is copied while it is scanned; a zero block's copy is overwritten by the next, still in the nearest
    cache. The blocks that will be scanned next follow on each other up to `stop`, and go on at `stop + skip`.
    """
    width = source.shape[1]
    ahead, near = max(1, AHEAD // width), max(1, NEAR // width)
    for block in range(start, stop):
        if count == rows.shape[0]:
            return count, block
        row, out, bits = source[block], rows[count], np.uint64(0)
        distance = ahead if block + ahead < stop else ahead + skip
        for i in range(0, width, LINE):
            prefetch(row, distance * width + i)
            prefetch_to_write(out, near * width + i)
        for i in range(width):  # to the end even if the first word decides: so it vectorises
            out[i] = row[i]
            bits |= row[i]
        if bits & mask != 0:
            indices[count] = block
            count += 1
        else:
            _clear(target, block, bits, in_place)
    return count, stop


@kernel
def pack_blocks(
    source: Array,
    target: Array,
    in_place: bool,
    mask: np.uint64,
    cursor: int,
    span: int,
    stripe: int,
    shards: int,
    rows: Array,
    indices: Array,
) -> tuple[int, int]:
    """Copy the shard's non-zero blocks from block `cursor` on into `rows`, their numbers into `indices`.

    `source`, `target`: uint64 (blocks, words per block), the same memory when `in_place`. `rows`: uint64 (capacity,
    words per block). Stops when `rows` is full, after `span` blocks, or at the end. Zero blocks are cleared in
    `target`; the row behind the last block is scratch. Returns (blocks packed, next cursor); every block of the shard
    below the next cursor is dealt with.
    """
    blocks, count = source.shape[0], 0
    skip = (shards - 1) * stripe
    while cursor < blocks and span > 0:
        stop = _end_of_run(cursor, min(cursor + span, blocks), stripe, shards)
        count, reached = _pack_run(
            source, target, in_place, mask, start=cursor, stop=stop, skip=skip, rows=rows, indices=indices, count=count
        )
        span -= reached - cursor
        cursor = reached
        if reached < stop:
            break
        cursor = _next_of_shard(cursor, stripe, shards)
    return count, min(cursor, blocks)


@inlined
def _end_of_run(cursor: int, stop: int, stripe: int, shards: int) -> int:
    """The end of the blocks of the shard that follow on each other from `cursor` on; `stop` at most."""
    return min(stop, (cursor // stripe + 1) * stripe) if shards > 1 else stop


@inlined
def _next_of_shard(reached: int, stripe: int, shards: int) -> int:
    """The shard's next block once all below `reached` are dealt with."""
    return reached + (shards - 1) * stripe if shards > 1 and reached % stripe == 0 else reached


@kernel
def list_blocks(
    source: Array,
    target: Array,
    in_place: bool,
    mask: np.uint64,
    cursor: int,
    span: int,
    stripe: int,
    shards: int,
    indices: Array,
) -> tuple[int, int]:
    """`pack_blocks` without the copies: of most blocks that are not zero only the first cache line is read."""
    blocks, width, count = source.shape[0], source.shape[1], 0
    line, ahead = min(LINE, width), max(1, AHEAD // width)
    while cursor < blocks and span > 0:
        stop = _end_of_run(cursor, min(cursor + span, blocks), stripe, shards)
        span -= stop - cursor
        for block in range(cursor, stop):
            if count == indices.size:
                return count, block
            row, bits = row_of(source, block), np.uint64(0)
            for i in range(line):
                bits |= row[i]
            if bits & mask == 0:
                for i in range(0, width, LINE):
                    prefetch(row, ahead * width + i)
                for i in range(width):
                    bits |= row[i]
            if bits & mask != 0:
                indices[count] = block
                count += 1
            else:
                _clear(target, block, bits, in_place)
        cursor = _next_of_shard(stop, stripe, shards)
    return count, min(cursor, blocks)


@kernel
def list_noted(
    notes: Array, note: int, cursor: int, limit: int, stripe: int, shards: int, indices: Array
) -> tuple[int, int]:
    """`list_blocks` of blocks that are known: those below `limit` with the bit `note` in `notes`, uint8 (blocks,).
    Nothing is scanned, so there is no span."""
    count = 0
    while cursor < limit:
        if notes[cursor] & note:
            if count == indices.size:
                break
            indices[count] = cursor
            count += 1
        cursor = _next_of_shard(cursor + 1, stripe, shards)
    return count, min(cursor, limit)


@kernel
def pack_listed(source: Array, where: Array, rows: Array) -> None:
    """`rows[k] = source[where[k]]` for each block that is listed: uint64 (…, words per block)."""
    for k in range(where.size):
        row, out = row_of(source, where[k]), row_of(rows, k)
        for i in range(row.size):
            out[i] = row[i]


@kernel
def deal_rows(numbers: Array, stripe: int, shards: int, order: Array, starts: Array) -> None:
    """List the rows of each shard: `order[starts[s] : starts[s + 1]]` says where in `numbers` those of shard s are.

    `numbers`: int64 (n,), ascending row numbers; `order`: int64 (n,); `starts`: int64 (shards + 1,).
    """
    starts[:] = 0
    for p in range(numbers.size):
        starts[numbers[p] // stripe % shards] += 1
    total = 0
    for shard in range(shards + 1):
        count = starts[shard]
        starts[shard] = total
        total += count
    for p in range(numbers.size):
        shard = numbers[p] // stripe % shards
        order[starts[shard]] = p
        starts[shard] += 1
    for shard in range(shards, 0, -1):
        starts[shard] = starts[shard - 1]
    starts[0] = 0


@kernel
def pack_rows(numbers: Array, values: Array, order: Array, position: int, rows: Array, indices: Array) -> int:
    """Copy the rows `values[order[position]]`, and those that follow, until `rows` is full; return how many.

    `numbers`: int64 (n,), row numbers; `values`, `rows`: uint8 (n, row bytes); `order`: int64 (rows of this shard,).
    """
    count: int = min(order.size - position, rows.shape[0])
    width = values.shape[1]
    for k in range(count):
        p = order[position + k]
        row, out = values[p], rows[k]
        for i in range(width):  # six times as fast as the assignment of slices
            out[i] = row[i]
        indices[k] = numbers[p]
    return count


_CHUNK_ELEMENTS = 1 << 20


@kernel
def nonzero_blocks(words: Array, mask: np.uint64, is_nonzero: Array) -> int:
    """Set `is_nonzero[b]` for every non-zero row of `words` (uint64, blocks x words per block); return how many there
    are."""
    total = 0
    for block in range(words.shape[0]):
        row = words[block]
        bits = np.uint64(0)
        for i in range(row.size):
            bits |= row[i]
        is_nonzero[block] = bits & mask != 0
        if is_nonzero[block]:
            total += 1
    return total


def find_blocks(values: Array, block_size: int) -> Array:
    """A mask of the blocks of `values`, (elements,), that are not zero: bool (blocks,).

    `values` may be of any dtype that the service reduces, in any byte order. `block_size`: elements, a multiple of 8.
    Raises UsageError for another dtype.
    """
    kind = number_type(values.dtype.newbyteorder("="))
    is_nonzero = np.zeros(-(-values.size // block_size), np.bool_)
    for first, chunk in native_chunks(values, kind, block_size):
        mark_blocks(chunk, kind, block_size, is_nonzero[first:])
    return is_nonzero


def native_chunks(values: Array, kind: ElementType, block_size: int) -> Iterator[tuple[int, Array]]:
    """Yield (number of the first block, elements of that block and some more), in native byte order and aligned."""
    step = max(1, _CHUNK_ELEMENTS // block_size)
    for first in range(0, -(-values.size // block_size), step):
        yield first, np.require(values[first * block_size : (first + step) * block_size], kind.dtype, ["C", "A"])


def mark_blocks(chunk: Array, kind: ElementType, block_size: int, is_nonzero: Array) -> None:
    """Set `is_nonzero[b]` for each block b of `chunk`, (elements,); a short last one is filled up with zeros."""
    if chunk.size % block_size:
        chunk = np.concatenate([chunk, np.zeros(-chunk.size % block_size, chunk.dtype)])
    words = chunk.view(np.uint64).reshape(-1, block_size * chunk.itemsize // 8)
    nonzero_blocks(words, kind.zero_mask, is_nonzero[: len(words)])
