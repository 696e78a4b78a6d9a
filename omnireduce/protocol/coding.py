"""Blocks on their way: float32 in a tensor or a sum, encoded in a message.

A few blocks at a time go through memory that stays in the cache: packed there and encoded from there, or decoded there
and put into the tensor. So a scan, a sum or a scatter knows nothing of codecs, and a codec nothing of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import Array
from omnireduce.errors import CodecError, ProtocolError, in_a_line
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.draws import block_keys, stream_key
from omnireduce.kernels.codecs.table import Codecs
from omnireduce.kernels.density import find_blocks
from omnireduce.protocol.operands import Operand, Packed

PIECE_BYTES = 1 << 19  # of float32 that are encoded, or decoded, in one step
FLOAT_BYTES = 4


def coding_of(descriptor: Descriptor, known: Codecs, number: int, sender: int) -> tuple[Codec, int]:
    """How the blocks of collective `number` of peers travel, which has a codec, and the key of what `sender` draws.
    Raises ProtocolError for a codec that is not `known`."""
    if descriptor.codec not in known:
        raise ProtocolError(
            f"the codec '{descriptor.codec}' is not known here; expected {', '.join(known)}. A codec of your own "
            "belongs in aggregator.codecs of each aggregator"
        )
    return known[descriptor.codec], stream_key(descriptor.seed, number, sender)


class Scratch:
    """The memory that it takes to encode and to decode, for one at a time."""

    def __init__(self) -> None:
        self.plain = np.empty(PIECE_BYTES // FLOAT_BYTES, np.float32)

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes


class Coder:
    """Encodes and decodes blocks of one size in `scratch`. Raises CodecError where the codec fails."""

    def __init__(self, name: str, codec: Codec, block_size: int, scratch: Scratch) -> None:
        self.name, self._codec, self.block_size = name, codec, block_size
        self._calling = _Calling(name)
        with self._calling:
            self.block_bytes = codec.block_bytes(block_size)
        if not (isinstance(self.block_bytes, int) and 1 <= self.block_bytes <= FLOAT_BYTES * block_size):
            raise CodecError(
                f"the codec '{name}' does not say how many bytes {block_size} elements take; expected an int from 1 to "
                f"{FLOAT_BYTES * block_size}"
            )
        self._most = scratch.plain.size // block_size
        self._plain = scratch.plain[: self._most * block_size].reshape(self._most, block_size)

    def suits(self, descriptor: Descriptor) -> bool:
        return (self.name, self.block_size) == (descriptor.codec, descriptor.layout.block_size)

    def pack(
        self, operand: Operand, shard: int, cursor: int, span: int, rows: Array, indices: Array, key: int
    ) -> Packed:
        """As `operand.pack`; `rows`, uint8 (rows, block bytes), are encoded. `key`: of this rank's stream."""
        count, stripes = 0, operand.layout.stripes(shard)
        while True:
            room = min(self._most, len(rows) - count)
            own: Array = indices[count : count + room]
            plain = self._plain.view(operand.row_dtype)[:room]
            packed = operand.pack(shard, cursor, span, plain, own)
            fresh = packed.block_count
            if fresh:
                with self._calling:
                    self._codec.encode(self._plain[:fresh], rows[count : count + fresh], block_keys(key, own[:fresh]))
            count += fresh
            span -= stripes.count(packed.cursor) - stripes.count(cursor)
            cursor = packed.cursor
            if fresh < room or count == len(rows) or span <= 0:
                return Packed(count, cursor, packed.frontier)

    def put(self, operand: Operand, rows: Array, indices: Array) -> None:
        """As `operand.put`, of `rows`, uint8 (blocks, block bytes), that are encoded."""

        def place(some: slice, where: Array, target: Array) -> None:
            encoded = rows[some]
            for piece in self._pieces(len(where)):
                with self._calling:
                    self._codec.place(encoded[piece], where[piece], target)

        operand.put_placed(indices, place)

    def combine(self, slots: Array, parts: Array, out: Array, *, divisor: int, numbers: Array, key: int) -> None:
        """Combine `parts`, as `Union.plan` lists them, of `slots`, uint8 (bytes,), into `out`, uint8 (blocks, block
        bytes). A mean is their sum, divided by `divisor`. `numbers`: of the blocks; `key`: of the stream of sums."""
        for piece in self._pieces(len(parts)):
            some = parts[piece]
            totals = self._plain[: len(some)]
            with self._calling:
                self._codec.sum(slots, some, totals)
            if divisor != 1:
                totals /= divisor
            with self._calling:
                self._codec.encode(totals, out[piece], block_keys(key, numbers[piece]))

    def there_and_back(self, x: Array, keys: Array) -> Array:
        """What the blocks of `x`, float32 (elements,), stand for once they are encoded: an array like it. `keys`:
        uint64 (blocks,), of what is drawn."""
        found = np.zeros(keys.size * self.block_size, np.float32)
        found[: x.size] = x
        values = found.reshape(keys.size, self.block_size)
        present = np.flatnonzero(find_blocks(found, self.block_size))  # others do not travel
        for piece in self._pieces(present.size):
            own = present[piece]
            some, encoded = values[own], np.empty((own.size, self.block_bytes), np.uint8)
            with self._calling:
                self._codec.encode(some, encoded, keys[own])
                self._codec.decode(encoded, some)
            values[own] = some
        return found[: x.size]

    def _pieces(self, blocks: int) -> Iterator[slice]:
        return (slice(at, min(at + self._most, blocks)) for at in range(0, blocks, self._most))


class _Calling:
    """Around a call of a codec, which may be a user's own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit):
            raise CodecError(f"the codec '{self._name}' failed: {in_a_line(error)}") from error
