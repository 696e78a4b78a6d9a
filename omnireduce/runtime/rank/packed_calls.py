"""Calls whose sums go through a block program on the shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.block_program import BlockProgram
from omnireduce.core.descriptor import PACKET_BYTES, Descriptor, Kind, describe, dtype_text
from omnireduce.core.dtypes import Array, element_type
from omnireduce.errors import UsageError, a_type
from omnireduce.protocol.collective.block_programs import ProgrammedRows, ProgrammedTensor, Totals
from omnireduce.protocol.collective.packets import Packets, packed, packed_refusal, packet_count
from omnireduce.runtime.rank.arguments import (
    check_array,
    check_name,
    check_op,
    check_root,
    check_rows,
    combine_duplicates,
    flat_view,
    whole,
)
from omnireduce.runtime.rank.calls import Call, CallContext, once
from omnireduce.runtime.rank.objects import from_bytes, to_bytes
from omnireduce.runtime.rank.refusals import take_part_instead, told

S = TypeVar("S", bound=np.generic)
NOTHING = np.empty((0, PACKET_BYTES), np.uint8)
BYTE = np.empty(0, np.uint8)


def ragged_parts(place: CallContext, x: NDArray[S], name: str) -> Call[list[NDArray[S]]]:
    """The bytes of everybody's `x`, of which the first dimension may differ."""
    if check_array(x, "x").ndim == 0:
        raise UsageError("allgather_ragged needs an array of at least one dimension, the one that may differ")
    flat_view(x, "x", writable=False)
    called = _describe(place, "allgather_ragged", name, dtype_text(x.dtype), x.shape[1:], x.dtype.itemsize)
    like = np.empty((0, *x.shape[1:]), x.dtype)
    packets = _packets(place, called, lambda: np.asarray(x), range(place.size), like)
    return Call(called, packets, lambda: _parts(packets))


def object_of_root(place: CallContext, x: object, root: int, name: str, trust: bool) -> Call[Any]:
    """The root's `x` on the root, and an equal object elsewhere."""
    root, language = check_root(root, place.size), _language(trust)
    called = _describe(place, "broadcast_object", name, language, (), root=root)
    packets = _packets(place, called, lambda: _bytes_of(x, trust) if place.rank == root else None, [root], BYTE)
    return Call(called, packets, once(lambda: x if place.rank == root else _read(packets, 0, root, trust)))


def all_objects(place: CallContext, x: object, name: str, trust: bool) -> Call[list[Any]]:
    """An object equal to the `x` of each rank."""
    called = _describe(place, "allgather_object", name, _language(trust), ())
    packets = _packets(place, called, lambda: _bytes_of(x, trust), range(place.size), BYTE)
    return Call(called, packets, once(lambda: [_read(packets, rank, rank, trust) for rank in range(place.size)]))


def _language(trust: object) -> str:
    """The encoding of objects. All ranks must agree on it."""
    if not isinstance(trust, bool):
        raise UsageError(f"trust is {a_type(trust)}; expected True or False")
    return "pickles" if trust else "plain data"


def _describe(
    place: CallContext, kind: Kind, name: str, dtype: str, shape: tuple[int, ...], item_bytes: int = 1, root: int = 0
) -> Descriptor:
    name, packets = check_name(name, place.owner), packet_count(place.part_bytes)
    return describe(
        kind, name, dtype, shape,
        block_size=place.block_size, root=root, item_bytes=item_bytes, parts=place.size, packets=packets,
    )  # fmt: skip


def _packets(
    place: CallContext, called: Descriptor, own: Callable[[], Array | None], senders: Sequence[int], like: Array
) -> Packets:
    """This rank's part of the call, which `own` makes. Raises what `own` raises, and UsageError for too many bytes;
    then a refusal can travel in place of the part."""

    def made(rows: Array) -> Packets:
        layout, most = place.layout(called), called.packets
        return place.with_pool(
            lambda pool: Packets(rows, like, layout, pool.take, rank=place.rank, senders=senders, most=most)
        )

    try:
        return made(_rows_of(own(), place.part_bytes))
    except Exception as error:
        take_part_instead(error, lambda why: Call(called, made(packed_refusal(why)), lambda: None))
        raise


def _rows_of(own: Array | None, most: int) -> Array:
    if own is None:
        return NOTHING
    if own.nbytes > most:
        raise UsageError(
            f"{own.nbytes} bytes to send; expected at most protocol.max_part_bytes, {most}: send less at once, or "
            "raise it on every rank"
        )
    return packed(own)


def _parts(packets: Packets) -> list[Array]:
    """The parts of all ranks. Raises UsageError if a rank has refused its part."""
    for rank, why in packets.refused.items():
        raise told(UsageError(f"rank {rank} refused its part: {why}"))
    return packets.parts


def _bytes_of(x: object, trust: bool) -> Array:
    return np.frombuffer(to_bytes(x, trust), np.uint8)


def _read(packets: Packets, at: int, rank: int, trust: bool) -> object:
    return from_bytes(_parts(packets)[at].tobytes(), trust, f"rank {rank}")


FLOAT = element_type(np.float32)


class Fused(NamedTuple):
    """What came of a fused all-reduce: the array with the results, and the totals of the program, float64."""

    out: NDArray[np.float32]
    totals: NDArray[np.float64]


class FusedRows(NamedTuple):
    """What came of a fused all-reduce of rows: their numbers, int64 (m,), ascending; the results, (m, row length); the
    totals of the program, float64."""

    indices: NDArray[np.int64]
    rows: NDArray[np.float32]
    totals: NDArray[np.float64]


def fused_reduction(
    place: CallContext, x: Array | None, program: BlockProgram,
    *, out: Array, op: str, name: str, block_size: int | None, wanted: bool,
) -> Call[Fused]:  # fmt: skip
    """The sum of `x`, through `program`, in `out`."""
    _check_program(place, program)
    target = flat_view(check_float(out, "out"), "out", writable=wanted)
    source = None if x is None else flat_view(check_float(x, "x"), "x", writable=False)
    if source is not None and x is not None and x.shape != out.shape:
        raise UsageError(f"out has the shape {list(out.shape)}, x has {list(x.shape)}: expected the same")
    if source is not None and np.may_share_memory(source, target):
        raise UsageError("out overlaps x; a program needs two arrays")
    called = describe(
        "allreduce", check_name(name, place.owner), FLOAT.name, out.shape, check_op(op),
        place.block_size if block_size is None else whole(block_size, "block_size"), program=program,
    )  # fmt: skip
    totals, layout = Totals(program.totals), place.layout(called)
    results = 0 if not program.returns else layout.blocks if program.every_block else None
    operand = ProgrammedTensor(source, target, layout, FLOAT.zero_mask, totals, drops=not wanted, results=results)
    reads = () if source is None else (source,)
    return Call(called, operand, once(lambda: Fused(out, totals.sums)), reads, (target,) if wanted else ())


def fused_rows(
    place: CallContext, indices: Array, values: Array, program: BlockProgram,
    *, n_rows: int, out: Array | None, op: str, name: str, wanted: bool,
) -> Call[FusedRows]:  # fmt: skip
    """Rows of a tall matrix, added by number, through `program`."""
    _check_program(place, program)
    shape = check_rows(indices, check_float(values, "values"), n_rows), values.shape[1]
    target = () if out is None else (flat_view(check_float(out, "out"), "out", writable=True),)
    if out is not None and out.shape != shape:
        raise UsageError(f"out has the shape {list(out.shape)}; expected {list(shape)}")
    called = describe("allreduce_rows", check_name(name, place.owner), FLOAT.name, shape, check_op(op), program=program)
    numbers, own = combine_duplicates(indices.astype(np.int64), np.ascontiguousarray(values), FLOAT)
    totals, layout = Totals(program.totals), place.layout(called)
    operand = place.with_pool(
        lambda pool: ProgrammedRows(numbers, own, layout, pool.take, totals, out=out, drops=not wanted)
    )
    result = once(lambda: FusedRows(*operand.result, totals.sums))
    return Call(called, operand, result, reads=(indices, values), writes=target)


def check_float(array: Array, what: str) -> Array:
    """Raises UsageError for anything but an array of float32."""
    checked = check_array(array, what)
    if checked.dtype != np.float32:
        raise UsageError(f"{what} is an array of {checked.dtype}; block programs work on float32")
    return checked


def _check_program(place: CallContext, program: object) -> None:
    if not isinstance(program, BlockProgram):
        raise UsageError(f"program is {a_type(program)}; expected a BlockProgram")
    if place.in_memory:
        raise UsageError(
            "ranks of this communicator exchange in memory, where no program runs; make one with "
            "create_group(name=..., state_bytes=...), or set protocol.state_bytes"
        )
