"""Worker side, upward: copy non-zero blocks of a tensor, or listed rows, into a message."""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.jit import kernel


@kernel
def _pack_run(
    source: Array,
    target: Array,
    in_place: bool,
    mask: np.uint64,
    start: int,
    stop: int,
    rows: Array,
    indices: Array,
    count: int,
) -> tuple[int, int]:
    """Pack blocks start..stop-1 until `rows` is full; return (blocks in `rows`, first block not looked at)."""
    for block in range(start, stop):
        row = source[block]
        seen = np.uint64(0)
        for i in range(row.size):  # to the end even if a first word decides: this loop vectorises, and a copy follows
            seen |= row[i]
        if seen & mask != 0:
            if count == rows.shape[0]:
                return count, block
            out = rows[count]
            for i in range(row.size):
                out[i] = row[i]
            indices[count] = block
            count += 1
        elif seen != 0 or not in_place:  # a zero block: -0 becomes +0, and a separate target starts as zero
            target[block, :] = np.uint64(0)
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
    `target`. Returns (blocks packed, next cursor); every block of the shard below the next cursor is dealt with.
    """
    blocks, count = source.shape[0], 0
    while cursor < blocks and span > 0:
        run_stop = (
            min((cursor // stripe + 1) * stripe, blocks, cursor + span) if shards > 1 else min(cursor + span, blocks)
        )
        count, reached = _pack_run(source, target, in_place, mask, cursor, run_stop, rows, indices, count)
        span -= reached - cursor
        cursor = reached
        if reached < run_stop:
            break
        if shards > 1 and cursor % stripe == 0:
            cursor += (shards - 1) * stripe
    return count, min(cursor, blocks)


@kernel
def pack_rows(
    numbers: Array, values: Array, position: int, stripe: int, shards: int, shard: int, rows: Array, indices: Array
) -> tuple[int, int]:
    """Copy `values[p]` for the rows of `shard` from `position` on until `rows` is full.

    `numbers`: int64 (n,), ascending row numbers; `values`, `rows`: uint8 (n, row bytes).
    Returns (rows packed, next position).
    """
    count = 0
    while position < numbers.size:
        number = numbers[position]
        if number // stripe % shards == shard:
            if count == rows.shape[0]:
                break
            rows[count, :] = values[position, :]
            indices[count] = number
            count += 1
        position += 1
    return count, position
