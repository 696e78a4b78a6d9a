"""The block indices of messages: a peer's are checked, those of all ranks merged, those of a result marked."""

from __future__ import annotations

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inner, kernel

ABSENT = -1  # in `parts`: this rank's block is zero
MARK_SHIFT = 48  # above it in a result's index: 1 + the only contributor, or 0
NUMBER_MASK = (1 << MARK_SHIFT) - 1  # the bits of an index that are its block number


@inner
def _valid_count(indices: Array, low: int, high: int, shard: int, shards: int, stripe_blocks: int) -> int:
    """The number of the first `indices` that ascend strictly, lie in [low, high) and are in stripes of `shard`."""
    previous, stop = low - 1, 0  # of a stripe of this shard
    for k in range(indices.size):
        index = indices[k]
        if index <= previous or index >= high:
            return k
        if index >= stop:
            stripe = index // stripe_blocks
            if stripe % shards != shard:
                return k
            stop = (stripe + 1) * stripe_blocks
        previous = index
    return indices.size


@kernel
def admit_indices(shared: Array, low: int, high: int, shard: int, shards: int, stripe_blocks: int, copy: Array) -> int:
    """Copy `shared` (int64, possibly still writable by the peer) to `copy`, then check the copy.

    Returns how many of the first indices ascend strictly, lie in [low, high), where `low` is not negative, and are in
    stripes of `shard`: all, if none is wrong.
    """
    for k in range(shared.size):
        copy[k] = shared[k]
    return _valid_count(copy, low, high, shard, shards, stripe_blocks)


@kernel
def admit_marked(
    shared: Array,
    rank: int,
    low: int,
    high: int,
    shard: int,
    shards: int,
    stripe_blocks: int,
    copy: Array,
    unchanged: Array,
) -> int:
    """As `admit_indices`, for indices of a result, which say of a block who alone brought it.

    `unchanged`, bool: whether that is `rank`, so that the result is the block that it has.
    """
    for k in range(shared.size):
        marked = shared[k]
        copy[k] = marked & NUMBER_MASK
        unchanged[k] = marked >> MARK_SHIFT == rank + 1
    return _valid_count(copy, low, high, shard, shards, stripe_blocks)


@kernel
def plan_union(
    indices: Array,
    position: Array,
    count: Array,
    start: Array,
    block_size: int,
    watermark: int,
    out_indices: Array,
    parts: Array,
    marks_single_sender: bool,
    single_sender_counts: Array,
) -> int:
    """Walk the ranks' ascending `indices` below `watermark` and list their union.

    `indices`: int64 (ranks, capacity), `position`, `count`: int64 (ranks,), the unread part of each rank's message;
    `position` advances. `start`: int64 (ranks,), where the message's first block begins in the arena, in elements. For
    each block in the union, its number goes to `out_indices` (entries,) and to `parts` (entries or more, ranks) where
    each rank's block begins, or ABSENT. With `marks_single_sender` a number is marked where one rank alone contributed,
    and counted in `single_sender_counts`, int64 (ranks,). Stops when `out_indices` is full. Returns the number of
    entries.
    """
    ranks, written = indices.shape[0], 0
    while written < out_indices.size:
        block = watermark
        for r in range(ranks):
            if position[r] < count[r] and indices[r, position[r]] < block:
                block = indices[r, position[r]]
        if block == watermark:
            break
        present, last = 0, 0
        for r in range(ranks):
            if position[r] < count[r] and indices[r, position[r]] == block:
                parts[written, r] = start[r] + position[r] * block_size
                position[r] += 1
                present += 1
                last = r
            else:
                parts[written, r] = ABSENT
        mark = 0
        if marks_single_sender and present == 1:
            mark = last + 1
            single_sender_counts[last] += 1
        out_indices[written] = block | mark << MARK_SHIFT
        written += 1
    return written


@kernel
def plan_every(
    indices: Array,
    position: Array,
    count: Array,
    start: Array,
    block_size: int,
    cursor: int,
    stop: int,
    shards: int,
    stripe_blocks: int,
    out_indices: Array,
    parts: Array,
) -> tuple[int, int]:
    """As `plan_union`, but list every block of this shard from `cursor` on, its own, that is below `stop`.

    Returns the number of entries and the next cursor.
    """
    ranks, written = indices.shape[0], 0
    while written < out_indices.size and cursor < stop:
        for r in range(ranks):
            if position[r] < count[r] and indices[r, position[r]] == cursor:
                parts[written, r] = start[r] + position[r] * block_size
                position[r] += 1
            else:
                parts[written, r] = ABSENT
        out_indices[written] = cursor
        written += 1
        cursor += 1
        if cursor % stripe_blocks == 0:
            cursor += (shards - 1) * stripe_blocks
    return written, cursor


@kernel
def leave_out(marked: Array, rank: int, rows: Array, out: Array) -> None:
    """Copy the rows whose index has no mark of `rank` to the start of `out`.

    `rows`, `out`: uint8 (indices or more, block bytes).
    """
    written = 0
    for k in range(marked.size):
        if marked[k] >> MARK_SHIFT != rank + 1:
            row, copy = rows[k], out[written]
            for i in range(row.size):
                copy[i] = row[i]
            written += 1
