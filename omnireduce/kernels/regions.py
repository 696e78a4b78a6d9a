"""The memory that ranks of one host share: where it has what, and how far each rank has come.

A region is the memory that one rank writes and all ranks of the host read. It begins with its counters and two
descriptors. Each of its slots has, for a chunk of up to C blocks, counts (one for each part), indices (C) and rows (C).
Part p of a chunk has the same place in the rows and indices of every slot. In the slot of rank p itself that place
holds the result of part p; with several hosts, results have slots of their own. An index of a result also says who
alone contributed: see `merge_indices`.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inner, kernel
from omnireduce.kernels.instructions import LINE_BYTES, counter, publish

LINE = LINE_BYTES // 8  # words
EXTRA_WORDS = 128  # room for one descriptor
# A rank's description of a collective: the length of its descriptor in bytes, the descriptor, the number of its rows
DESCRIPTOR_WORDS = 2 + EXTRA_WORDS
ROWS_AT = DESCRIPTOR_WORDS - 1  # the word with the number of rows that the rank brings
# The positions of the counters in a region, in words: each counter has its own cache line.
BEGUN, STAGED, COMBINED, COLLECTED, ASLEEP, LEFT, SUMMED, COMPILED = (line * LINE for line in range(8))
# COMPILED is no counter: when the rank last said that it compiles kernels, in nanoseconds; 0: never.
BEGUN_AT = BEGUN + 1  # two words: when the rank began this collective and the one before, in nanoseconds
DESCRIPTORS = 8 * LINE  # two places: the next collective has the other one
SLOTS = DESCRIPTORS + 2 * DESCRIPTOR_WORDS + 4  # the first slot, at a cache line
# The types in which elements are added.
STORAGES = "float32", "float64", "int8", "int16", "int32", "int64", "float16", "bfloat16"
FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16 = range(len(STORAGES))

STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "me", "ranks", "slots", "region_words", "slot_words",  # the group
            "number", "base",  # the number of the collective; the chunks of all collectives before it
            "may_begin", "has_begun", "has_agreed",  # may_begin: no shard owes this rank rows to pass on
            "chunks", "staged", "combined", "collected",  # chunks; those that have taken each step so far
            "full_blocks", "tail_blocks", "chunk_blocks", "indices", "rows",  # blocks; places in a slot
            "width", "size",  # the length of a block in words and in elements
            "in_place", "silent", "storage", "op", "reducer", "is_dense",  # reducer: its address
            "staged_blocks", "own_blocks", "result_blocks", "collected_blocks",  # so far
            "taken",  # steps
            "last", "late_ns", "culprit",  # the last rank to begin, its delay; the rank with a wrong region
            "number_chunks", "is_listing", "wants_room", "union", "staged_rows",  # fields for rows; see `rows`
            "row_shards",  # the number of shards among which a host's sums of rows are divided; 0: it sends none
            "shards", "stripe_blocks",  # the number of shards among which stripes are divided; 0: there is one host
            "summed", "shown_blocks",  # chunks of which this rank has summed its part, blocks that it has shown
            "arrived",  # below this block the sums of all hosts are there
        )
    ]
    + [("mask", np.uint64)]
)  # fmt: skip


@inner
def lowest(ints: Array, state: Array, counter_word: int) -> int:
    """The lowest of a counter of the other ranks."""
    s = state[0]
    low = (1 << 63) - 1
    for rank in range(s["ranks"]):
        if rank != s["me"]:
            low = min(low, counter(ints, rank * s["region_words"] + counter_word))
    return low


@inner
def is_tail(state: Array, chunk: int) -> bool:
    """Whether this chunk is the short last block."""
    s = state[0]
    return bool(chunk * s["chunk_blocks"] >= s["full_blocks"])


@inner
def _range_of(state: Array, chunk: int) -> tuple[int, int]:
    """The first block of a chunk, and how many it has."""
    s = state[0]
    if is_tail(state, chunk):
        return s["full_blocks"], s["tail_blocks"]
    first = chunk * s["chunk_blocks"]
    return first, min(s["chunk_blocks"], s["full_blocks"] - first)


@inner
def _delegate_of(state: Array, block: int) -> int:
    """The rank that sends the stripe of this block to its shard, for all ranks of the host."""
    s = state[0]
    rank: int = block // s["stripe_blocks"] % s["shards"] % s["ranks"]
    return rank


@inner
def is_needed(state: Array, number: int) -> bool:
    """Whether this rank needs the sum of this row: for itself, or to send it."""
    s = state[0]
    return bool(not s["row_shards"] or number // s["stripe_blocks"] % s["row_shards"] % s["ranks"] == s["me"])


@inner
def part_of(state: Array, chunk: int, part: int) -> tuple[int, int, int]:
    """The first block of a chunk; the first block of its part `part`, and the one behind its last. With several hosts
    all of a chunk is the part of one rank."""
    s = state[0]
    first, count = _range_of(state, chunk)
    if s["shards"]:
        return first, first, first + (count if _delegate_of(state, first) == part else 0)
    return first, first + count * part // s["ranks"], first + count * (part + 1) // s["ranks"]


@inner
def has_arrived(state: Array, chunk: int) -> bool:
    """Whether this rank waits for no shard before it can show its part of a chunk."""
    s = state[0]
    first, count = _range_of(state, chunk)
    return bool(_delegate_of(state, first) != s["me"] or s["arrived"] >= first + count)


@inner
def slot_of(state: Array, rank: int, chunk: int) -> int:
    """The place of the slot of a chunk in the region of `rank`."""
    s = state[0]
    at: int = rank * s["region_words"] + SLOTS + (s["base"] + chunk) % s["slots"] * s["slot_words"]
    return at


@inner
def result_slot_of(state: Array, rank: int, chunk: int) -> int:
    """The place of the slot for the result of a chunk in the region of `rank`. With several hosts a result comes much
    later than what is staged, and has separate slots."""
    s = state[0]
    offset = s["slots"] * s["slot_words"] if s["shards"] else 0
    return slot_of(state, rank, chunk) + offset


@kernel
def anybody_sleeps(state: Array, ints: Array, woken: Array) -> bool:
    """Whether another rank sleeps that was not called since it fell asleep: odd numbers are sleeps."""
    s = state[0]
    for rank in range(s["ranks"]):
        sleep = counter(ints, rank * s["region_words"] + ASLEEP)
        if sleep % 2 == 1 and sleep != woken[rank] and rank != s["me"]:
            return True
    return False


@kernel
def anybody_left(state: Array, ints: Array) -> bool:
    """Whether a rank says that it takes no further step."""
    s = state[0]
    left = False
    for rank in range(s["ranks"]):
        left |= counter(ints, rank * s["region_words"] + LEFT) != 0
    return left


@kernel
def get_counter(ints: Array, at: int) -> int:
    """`counter`, for callers that are not compiled."""
    return counter(ints, at)


@kernel
def set_counter(ints: Array, at: int, value: int) -> None:
    """`publish`, for callers that are not compiled."""
    publish(ints, at, value)
