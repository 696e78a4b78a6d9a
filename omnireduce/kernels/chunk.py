"""The steps of a rank with a chunk of a tensor: stage, combine, show, collect. See `exchange_steps`.

`rows` are blocks of this rank's tensor, uint64 (blocks, words per block), the first of them block number `origin`.

What another rank wrote is checked before it is used: it can spoil the sum of its own job, and reach nothing else.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inlined, inner
from omnireduce.kernels.instructions import counter, prefetch, prefetch_to_write, row_of, span_of
from omnireduce.kernels.merge_indices import ABSENT, MARK_SHIFT, NUMBER_MASK
from omnireduce.kernels.reduce import OWN, SUM
from omnireduce.kernels.reducers_by_type import reduce_at
from omnireduce.kernels.regions import FLOAT16, LINE, part_of, result_slot_of, slot_of

AHEAD = 1024  # words between what is scanned and what is fetched
NEAR = 512  # the same for what is written
# Flags of a block in `notes`, for a job of several hosts.
PRESENT = 1  # a rank of this host has it
NON_ZERO = 2  # the sum of this host is not 0
RETURNED = 4  # a shard has returned it
BATCH = 16  # blocks that are planned, then reduced: they stay in the nearest cache


@inner
def stage_part(
    state: Array, ints: Array, words: Array, source: Array, target: Array, origin: int, start: int, stop: int, at: int,
    skip: int,
) -> int:  # fmt: skip
    """Copy the blocks start…stop-1 that are not zero to the slot at `at`, from its place `skip` on; return how many.

    Where most blocks are not zero, every block is copied while it is scanned. The copy of a zero block is overwritten
    by the next.
    """
    s = state[0]
    width, mask, in_place, copies, count = s["width"], s["mask"], s["in_place"] != 0, s["is_dense"] != 0, 0
    rows_at, indices_at, ahead = at + s["rows"] + skip * width, at + s["indices"] + skip, max(1, AHEAD // width)
    for block in range(start, stop):
        row, out, bits = row_of(source, block - origin), span_of(words, rows_at + count * width, width), np.uint64(0)
        if copies:
            for i in range(width):
                out[i] = row[i]
                bits |= row[i]
        else:
            for i in range(0, width, LINE):
                prefetch(row, ahead * width + i)
            for i in range(width):
                bits |= row[i]
        if bits & mask != 0:
            if not copies:
                for i in range(width):
                    out[i] = row[i]
            ints[indices_at + count] = block
            count += 1
        elif bits != 0 and in_place:  # -0 becomes +0
            row_of(target, block - origin)[:] = 0
    return count


@inner
def _note_staged(state: Array, ints: Array, chunk: int, positions: Array) -> int:
    """Note where the indices begin and end that each rank staged for this rank's part. Returns -1, or the rank whose
    count cannot be."""
    s = state[0]
    first, start, stop = part_of(state, chunk, s["me"])
    for rank in range(s["ranks"]):
        slot = slot_of(state, rank, chunk)
        # Read once, because another process may change it.
        staged = 0 if rank == s["me"] else counter(ints, slot + s["me"])
        if staged < 0 or staged > stop - start:
            return rank
        positions[0, rank] = slot + s["indices"] + start - first
        positions[1, rank] = positions[0, rank] + staged
        positions[2, rank] = slot
    return -1


@inlined
def _find_block(
    state: Array, ints: Array, block: int, has_block: bool, positions: Array, part: Array
) -> tuple[int, int]:
    """Note in `part`, as `reduce_block` wants it, where each rank has the block. Returns how many ranks have it, and
    1 + the last of them."""
    s = state[0]
    present, last = 0, 0
    for rank in range(s["ranks"]):
        offset = ABSENT
        if rank == s["me"]:
            if has_block:
                offset = OWN
        elif positions[0, rank] < positions[1, rank] and ints[positions[0, rank]] == block:
            slot = positions[2, rank]
            row = s["rows"] + (positions[0, rank] - slot - s["indices"]) * s["width"]
            offset = (slot + row) * (s["size"] // s["width"])
            positions[0, rank] += 1
        part[rank] = offset
        if offset != ABSENT:
            present, last = present + 1, rank + 1
    return present, last


@inner
def _plan(
    state: Array, ints: Array, source: Array, target: Array, origin: int, start: int, stop: int, positions: Array,
    plan: Array, marked: Array,
) -> int:  # fmt: skip
    """Plan what becomes of blocks start…stop-1, no more than `plan` has rows: note in `plan` those that any rank has,
    as a reducer wants it, and in `marked` their numbers and who alone has them. Returns how many."""
    s = state[0]
    width, mask, in_place, scans, count = s["width"], s["mask"], s["in_place"] != 0, s["silent"] == 0, 0
    ahead = 0 if s["is_dense"] else max(1, AHEAD // width)
    for block in range(start, stop):
        row, bits = row_of(source, block - origin), np.uint64(0)
        if ahead:
            for i in range(0, width, LINE):
                prefetch(row, ahead * width + i)
        if scans:
            for i in range(width):
                bits |= row[i]
        present, last = _find_block(
            state, ints, block, bits & mask != 0, positions, span_of(row_of(plan, count), 1, s["ranks"])
        )
        s["own_blocks"] += bits & mask != 0
        if present:
            plan[count, 0] = block - origin
            marked[count] = block | (last if present == 1 else 0) << MARK_SHIFT
            count += 1
        elif not in_place or bits != 0:
            row_of(target, block - origin)[:] = 0
    return count


@inner
def _write_result(state: Array, out: Array, plan: Array, marked: Array, target: Array, notes: Array) -> None:
    """Copy the blocks `out` of a result into this rank's tensor. With several hosts, note in `notes` what they are."""
    s = state[0]
    me, in_place, mask = s["me"], s["in_place"] != 0, s["mask"]
    for k in range(out.shape[0]):
        result, destination, word = row_of(out, k), row_of(target, plan[k, 0]), np.uint64(0)
        if in_place and marked[k] >> MARK_SHIFT == me + 1:
            word = mask  # it is there, and is not 0
        else:
            for i in range(s["width"]):
                destination[i] = result[i]
                word |= result[i]
        if s["shards"]:
            notes[marked[k] & NUMBER_MASK] = PRESENT | (NON_ZERO if word & mask != 0 else 0)
            if word & mask == 0:
                destination[:] = 0  # -0 becomes +0


@inner
def combine_part(
    state: Array, ints: Array, words: Array, source: Array, target: Array, origin: int, chunk: int, positions: Array,
    plan: Array, marked: Array, notes: Array, scratch: Array, bits: Array,
) -> int:  # fmt: skip
    """Combine this rank's part of a chunk. Returns how many blocks the result has, or -1 - the rank whose region is
    not in order."""
    s = state[0]
    width, me, count = s["width"], s["me"], 0
    first, start, stop = part_of(state, chunk, me)
    at = slot_of(state, me, chunk)
    rows_at, indices_at = at + s["rows"] + (start - first) * width, at + s["indices"] + start - first
    # Then a block that one rank alone brought is its own sum, so the mark stays.
    keeps_marks = s["op"] == SUM and s["storage"] < FLOAT16
    arena, own_bytes = words.view(np.uint8), source.view(np.uint8)
    wrong = _note_staged(state, ints, chunk, positions)
    if wrong >= 0:
        return -1 - wrong
    for low in range(start, stop, BATCH):
        high = min(low + BATCH, stop)
        planned = _plan(state, ints, source, target, origin, low, high, positions, plan, marked)
        if planned == 0:
            continue
        out = words[rows_at + count * width : rows_at + (count + planned) * width].reshape(planned, width)
        reduce_at(s["reducer"], s["op"], arena, plan[:planned], own_bytes, out.view(np.uint8), scratch, bits)
        for k in range(planned):
            if not keeps_marks:
                marked[k] &= NUMBER_MASK
            ints[indices_at + count + k] = marked[k]
        _write_result(state, out, plan, marked, target, notes)
        count += planned
    for rank in range(s["ranks"]):
        if positions[0, rank] != positions[1, rank]:
            return -1 - rank
    ints[at + me] = count
    return count


@inner
def show_part(state: Array, ints: Array, words: Array, target: Array, origin: int, chunk: int, notes: Array) -> int:
    """With several hosts, copy this rank's part of the result of a chunk to its region: the blocks that a rank of this
    host has, or that the shard has returned. Returns how many."""
    s = state[0]
    width, me, count = s["width"], s["me"], 0
    first, start, stop = part_of(state, chunk, me)
    at = result_slot_of(state, me, chunk)
    rows_at, indices_at = at + s["rows"] + (start - first) * width, at + s["indices"] + start - first
    for block in range(start, stop):
        if notes[block]:
            row, out = row_of(target, block - origin), span_of(words, rows_at + count * width, width)
            for i in range(width):
                out[i] = row[i]
            ints[indices_at + count] = block
            count += 1
    ints[at + me] = count
    return count


@inner
def collect_part(state: Array, ints: Array, words: Array, target: Array, origin: int, chunk: int, rank: int) -> int:
    """Take the result of the part of `rank` of a chunk. Returns how many blocks it has; -1: its region is not in
    order."""
    s = state[0]
    width, me, in_place = s["width"], s["me"], s["in_place"] != 0
    first, start, stop = part_of(state, chunk, rank)
    at = result_slot_of(state, rank, chunk)
    rows_at, indices_at = at + s["rows"] + (start - first) * width, at + s["indices"] + start - first
    count = counter(ints, at + rank)  # read once: another process may change it, and what follows
    if count < 0 or count > stop - start:
        return -1
    previous, ahead = start - 1, max(1, NEAR // width)
    for k in range(count):
        marked = counter(ints, indices_at + k)
        block = marked & NUMBER_MASK
        if block <= previous or block >= stop:
            return -1
        if not in_place:
            target[previous + 1 - origin : block - origin] = 0
        previous = block
        if k + ahead < count:
            next_block = min(max(ints[indices_at + k + ahead] & NUMBER_MASK, start), stop - 1)
            next_row = row_of(target, next_block - origin)
            for i in range(0, width, LINE):
                prefetch_to_write(next_row, i)
        if not (in_place and marked >> MARK_SHIFT == me + 1):
            row, destination = span_of(words, rows_at + k * width, width), row_of(target, block - origin)
            for i in range(width):
                destination[i] = row[i]
    if not in_place:
        target[previous + 1 - origin : stop - origin] = 0
    return count
