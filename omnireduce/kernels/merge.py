"""Aggregator side, first step: which blocks may leave now, and where each rank's part of them lies."""

from __future__ import annotations

from omnireduce.dtypes import Array
from omnireduce.kernels.jit import kernel

ABSENT = -1  # in `parts`: this rank's block is zero
SOLE_SHIFT = 48  # above it in a result's index: 1 + the only contributor, or 0


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
    written: int,
) -> int:
    """Walk the ranks' ascending `indices` below `watermark` and list their union from entry `written` on.

    `indices`: int64 (ranks, capacity), `position`, `count`: int64 (ranks,), the unread part of each rank's message;
    `position` advances. `start`: int64 (ranks,), where the message's first block begins in the arena, in elements.
    For each block in the union, its number goes to `out_indices` (capacity,) and to `parts` (capacity, ranks) where
    each rank's block begins, or ABSENT. Stops when `out_indices` is full. Returns the number of entries.
    """
    ranks = indices.shape[0]
    while written < out_indices.size:
        block = watermark
        for r in range(ranks):
            if position[r] < count[r] and indices[r, position[r]] < block:
                block = indices[r, position[r]]
        if block == watermark:
            break
        for r in range(ranks):
            if position[r] < count[r] and indices[r, position[r]] == block:
                parts[written, r] = start[r] + position[r] * block_size
                position[r] += 1
            else:
                parts[written, r] = ABSENT
        out_indices[written] = block
        written += 1
    return written


@kernel
def mark_sole(parts: Array, first: int, out_indices: Array) -> None:
    """Mark the entries from `first` on to which one rank alone contributed; `parts` as filled by `plan_union`."""
    for k in range(first, parts.shape[0]):
        present, mark = 0, 0
        for r in range(parts.shape[1]):
            if parts[k, r] >= 0:
                present += 1
                mark = r + 1
        if present == 1:
            out_indices[k] |= mark << SOLE_SHIFT


@kernel
def leave_out(marked: Array, rank: int, rows: Array, out: Array) -> None:
    """Copy the rows whose index has no mark of `rank` to the start of `out`.

    `rows`, `out`: uint8 (indices or more, block bytes).
    """
    at = 0
    for k in range(marked.size):
        if marked[k] >> SOLE_SHIFT != rank + 1:
            row, copy = rows[k], out[at]
            for i in range(row.size):
                copy[i] = row[i]
            at += 1


@kernel
def split_marks(shared: Array, rank: int, indices: Array, unchanged: Array) -> None:
    """Copy marked indices (int64, possibly still writable by the peer) into block numbers and a flag each.

    `unchanged[k]`: `rank` alone contributed, so the result is the block that it has.
    """
    for k in range(shared.size):
        marked = shared[k]
        indices[k] = marked & ((1 << SOLE_SHIFT) - 1)
        unchanged[k] = marked >> SOLE_SHIFT == rank + 1
