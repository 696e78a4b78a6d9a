"""Encoding of blocks for messages. In a tensor or a sum they are float32.

A scan lists the blocks, and the codec encodes them where they lie in the tensor. Results are decoded in the tensor
itself. So a scan knows nothing of codecs, and a codec nothing of scans.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import Array
from omnireduce.errors import CodecError, ProtocolError, in_a_line
from omnireduce.kernels.codecs.base import Codec, pieces
from omnireduce.kernels.codecs.draws import block_keys, stream_key
from omnireduce.kernels.codecs.table import Codecs
from omnireduce.kernels.nonzero_blocks import find_blocks
from omnireduce.protocol.collective.dense_operands import Operand, Packed

FLOAT_BYTES = 4


def codec_and_key(descriptor: Descriptor, known: Codecs, number: int, sender: int) -> tuple[Codec, int]:
    """The codec of a collective, and the key of the random numbers that `sender` draws in collective `number`. Raises
    ProtocolError for a codec that is not `known`."""
    if descriptor.codec not in known:
        raise ProtocolError(
            f"the codec '{descriptor.codec}' is not known here; expected {', '.join(known)}. A codec of your own "
            "belongs in aggregator.codecs of each aggregator"
        )
    return known[descriptor.codec], stream_key(descriptor.seed, number, sender)


class BlockCoder:
    """Encodes and decodes blocks of one size. Raises CodecError where the codec fails."""

    def __init__(self, name: str, codec: Codec, block_size: int) -> None:
        self.name, self._codec, self.block_size = name, codec, block_size
        self._codec_errors = _CodecErrors(name)
        with self._codec_errors:
            self.block_bytes = codec.block_bytes(block_size)
        if not (isinstance(self.block_bytes, int) and 1 <= self.block_bytes <= FLOAT_BYTES * block_size):
            raise CodecError(
                f"the codec '{name}' does not say how many bytes {block_size} elements take; expected an int from 1 to "
                f"{FLOAT_BYTES * block_size}"
            )

    def suits(self, descriptor: Descriptor) -> bool:
        return (self.name, self.block_size) == (descriptor.codec, descriptor.layout.block_size)

    def pack(
        self, operand: Operand, shard: int, cursor: int, span: int, rows: Array, indices: Array, key: int
    ) -> Packed:
        """As `operand.pack`, with encoded `rows`, uint8 (rows, block bytes). `key`: the key of this rank's random
        numbers."""
        packed = operand.find(shard, cursor, span, indices[: len(rows)])
        present: Array = indices[: packed.block_count]

        def encode(part: slice, where: Array, source: Array) -> None:
            with self._codec_errors:
                self._codec.encode_at(source, where, rows[part], block_keys(key, present[part]))

        operand.pack_found(present, encode)
        return packed

    def put(self, operand: Operand, rows: Array, indices: Array) -> None:
        """As `operand.put`, with encoded `rows`, uint8 (blocks, block bytes)."""

        def write(part: slice, where: Array, target: Array) -> None:
            with self._codec_errors:
                self._codec.place(rows[part], where, target)

        operand.put_encoded(indices, write)

    def combine(
        self, slots: Array, parts: Array, out: Array, *, divisor: int, numbers: Array, key: int, scratch: Array
    ) -> None:
        """Combine `parts`, as `Union.plan` lists them, of `slots`, uint8 (bytes,), into `out`, uint8 (blocks, block
        bytes). A mean is their sum, divided by `divisor`. `numbers`: the block numbers; `key`: the key of the random
        numbers for sums. `scratch`: float32 (PIECE_ELEMENTS,)."""
        for piece in pieces(len(parts), self.block_size):
            piece_parts = parts[piece]
            totals = scratch[: len(piece_parts) * self.block_size].reshape(-1, self.block_size)
            with self._codec_errors:
                self._codec.sum(slots, piece_parts, totals)
            if divisor != 1:
                totals /= divisor
            with self._codec_errors:
                self._codec.encode(totals, out[piece], block_keys(key, numbers[piece]))

    def round_trip(self, x: Array, keys: Array) -> Array:
        """Encode and decode the blocks of `x`, float32 (elements,); return an array like it. `keys`: uint64 (blocks,),
        the key of each block's random numbers."""
        padded = np.zeros(keys.size * self.block_size, np.float32)
        padded[: x.size] = x
        values = padded.reshape(keys.size, self.block_size)
        present = np.flatnonzero(find_blocks(padded, self.block_size))  # blocks of zeros do not travel
        for piece in pieces(present.size, self.block_size):
            indices = present[piece]
            encoded = np.empty((indices.size, self.block_bytes), np.uint8)
            with self._codec_errors:
                self._codec.encode_at(values, indices, encoded, keys[indices])
                self._codec.place(encoded, indices, values)
        return padded[: x.size]


class _CodecErrors:
    """A context for calls of a codec, which may be a user's own: its failures become CodecError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception | SystemExit):
            raise CodecError(f"the codec '{self._name}' failed: {in_a_line(error)}") from error
