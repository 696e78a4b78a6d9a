"""Load of an all-reduce: the blocks that go from each rank to each shard and back."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.layout import Layout
from omnireduce.planning.patterns import Patterns


class Load(NamedTuple):
    """Numbers of blocks of a tensor that is cut into windows of successive blocks, for each window and shard.

    `own` (senders, windows, shards): blocks that a sender has, none of zeros; `sole`, of the same shape: those that no
    other sender has; `union` (windows, shards): blocks that any sender has; `all` (windows, shards): all blocks of the
    tensor, even those of zeros.
    """

    own: Array
    sole: Array
    union: Array
    all: Array

    @property
    def density(self) -> float:
        """Blocks that are not zero / blocks, mean over the senders."""
        return float(self.own.sum() / max(1, len(self.own) * self.all.sum()))

    @property
    def union_density(self) -> float:
        """Blocks that are not zero on at least one sender / blocks."""
        return float(self.union.sum() / max(1, self.all.sum()))


def load_of(patterns: Patterns, senders: int, layout: Layout, windows: int) -> Load:
    """The load of a tensor with this layout, whose blocks on the first `senders` ranks are those of `patterns`."""
    blocks = np.arange(layout.blocks)
    window = blocks * windows // max(1, layout.blocks)
    place = window * layout.shards + blocks // layout.stripe_blocks % layout.shards
    owners = np.zeros(layout.blocks, np.int32)
    for sender in range(senders):
        owners += patterns.of(sender)

    starts = np.flatnonzero(np.diff(place, prepend=-1))  # of neighbours that belong to one window and shard

    def counted(chosen: Array) -> Array:
        of_neighbours = np.add.reduceat(chosen.view(np.int8), starts, dtype=np.int64) if starts.size else starts
        counts = np.bincount(place[starts], weights=of_neighbours, minlength=windows * layout.shards)
        return counts.astype(np.int32).reshape(windows, layout.shards)

    alone, shape = owners == 1, (senders, windows, layout.shards)
    own, sole = np.empty(shape, np.int32), np.zeros(shape, np.int32)
    for sender in range(senders):
        mask = patterns.of(sender)
        own[sender] = counted(mask)
        mask = mask & alone
        if mask.any():
            sole[sender] = counted(mask)
    return Load(own, sole, counted(owners > 0), counted(owners >= 0))
