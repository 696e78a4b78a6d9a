"""Calls that move a part of any size from each rank, in packets: arrays of different lengths, and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.descriptor import PACKET_BYTES, Descriptor, Kind, describe, dtype_text
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.protocol.collective.ragged_parts import RaggedParts, packed, packed_refusal, packet_count
from omnireduce.runtime.rank.calls.arguments import (
    check_array,
    check_name,
    check_root,
    flat_view,
)
from omnireduce.runtime.rank.calls.objects import from_bytes, to_bytes
from omnireduce.runtime.rank.calls.single import Call, CallContext, once
from omnireduce.runtime.rank.reported_errors import mark_reported, set_replacement

S = TypeVar("S", bound=np.generic)
NOTHING = np.empty((0, PACKET_BYTES), np.uint8)
BYTE = np.empty(0, np.uint8)


def ragged_parts(context: CallContext, x: NDArray[S], name: str) -> Call[list[NDArray[S]]]:
    """A call that gives the bytes of all ranks' `x`. Their first dimensions may differ."""
    if check_array(x, "x").ndim == 0:
        raise UsageError("allgather_ragged needs an array of at least one dimension, the one that may differ")
    flat_view(x, "x", writable=False)
    descriptor = _describe(context, "allgather_ragged", name, dtype_text(x.dtype), x.shape[1:], x.dtype.itemsize)
    like = np.empty((0, *x.shape[1:]), x.dtype)
    packets = _packets(context, descriptor, lambda: np.asarray(x), range(context.size), like)
    return Call(descriptor, packets, lambda: _parts(packets))


def object_of_root(context: CallContext, x: object, root: int, name: str, trust: bool) -> Call[Any]:
    """A call that gives the root's `x` on the root, and an equal object elsewhere."""
    root, encoding = check_root(root, context.size), _encoding_name(trust)
    descriptor = _describe(context, "broadcast_object", name, encoding, (), root=root)
    packets = _packets(context, descriptor, lambda: _bytes_of(x, trust) if context.rank == root else None, [root], BYTE)
    return Call(descriptor, packets, once(lambda: x if context.rank == root else _read(packets, 0, root, trust)))


def all_objects(context: CallContext, x: object, name: str, trust: bool) -> Call[list[Any]]:
    """A call that gives a list with an object equal to the `x` of each rank."""
    descriptor = _describe(context, "allgather_object", name, _encoding_name(trust), ())
    packets = _packets(context, descriptor, lambda: _bytes_of(x, trust), range(context.size), BYTE)
    return Call(descriptor, packets, once(lambda: [_read(packets, rank, rank, trust) for rank in range(context.size)]))


def _encoding_name(trust: object) -> str:
    """The encoding of objects. All ranks must agree on it."""
    if not isinstance(trust, bool):
        raise UsageError(f"trust is {a_type(trust)}; expected True or False")
    return "pickles" if trust else "plain data"


def _describe(
    context: CallContext, kind: Kind, name: str, dtype: str, shape: tuple[int, ...], item_bytes: int = 1, root: int = 0
) -> Descriptor:
    name, packets = check_name(name, context.owner), packet_count(context.part_bytes)
    return describe(
        kind, name, dtype, shape,
        block_size=context.block_size, root=root, item_bytes=item_bytes, parts=context.size, packets=packets,
    )  # fmt: skip


def _packets(
    context: CallContext,
    descriptor: Descriptor,
    make_part: Callable[[], Array | None],
    senders: Sequence[int],
    like: Array,
) -> RaggedParts:
    """The operand with this rank's part, which `make_part` makes. Raises the errors of `make_part`, and UsageError for
    too many bytes; then a refusal can travel in place of the part."""

    def make_packets(rows: Array) -> RaggedParts:
        layout, max_packets = context.layout(descriptor), descriptor.packets
        return context.with_pool(
            lambda pool: RaggedParts(
                rows, like, layout, pool.take, rank=context.rank, senders=senders, max_packets=max_packets
            )
        )

    try:
        return make_packets(_rows_of(make_part(), context.part_bytes))
    except Exception as error:
        set_replacement(error, lambda reason: Call(descriptor, make_packets(packed_refusal(reason)), lambda: None))
        raise


def _rows_of(part: Array | None, max_bytes: int) -> Array:
    if part is None:
        return NOTHING
    if part.nbytes > max_bytes:
        raise UsageError(
            f"{part.nbytes} bytes to send; expected at most protocol.max_part_bytes, {max_bytes}: send less at once, "
            "or raise it on every rank"
        )
    return packed(part)


def _parts(packets: RaggedParts) -> list[Array]:
    """The parts of all ranks. Raises UsageError if a rank has refused its part."""
    for rank, reason in packets.refused.items():
        raise mark_reported(UsageError(f"rank {rank} refused its part: {reason}"))
    return packets.parts


def _bytes_of(x: object, trust: bool) -> Array:
    return np.frombuffer(to_bytes(x, trust), np.uint8)


def _read(packets: RaggedParts, index: int, rank: int, trust: bool) -> object:
    return from_bytes(_parts(packets)[index].tobytes(), trust, f"rank {rank}")
