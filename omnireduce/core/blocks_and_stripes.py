"""Layout of a flat tensor: its blocks, and the stripes of blocks that aggregator shards own. Pure 64-bit arithmetic."""

from __future__ import annotations

from typing import NamedTuple


class Stripes(NamedTuple):
    """The stripes of shard `shard`, of `stripe_blocks` blocks each: every stripe whose number mod `shards` is
    `shard`."""

    shard: int = 0
    shards: int = 1
    stripe_blocks: int = 64

    def count(self, blocks: int) -> int:
        """The number of blocks in these stripes, among the first `blocks` blocks of a tensor."""
        rounds, rest = divmod(blocks, self.shards * self.stripe_blocks)
        return rounds * self.stripe_blocks + min(max(rest - self.shard * self.stripe_blocks, 0), self.stripe_blocks)

    def first_block(self, blocks: int) -> int:
        """The lowest block in these stripes of a tensor of `blocks` blocks, or `blocks` if there is none."""
        return min(self.shard * self.stripe_blocks, blocks)

    def misfit(self, block: int, low: int, high: int) -> str:
        """The error text for `block`, the first that breaks the order of ascending blocks of [low, high) in these
        stripes."""
        blocks = f"blocks from {low} to {high - 1} of shard {self.shard} of {self.shards}"
        return f"block {block}, expected ascending {blocks}"


class Layout(NamedTuple):
    """`elements` elements in blocks of `block_size`; stripe s (of `stripe_blocks` blocks) belongs to shard s mod
    shards.

    The last block may be short. Plain Python integers: no size overflows.
    """

    elements: int
    block_size: int
    shards: int = 1
    stripe_blocks: int = 64

    @property
    def blocks(self) -> int:
        """The number of blocks, including a short last block."""
        return -(-self.elements // self.block_size)

    @property
    def full_blocks(self) -> int:
        return self.elements // self.block_size

    @property
    def tail_elements(self) -> int:
        """The elements in the short last block; 0 if there is none."""
        return self.elements % self.block_size

    def dealt(self, shards: int, stripe_blocks: int, whole_bytes: int, block_bytes: int) -> Layout:
        """This layout, with its stripes distributed among `shards` shards.

        A tensor whose blocks, of `block_bytes` each, take no more than `whole_bytes` goes to the first shard as a
        whole.
        """
        if self.blocks * block_bytes <= whole_bytes:
            stripe_blocks = max(stripe_blocks, self.blocks)
        return Layout(self.elements, self.block_size, shards, stripe_blocks)

    def owner(self, block: int) -> int:
        """The shard that reduces `block`."""
        return block // self.stripe_blocks % self.shards

    def stripes(self, shard: int) -> Stripes:
        """The stripes of this tensor that `shard` owns."""
        return Stripes(shard, self.shards, self.stripe_blocks)

    def first_block(self, shard: int) -> int:
        """The lowest block of `shard`, or `blocks` if the tensor has no block there."""
        return min(shard * self.stripe_blocks, self.blocks)

    def next_block(self, shard: int, block: int) -> int:
        """The lowest block of `shard` from `block` on, or `blocks` if there is none."""
        stripe = block // self.stripe_blocks
        ahead = (shard - stripe) % self.shards
        return min((stripe + ahead) * self.stripe_blocks if ahead else block, self.blocks)

    def takes_part(self, shard: int) -> bool:
        """Whether `shard` owns a block, or is the first shard, which takes part in every collective."""
        return shard == 0 or self.first_block(shard) < self.blocks
