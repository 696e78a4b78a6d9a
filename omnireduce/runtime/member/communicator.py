"""The public API of a worker: collectives on NumPy arrays over the aggregators of one job."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from msgspec.structs import replace

from omnireduce.config import Config, check_config
from omnireduce.config_schema import JOB_ALLOWED, JOB_PATTERN
from omnireduce.descriptor import Descriptor, Kind, describe, dtype_text
from omnireduce.dtypes import BYTES, Array, element_type
from omnireduce.errors import ClosedError, ConfigError, UsageError, left_because
from omnireduce.kernels.warm import warm_up_worker
from omnireduce.layout import Layout
from omnireduce.logs import BoundLog, tagged
from omnireduce.protocol.operands import DenseTensor
from omnireduce.protocol.rows import Pool, RowSet
from omnireduce.runtime.member.arguments import (
    check_array,
    check_name,
    check_op,
    check_rows,
    combine_duplicates,
    flat_view,
)
from omnireduce.runtime.member.assemble import assemble
from omnireduce.runtime.member.handle import Handle
from omnireduce.runtime.member.launcher import job_name, launch_id, whole
from omnireduce.runtime.member.rendezvous import Arrival, hello_of, join
from omnireduce.runtime.tracing.trace import check_trace
from omnireduce.wire import Hello

MOST_RANKS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Statistics:
    """Totals of one worker since it joined. Bytes include framing; with shared memory, what a wire would have
    carried. `shard_bytes` are those exchanged with each shard, both ways."""

    sent_bytes: int
    received_bytes: int
    collectives: int
    shard_bytes: tuple[int, ...]


class Communicator:
    """Membership of this process in one job; every rank must call the same collectives in the same order.

    `config` says where the aggregators are and how to reach them, `rank` of `size` who this worker is, `job` the job
    (None: as `cluster.job` says). Construction returns once all ranks have joined.

    Several threads may share it. A collective without a name may be started by one of them only: the thread that has
    made the communicator, or has called `reform` last. Others must name theirs, the same on every rank: the name is
    what tells which thread's tensor meets which. Named ones that meet in another order on another rank are an error.
    No two threads may have collectives of one name under way. Handles may be waited for in any thread.

    A signal handler may call `shutdown`, nothing else, while its thread is in a collective.

    Attributes, not to be changed: `rank`, `size` and `local_rank` of this worker, `config`, `transport` ("shm", "tcp",
    "verbs", or several joined by "+"), `shards`, the number of aggregators, and `generation`, the
    number that the first one gave this membership.

    With `elastic.enabled` the job can be formed anew after a fault: see `reform`. A worker that is started again waits
    until the others do so.

    Raises ConfigError; UsageError for a `job` or `rank` that cannot be; TransportError when an aggregator cannot be
    reached; RefusedError when it does not admit this worker, or ranks are missing after `cluster.join_timeout_s`;
    AbortedError when another rank failed meanwhile.
    """

    def __init__(self, config: Config, *, rank: int, size: int, local_rank: int = 0, job: str | None = None) -> None:
        check_config(config)
        rank, size, local_rank = whole(rank, "rank"), whole(size, "size"), whole(local_rank, "local_rank")
        if not 0 <= rank < size <= MOST_RANKS:
            raise UsageError(f"rank {rank} of {size}: expected 0 <= rank < size <= {MOST_RANKS}")
        self.local_rank, self.config = local_rank, config
        name = job or job_name(config, None)
        if not re.match(JOB_PATTERN, name):
            raise UsageError(f"job {name!r}: expected {JOB_ALLOWED}")
        if config.elastic.enabled and config.elastic.settle_s >= config.cluster.join_timeout_s:
            raise ConfigError(
                f"elastic.settle_s is {config.elastic.settle_s:g}, expected less than cluster.join_timeout_s, "
                f"{config.cluster.join_timeout_s:g}"
            )
        if config.elastic.enabled and config.elastic.smallest > size:
            raise UsageError(f"elastic.smallest is {config.elastic.smallest}, expected at most the size, {size}")
        check_trace(config.trace)
        warm_up_worker()
        self._job, self._largest, self._pool = name, size, Pool()
        self._gave_up = False  # by `shutdown`
        self._on_shutdown: Callable[[], None] = lambda: None
        launch = launch_id(rank, size) if config.cluster.launch == "auto" else config.cluster.launch
        self._hello = hello_of(config, name, launch, rank, size)
        self._log = BoundLog(logging.getLogger("omnireduce"), job=name, rank=rank)
        if size > 1 and not launch and config.cluster.job == "auto" and name == job_name(config, None):
            self._log.warning(
                "nothing tells this launch from another one of %d workers: if two may run at once on these "
                "aggregators, set another cluster.job for each", size, extra=tagged("no_launch_id"),
            )  # fmt: skip
        if config.elastic.enabled:
            self._hello = replace(self._hello, smallest=config.elastic.smallest, settle_s=config.elastic.settle_s)
        self._form(self._hello)

    def reform(self, *, smallest: int | None = None, largest: int | None = None) -> None:
        """Leave the job if it still runs, and form it anew with all who do the same, and those who wait to join.

        For after an AbortedError, or when `newcomers` is not 0. `rank`, `size`, `generation` and `statistics` are new
        afterwards, also of which rank is which process; the order of ranks stays that in which they were launched. The
        job starts again with `largest` workers (None: as many as were launched), or with `smallest` or more
        (None: `elastic.smallest`) when no other has come for `elastic.settle_s`. All workers give the same numbers.

        Returns when this worker is in such a job. Raises what construction raises, RefusedError when fewer than
        `smallest` have come after `cluster.join_timeout_s`; it may then be called again. Collectives under way in other
        threads raise. Raises UsageError in a signal handler that interrupts a collective; ClosedError when a signal
        handler or another thread calls `shutdown` meanwhile.
        """
        smallest = self.config.elastic.smallest if smallest is None else whole(smallest, "smallest")
        largest = max(self._largest, smallest) if largest is None else whole(largest, "largest")
        if not 1 <= smallest <= largest <= MOST_RANKS:
            raise UsageError(f"from {smallest} to {largest} workers: expected 1 <= smallest <= largest <= {MOST_RANKS}")
        if self._engine.inside:
            raise UsageError("reform in a signal handler that interrupts a collective; let the handler set a flag")
        self._gave_up = False
        self._hang_up()
        hello = replace(self._hello, world_size=largest, smallest=smallest, settle_s=self.config.elastic.settle_s)
        if self._seat is not None:
            hello = replace(hello, survived=self._seat.formation, ticket=self._seat.ticket)
        self._form(hello)

    @property
    def newcomers(self) -> int:
        """How many workers wait to join this job, as far as this rank has heard; they join when all `reform` it."""
        return self._machine.newcomers

    def _form(self, hello: Hello) -> None:
        """Become a rank of a generation of the job, unless `shutdown` is called meanwhile: then raise ClosedError."""
        self._enter(join(self.config, hello, lambda: self._gave_up))
        if self._gave_up:  # since it had joined; the old engine may have been the one that was asked
            self._hang_up()
            raise ClosedError("the communicator was shut down while it joined; make a new one to go on")

    def _enter(self, arrival: Arrival) -> None:
        self._links, self._machine, self._engine = assemble(self.config, self._job, arrival)
        joined = arrival.joined
        self.rank, self.size, self.generation = joined.rank, joined.size, joined.generation
        self._whole_bytes, self._seat = joined.whole_bytes, joined.seat
        self.transport = "+".join(sorted({link.kind for link in self._links}))
        self.shards = len(self._links)
        self._owner = threading.current_thread()
        _open_communicators.add(self)
        _process.watch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._engine.abort(left_because(error))
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leave the job. Collectives under way are aborted on all ranks. May be called twice; raises nothing.

        In a signal handler that interrupts a collective it returns at once. The collective then leaves the job, closes
        everything and raises ClosedError. While `reform` joins it makes that raise ClosedError soon.
        """
        self._gave_up = True
        self._hang_up()
        self._on_shutdown()

    @property
    def is_shut_down(self) -> bool:
        """`shutdown` was called, and `reform` was not since."""
        return self._gave_up

    def _hang_up(self) -> None:
        if self._engine.shutdown():
            _open_communicators.discard(self)

    def statistics(self) -> Statistics:
        """What this worker has moved so far. Raises nothing, also after `shutdown`."""
        counters = [link.counters for link in self._links]
        return Statistics(
            sum(each.sent_bytes for each in counters),
            sum(each.received_bytes for each in counters),
            self._machine.submitted,
            tuple(each.sent_bytes + each.received_bytes for each in counters),
        )

    def allreduce(
        self, x: Array, *, out: Array | None = None, op: str = "sum", name: str = "", block_size: int | None = None
    ) -> Array:
        """Combine `x` of all ranks, element by element, in rank order; return the result, which is the same on all
        ranks.

        `x`: a C-contiguous array of any shape, equal on all ranks, of float16, bfloat16, float32, float64, int8 …
        int64 or uint8. The result replaces `x`, or goes to `out` (same shape and dtype; `x` is then only read). `op`:
        sum, mean, min, max or prod; mean needs a float type; 16-bit floats are summed in float32 and rounded once;
        integers wrap. `name` is compared between ranks and appears in errors; threads other than the communicator's own
        must give one. `block_size` overrides `protocol.block_size`: elements, a multiple of 8.

        A sum that is zero may be -0 where NumPy gives +0, the same on all ranks; in a block that is zero everywhere -0
        becomes +0.

        Raises UsageError for unsuitable arguments, for arrays that a collective under way uses, for a missing name in
        another thread, and for a name that another thread has under way; AbortedError or its subclass
        CollectiveTimeoutError when the job failed; ClosedError after `shutdown`.
        """
        return self._allreduce("allreduce", x, out, op, name, block_size).wait()

    def allreduce_async(
        self, x: Array, *, out: Array | None = None, op: str = "sum", name: str = "", block_size: int | None = None
    ) -> Handle[Array]:
        """Start an `allreduce` and return its handle. Collectives complete in the order in which they were started.

        The arrays belong to the collective until the handle was waited for. Raises what `allreduce` raises, except that
        a failure after the start is raised by the handle's `wait`.
        """
        handle = self._allreduce("allreduce", x, out, op, name, block_size)
        self._engine.drive_in_background()
        return handle

    def broadcast(self, x: Array, root: int = 0, *, name: str = "") -> Array:
        """Replace `x` on all ranks by the `x` of `root`, bit by bit; return it. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises what `allreduce` raises.
        """
        root = whole(root, "root")
        if not 0 <= root < self.size:
            raise UsageError(f"root {root}: expected 0 to {self.size - 1}")
        flat = flat_view(x, "x", writable=True)
        source = flat if self.rank == root else None
        self._move_bytes(self._moving("broadcast", name, x, root=root), source, flat)
        return x

    def allgather(self, x: Array, *, name: str = "") -> Array:
        """Return the `x` of all ranks, (size, *x.shape), bit by bit. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises what `allreduce` raises.
        """
        flat = flat_view(x, "x", writable=False)
        called = self._moving("allgather", name, x, parts=self.size)
        try:
            result = np.zeros((self.size, *x.shape), x.dtype)
        except ValueError as error:
            raise UsageError(f"the result of an allgather of {x.shape} by {self.size} ranks: {error}") from None
        result[self.rank] = x
        target = flat_view(result, "result", writable=True)
        self._move_bytes(called, target, target, reads=(flat,))
        return result

    def reduce_scatter(self, x: Array, *, op: str = "sum", name: str = "") -> Array:
        """Return this rank's part of `allreduce(x)`: part `rank` of `numpy.array_split(result, size)`. `x` is kept.

        Needs a temporary array of the size of `x`, and moves as many bytes as an allreduce. Raises what `allreduce`
        raises.
        """
        if check_array(x, "x").ndim == 0:
            raise UsageError("reduce_scatter needs an array of at least one dimension")
        result = self._allreduce("reduce_scatter", x, np.empty_like(x), op, name, None).wait()
        return np.array_split(result, self.size)[self.rank].copy()

    def barrier(self, *, name: str = "") -> None:
        """Return when all ranks have called it. Raises what `allreduce` raises."""
        empty = np.zeros(0, BYTES)
        self._move_bytes(self._moving("barrier", name, empty), None, empty)

    def allreduce_rows(self, indices: Array, values: Array, n_rows: int, *, name: str = "") -> tuple[Array, Array]:
        """Sum rows of a tall matrix of which each rank has few, as in the gradient of an embedding.

        `indices`: integers (n,), row numbers below `n_rows`, in any order, duplicates allowed (they are added first,
        in the order given); `values`: (n, row length). n may be 0 and differ between ranks; `n_rows`, dtype and row
        length may not. Returns (indices, values) of the union of all ranks' rows: int64 (m,) ascending, and (m, row
        length).

        Raises UsageError for unsuitable arrays, among them rows that fit no slot; otherwise what `allreduce` raises.
        """
        element = element_type(check_array(values, "values").dtype)
        n_rows = check_rows(indices, values, n_rows)
        shape = n_rows, values.shape[1]
        called = describe("allreduce_rows", check_name(name, self._owner), element.name, shape)
        numbers, rows = combine_duplicates(indices.astype(np.int64), np.ascontiguousarray(values), element.is_half)
        layout = self._layout(called)
        operand = self._engine.exclusively(lambda: RowSet(numbers, rows, layout, self._pool))  # one pool for all
        return self._engine.submit(called, operand, lambda: operand.result, reads=(indices, values)).wait()

    def _allreduce(
        self, kind: Kind, x: Array, out: Array | None, op: str, name: str, block_size: int | None
    ) -> Handle[Array]:
        element = element_type(check_array(x, "x").dtype)
        block_size = self.config.protocol.block_size if block_size is None else whole(block_size, "block_size")
        called = describe(kind, check_name(name, self._owner), element.name, x.shape, check_op(op), block_size)
        source = flat_view(x, "x", writable=out is None, instead="pass out=")
        target = source
        if out is not None:
            if check_array(out, "out").shape != x.shape or out.dtype != x.dtype:
                raise UsageError(
                    f"out is {out.dtype}{list(out.shape)}, x is {x.dtype}{list(x.shape)}: expected the same"
                )
            target = flat_view(out, "out", writable=True)
            if np.may_share_memory(source, target):
                raise UsageError("out overlaps x; leave out away to work in place")
        operand = DenseTensor(source, target, self._layout(called), element.zero_mask)
        reads, result = () if target is source else (source,), x if out is None else out
        return self._engine.submit(called, operand, lambda: result, reads=reads, writes=(target,))

    def _moving(self, kind: Kind, name: str, x: Array, *, root: int = 0, parts: int = 1) -> Descriptor:
        name, block_size = check_name(name, self._owner), self.config.protocol.block_size
        return describe(kind, name, dtype_text(x.dtype), x.shape, "sum", block_size, root, x.dtype.itemsize, parts)

    def _move_bytes(
        self, called: Descriptor, source: Array | None, target: Array, *, reads: tuple[Array, ...] = ()
    ) -> None:
        """Copy between ranks as a sum of bytes to which all but one rank contribute zeros."""
        in_place = source is target
        target = target.view(BYTES)
        operand = DenseTensor(target if in_place else source, target, self._layout(called), called.element.zero_mask)
        self._engine.submit(called, operand, lambda: None, reads=reads, writes=(target,)).wait()

    def _layout(self, descriptor: Descriptor) -> Layout:
        return descriptor.layout.dealt(
            self.shards, self.config.protocol.stripe_blocks, self._whole_bytes, descriptor.block_bytes
        )


_open_communicators: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _abandon_in_child() -> None:
    """A forked child must neither speak for its parent nor keep the parent's connections open after its death."""
    for communicator in list(_open_communicators):
        communicator._engine.abandon()
    _open_communicators.clear()


os.register_at_fork(after_in_child=_abandon_in_child)


class _Process:
    """Remembers the exception that ends this process: Python shows it by `sys.excepthook`, then the process exits."""

    def __init__(self) -> None:
        self.ended_by: BaseException | None = None
        self._show: Callable[..., object] | None = None

    def watch(self) -> None:
        if self._show is None:
            self._show, sys.excepthook = sys.excepthook, self._remember

    def _remember(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            self.ended_by = error
        assert self._show is not None
        self._show(kind, error, trace)


_process = _Process()


@atexit.register
def _shut_down_all() -> None:
    """At the end of the process. Where an exception ended it the other ranks read which."""
    error = _process.ended_by
    for communicator in list(_open_communicators):
        communicator.__exit__(None if error is None else type(error), error, None)
