"""The collectives that a member of a job may ask for. Each has a form that starts it and returns a handle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from omnireduce.descriptor import Op, RowOp
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.member import calls, groups, packed_calls
from omnireduce.runtime.member.calls import Call, CallContext, Rows
from omnireduce.runtime.member.groups import Table
from omnireduce.runtime.member.handle import Handle, Together
from omnireduce.runtime.member.rank_channels import CallChannel, RankChannels
from omnireduce.runtime.member.refusals import tell

GROUPS = list, tuple, dict
T = TypeVar("T")
P = ParamSpec("P")
G = TypeVar("G", bound=list[Any] | tuple[Any, ...] | dict[Any, Any])
S = TypeVar("S", bound=np.generic)


class Collectives:
    """Collectives on NumPy arrays; every rank must call the same ones in the same order. A call that raises here
    before it was started has its place in that order, too: see `refuse`."""

    _member: RankChannels
    drives_in_background: bool

    @overload
    def allreduce(
        self, x: G, *, op: Op = ..., name: str = ..., priority: int | None = ..., codec: str | None = ...
    ) -> G: ...
    @overload
    def allreduce(
        self,
        x: NDArray[S],
        *,
        out: NDArray[S] | None = ...,
        op: Op = ...,
        name: str = ...,
        block_size: int | None = ...,
        priority: int | None = ...,
        codec: str | None = ...,
    ) -> NDArray[S]: ...
    def allreduce(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        name: str = "",
        block_size: int | None = None,
        priority: int | None = None,
        codec: str | None = None,
    ) -> Any:
        """Combine `x` of all ranks, element by element, in a fixed order; return the result, which is the same on all
        ranks.

        `x`: a C-contiguous array of any shape, equal on all ranks, of float16, bfloat16, float32, float64, int8 …
        int64, uint8 … uint64 or bool. The result replaces `x`, or goes to `out` (same shape and dtype; `x` is then only
        read). `op`: sum, mean, min, max or prod, and of bool any or all; mean needs a float type; 16-bit floats are
        summed in float32 and rounded once, bfloat16 also in each of several hosts; integers wrap. `name` is compared
        between ranks and appears in errors; threads other than the communicator's own must give one. `block_size`
        overrides `protocol.block_size`: elements, a multiple of 8.

        A list, tuple or dict of arrays, also nested, is a group: all its arrays are combined in place, and it is
        returned. Those of up to 512 KiB travel together, one exchange for each dtype; larger ones travel on their own,
        at the same time. Keys and shapes are the same on all ranks; `out` and `block_size` are not for groups. In an
        array of a group a block is part of a larger whole, so a -0 may stay where the array alone would get +0.

        `priority`: 1 for a tensor that is urgent, 0 for one that is not, the same on all ranks. None says that tensors
        of up to `protocol.urgent_bytes` are, but not groups. Where that is not 0, urgent tensors have a channel of
        their own: they do not wait for other collectives, and may be complete before those. Sums are the same.
        Other collectives, and what has a larger `block_size` than `protocol.block_size`, are never urgent.

        `codec` overrides `protocol.codec` for sums and means of float32: how blocks travel to aggregators and back, in
        fewer bytes and not exactly. "none": as they are; "bf16", "fp16", "int8", "natural", "onebit", "qsgd",
        "scaled_sign", "sign", "ternary", or "module:Class", a codec of your own. Of a group it is for the arrays of
        float32, of which small ones share blocks. All ranks get the same result. Between ranks of one host, which share
        memory, nothing is encoded: there "sign" is a sum, not a vote.

        A sum that is zero may be -0 where NumPy gives +0, the same on all ranks; in a block that is zero everywhere -0
        becomes +0.

        Raises UsageError for unsuitable arguments, for arrays that a collective under way uses, for a missing name in
        another thread, and for a name that belongs to another thread; AbortedError or its subclass
        CollectiveTimeoutError when the job failed; ClosedError after `shutdown`.
        """
        way = self._way(x, priority, block_size)
        return self._start_allreduce(way, x, out, op=op, name=name, block_size=block_size, codec=codec).wait()

    @overload
    def allreduce_async(
        self, x: G, *, op: Op = ..., name: str = ..., priority: int | None = ..., codec: str | None = ...
    ) -> Handle[G]: ...
    @overload
    def allreduce_async(
        self,
        x: NDArray[S],
        *,
        out: NDArray[S] | None = ...,
        op: Op = ...,
        name: str = ...,
        block_size: int | None = ...,
        priority: int | None = ...,
        codec: str | None = ...,
    ) -> Handle[NDArray[S]]: ...
    def allreduce_async(
        self,
        x: Any,
        *,
        out: Any = None,
        op: Op = "sum",
        name: str = "",
        block_size: int | None = None,
        priority: int | None = None,
        codec: str | None = None,
    ) -> Handle[Any]:
        """Start an `allreduce` and return its handle. Those of one priority complete in the order of their starts.

        The arrays belong to the collective until the handle is done. Raises what `allreduce` raises, except that
        a failure after the start is raised by the handle's `wait`. So do all methods that end with `_async`.
        """
        way = self._way(x, priority, block_size)
        return self._in_background(
            way, lambda: self._start_allreduce(way, x, out, op=op, name=name, block_size=block_size, codec=codec)
        )

    def reduce(self, x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = "") -> NDArray[S] | None:
        """Combine `x` of all ranks as `allreduce` does, for one of them: replace the root's `x` and return it there.

        The others' `x` is only read; they get None. The result travels to all ranks, not only to the root. Raises what
        `allreduce` raises.
        """
        return self._start(calls.reduction_at_root, x, root, op, name).wait()

    def reduce_async(
        self, x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = ""
    ) -> Handle[NDArray[S] | None]:
        """Start a `reduce`; see `allreduce_async`."""
        return self._start_async(calls.reduction_at_root, x, root, op, name)

    def broadcast(self, x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S]:
        """Replace `x` on all ranks by the `x` of `root`, bit by bit; return it. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises what `allreduce` raises.
        """
        return self._start(calls.copy_of_root, x, root, name).wait()

    def broadcast_async(self, x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S]]:
        """Start a `broadcast`; see `allreduce_async`."""
        return self._start_async(calls.copy_of_root, x, root, name)

    def allgather(self, x: NDArray[S], *, name: str = "") -> NDArray[S]:
        """Return the `x` of all ranks, (size, *x.shape), bit by bit. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises what `allreduce` raises.
        """
        return self._start(calls.all_parts, x, name).wait()

    def allgather_async(self, x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
        """Start an `allgather`; see `allreduce_async`."""
        return self._start_async(calls.all_parts, x, name)

    def allgather_ragged(self, x: NDArray[S], *, name: str = "") -> list[NDArray[S]]:
        """Return the `x` of all ranks in a list, bit by bit, where the length of the first dimension may differ.

        `x`: a C-contiguous array of at least one dimension, of any dtype without Python objects, of up to
        `protocol.max_part_bytes` (1 GiB), else all ranks raise UsageError; dtype and `x.shape[1:]` are the same on all
        ranks. Raises what `allreduce` raises.
        """
        return self._start(packed_calls.ragged_parts, x, name).wait()

    def allgather_ragged_async(self, x: NDArray[S], *, name: str = "") -> Handle[list[NDArray[S]]]:
        """Start an `allgather_ragged`; see `allreduce_async`."""
        return self._start_async(packed_calls.ragged_parts, x, name)

    def gather(self, x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S] | None:
        """Return the `x` of all ranks, (size, *x.shape), on the root; None on the others.

        The parts travel to all ranks, not only to the root. Otherwise as `allgather`.
        """
        return self._start(calls.parts_at_root, x, root, name).wait()

    def gather_async(self, x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S] | None]:
        """Start a `gather`; see `allreduce_async`."""
        return self._start_async(calls.parts_at_root, x, root, name)

    def scatter(self, out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = "") -> NDArray[S]:
        """Replace `out` on each rank by the root's `parts[rank]`, bit by bit; return it.

        `out`: a C-contiguous array, of the same dtype and shape on all ranks; `parts`: (size, *out.shape) of that dtype
        on the root, not looked at elsewhere. Every part travels to all ranks. Raises what `allreduce` raises.
        """
        return self._start(calls.part_of_root, out, parts, root, name).wait()

    def scatter_async(
        self, out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = ""
    ) -> Handle[NDArray[S]]:
        """Start a `scatter`; see `allreduce_async`."""
        return self._start_async(calls.part_of_root, out, parts, root, name)

    def alltoall(self, x: NDArray[S], *, name: str = "") -> NDArray[S]:
        """Send part `x[r]` to rank r; return the parts that the ranks have sent here, (size, *x.shape[1:]), bit by bit.

        `x`: a C-contiguous array of `size` parts, of the same dtype and shape on all ranks. All parts travel to all
        ranks, so this moves `size` times as many bytes as are needed. Raises what `allreduce` raises.
        """
        return self._start(calls.exchanged_parts, x, name).wait()

    def alltoall_async(self, x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
        """Start an `alltoall`; see `allreduce_async`."""
        return self._start_async(calls.exchanged_parts, x, name)

    def broadcast_object(self, x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Any:
        """Return the root's `x` on all ranks: the object itself on the root, an equal one elsewhere. The others' `x` is
        ignored.

        `x` is plain data: None, bool, numbers of up to some 4,000 digits, str, bytes, tuples, lists, dicts, sets, dates
        (whose tzinfo is None or a plain offset), arrays. It is nested up to 64 deep, and has up to 65,536 keys that are
        neither str nor bytes. With `trust`, on all ranks, it is anything that can be pickled; then each rank and each
        aggregator of the job can run code in this process. It takes up to `protocol.max_part_bytes` (1 GiB).

        Raises UsageError on all ranks for other objects of the root, and the job goes on. On all ranks but the root it
        also raises UsageError for bytes of a peer that are no such object. Otherwise it raises what `allreduce` raises.
        """
        return self._start(packed_calls.object_of_root, x, root, name, trust).wait()

    def broadcast_object_async(self, x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Handle[Any]:
        """Start a `broadcast_object`; see `allreduce_async`."""
        return self._start_async(packed_calls.object_of_root, x, root, name, trust)

    def allgather_object(self, x: object, *, name: str = "", trust: bool = False) -> list[Any]:
        """Return a list with an object equal to the `x` of each rank. See `broadcast_object` for what `x` may be; where
        that of one rank is anything else, all raise UsageError."""
        return self._start(packed_calls.all_objects, x, name, trust).wait()

    def allgather_object_async(self, x: object, *, name: str = "", trust: bool = False) -> Handle[list[Any]]:
        """Start an `allgather_object`; see `allreduce_async`."""
        return self._start_async(packed_calls.all_objects, x, name, trust)

    def reduce_scatter(self, x: NDArray[S], *, op: Op = "sum", name: str = "") -> NDArray[S]:
        """Return this rank's part of `allreduce(x)`: part `rank` of `numpy.array_split(result, size)`. `x` is kept.

        Needs a temporary array of the size of `x`, and moves as many bytes as an allreduce. Raises what `allreduce`
        raises.
        """
        return self._start(calls.reduced_part, x, op, name).wait()

    def reduce_scatter_async(self, x: NDArray[S], *, op: Op = "sum", name: str = "") -> Handle[NDArray[S]]:
        """Start a `reduce_scatter`; see `allreduce_async`."""
        return self._start_async(calls.reduced_part, x, op, name)

    def barrier(self, *, name: str = "") -> None:
        """Return when all ranks have called it. Raises what `allreduce` raises."""
        self._start(calls.barrier, name).wait()

    def barrier_async(self, *, name: str = "") -> Handle[None]:
        """Start a `barrier`; its handle is done when all ranks have started theirs. See `allreduce_async`."""
        return self._start_async(calls.barrier, name)

    def allreduce_rows(
        self, indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = ""
    ) -> Rows[S]:
        """Sum rows of a tall matrix of which each rank has few, as in the gradient of an embedding.

        `indices`: integers (n,), row numbers below `n_rows`, in any order, duplicates allowed (they are added first, in
        the order given); `values`: (n, row length). n may be 0 and differ between ranks; `n_rows`, dtype and row length
        may not. `op`: sum or mean; mean divides by the number of all ranks, also of those that lack the row. Returns
        (indices, values) of the union of all ranks' rows: int64 (m,) ascending, and (m, row length).

        Raises UsageError for unsuitable arrays, among them rows that fit no slot; otherwise what `allreduce` raises.
        """
        return self._start(calls.rows, indices, values, n_rows, op=op, name=name).wait()

    def allreduce_rows_async(
        self, indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = ""
    ) -> Handle[Rows[S]]:
        """Start an `allreduce_rows`; see `allreduce_async`."""
        return self._start_async(calls.rows, indices, values, n_rows, op=op, name=name)

    def allreduce_rows_into(
        self, out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
    ) -> NDArray[S]:
        """`allreduce_rows`, with a dense result: `out`, (n_rows, row length), gets the sums in their rows, and zeros in
        the others. Returns `out`.

        Raises UsageError where `out` does not fit, too; otherwise what `allreduce_rows` raises.
        """
        return self._start(calls.rows_into, out, indices, values, op=op, name=name).wait()

    def allreduce_rows_into_async(
        self, out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
    ) -> Handle[NDArray[S]]:
        """Start an `allreduce_rows_into`; see `allreduce_async`."""
        return self._start_async(calls.rows_into, out, indices, values, op=op, name=name)

    def allreduce_tables(self, tables: Sequence[Table], *, op: RowOp = "sum", name: str = "") -> list[Rows[Any]]:
        """`allreduce_rows` of several tables at once: those of one dtype and row length travel in one exchange.

        `tables`: a list of (indices, values, n_rows). Returns (indices, values) of each. Raises what
        `allreduce_rows` raises.
        """
        return self._start_tables(tables, op, name).wait()

    def allreduce_tables_async(
        self, tables: Sequence[Table], *, op: RowOp = "sum", name: str = ""
    ) -> Handle[list[Rows[Any]]]:
        """Start an `allreduce_tables`; see `allreduce_async`."""
        return self._in_background(self._member.ordinary, lambda: self._start_tables(tables, op, name))

    def refuse(self, error: Exception) -> None:
        """Take part in the next collective of the other ranks by refusing it, because of `error`. For programs that
        find by themselves, before they call it, that this rank cannot take part.

        If all ranks refuse, the job goes on; else all get an AbortedError that says what this one has refused, at once
        where they wait already. Returns before the others know. Does nothing for an error that they have been told of,
        and where the job is over. Raises nothing.
        """
        tell(self._member, error)

    # Each `except` costs nothing where nothing is raised. What begins after the call was started is not inside.

    def _way(self, x: object, priority: object, block_size: object) -> CallChannel:
        try:
            return self._member.way(x, priority, block_size)
        except Exception as error:
            self.refuse(error)
            raise

    def _start(
        self, make: Callable[Concatenate[CallContext, P], Call[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        place, engine = self._member.ordinary
        try:
            [handle] = engine.submit(make(place, *args, **kwargs))
        except Exception as error:
            self.refuse(error)
            raise
        return handle

    def _start_async(
        self, make: Callable[Concatenate[CallContext, P], Call[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        return self._in_background(self._member.ordinary, lambda: self._start(make, *args, **kwargs))

    def _start_allreduce(
        self, way: CallChannel, x: Any, out: Any, *, op: Op, name: str, block_size: int | None, codec: str | None
    ) -> Handle[Any]:
        place, engine = way
        try:
            if not isinstance(x, GROUPS):
                call = calls.reduction(
                    place, "allreduce", x, op=op, name=name, out=out, block_size=block_size, codec=codec
                )
                return engine.submit(call)[0]
            if out is not None or block_size is not None:
                raise UsageError(
                    "out and block_size go with one array; a group is combined in place, in blocks of its own"
                )
            handles = engine.submit(*groups.arrays(place, x, op=op, name=name, codec=codec))
        except Exception as error:
            self.refuse(error)
            raise
        return Together(handles, lambda _: x)

    def _start_tables(self, tables: Sequence[Table], op: RowOp, name: str) -> Handle[list[Rows[Any]]]:
        place, engine = self._member.ordinary
        try:
            batch = groups.tables(place, tables, op, name)
            handles = engine.submit(*batch.calls)
        except Exception as error:
            self.refuse(error)
            raise
        return Together(handles, batch.result)

    def _in_background(self, way: CallChannel, start: Callable[[], Handle[T]]) -> Handle[T]:
        if not self.drives_in_background and self._member.urgent.engine is self._member.ordinary.engine:
            return start()
        try:
            way.engine.drive_in_background()  # first: where there is no room for a thread, nothing is started
        except Exception as error:
            self.refuse(error)
            raise
        handle = start()
        way.engine.drive_in_background()  # now there is something to drive
        return handle
