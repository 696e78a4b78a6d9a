"""Where the memory of ranks of one host has what, and how far a rank has come in it.

A region is the memory that one rank writes and all ranks of the host read. It begins with its counters and two
descriptors. Each of its slots has, for a chunk of up to C blocks, counts (one for each part), indices (C) and rows (C).
Part p of a chunk has the same place in the rows and indices of every slot. In the slot of rank p itself that place
holds the result of part p. An index of a result also says who alone contributed, as in `merge`.
"""

from __future__ import annotations

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.jit import LINE_BYTES, counter, kernel

LINE = LINE_BYTES // 8  # words
EXTRA_WORDS = 128  # room for one descriptor
PLACE_WORDS = 2 + EXTRA_WORDS  # what a rank says of a collective: the length of its descriptor, in bytes, and these
ROWS_AT = PLACE_WORDS - 1  # behind them how many rows the rank brings
# Where a region has its counters, in words: each on a cache line of its own.
BEGUN, STAGED, COMBINED, COLLECTED, ASLEEP, LEFT = (line * LINE for line in range(6))
BEGUN_AT = BEGUN + 1  # two words: when the rank began this collective and the one before, in nanoseconds
DESCRIPTORS = 8 * LINE  # two places: the next collective has the other one
SLOTS = DESCRIPTORS + 2 * PLACE_WORDS + 4  # the first slot, at a cache line
STORAGES = ("float32", "float64", "int8", "int16", "int32", "int64", "float16", "bfloat16")  # how elements are added
FLOAT32, FLOAT64, INT8, INT16, INT32, INT64, FLOAT16, BFLOAT16 = range(len(STORAGES))

STATE = np.dtype(
    [
        (name, np.int64)
        for name in (
            "me", "ranks", "slots", "region_words", "slot_words",  # of the group
            "number", "base", "has_begun", "has_agreed",  # of the collective; chunks in all collectives before it
            "chunks", "staged", "combined", "collected",  # of these chunks so far
            "full_blocks", "chunk_blocks", "indices", "rows",  # where a slot has what
            "width", "size",  # of a block, in words and in elements
            "in_place", "silent", "storage", "op", "is_dense",
            "staged_blocks", "own_blocks", "result_blocks", "collected_blocks",  # so far
            "taken",  # steps
            "last", "late_ns", "culprit",  # who began last, how long after the first; whose region is not in order
            "number_chunks", "is_listing", "wants_room", "union", "staged_rows",  # of rows; see `rows`
        )
    ]
    + [("mask", np.uint64)]
)  # fmt: skip


@kernel
def lowest(ints: Array, state: Array, line: int) -> int:
    """The lowest of a counter of the other ranks."""
    s = state[0]
    low = (1 << 63) - 1
    for rank in range(s["ranks"]):
        if rank != s["me"]:
            low = min(low, counter(ints, rank * s["region_words"] + line))
    return low


@kernel
def is_tail(state: Array, chunk: int) -> bool:
    """Whether this chunk is the short last block."""
    s = state[0]
    return bool(chunk * s["chunk_blocks"] >= s["full_blocks"])


@kernel
def part_of(state: Array, chunk: int, part: int) -> tuple[int, int, int]:
    """The first block of a chunk; the first block of its part `part`, and the one behind its last."""
    s = state[0]
    first, count = s["full_blocks"], 1
    if not is_tail(state, chunk):
        first = chunk * s["chunk_blocks"]
        count = min(s["chunk_blocks"], s["full_blocks"] - first)
    return first, first + count * part // s["ranks"], first + count * (part + 1) // s["ranks"]


@kernel
def slot_of(state: Array, rank: int, chunk: int) -> int:
    """Where the region of `rank` has the slot of a chunk."""
    s = state[0]
    at: int = rank * s["region_words"] + SLOTS + (s["base"] + chunk) % s["slots"] * s["slot_words"]
    return at
