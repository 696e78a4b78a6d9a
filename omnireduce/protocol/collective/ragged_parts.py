"""The operand of a collective in which each rank sends a part of any size. Parts travel in packets, numbered by rank.

A part is the bytes of an array, with zeros up to the end of the last packet. The last 8 bytes hold its number of items.
A rank may refuse its part and say why. Then the part is that text, and the highest bit of these 8 bytes is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import PACKET_BYTES, REFUSED_BYTES
from omnireduce.core.dtypes import BYTES, Array
from omnireduce.errors import ProtocolError
from omnireduce.protocol.collective.dense_operands import Memory
from omnireduce.protocol.collective.row_operands import RowSet

COUNT_BYTES = 8
IS_REFUSAL = 1 << 63


class RaggedParts(RowSet):
    """This rank's part, and in the end the parts of all `senders`.

    `packets`: those of this rank, which is `rank`; none if it sends nothing. `like`: (0, ...), an empty array of the
    items of all parts. A part has at most `max_packets` packets. After `finish`, `parts` holds an array (items, ...) of
    each sender. `refused` then says why ranks have refused; their parts are empty.
    """

    def __init__(
        self,
        packets: Array,
        like: Array,
        layout: Layout,
        memory: Memory,
        *,
        rank: int,
        senders: Sequence[int],
        max_packets: int,
    ) -> None:
        super().__init__(rank * max_packets + np.arange(len(packets)), packets, layout, memory)
        self.nbytes = packets.nbytes  # the sizes of the other parts are not known
        self._senders, self._max_packets, self._like = senders, max_packets, like
        self.parts: list[Array] = []
        self.refused: dict[int, str] = {}

    def finish(self) -> None:
        super().finish()
        numbers, rows = self.result
        ranks = np.asarray(self._senders)
        starts = np.searchsorted(numbers, ranks * self._max_packets)
        stops = np.searchsorted(numbers, (ranks + 1) * self._max_packets)
        if np.sum(stops - starts) != len(numbers):
            raise ProtocolError("a result with packets of a rank that has nothing to send")
        for rank, start, stop in zip(self._senders, starts.tolist(), stops.tolist(), strict=True):
            if start == stop:
                raise ProtocolError(f"a result without packets of rank {rank}")
            if not np.array_equal(numbers[start:stop] - rank * self._max_packets, np.arange(stop - start)):
                raise ProtocolError(f"a result that lacks packets of rank {rank}")
            self.parts.append(self._unpacked(rank, rows[start:stop].reshape(-1)))

    def _unpacked(self, rank: int, data: Array) -> Array:
        shape, dtype = self._like.shape[1:], self._like.dtype
        items = int(data[-COUNT_BYTES:].view(np.uint64)[0])
        if items & IS_REFUSAL:
            self.refused[rank] = self._text(rank, data, items ^ IS_REFUSAL)
            return self._like
        nbytes = items * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if packet_count(nbytes) * PACKET_BYTES != data.size:
            raise ProtocolError(f"a result with {data.size} bytes of packets of rank {rank} for {items} items")
        try:
            return data[:nbytes].view(dtype).reshape(items, *shape)
        except (ValueError, OverflowError) as error:  # the number of items without bytes is any that the peer wrote
            raise ProtocolError(f"a result with {items} items of rank {rank}: {error}") from None

    @staticmethod
    def _text(rank: int, data: Array, nbytes: int) -> str:
        try:
            text = data[:nbytes].tobytes().decode()
        except UnicodeDecodeError:
            text = ""
        if nbytes > REFUSED_BYTES or data.size != PACKET_BYTES or not (text and text.isprintable()):
            raise ProtocolError(f"a refusal of rank {rank} of {nbytes} bytes in {data.size}, or that is no text")
        return text


def packet_count(nbytes: int) -> int:
    """The number of packets for a part of that size."""
    return -(-(nbytes + COUNT_BYTES) // PACKET_BYTES)


def packed(x: Array) -> Array:
    """The packets of `x`, (items, ...): uint8 (packets, PACKET_BYTES)."""
    rows = np.empty(packet_count(x.nbytes) * PACKET_BYTES, np.uint8)
    rows[: x.nbytes] = x.reshape(-1).view(BYTES)
    rows[x.nbytes :] = 0
    rows[-COUNT_BYTES:].view(np.uint64)[0] = len(x)
    return rows.reshape(-1, PACKET_BYTES)


def packed_refusal(reason: str) -> Array:
    """The packets of a rank that refuses its part: uint8 (packets, PACKET_BYTES). `reason`: printable, up to
    REFUSED_BYTES."""
    rows = packed(np.frombuffer(reason.encode(), np.uint8))
    rows.reshape(-1)[-COUNT_BYTES:].view(np.uint64)[0] |= np.uint64(IS_REFUSAL)
    return rows
