"""State of the exchange for the compiled step function: its values at the beginning, and the counters at the end."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import BOOL, ELEMENT_TYPES, Array, ElementType
from omnireduce.core.wire.blocks import capacity
from omnireduce.kernels.reduce import op_code
from omnireduce.kernels.reducers_by_type import reducer_of
from omnireduce.kernels.regions import LINE, STATE, STORAGES
from omnireduce.protocol.sharding import CHUNKS_AT_ONCE, CHUNKS_OF_ONE_HOST, chunk_blocks


def storage_of(element: ElementType) -> int:
    """The number by which kernels know how to add these elements: an index into STORAGES."""
    name = element.name if element.is_narrow else element.storage.name
    assert name in STORAGES, f"no kernel adds {name}: see 'An element type' in CONTRIBUTING.md"
    return STORAGES.index(name)


_STORAGE_OF = {element.name: storage_of(element) for element in (*ELEMENT_TYPES.values(), BOOL)}

# The content of a pass through memory. On one host: a tensor, or rows. With several hosts: a tensor whose sum the host
# sends, rows whose sums it sends, or rows that shards return. "agreement": only the descriptors are compared.
PassKind = Literal["tensor", "sum", "rows", "sums of rows", "returned rows", "agreement"]


class Group(NamedTuple):
    """Rank `me` of the `ranks` of a host, and their memory: `slots` of `slot_words` in regions of `region_words`. A
    slot has room for blocks of `slot_bytes`. The fields before `slot_bytes` are the first of STATE, in this order."""

    me: int
    ranks: int
    slots: int
    region_words: int
    slot_words: int
    slot_bytes: int

    @property
    def count_words(self) -> int:
        """The words of a slot for counts, one count for each rank, rounded up to whole cache lines."""
        return (self.ranks + LINE - 1) // LINE * LINE


class Preset(NamedTuple):
    """The part of the state that is the same for all calls with one descriptor. `state`: an element of STATE as int64.
    `encoded`: int64, the length of the encoded descriptor in bytes, and its words."""

    state: Array
    encoded: Array


def preset(group: Group, descriptor: Descriptor, layout: Layout, kind: PassKind) -> Preset:
    """The preset for a descriptor. `layout` says which shard gets which blocks, if hosts send sums."""
    element, block_bytes, is_sum, has_rows = descriptor.element, descriptor.block_bytes, kind == "sum", "rows" in kind
    full, tail = (0, 0) if kind == "agreement" else (layout.full_blocks, layout.blocks - layout.full_blocks)
    at_once = CHUNKS_AT_ONCE if is_sum else CHUNKS_OF_ONE_HOST
    blocks = chunk_blocks(full, block_bytes, capacity(group.slot_bytes, block_bytes), at_once)
    rows = group.count_words + (blocks + LINE - 1) // LINE * LINE
    chunks = -(-full // blocks) + tail
    if has_rows:  # the number of further chunks is known once all ranks have begun
        chunks = 1
    elif is_sum:  # hosts wait for each other even if the tensor is empty
        chunks = max(chunks, 1)
    state, storage = np.zeros(1, STATE), _STORAGE_OF[element.name]
    for name, value in {
        "me": group.me, "ranks": group.ranks, "slots": group.slots, "region_words": group.region_words,
        "slot_words": group.slot_words, "chunks": chunks, "full_blocks": full, "tail_blocks": tail,
        "chunk_blocks": blocks, "indices": group.count_words, "rows": rows,
        "width": block_bytes // 8, "size": layout.block_size,
        "storage": storage, "reducer": reducer_of(storage) if layout.blocks or has_rows else 0,
        "op": op_code("sum" if descriptor.op == "mean" and kind not in ("tensor", "rows") else descriptor.op, element),
        "number_chunks": has_rows, "is_listing": has_rows, "may_begin": kind != "returned rows",
        "row_shards": layout.shards if kind == "sums of rows" else 0,
        "shards": layout.shards if is_sum else 0, "stripe_blocks": layout.stripe_blocks, "arrived": -1,
        "mask": element.zero_mask,
    }.items():  # fmt: skip
        state[name] = value
    text = descriptor.encoded
    words = np.frombuffer(text + bytes(-len(text) % 8), np.int64)
    return Preset(state.view(np.int64), np.concatenate(([len(text)], words)))


MAX_LATE_S = 3600.0  # the most that counts for one collective


class Counts(NamedTuple):
    """Counters of one collective, with blocks of this rank. The fields have the names and the order of STATE."""

    staged_blocks: int
    own_blocks: int
    result_blocks: int
    collected_blocks: int
    taken: int
    last: int
    late_ns: int


class HostAccount:
    """Totals, as in `Report`, and the seconds that the others waited for each rank of the host."""

    def __init__(self) -> None:
        self.totals = {"collectives": 0, "blocks": 0, "own_blocks": 0, "union_blocks": 0}
        self.late_s: dict[int, float] = {}

    def count(self, counts: Counts, descriptor: Descriptor, *, says_who_is_late: bool) -> None:
        """A collective is complete."""
        totals = self.totals
        if counts.late_ns > 0 and says_who_is_late:  # a rank can write any time into its region
            last = counts.last
            self.late_s[last] = min(self.late_s.get(last, 0.0) + min(counts.late_ns / 1e9, MAX_LATE_S), 1e9)
        totals["collectives"] += 1
        if descriptor.reduces:  # in other collectives ranks send all or nothing by design
            totals["blocks"] += descriptor.layout.blocks
            totals["own_blocks"] += counts.staged_blocks + counts.own_blocks
            totals["union_blocks"] += counts.result_blocks
