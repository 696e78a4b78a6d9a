"""Calls whose parts differ in size from rank to rank, or whose size only the sender knows: each is one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnireduce.descriptor import Descriptor
from omnireduce.dtypes import BYTES
from omnireduce.errors import UsageError
from omnireduce.protocol.packets import Packets, Part
from omnireduce.runtime.member.arguments import check_array, check_root, flat_view
from omnireduce.runtime.member.calls import Call, Place, moving, once
from omnireduce.runtime.member.objects import from_bytes, to_bytes

S = TypeVar("S", bound=np.generic)
OBJECT = np.dtype(np.uint8)


def ragged_parts(place: Place, x: NDArray[S], name: str) -> Call[list[NDArray[S]]]:
    """The bytes of everybody's `x`, of which the first dimension may differ."""
    if check_array(x, "x").ndim == 0:
        raise UsageError("allgather_ragged needs an array of at least one dimension, the one that may differ")
    own, dtype, shape = Part(len(x), flat_view(x, "x", writable=False).view(BYTES)), x.dtype, x.shape[1:]
    called = moving(place, "allgather_ragged", name, dtype, shape, 0, place.size)
    item_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    packets = _packets(place, called, own, range(place.size), item_bytes)

    @once
    def arrays() -> list[NDArray[S]]:
        return [part.data.view(dtype).reshape(part.items, *shape) for part in packets.parts]

    return Call(called, packets, arrays)


def object_of_root(place: Place, x: object, root: int, name: str, trust: bool) -> Call[Any]:
    """The root's `x`, or what is equal to it."""
    root = check_root(root, place.size)
    own = _part(to_bytes(x, trust)) if place.rank == root else None
    called = moving(place, "broadcast_object", name, OBJECT, (), root, place.size)
    packets = _packets(place, called, own, [root], 1)
    return Call(called, packets, once(lambda: x if place.rank == root else _read(packets, 0, root, trust)))


def all_objects(place: Place, x: object, name: str, trust: bool) -> Call[list[Any]]:
    """What is equal to everybody's `x`."""
    called = moving(place, "allgather_object", name, OBJECT, (), 0, place.size)
    packets = _packets(place, called, _part(to_bytes(x, trust)), range(place.size), 1)
    return Call(called, packets, once(lambda: [_read(packets, rank, rank, trust) for rank in range(place.size)]))


def _packets(place: Place, called: Descriptor, own: Part | None, senders: Sequence[int], item_bytes: int) -> Packets:
    layout = place.layout(called)
    return place.with_pool(lambda pool: Packets(place.rank, own, senders, item_bytes, layout, pool))


def _part(data: bytes) -> Part:
    return Part(len(data), np.frombuffer(data, np.uint8))


def _read(packets: Packets, at: int, rank: int, trust: bool) -> object:
    return from_bytes(packets.parts[at].data.tobytes(), trust, f"rank {rank}")
