"""Division of a tensor: into chunks, on which the ranks of a host work together, and into stripes, which belong to
shards."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import REMEMBERED, Descriptor
from omnireduce.core.wire.blocks import capacity

# Chunk of a large tensor: smaller chunks make ranks read counters more often, larger ones leave the caches
CHUNK_BYTES = 1 << 19
SMALL_CHUNK_BYTES = 1 << 16  # the smallest chunk that is worth reading the counters
CHUNKS_AT_ONCE = 4  # chunks of a small union, or of a small sum of a host: ranks and shards work on them side by side
CHUNKS_OF_ONE_HOST = 2  # chunks of a small tensor in a job on one host: all ranks share each chunk


def chunk_bytes(nbytes: int, largest: int, at_once: int = CHUNKS_AT_ONCE) -> int:
    """The size to aim at for a chunk of a tensor or union of `nbytes`, between the smallest size and `largest`."""
    return min(largest, max(SMALL_CHUNK_BYTES, nbytes // at_once))


def chunk_blocks(blocks: int, block_bytes: int, room: int, at_once: int = CHUNKS_AT_ONCE) -> int:
    """The blocks in a chunk of a tensor of `blocks` full blocks, if `room` of them fit a slot."""
    return max(1, min(chunk_bytes(blocks * block_bytes, CHUNK_BYTES, at_once) // block_bytes, room))


class Sharding(NamedTuple):
    """The distribution of blocks among `shards` shards: in stripes of `stripe_blocks`, or all to the first one if the
    tensor has no more than `whole_bytes`. If hosts send sums, a stripe of a tensor is a chunk that fits `slot_bytes`;
    else that is 0."""

    shards: int = 1
    stripe_blocks: int = 64
    whole_bytes: int = 0
    slot_bytes: int = 0

    @classmethod
    def among(cls, hosts: int, shards: int, stripe_blocks: int, whole_bytes: int, slot_bytes: int) -> Sharding:
        """The sharding of a job on `hosts` hosts. On one host, or if no ranks share memory, no host sends sums."""
        return cls(shards, stripe_blocks, whole_bytes, slot_bytes if hosts > 1 else 0)

    def layout(self, descriptor: Descriptor) -> Layout:
        """The tensor of a collective, with its stripes dealt to the shards."""
        return _layout_in_stripes(self, descriptor)


@lru_cache(REMEMBERED)
def _layout_in_stripes(sharding: Sharding, descriptor: Descriptor) -> Layout:
    layout, block_bytes, stripe_blocks = descriptor.layout, descriptor.block_bytes, sharding.stripe_blocks
    if sharding.slot_bytes and descriptor.summed_by_host and not descriptor.has_rows:
        stripe_blocks = chunk_blocks(layout.full_blocks, block_bytes, capacity(sharding.slot_bytes, block_bytes))
    return layout.dealt(sharding.shards, stripe_blocks, sharding.whole_bytes, block_bytes)
