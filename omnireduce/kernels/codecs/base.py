"""Base of codecs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from omnireduce.core.dtypes import Array

PIECE_ELEMENTS = 1 << 17  # float32 on the way from a tensor to a message; they stay in the cache


def pieces(blocks: int, block_size: int) -> Iterator[slice]:
    """Slices over the blocks, each of at most PIECE_ELEMENTS elements, or of one block."""
    most = max(1, PIECE_ELEMENTS // block_size)
    return (slice(at, min(at + most, blocks)) for at in range(0, blocks, most))


class Codec(ABC):
    """The form in which a block of float32 travels. A class of a user's own derives from this, and has no arguments.

    Arrays are C-contiguous. `values` and `totals`: float32, (blocks, block size). `encoded`: uint8, (blocks,
    `block_bytes(block size)`), which begins at an even address if a block takes an even number of bytes. There is one
    block at least. Methods may be called from several threads, for different arrays. On an aggregator they see what
    other processes have sent: any bytes at all. A codec is tried with a block of 8 elements when it is loaded.
    """

    @abstractmethod
    def block_bytes(self, block_size: int) -> int:
        """The number of bytes that a block of so many elements takes: at least one, and no more than as float32."""

    @abstractmethod
    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        """Encode each block of `values`, which may be overwritten. `keys`: uint64 (blocks,), random numbers for
        codecs that round at random; the same block gets the same key whenever a program is run again with its seed."""

    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None:
        """As `encode`, of the blocks `source[where[k]]`. `source`, float32 like `values`, stays as it is."""
        for piece in pieces(len(where), source.shape[1]):
            self.encode(source[where[piece]], encoded[piece], keys[piece])

    @abstractmethod
    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        """Add to `totals[where[k]]` what block k of `encoded` stands for. `where`: int64 (blocks,), ascending."""

    def decode(self, encoded: Array, values: Array) -> None:
        """Write what each block of `encoded` stands for to `values`."""
        values[:] = 0
        self.add(encoded, np.arange(len(encoded)), values)

    def place(self, encoded: Array, where: Array, target: Array) -> None:
        """Write to `target[where[k]]`, float32 like `values`, what block k of `encoded` stands for."""
        for piece in pieces(len(where), target.shape[1]):
            values = np.empty((len(encoded[piece]), target.shape[1]), np.float32)
            self.decode(encoded[piece], values)
            target[where[piece]] = values

    def sum(self, slots: Array, parts: Array, totals: Array) -> None:
        """Write to each of `totals` the sum of its parts, in their order. `parts`: int64 (blocks, senders), where in
        `slots`, uint8 (bytes,), an encoded block begins; negative: there is none."""
        row = np.arange(self.block_bytes(totals.shape[1]))
        totals[:] = 0
        for starts in parts.T:
            where = np.flatnonzero(starts >= 0)
            if where.size:
                self.add(slots[starts[where, None] + row], where, totals)


class CompiledCodec(Codec):
    """A codec that encodes in one kernel, and sums in another."""

    def encode(self, values: Array, encoded: Array, keys: Array) -> None:
        self.encode_at(values, np.arange(len(values)), encoded, keys)

    def add(self, encoded: Array, where: Array, totals: Array) -> None:
        values = np.empty((len(encoded), totals.shape[1]), np.float32)
        self.decode(encoded, values)
        totals[where] += values

    def decode(self, encoded: Array, values: Array) -> None:
        self.place(encoded, np.arange(len(encoded)), values)

    def place(self, encoded: Array, where: Array, target: Array) -> None:
        starts = np.arange(0, encoded.size, encoded.shape[1])
        self.sum_at(encoded.reshape(-1), starts.reshape(-1, 1), where, target)

    def sum(self, slots: Array, parts: Array, totals: Array) -> None:
        self.sum_at(slots, parts, np.arange(len(parts)), totals)

    @abstractmethod
    def encode_at(self, source: Array, where: Array, encoded: Array, keys: Array) -> None: ...

    @abstractmethod
    def sum_at(self, slots: Array, parts: Array, where: Array, totals: Array) -> None:
        """As `sum`, of parts k to `totals[where[k]]`."""
