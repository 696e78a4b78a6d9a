"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from omnireduce.dtypes import Array

MOST_ELEMENTS = 1 << 14  # of a block that is encoded: a shard decodes that of all ranks in one step


class Codec(ABC):
    """How a block of float32 travels. A class of a user's own derives from this, and has no arguments.

    Arrays are C-contiguous. `values` and `totals`: float32, (blocks, block size). `encoded`: uint8, (blocks,
    `block_bytes(block size)`), which may begin at any address that is even. Methods may be called from several threads,
    for different arrays. On an aggregator they see what other processes have sent: any bytes at all.
    """

    @abstractmethod
    def block_bytes(self, block_size: int) -> int:
        """How many bytes a block of so many elements takes: at least one, and no more than as float32."""

    @abstractmethod
    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        """Encode each block of `values`, which may be overwritten. `keys`: uint64 (blocks,), random numbers for those
        who round at random; the same block gets the same key whenever a program is run again with its seed."""

    @abstractmethod
    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        """Add to `totals[where[k]]` what block k of `encoded` stands for. `where`: int64 (blocks,), ascending."""

    def decode(self, encoded: Array, values: Array) -> None:
        """Write what each block of `encoded` stands for to `values`."""
        values[:] = 0
        self.add(encoded, np.arange(len(encoded)), values)
