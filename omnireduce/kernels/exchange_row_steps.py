"""The steps of a rank with rows of a sparse matrix: stage, list, merge. See `exchange_steps`.

`lists`, int64 (5, ranks), says where each rank's numbers are in `listed`, int64 (rows of all ranks,). These are a
checked copy, which no peer can change. So nothing of staged rows is believed except the elements. `union`: int64 (room,
as in `listed`), the numbers of the result. `rows`, `result`: uint8 (…, row bytes), this rank's rows and the sums.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inner
from omnireduce.kernels.instructions import counter
from omnireduce.kernels.merge_indices import ABSENT
from omnireduce.kernels.reduce import OWN, SUM
from omnireduce.kernels.reducers_by_type import reduce_at
from omnireduce.kernels.regions import DESCRIPTOR_WORDS, DESCRIPTORS, FLOAT16, ROWS_AT, is_needed, slot_of

# Of `lists`: where a rank's numbers begin and end, behind those listed so far, which row is to be merged next,
# and where its row 0 would be, were all rows in the slot of this chunk: in elements of all regions.
FIRST, STOP, LISTED_SO_FAR, MERGED, SLOT_ORIGIN = range(5)
ROWS_PER_STEP = 1 << 16  # rows of the union that one step lists
NO_NUMBER = (1 << 63) - 1


@inner
def count_rows(state: Array, ints: Array, numbers: Array, lists: Array) -> int:
    """Note in `lists` how many rows each rank brings. Returns -1, or the rank whose count cannot be."""
    s = state[0]
    descriptor_at, total, longest = DESCRIPTORS + s["number"] % 2 * DESCRIPTOR_WORDS, 0, 1
    for rank in range(s["ranks"]):
        count = numbers.size
        if rank != s["me"]:
            # Read once, because another process may change it.
            count = counter(ints, rank * s["region_words"] + descriptor_at + ROWS_AT)
        if count < 0 or count > s["full_blocks"]:
            return rank
        lists[:, rank] = total
        total += count
        lists[STOP, rank] = total
        longest = max(longest, count)
    s["number_chunks"] = s["chunks"] = (longest + s["slot_words"] - 1) // s["slot_words"]
    s["wants_room"] = 1
    return -1


@inner
def stage_numbers(state: Array, ints: Array, numbers: Array, chunk: int) -> None:
    """Copy this rank's next numbers to its slot, as many as it holds."""
    s = state[0]
    at, start = slot_of(state, s["me"], chunk), chunk * s["slot_words"]
    for k in range(start, min(start + s["slot_words"], numbers.size)):
        ints[at + k - start] = numbers[k]


@inner
def take_numbers(state: Array, ints: Array, numbers: Array, chunk: int, lists: Array, listed: Array) -> int:
    """Copy the numbers of a chunk of all ranks. Returns -1, or the rank whose numbers do not ascend or are out of
    range."""
    s = state[0]
    own_start, first = lists[FIRST, s["me"]], chunk * s["slot_words"]
    for k in range(first, min(first + s["slot_words"], numbers.size)):
        listed[own_start + k] = numbers[k]
    for rank in range(s["ranks"]):
        if rank == s["me"]:
            continue
        at = slot_of(state, rank, chunk)
        start = lists[FIRST, rank] + first
        previous = listed[start - 1] if chunk and start <= lists[STOP, rank] else -1
        for k in range(start, min(start + s["slot_words"], lists[STOP, rank])):
            number = counter(ints, at + k - start)  # read once, too
            if number <= previous or number >= s["full_blocks"]:
                return rank
            listed[k] = previous = number
    return -1


@inner
def list_union(state: Array, lists: Array, listed: Array, union: Array) -> None:
    """List the next rows of the union, up to ROWS_PER_STEP."""
    s = state[0]
    for count in range(s["union"], s["union"] + ROWS_PER_STEP):
        low, first = NO_NUMBER, -1
        for rank in range(s["ranks"]):
            at = lists[LISTED_SO_FAR, rank]
            if at < lists[STOP, rank] and listed[at] < low:
                low, first = listed[at], rank
        if low == NO_NUMBER:
            s["is_listing"], s["wants_room"] = 0, 1
            return
        for rank in range(first, s["ranks"]):
            at = lists[LISTED_SO_FAR, rank]
            if at < lists[STOP, rank] and listed[at] == low:
                lists[LISTED_SO_FAR, rank] = at + 1
        union[count] = low
        s["union"] = count + 1
        s["result_blocks"] += first == s["me"]


@inner
def _chunk_of_union(state: Array, chunk: int) -> tuple[int, int]:
    """The first row of the union that a chunk has, and the one behind its last."""
    s = state[0]
    first = (chunk - s["number_chunks"]) * s["chunk_blocks"]
    return first, min(first + s["chunk_blocks"], s["union"])


@inner
def stage_rows(state: Array, words: Array, lists: Array, listed: Array, union: Array, rows: Array, chunk: int) -> None:
    """Copy this rank's rows of a chunk to its slot."""
    s = state[0]
    at = slot_of(state, s["me"], chunk) * 8
    last = union[_chunk_of_union(state, chunk)[1] - 1]
    start, own_numbers = s["staged_rows"], listed[lists[FIRST, s["me"]] : lists[STOP, s["me"]]]
    stop = start
    while stop < own_numbers.size and own_numbers[stop] <= last:
        stop += 1
    width = rows.shape[1]
    source = rows.reshape(-1)[start * width : stop * width]
    slot = words.view(np.uint8)[at : at + source.size]
    for i in range(source.size):
        slot[i] = source[i]
    s["staged_rows"] = stop
    s["staged_blocks"] += stop - start


@inner
def _copy(source: Array, start: int, target: Array, at: int, count: int) -> None:
    copy, original = target[at : at + count], source[start : start + count]
    for i in range(count):
        copy[i] = original[i]


@inner
def merge_rows(
    state: Array, words: Array, lists: Array, listed: Array, union: Array, rows: Array, result: Array, chunk: int,
    plan: Array, scratch: Array, bits: Array,
) -> None:  # fmt: skip
    """Combine all ranks' rows of a chunk into the result, as far as this rank needs them."""
    s = state[0]
    width, planned = rows.shape[1], 0
    staged, own_rows, sums = words.view(np.uint8), rows.reshape(-1), result.reshape(-1)
    may_copy = s["op"] == SUM and s["storage"] < FLOAT16  # then what one rank alone brings is the sum
    first, stop = _chunk_of_union(state, chunk)
    for rank in range(s["ranks"]):
        slot = slot_of(state, rank, chunk) * 8 // (width // s["size"])
        lists[SLOT_ORIGIN, rank] = slot - lists[MERGED, rank] * s["size"]
    for row in range(first, stop):
        collected = s["collected_blocks"]
        present, last = _find_row(state, lists, listed, union[row], plan[planned])
        is_copied = may_copy and present == 1
        is_left_out = not is_needed(state, union[row])
        is_planned = not is_copied and not is_left_out
        planned += is_planned
        if planned and (not is_planned or planned == plan.shape[0] or row + 1 == stop):
            end = row + is_planned
            out = result[end - planned : end]
            reduce_at(s["reducer"], s["op"], staged, plan[:planned], rows, out, scratch, bits)
            planned = 0
        if is_left_out:
            s["collected_blocks"] = collected
            continue
        if is_copied and last == s["me"]:
            _copy(own_rows, (lists[MERGED, last] - 1 - lists[FIRST, last]) * width, sums, row * width, width)
        elif is_copied:
            at = lists[SLOT_ORIGIN, last] + (lists[MERGED, last] - 1) * s["size"]
            _copy(staged, at * (width // s["size"]), sums, row * width, width)


@inner
def _find_row(state: Array, lists: Array, listed: Array, number: int, part: Array) -> tuple[int, int]:
    """Note in `part`, a row of a plan as a reducer wants it, where each rank has the next row of the union.
    Returns how many ranks have it, and the last of them."""
    s = state[0]
    present, last = 0, 0
    part[0] = 0
    for rank in range(s["ranks"]):
        at, offset = lists[MERGED, rank], ABSENT
        if at < lists[STOP, rank] and listed[at] == number:
            lists[MERGED, rank] = at + 1
            present, last = present + 1, rank
            if rank == s["me"]:
                part[0], offset = at - lists[FIRST, rank], OWN
            else:
                offset = lists[SLOT_ORIGIN, rank] + at * s["size"]
                s["collected_blocks"] += 1
        part[1 + rank] = offset
    return present, last
