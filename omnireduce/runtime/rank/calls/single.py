"""Calls of collectives on single arrays: the arguments are checked, the data to send and the arrays in use are known.

Nothing is started here, so nothing has to be undone when an argument is wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import CODED_ELEMENTS, CODED_OPS, Descriptor, Kind, Op, describe, dtype_text
from omnireduce.core.dtypes import BYTES, Array, ElementType, element_type
from omnireduce.errors import ConfigError, UsageError, a_type
from omnireduce.kernels.codecs.base import Codec
from omnireduce.kernels.codecs.table import NONE, codec_named
from omnireduce.protocol.collective.dense_operands import DenseTensor, Operand
from omnireduce.protocol.collective.row_operands import RowSet, RowsInto
from omnireduce.protocol.sharding import Sharding
from omnireduce.runtime.rank.calls.arguments import (
    check_array,
    check_name,
    check_op,
    check_root,
    check_rows,
    combine_duplicates,
    flat_view,
    whole_number,
)
from omnireduce.support.config.schema import Protocol as ProtocolConfig

# Arrays that a pool remembers: a call with rows takes up to four, and users keep results of earlier calls.
MAX_POOL_ARRAYS = 6


class Pool:
    """Lends arrays of bytes, and lends them again once nobody refers to them. The first touch of fresh memory costs
    more than all copies of a row. For one thread at a time."""

    def __init__(self) -> None:
        self._lent: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """An array of at least `nbytes` bytes, with any content. It belongs to the caller until no reference is
        left."""
        free = [index for index in range(len(self._lent)) if _reference_count(self._lent, index) == _UNUSED]
        for index in reversed(free):
            if self._lent[index].size >= nbytes:
                return self._lent[index]
            del self._lent[index]
        self._lent = [*self._lent[1 - MAX_POOL_ARRAYS :], np.empty(nbytes, np.uint8)]
        return self._lent[-1]


def _reference_count(arrays: list[Array], index: int) -> int:
    return sys.getrefcount(arrays[index])


_UNUSED = _reference_count([np.empty(0)], 0)  # depends on the interpreter


T = TypeVar("T")
S = TypeVar("S", bound=np.generic)
Rows = tuple[NDArray[np.int64], NDArray[S]]
"""The numbers of rows, ascending, and the rows: what `allreduce_rows` returns."""


class Call(NamedTuple, Generic[T]):
    """A collective that can be started: its descriptor, this rank's operand, and the result for the caller.

    The arrays that it `reads` and `writes` belong to it until it is finished; `put_back` is its last use of them.
    `result` gives the same object each time. `codec` encodes its blocks, if it is not None.
    """

    descriptor: Descriptor
    operand: Operand
    result: Callable[[], T]
    reads: tuple[Array, ...] = ()
    writes: tuple[Array, ...] = ()
    put_back: Callable[[], None] = lambda: None
    codec: Codec | None = None


def once(make: Callable[[], T]) -> Callable[[], T]:
    """A function that calls `make` once and returns this result each time, in any thread."""
    lock, made = threading.RLock(), list[T]()  # reentrant: a signal handler may interrupt its owner

    def get() -> T:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get


class WithPool(Protocol):
    """Calls `make` with the pool while no other thread uses it, and returns the result."""

    def __call__(self, make: Callable[[Pool], T]) -> T: ...


class CallContext(NamedTuple):
    """The facts about a rank that a call needs.

    `owner`: the thread whose collectives need no name. `block_size`: in elements. `sharding`: the distribution of
    blocks among shards. `part_bytes`: the largest part that travels in packets. `with_pool` lends memory for results.
    `codec`: the name of the codec for sums of float32; `codec_seed`: the seed of its random numbers. `in_memory`: ranks
    exchange in memory that they share. `warn_unused_codec` is called with each codec that has no effect, because all
    ranks share memory.
    """

    rank: int
    size: int
    owner: threading.Thread
    block_size: int
    sharding: Sharding
    part_bytes: int
    with_pool: WithPool
    codec: str = NONE
    codec_seed: int = 0
    in_memory: bool = False
    warn_unused_codec: Callable[[str], None] | None = None

    def layout(self, descriptor: Descriptor) -> Layout:
        return self.sharding.layout(descriptor)


def reduction(
    context: CallContext,
    kind: Kind,
    x: NDArray[S],
    *,
    op: str,
    name: str,
    out: NDArray[S] | None = None,
    block_size: int | None = None,
    group: str = "",
    codec: str | None = None,
) -> Call[NDArray[S]]:
    """A call that combines all elements of `x`, in place or in `out`."""
    element = element_type(check_array(x, "x").dtype)
    block_size = context.block_size if block_size is None else whole_number(block_size, "block_size")
    name, op = check_name(name, context.owner), check_op(op)
    codec, seed = _codec_of(context, kind, element, op, codec, block_size)
    if codec and context.warn_unused_codec is not None:
        context.warn_unused_codec(codec)
    descriptor = describe(kind, name, element.name, x.shape, op, block_size, group=group, codec=codec, seed=seed)
    source = flat_view(x, "x", writable=out is None, advice="pass out=")
    target = source
    if out is not None:
        if check_array(out, "out").shape != x.shape or out.dtype != x.dtype:
            raise UsageError(f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: expected the same")
        target = flat_view(out, "out", writable=True)
        if np.may_share_memory(source, target):
            raise UsageError("out overlaps x; to work in place, call without out=")
    operand = DenseTensor(source, target, context.layout(descriptor), element.zero_mask)
    reads, result = () if target is source else (source,), x if out is None else out
    return Call(descriptor, operand, lambda: result, reads, (target,), codec=codec_named(codec) if codec else None)


def _codec_of(
    context: CallContext, kind: Kind, element: ElementType, op: Op, requested: str | None, block_size: int
) -> tuple[str, int]:
    """The name and the seed of the codec for a call that wants codec `requested`; an empty name for none. Without a
    wish (None) the configured codec serves the calls that codecs work on."""
    is_codable = kind == "allreduce" and element.name == "float32" and op in CODED_OPS and block_size <= CODED_ELEMENTS
    if requested is None and is_codable:
        requested = context.codec
    if requested is None or check_codec(requested) == NONE:
        return "", 0
    return requested, context.codec_seed


def check_codec(name: object) -> str:
    """The name of a codec, or "none". Raises UsageError for anything else."""
    if not isinstance(name, str):
        raise UsageError(f"codec is {a_type(name)}; expected a str")
    if name != NONE:
        codec_named(name)
    return name


def check_codec_of(protocol: ProtocolConfig) -> None:
    """Raises ConfigError if the configuration wants a codec that cannot be used."""
    try:
        check_codec(protocol.codec)
    except UsageError as error:
        raise ConfigError(f"protocol.codec: {error}") from error
    if protocol.codec != NONE and protocol.block_size > CODED_ELEMENTS:
        raise ConfigError(f"protocol.block_size {protocol.block_size}: expected at most {CODED_ELEMENTS} with a codec")


def reduced_part(context: CallContext, x: NDArray[S], op: str, name: str) -> Call[NDArray[S]]:
    """A call that gives this rank's part of the combined `x`. `x` is only read."""
    if check_array(x, "x").ndim == 0:
        raise UsageError("reduce_scatter needs an array of at least one dimension")
    whole_result = np.empty_like(x)
    call = reduction(context, "reduce_scatter", x, op=op, name=name, out=whole_result)
    part = once(lambda: np.array_split(whole_result, context.size)[context.rank].copy())
    return call._replace(result=part)


def reduction_at_root(context: CallContext, x: NDArray[S], root: int, op: str, name: str) -> Call[NDArray[S] | None]:
    """A call that combines all elements of `x` in the root's `x`. The other ranks' `x` is only read."""
    root, element = check_root(root, context.size), element_type(check_array(x, "x").dtype)
    descriptor = describe(
        "reduce", check_name(name, context.owner), element.name, x.shape, check_op(op),
        block_size=context.block_size, root=root,
    )  # fmt: skip
    layout, is_root = context.layout(descriptor), context.rank == root
    flat = flat_view(x, "x", writable=is_root)
    if is_root:
        return Call(descriptor, DenseTensor(flat, flat, layout, element.zero_mask), lambda: x, writes=(flat,))
    dropped = np.empty_like(flat)  # the result comes to all ranks
    return Call(descriptor, DenseTensor(flat, dropped, layout, element.zero_mask), lambda: None, reads=(flat,))


def rows(
    context: CallContext,
    indices: Array,
    values: NDArray[S],
    n_rows: int,
    *,
    op: str,
    name: str,
    group: str = "",
) -> Call[Rows[S]]:
    """A call that adds rows of a tall matrix by number."""
    descriptor, numbers, row_values = _rows(context, indices, values, n_rows, op=op, name=name, group=group)
    layout = context.layout(descriptor)
    operand = context.with_pool(lambda pool: RowSet(numbers, row_values, layout, pool.take))
    return Call(descriptor, operand, lambda: operand.result, reads=(indices, values))


def rows_into(
    context: CallContext, out: NDArray[S], indices: Array, values: NDArray[S], *, op: str, name: str
) -> Call[NDArray[S]]:
    """A call that adds rows of a tall matrix by number, in `out`."""
    target = flat_view(out, "out", writable=True)
    if out.ndim != 2 or check_array(values, "values").shape[1:] != out.shape[1:] or values.dtype != out.dtype:
        raise UsageError(
            f"out is {out.dtype}{list(out.shape)}, values is {values.dtype}{list(values.shape)}: expected rows of the "
            "same dtype and length"
        )
    descriptor, numbers, row_values = _rows(context, indices, values, len(out), op=op, name=name)
    if any(np.may_share_memory(out, array) for array in (indices, values)):
        raise UsageError("out overlaps indices or values; pass an array of its own")
    layout = context.layout(descriptor)
    operand = context.with_pool(lambda pool: RowsInto(numbers, row_values, layout, pool.take, out=out))
    return Call(descriptor, operand, lambda: out, reads=(indices, values), writes=(target,))


def _rows(
    context: CallContext, indices: Array, values: Array, n_rows: int, *, op: str, name: str, group: str = ""
) -> tuple[Descriptor, Array, Array]:
    """The descriptor, and this rank's rows: their numbers, which ascend, and their values."""
    element = element_type(check_array(values, "values").dtype)
    shape = check_rows(indices, values, n_rows), values.shape[1]
    descriptor = describe(
        "allreduce_rows", check_name(name, context.owner), element.name, shape, check_op(op), group=group
    )
    return descriptor, *combine_duplicates(indices.astype(np.int64), np.ascontiguousarray(values), element)


def copy_of_root(context: CallContext, x: NDArray[S], root: int, name: str) -> Call[NDArray[S]]:
    """A call that copies the bytes of the root's `x` to the `x` of every rank."""
    root, flat = check_root(root, context.size), flat_view(x, "x", writable=True)
    descriptor = _move_descriptor(context, "broadcast", name, x, root=root)
    return _move_call(context, descriptor, flat if context.rank == root else None, flat, lambda: x)


def all_parts(context: CallContext, x: NDArray[S], name: str) -> Call[NDArray[S]]:
    """A call that gives the bytes of all ranks' `x`, side by side."""
    flat, result = flat_view(x, "x", writable=False), _side_by_side(context, "an allgather", x)
    target = flat_view(result, "result", writable=True)
    descriptor = _move_descriptor(context, "allgather", name, x, parts=context.size)
    return _move_call(context, descriptor, target, target, lambda: result, reads=(flat,))


def parts_at_root(context: CallContext, x: NDArray[S], root: int, name: str) -> Call[NDArray[S] | None]:
    """A call that gives the bytes of all ranks' `x`, side by side, to the root."""
    root, flat = check_root(root, context.size), flat_view(x, "x", writable=False)
    result = _side_by_side(context, "a gather", x)
    target = result.reshape(-1).view(BYTES)
    descriptor = _move_descriptor(context, "gather", name, x, root=root, parts=context.size)
    return _move_call(
        context, descriptor, target, target, lambda: result if context.rank == root else None, reads=(flat,)
    )


def part_of_root(
    context: CallContext, out: NDArray[S], parts: NDArray[S] | None, root: int, name: str
) -> Call[NDArray[S]]:
    """A call that puts this rank's part of the root's `parts` into `out`."""
    root, flat = check_root(root, context.size), flat_view(out, "out", writable=True)
    source, shape = None, (context.size, *out.shape)
    if context.rank == root:
        if parts is None:
            raise UsageError(f"parts is None on the root; expected an array of {shape}")
        if check_array(parts, "parts").shape != shape or parts.dtype != out.dtype:
            raise UsageError(f"parts is {parts.dtype}{list(parts.shape)}; expected {out.dtype}{list(shape)}")
        source = flat_view(parts, "parts", writable=False).view(BYTES)
    descriptor = _move_descriptor(context, "scatter", name, out, root=root, parts=context.size)
    target = np.empty(shape, out.dtype)

    def put_back() -> None:
        flat[:] = target[context.rank].reshape(-1)

    reads = () if source is None else (source,)
    call = _move_call(context, descriptor, source, target.reshape(-1).view(BYTES), lambda: out, reads=reads)
    return call._replace(writes=(*call.writes, flat), put_back=put_back)


def exchanged_parts(context: CallContext, x: NDArray[S], name: str) -> Call[NDArray[S]]:
    """A call that gives, from each rank, the part of its `x` that has this rank's number."""
    flat = flat_view(x, "x", writable=False)
    if x.ndim == 0 or len(x) != context.size:
        raise UsageError(f"x is {list(x.shape)}; expected one part for each of the {context.size} ranks, x[rank]")
    everything = _side_by_side(context, "an alltoall", x)
    target = everything.reshape(-1).view(BYTES)
    descriptor = _move_descriptor(context, "alltoall", name, x, parts=context.size)
    result = once(lambda: np.ascontiguousarray(everything[:, context.rank]))
    return _move_call(context, descriptor, target, target, result, reads=(flat,))


def _side_by_side(context: CallContext, call_name: str, x: NDArray[S]) -> NDArray[S]:
    """Room for the `x` of all ranks, with this rank's in place and zeros for the others."""
    try:
        result = np.zeros((context.size, *x.shape), x.dtype)
    except ValueError as error:
        raise UsageError(f"the result of {call_name} of {x.shape} by {context.size} ranks: {error}") from None
    result[context.rank] = x
    return result


def barrier(context: CallContext, name: str) -> Call[None]:
    """A call without a result. It is complete once all ranks have called it."""
    empty = np.zeros(0, BYTES)
    return _move_call(context, _move_descriptor(context, "barrier", name, empty), None, empty, lambda: None)


def _move_descriptor(
    context: CallContext, kind: Kind, name: str, x: Array, *, root: int = 0, parts: int = 1
) -> Descriptor:
    """The descriptor of a collective that moves bytes: `parts` arrays like `x`."""
    name = check_name(name, context.owner)
    return describe(
        kind, name, dtype_text(x.dtype), x.shape,
        block_size=context.block_size, root=root, item_bytes=x.dtype.itemsize, parts=parts,
    )  # fmt: skip


def _move_call(
    context: CallContext,
    descriptor: Descriptor,
    source: Array | None,
    target: Array,
    result: Callable[[], T],
    reads: tuple[Array, ...] = (),
) -> Call[T]:
    """A copy between ranks, as a sum of bytes to which all but one rank contribute zeros."""
    data = target.view(BYTES)
    mask = descriptor.element.zero_mask
    operand = DenseTensor(data if source is target else source, data, context.layout(descriptor), mask)
    return Call(descriptor, operand, result, reads, (data,))
