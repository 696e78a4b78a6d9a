"""The public API of a worker: collectives on NumPy arrays over the aggregators of one job."""

from __future__ import annotations

import atexit
import logging
import os
import re
import socket
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from omnireduce.config import Config, check_config, whole_bytes
from omnireduce.config_schema import JOB_ALLOWED, JOB_PATTERN
from omnireduce.dtypes import BYTES, Array, element_type
from omnireduce.errors import AbortedError, ConfigError, RefusedError, TransportError, UsageError
from omnireduce.kernels.warm import warm_up_worker
from omnireduce.layout import Layout
from omnireduce.logs import BoundLog, tagged
from omnireduce.protocol.gathering import worker_name
from omnireduce.protocol.operands import DenseTensor
from omnireduce.protocol.rows import Pool, RowSet
from omnireduce.protocol.worker import WorkerMachine
from omnireduce.runtime.arguments import (
    check_array,
    check_name,
    check_op,
    combine_duplicates,
    dtype_text,
    flat_view,
)
from omnireduce.runtime.engine import Engine, Handle
from omnireduce.runtime.launcher import job_name, whole
from omnireduce.runtime.rendezvous import RETRY_S, Joined, Wish, join
from omnireduce.runtime.trace import check_trace
from omnireduce.runtime.traced import trace_worker
from omnireduce.wire import MAX_BLOCKS, MAX_ELEMENTS, Descriptor

LONGEST_RETRY_S = 2.0


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
    (None: as `cluster.job` says). Construction returns once all ranks have joined. Methods may be called from several
    threads.

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
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}: expected 0 <= rank < size")
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
        self._job, self._first_rank, self._largest = name, rank, size
        self._pool, self._whole_bytes = Pool(), whole_bytes(config)
        if config.elastic.enabled:
            self._join_elastic(config.elastic.smallest, size, survivor=False)
        else:
            self._enter(join(config, name, Wish(rank, size), self._deadline()))

    def reform(self, *, smallest: int | None = None, largest: int | None = None) -> None:
        """Leave the job if it still runs, and form it anew with all who do the same, and those who wait to join.

        For after an AbortedError, or when `newcomers` is not 0. `rank`, `size`, `generation` and `statistics` are new
        afterwards, also of which rank is which process; the order of ranks stays that in which they were launched. The
        job starts again with `largest` workers (None: as many as were launched), or with `smallest` or more
        (None: `elastic.smallest`) when no other has come for `elastic.settle_s`. All workers give the same numbers.

        Returns when this worker is in such a job. Raises what construction raises, RefusedError when fewer than
        `smallest` have come after `cluster.join_timeout_s`; it may then be called again. Collectives under way in other
        threads raise.
        """
        smallest = self.config.elastic.smallest if smallest is None else whole(smallest, "smallest")
        largest = max(self._largest, smallest) if largest is None else whole(largest, "largest")
        if not 1 <= smallest <= largest:
            raise UsageError(f"from {smallest} to {largest} workers: expected 1 <= smallest <= largest")
        self.shutdown()
        self._join_elastic(smallest, largest, survivor=True)

    @property
    def newcomers(self) -> int:
        """How many workers wait to join this job, as far as this rank has heard; they join when all `reform` it."""
        return self._machine.newcomers

    def _deadline(self) -> float:
        return time.monotonic() + self.config.cluster.join_timeout_s

    def _join_elastic(self, smallest: int, largest: int, *, survivor: bool) -> None:
        """Join again and again, as long as others fail meanwhile."""
        wish = Wish(self._first_rank, largest, smallest, self.config.elastic.settle_s, survivor)
        log = BoundLog(logging.getLogger("omnireduce"), job=self._job, rank=self._first_rank)
        deadline, said, pause_s = self._deadline(), "", RETRY_S
        while True:
            try:
                return self._enter(join(self.config, self._job, wish, deadline))
            except (AbortedError, TransportError, RefusedError) as error:
                is_final = isinstance(error, RefusedError) and not error.temporary
                is_first = isinstance(error, TransportError) and not survivor  # most likely a wrong address
                if is_final or is_first or time.monotonic() + pause_s >= deadline:
                    raise
                if str(error) != said:
                    said = str(error)
                    log.warning("joining once more: %s", said, extra=tagged("joining_again"))
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    def _enter(self, joined: Joined) -> None:
        """Become a rank of a generation of the job."""
        config, rank, size = self.config, joined.rank, joined.size
        self.rank, self.size, self.generation, self._links = rank, size, joined.generation, joined.links
        make_engine: Callable[..., Engine] = Engine
        if config.trace.folder:
            self._links, make_engine = trace_worker(config.trace, self._job, rank, size, self._links)
        self.transport = "+".join(sorted({link.kind for link in self._links}))
        self.shards = len(self._links)
        self._machine = WorkerMachine(
            [(link.send_slots, link.receive_slots) for link in self._links],
            [link.peer for link in self._links],
            worker_name(rank, socket.gethostname(), os.getpid()),
            rank=rank,
            scan_span=config.protocol.scan_span,
            timeout_s=config.cluster.timeout_s,
            message_bytes=[
                config.protocol.tcp_message_bytes if link.kind == "tcp" else config.protocol.slot_bytes
                for link in self._links
            ],
        )
        self._machine.newcomers = joined.newcomers
        log = BoundLog(logging.getLogger("omnireduce"), job=self._job, rank=rank)
        self._engine = make_engine(self._machine, self._links, config.transport.spin_us / 1e6, log)
        _open_communicators.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._engine.abort(f"left because of {type(error).__name__}")
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the job. Collectives under way are aborted on all ranks. May be called twice; raises nothing."""
        if self in _open_communicators:
            _open_communicators.discard(self)
            self._engine.shutdown()

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
        integers wrap. `name` is compared between ranks and appears in errors. `block_size` overrides
        `protocol.block_size`: elements, a multiple of 8. A sum that is zero may be -0 where
        NumPy gives +0, the same on all ranks; in a block that is zero everywhere -0 becomes +0.

        Raises UsageError for unsuitable arguments and for arrays that a collective under way uses; AbortedError or its
        subclass CollectiveTimeoutError when the job failed; ClosedError after `shutdown`.
        """
        return self._allreduce(x, out, op, name, block_size).wait()

    def allreduce_async(
        self, x: Array, *, out: Array | None = None, op: str = "sum", name: str = "", block_size: int | None = None
    ) -> Handle[Array]:
        """Start an `allreduce` and return its handle. Collectives complete in the order in which they were started.

        The arrays belong to the collective until the handle was waited for. Raises what `allreduce` raises, except that
        a failure after the start is raised by the handle's `wait`.
        """
        handle = self._allreduce(x, out, op, name, block_size)
        self._engine.drive_in_background()
        return handle

    def broadcast(self, x: Array, root: int = 0, *, name: str = "") -> Array:
        """Replace `x` on all ranks by the `x` of `root`, bit by bit; return it. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and size on all ranks. Raises what `allreduce` raises.
        """
        root = whole(root, "root")
        if not 0 <= root < self.size:
            raise UsageError(f"root {root}: expected 0 to {self.size - 1}")
        flat = flat_view(x, "x", writable=True)
        source = flat if self.rank == root else None
        self._move_bytes("broadcast", source, flat, name, x.dtype, f"of {dtype_text(x.dtype)} from rank {root}")
        return x

    def allgather(self, x: Array, *, name: str = "") -> Array:
        """Return the `x` of all ranks, (size, *x.shape), bit by bit. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and size on all ranks. Raises what `allreduce` raises.
        """
        flat = flat_view(x, "x", writable=False)
        result = np.zeros((self.size, *x.shape), x.dtype)
        result[self.rank] = x
        target = flat_view(result, "result", writable=True)
        note = f"of {dtype_text(x.dtype)}[{flat.size}] per rank"
        self._move_bytes("allgather", target, target, name, x.dtype, note, reads=(flat,))
        return result

    def reduce_scatter(self, x: Array, *, op: str = "sum", name: str = "") -> Array:
        """Return this rank's part of `allreduce(x)`: part `rank` of `numpy.array_split(result, size)`. `x` is kept.

        Needs a temporary array of the size of `x`, and moves as many bytes as an allreduce. Raises what `allreduce`
        raises.
        """
        if check_array(x, "x").ndim == 0:
            raise UsageError("reduce_scatter needs an array of at least one dimension")
        result = self.allreduce(x, out=np.empty_like(x), op=op, name=name)
        return np.array_split(result, self.size)[self.rank].copy()

    def barrier(self) -> None:
        """Return when all ranks have called it. Raises what `allreduce` raises, but for UsageError."""
        empty = np.zeros(0, BYTES)
        descriptor = Descriptor("barrier", "", "sum", BYTES.name, 0, 8)
        self._submit(descriptor, DenseTensor(None, empty, self._layout(descriptor), np.uint64(0)), empty).wait()

    def allreduce_rows(self, indices: Array, values: Array, n_rows: int, *, name: str = "") -> tuple[Array, Array]:
        """Sum rows of a tall matrix of which each rank has few, as in the gradient of an embedding.

        `indices`: integers (n,), row numbers below `n_rows`, in any order, duplicates allowed (they are added first,
        in the order given); `values`: (n, row length). n may be 0 and differ between ranks; `n_rows`, dtype and row
        length may not. Returns (indices, values) of the union of all ranks' rows: int64 (m,) ascending, and (m, row
        length).

        Raises UsageError for unsuitable arrays, among them rows that fit no slot; otherwise what `allreduce` raises.
        """
        check_array(indices, "indices")
        element = element_type(check_array(values, "values").dtype)
        if indices.ndim != 1 or values.ndim != 2 or len(indices) != len(values) or values.shape[1] == 0:
            raise UsageError(
                f"expected indices (n,) and values (n, row length), got {indices.shape} and {values.shape}"
            )
        if not np.issubdtype(indices.dtype, np.integer):
            raise UsageError(f"expected integer indices, got {indices.dtype}")
        n_rows, length = whole(n_rows, "n_rows"), values.shape[1]
        most = min(MAX_BLOCKS, -(-MAX_ELEMENTS // length)) - 1
        if not 0 <= n_rows <= most:
            raise UsageError(f"n_rows {n_rows}: expected 0 to {most} for rows of {length} elements")
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < n_rows:
            raise UsageError(f"indices from {indices.min()} to {indices.max()}: expected 0 to {n_rows - 1}")
        numbers, rows = combine_duplicates(indices.astype(np.int64), np.ascontiguousarray(values), element.is_half)
        descriptor = Descriptor("rows", check_name(name), "sum", element.name, n_rows * length, length)
        with self._engine.exclusively():  # the pool is the machine's, too
            operand = RowSet(numbers, rows, self._layout(descriptor), self._pool)
        return self._engine.submit(descriptor, operand, lambda: operand.result, reads=(indices, values)).wait()

    def _allreduce(self, x: Array, out: Array | None, op: str, name: str, block_size: int | None) -> Handle[Array]:
        element = element_type(check_array(x, "x").dtype)
        checked_op = check_op(op, element)
        block_size = self.config.protocol.block_size if block_size is None else whole(block_size, "block_size")
        if block_size < 8 or block_size % 8:
            raise UsageError(f"block_size {block_size}: expected a multiple of 8 elements")
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
        descriptor = Descriptor("allreduce", check_name(name), checked_op, element.name, source.size, block_size)
        operand = DenseTensor(source, target, self._layout(descriptor), element.zero_mask)
        reads = () if target is source else (source,)
        return self._submit(descriptor, operand, x if out is None else out, reads=reads, writes=(target,))

    def _move_bytes(
        self,
        kind: str,
        source: Array | None,
        target: Array,
        name: str,
        dtype: np.dtype[Any],
        note: str,
        *,
        reads: tuple[Array, ...] = (),
    ) -> None:
        """Copy between ranks as a sum of bytes to which all but one rank contribute zeros."""
        in_place = source is target
        target = target.view(BYTES)
        size = max(8, min(self.config.protocol.block_size * dtype.itemsize, 1 << 15) // 8 * 8)  # fits any slot
        descriptor = Descriptor(cast(Any, kind), check_name(name), "sum", BYTES.name, target.size, size, note)
        operand = DenseTensor(
            target if in_place else source, target, self._layout(descriptor), element_type(BYTES).zero_mask
        )
        self._submit(descriptor, operand, target, reads=reads, writes=(target,)).wait()

    def _submit(
        self,
        descriptor: Descriptor,
        operand: DenseTensor,
        result: Array,
        *,
        reads: tuple[Array, ...] = (),
        writes: tuple[Array, ...] = (),
    ) -> Handle[Array]:
        return self._engine.submit(descriptor, operand, lambda: result, reads=reads, writes=writes)

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


@atexit.register
def _shut_down_all() -> None:
    for communicator in list(_open_communicators):
        communicator.shutdown()
