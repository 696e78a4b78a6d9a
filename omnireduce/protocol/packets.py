"""Parts of any size, one of each rank, as a worker's share of a collective: cut into packets that are numbered by rank.

A part is its bytes, zeros up to the end of the last packet but for 8 bytes, and there its number of items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omnireduce.descriptor import PACKET_BYTES, PART_PACKETS
from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError, UsageError
from omnireduce.layout import Layout
from omnireduce.protocol.rows import Pool, RowSet

COUNT_BYTES = 8


class Part(NamedTuple):
    """What one rank sends: uint8 (items * item bytes,)."""

    items: int
    data: Array


class Packets(RowSet):
    """This worker's part, and those of all `senders` in the end.

    `part`: None of one that sends nothing; `item_bytes`: the size of an item, which is the same for all. After
    `finish`, `parts` holds one part of each sender. Raises UsageError for a part that is too large.
    """

    def __init__(
        self, rank: int, part: Part | None, senders: Sequence[int], item_bytes: int, layout: Layout, pool: Pool
    ) -> None:
        rows = np.empty((0, PACKET_BYTES), np.uint8) if part is None else _wrapped(part)
        super().__init__(rank * PART_PACKETS + np.arange(len(rows)), rows, layout, pool)
        self.nbytes = rows.nbytes  # the other parts are as large as they are
        self._senders, self._item_bytes = senders, item_bytes
        self.parts: list[Part] = []

    def finish(self) -> None:
        super().finish()
        numbers, rows = self.result
        ranks = np.asarray(self._senders)
        starts = np.searchsorted(numbers, ranks * PART_PACKETS)
        stops = np.searchsorted(numbers, (ranks + 1) * PART_PACKETS)
        if np.sum(stops - starts) != len(numbers):
            raise ProtocolError("a result with packets of a rank that has nothing to send")
        for rank, start, stop in zip(self._senders, starts.tolist(), stops.tolist(), strict=True):
            if not np.array_equal(numbers[start:stop] - rank * PART_PACKETS, np.arange(stop - start)):
                raise ProtocolError(f"a result that lacks packets of rank {rank}")
            self.parts.append(self._unwrapped(rank, rows[start:stop].reshape(-1)))

    def _unwrapped(self, rank: int, data: Array) -> Part:
        items = int(data[-COUNT_BYTES:].view(np.uint64)[0]) if data.size else -1
        nbytes = items * self._item_bytes
        if items < 0 or _packets(nbytes) * PACKET_BYTES != data.size:
            raise ProtocolError(f"a result with {data.size} bytes of packets of rank {rank} for {items} items")
        return Part(items, data[:nbytes])


def _packets(nbytes: int) -> int:
    return -(-(nbytes + COUNT_BYTES) // PACKET_BYTES)


def _wrapped(part: Part) -> Array:
    packets = _packets(part.data.size)
    if packets > PART_PACKETS:
        most = PART_PACKETS * PACKET_BYTES - COUNT_BYTES
        raise UsageError(f"{part.data.size} bytes to send; expected at most {most}. Send several parts")
    rows = np.empty(packets * PACKET_BYTES, np.uint8)
    rows[: part.data.size] = part.data
    rows[part.data.size :] = 0
    rows[-COUNT_BYTES:].view(np.uint64)[0] = part.items
    return rows.reshape(-1, PACKET_BYTES)
