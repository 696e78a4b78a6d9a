"""The public API of a worker: collectives on NumPy arrays over the aggregators of one job."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from omnireduce.core.block_program import BlockProgram
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import Op, RowOp
from omnireduce.core.dtypes import Array
from omnireduce.core.names import JOB_ALLOWED, JOB_PATTERN
from omnireduce.core.wire.control import Hello
from omnireduce.errors import ClosedError, UsageError, left_because
from omnireduce.kernels.warm import Progress
from omnireduce.protocol.collective.block_programs import NUMBER_BYTES, row_numbers
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.rank import engine
from omnireduce.runtime.rank.calls import batched, ragged, single
from omnireduce.runtime.rank.calls.arguments import whole_number
from omnireduce.runtime.rank.calls.batched import Table
from omnireduce.runtime.rank.calls.block_programs import Fused, FusedRows, fused_reduction, fused_rows
from omnireduce.runtime.rank.calls.single import Call, CallContext, Pool, Rows, check_codec_of
from omnireduce.runtime.rank.channels import CallChannel, Channel, RankChannels, Statistics, join_urgent, statistics_of
from omnireduce.runtime.rank.embedded_aggregator import Embedded, embed
from omnireduce.runtime.rank.engine import Engine
from omnireduce.runtime.rank.error_agreement import check_agreement
from omnireduce.runtime.rank.handles import Handle, HandleGroup
from omnireduce.runtime.rank.joining import (
    JoinedWorker,
    hello_of,
    join_beside,
    tell_aggregators,
)
from omnireduce.runtime.rank.kernels_ready import (
    CompilingSigns,
    KernelsOnDemand,
    aggregator_sums,
    log_kernel_trouble,
    make_kernels_ready,
    needed_at_first,
    progress_of,
)
from omnireduce.runtime.rank.launcher_detection import Launch, check_told_apart, identity_of, job_name
from omnireduce.runtime.rank.process_groups import check_group, config_of_group, job_of_group, refuse_to_come
from omnireduce.runtime.rank.profiler import Profiler
from omnireduce.runtime.rank.refusals import settle, tell_ranks
from omnireduce.runtime.rank.reported_errors import mark_reported, reason_of, reported_names
from omnireduce.runtime.tracing.timeline import NoTimeline
from omnireduce.runtime.tracing.trace import check_trace
from omnireduce.support.config import Config, check_config
from omnireduce.support.logs import BoundLog
from omnireduce.support.secret import Secret, load_secret

GROUPS = list, tuple, dict
T = TypeVar("T")
P = ParamSpec("P")
G = TypeVar("G", bound=list[Any] | tuple[Any, ...] | dict[Any, Any])
S = TypeVar("S", bound=np.generic)


MAX_RANKS = (1 << 31) - 1


class Communicator:
    """Membership of this process in one job. Every rank must call the same collectives in the same order. (Urgent
    collectives have a separate order: see `allreduce`.)

    `config` says where the aggregators are and how to reach them. This worker is rank `rank` of `size` in `job` (None:
    the job of `cluster.job`). Construction returns once all ranks have joined.

    If `config` names no aggregators, rank 0 starts an aggregator for this job. All ranks must then be on one host. The
    aggregator ends when rank 0 has shut down or is gone.

    Several threads may share a communicator. Only one of them may start a collective without a name: the thread that
    has made the communicator, or has called `reform` last. The other threads must name theirs, with the same names on
    every rank: the names say which threads' tensors belong together. It is an error when named collectives meet in
    another order on another rank. A name belongs to the thread that used it first, until that thread has ended, or
    until `reform`: use other names in each thread. Any thread may wait for a handle. Another thread can take over the
    right to leave out names: see `take_over`.

    Set `drives_in_background` to False in a program in which some thread always waits while a collective is under way.
    Then the communicator starts no thread that competes with it. With `protocol.urgent_bytes` it starts threads all the
    same, because a thread that waits for an urgent collective does not drive the others.

    A collective that raises before it was started has its place in the order, too: see `refuse`. Collectives that run a
    program (`fused_allreduce`, `fused_allreduce_rows`) go through the aggregators, even between ranks of one host. They
    need a job with `protocol.state_bytes`, or a communicator from `create_group` with `state_bytes`.

    A signal handler may call `shutdown`, nothing else, while its thread is in a collective.

    Attributes, not to be changed: `rank`, `size`, `local_rank` and `local_size` (each None if the launcher did not give
    it) of this worker; `config`; `transport` ("shm", "tcp", "verbs", "memory", which ranks of one host share, or
    several joined by "+"); `in_memory`, whether ranks of this host share memory; `shards`, the number of aggregators;
    `generation`, the number that the first aggregator gave this membership; `formation`, an object that no other
    communicator has, and another object after `reform`.

    With `elastic.enabled` the job can be formed anew after a fault: see `reform`. A worker that is started again waits
    until the others call `reform`.

    Raises ConfigError; UsageError for an invalid `job` or `rank`; TransportError when an aggregator cannot be reached;
    RefusedError when it does not admit this worker, or ranks are missing after `cluster.join_timeout_s`; AbortedError
    when another rank failed meanwhile.
    """

    _rank_channels: RankChannels
    _has_embedded: bool

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        size: int,
        local_rank: int | None = None,
        local_size: int | None = None,
        job: str | None = None,
        _parent: Communicator | None = None,
    ) -> None:
        config = check_config(config)
        rank, size = whole_number(rank, "rank"), whole_number(size, "size")
        if not 0 <= rank < size <= MAX_RANKS:
            raise UsageError(f"rank {rank} of {size}: expected 0 <= rank < size <= {MAX_RANKS}")
        self.config = config
        self.local_rank = None if local_rank is None else whole_number(local_rank, "local_rank")
        self.local_size = None if local_size is None else whole_number(local_size, "local_size")
        name = job or job_name(config, None)
        if not re.match(JOB_PATTERN, name):
            raise UsageError(f"job {name!r}: expected {JOB_ALLOWED}")
        if config.elastic.enabled and config.elastic.min_ranks > size:
            raise UsageError(f"elastic.min_ranks is {config.elastic.min_ranks}, expected at most the size, {size}")
        check_trace(config.trace)
        check_codec_of(config.protocol)
        self._log = BoundLog(logging.getLogger("omnireduce"), job=name, rank=rank)
        self._job, self._max_ranks = name, size
        self._profiler = Profiler(config.trace, name, self._log)
        self._pools = Pool(), Pool()  # one for each channel
        self._groups = set[Communicator]()  # the groups that this communicator has created, until they are shut down
        self.rank, self.drives_in_background = rank, True
        self._name_in_parent, self._rank_in_parent = "", -1 if _parent is None else _parent.rank
        self._shutdown_called = False  # `shutdown` was called
        self._on_shutdown: Callable[[Communicator], None] = lambda _: None
        is_named = config.cluster.job != "auto" or name != job_name(config, None)
        self._embedded: Embedded | None = None
        if config.cluster.aggregators:
            check_told_apart(config, rank, size, is_named=is_named)
        else:
            context = Launch(rank, size, self.local_rank, None, "arguments", self.local_size)
            self._embedded = embed(config, context, name, is_named=is_named, sums=aggregator_sums(config, size))
        self._has_embedded = self._embedded is not None or (_parent is not None and _parent._has_embedded)
        self._own_secret: Secret | None = None if _parent is None else _parent._own_secret
        try:
            self._progress = progress = progress_of(rank, self._log)
            self._compiling_signs: CompilingSigns = (
                CompilingSigns(config.cluster.timeout_s) if _parent is None else _parent._compiling_signs
            )
            make_kernels_ready(
                needed_at_first(config, size, is_embedded=self._has_embedded), progress, self._compiling_signs,
                lambda: self._find_aggregators(progress),
                lambda stop: tell_aggregators(self.config, self._hello, self._own_secret, stop),
            )  # fmt: skip
            log_kernel_trouble(self._log, is_first=0 in (rank, self.local_rank))
            self._join_job(self._hello, None if _parent is None else _parent._engine)
        except BaseException:
            self._end_embedded()
            raise

    def _find_aggregators(self, progress: Progress) -> None:
        """Find the aggregators, and make the hello for them."""
        if self._embedded is not None:
            self.config = self._embedded.await_aggregator(progress)
            self._own_secret = self._embedded.secret
        self._hello = self._make_hello()

    def _make_hello(self) -> Hello:
        config, rank, size = self.config, self.rank, self._max_ranks
        hello = hello_of(config, self._job, identity_of(config, rank, size), rank, size)
        if config.elastic.enabled:
            hello = replace(hello, min_ranks=config.elastic.min_ranks, last_call_s=config.elastic.last_call_s)
        return replace(hello, parent_rank=self._rank_in_parent)

    def reform(self, *, min_ranks: int | None = None, max_ranks: int | None = None) -> None:
        """Leave the job if it still runs, and form it anew with all workers that call this, and workers that wait to
        join.

        Call it after an AbortedError, or when `newcomers` is not 0. Afterwards `rank`, `size`, `generation` and
        `statistics` are new. A process may have another rank, but the ranks keep the order of the launch. The job
        starts again with `max_ranks` workers (None: as many as were launched). It even starts with fewer, but at least
        `min_ranks` (None: `elastic.min_ranks`), when no other worker has come for `elastic.last_call_s`. All workers
        give the same numbers.

        Returns when this worker is in the new job. Raises the errors of construction. Raises RefusedError when fewer
        than `min_ranks` have come after `cluster.join_timeout_s`, or when there was no place for this worker; it may
        then be called again. Collectives under way in other threads raise. Raises UsageError in a signal handler that
        interrupts a collective; ClosedError when a signal handler or another thread calls `shutdown` meanwhile.
        """
        min_ranks = self.config.elastic.min_ranks if min_ranks is None else whole_number(min_ranks, "min_ranks")
        max_ranks = max(self._max_ranks, min_ranks) if max_ranks is None else whole_number(max_ranks, "max_ranks")
        if not 1 <= min_ranks <= max_ranks <= MAX_RANKS:
            raise UsageError(
                f"from {min_ranks} to {max_ranks} workers: expected 1 <= min_ranks <= max_ranks <= {MAX_RANKS}"
            )
        if any(channel.engine.inside for channel in self._channels):
            raise UsageError("reform in a signal handler that interrupts a collective; let the handler set a flag")
        if self._shutdown_called and self._embedded is not None:
            raise UsageError("the aggregator of this job has ended with shutdown; make a new communicator")
        self._shutdown_called = False
        self._end_groups()
        self._hang_up()
        hello = replace(
            self._hello, world_size=max_ranks, min_ranks=min_ranks, last_call_s=self.config.elastic.last_call_s
        )
        if self._assignment is not None:
            hello = replace(hello, survived=self._assignment.formation, ticket=self._assignment.ticket)
        self._join_job(hello)

    def create_group(self, ranks: Sequence[int] | None = None, *, name: str, state_bytes: int = 0) -> Communicator:
        """A new communicator for these ranks (None: all) on the same aggregators. Only these ranks call this.

        The first of `ranks` is rank 0 in the group, and so on. The collectives of the group are independent of those of
        this communicator, and have a separate order. `name`: letters, digits, "." and "-". No other group of this
        communicator may have it, and other ranks must not use it at the same time: some of them may be late, or may not
        have heard of an attempt that was refused. The group ends with this communicator, and with `reform`. It ignores
        `protocol.urgent_bytes` and `elastic`. `state_bytes` is its `protocol.state_bytes`.

        Raises UsageError for invalid ranks or an invalid name, or if this rank is missing; on all ranks if they give
        different ranks. Raises RefusedError if another rank has raised UsageError alone, or has called `refuse_group`.
        Raises the errors of construction, too.
        """
        config, size, job = None, None, job_of_group(self._job, name, self.generation)
        try:
            ranks = range(self.size) if ranks is None else [whole_number(rank, "rank") for rank in ranks]
            check_group(ranks, self.rank, self.size, name, [group._name_in_parent for group in self._groups])
            size = len(ranks)
            config = config_of_group(self.config, self._hello.launch, whole_number(state_bytes, "state_bytes"))
            group = Communicator(config, rank=ranks.index(self.rank), size=size, job=job, _parent=self)
        except Exception as error:
            if config is None:
                self.refuse_group(error, name=name, size=size)
            mark_reported(error, job)
            raise
        group._name_in_parent, group._on_shutdown = name, self._groups.discard
        self._groups.add(group)
        group._profiler.follow(self._profiler)
        try:
            check_agreement(group, [("ranks of the group", str(list(ranks)))], "")
        except BaseException:
            group.shutdown()
            raise
        return group

    def refuse_group(self, error: Exception, *, name: str, size: int | None = None) -> None:
        """Tell the ranks that call `create_group` with this `name` that this rank does not call it, because of `error`.
        They raise RefusedError, now or when they call it. For programs that find by themselves that they cannot create
        the group. `size`: the size of the group (None: not known). Does nothing if the other ranks know of the error.
        Raises nothing.
        """
        job = job_of_group(self._job, name, self.generation)
        if self.size > 1 and not self._engine.is_closed and job not in reported_names(error):
            hello = replace(self._hello, job=job, rank=self.rank, world_size=size or self.size, parent_rank=self.rank)
            refuse_to_come(self.config, hello, reason_of(mark_reported(error, job)), self._own_secret)

    def take_over(self) -> None:
        """Make this thread the one that may start collectives without a name.

        For programs in which several threads start collectives one after another, in the same order on every rank. Such
        a program holds a lock from this call until the collective is started. It does not `reform` meanwhile.
        """
        if self._rank_channels.owner is not threading.current_thread():
            self._rank_channels = self._rank_channels.owned_by(threading.current_thread())

    @property
    def _engine(self) -> Engine:
        return self._channels[0].engine

    @property
    def _machine(self) -> RankMachine:
        return self._channels[0].machine

    @property
    def timeline(self) -> NoTimeline:
        """The timeline of this rank, or `OFF`. It may change at any time."""
        return self._profiler.timeline

    def start_timeline(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a timeline of this rank in the file `path`. All ranks that call this with the same path share the file.

        `trace.timeline` does the same for the whole of a job. Each rank writes its part to the folder `path`.parts
        beside the file, or to `trace.folder`. `mark_cycles`: also note when a queue looks for tensors to combine.
        Without `trace.timeline` or `trace.folder` the timeline shows the collectives of the rank, but no waits and
        messages, and nothing of daemons. `path` is valid JSON at any time. Raises UsageError if it cannot be written,
        when a timeline is being recorded, and after `shutdown`.
        """
        self._profiler.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the timeline, and write it; does nothing when there is none. The last rank to do so, or to leave, writes
        the notes of all ranks."""
        self._profiler.stop()

    @property
    def newcomers(self) -> int:
        """The number of workers that wait to join this job, by the last news. They join when all ranks call
        `reform`."""
        self._engine.listen()  # the news may be old: this rank may have been idle for long
        return self._machine.newcomers

    def _join_job(self, hello: Hello, parent: Engine | None = None) -> None:
        """Become a rank of a generation of the job, while `parent` lasts. Raises ClosedError when `shutdown` is called
        meanwhile."""
        secret = load_secret(self.config.security) if self._own_secret is None else self._own_secret
        self._begin_generation(
            join_beside(parent, self.config, hello, secret, lambda: self._shutdown_called), hello, secret
        )
        if self._shutdown_called:  # `shutdown` came after the join, or has only asked the old engine to leave
            self._hang_up()
            self._end_embedded()
            raise ClosedError("the communicator was shut down while it joined; make a new one to go on")

    def _begin_generation(self, arrival: JoinedWorker, hello: Hello, secret: Secret | None) -> None:
        self._assignment = arrival.joined.assignment
        channels = [Channel(self.config, self._job, arrival, self._pools[0])]
        if self.config.protocol.urgent_bytes:
            try:
                pool, gave_up = self._pools[1], lambda: self._shutdown_called
                channels.append(join_urgent(channels[0], self.config, hello, secret, gave_up, pool))
            except BaseException as error:
                if not self._shutdown_called:
                    channels[0].engine.abort(left_because(error))
                channels[0].engine.shutdown()
                raise
        first, last = channels[0], channels[-1]
        self._channels, joined = channels, first.joined
        self._rank_channels = RankChannels(first.call_channel, last.call_channel, self.config.protocol.urgent_bytes)
        self.rank, self.size, self.generation = joined.rank, joined.size, joined.generation
        self.formation = object()
        self.transport = "+".join(sorted(first.kinds | last.kinds))
        self.in_memory = any(channel.in_memory for channel in channels)
        self.shards = len(first.links)
        if first is not last:
            first.engine.other_engine, last.engine.other_engine = weakref.ref(last.engine), weakref.ref(first.engine)
            last.engine.names = first.engine.names
        hosts = [channel.machine.host for channel in channels if channel.machine.host is not None]
        self._compiling_signs.add_exchanges(hosts)
        on_demand = KernelsOnDemand(self._compiling_signs, self._progress)
        for channel in channels:
            channel.engine.on_closed = _weak_call(self._has_closed)
            channel.engine.make_ready = on_demand if self._has_embedded and hosts else None
        self._profiler.opened(self.rank, self.size, channels)
        engine.opened(self)

    def __repr__(self) -> str:
        shards = "1 aggregator" if self.shards == 1 else f"{self.shards} aggregators"
        state = ", shut down" if self.is_shut_down else ""
        return (
            f"<omnireduce.Communicator: rank {self.rank} of {self.size} in job '{self._job}', generation "
            f"{self.generation}, {shards} by {self.transport}{state}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                for channel in self._channels:
                    channel.engine.abort(left_because(error))
        finally:
            self.shutdown()

    def shutdown(self) -> None:
        """Leave the job. Aborts collectives under way on all ranks. May be called twice; raises nothing.

        In a signal handler that interrupts a collective it returns at once. The collective then leaves the job, closes
        everything and raises ClosedError. A `reform` that joins meanwhile raises ClosedError soon.
        """
        self._shutdown_called = True
        self._end_groups()
        if self._hang_up():
            self._end_embedded()
        self._on_shutdown(self)

    @property
    def is_shut_down(self) -> bool:
        """Whether `shutdown` was called, and `reform` was not called since."""
        return self._shutdown_called

    def _hang_up(self) -> bool:
        """Close all channels; return whether all are closed. If not, a signal handler called this, and the call that it
        interrupts will close them."""
        inside = [channel for channel in self._channels if channel.engine.inside]
        with ExitStack() as stack:
            for channel in inside or self._channels:
                stack.callback(channel.engine.shutdown)
                stack.callback(settle, channel.engine)  # runs before the shutdown: a stack is last in, first out
        return all(channel.engine.is_closed for channel in self._channels)

    def _has_closed(self) -> None:
        """A channel has closed. After a shutdown that a signal handler asked for, the others follow."""
        for channel in self._channels if self._shutdown_called else ():
            if not channel.engine.is_closed:
                channel.engine.shutdown()
        if not all(channel.engine.is_closed for channel in self._channels):
            return
        engine.closed(self)
        self._profiler.closed()
        if self._shutdown_called:
            self._end_embedded()

    def _end_groups(self) -> None:
        for group in list(self._groups):
            group.shutdown()
        self._groups.clear()

    def _end_embedded(self) -> None:
        if self._embedded is not None:
            self._embedded.close()

    def _abandon(self) -> None:
        self._profiler.abandon()
        for channel in self._channels:
            channel.engine.abandon()

    def statistics(self) -> Statistics:
        """The totals of this worker so far. Raises nothing, even after `shutdown`."""
        return statistics_of(self._channels)

    # collectives

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
        """Combine `x` of all ranks, element by element, in a fixed order. Returns the result, which is the same on all
        ranks.

        `x`: a C-contiguous array of any shape, equal on all ranks, of float16, bfloat16, float32, float64, int8 …
        int64, uint8 … uint64 or bool. The result replaces `x`, or goes to `out` (same shape and dtype; `x` is then only
        read). `op`: sum, mean, min, max or prod; for bool any or all. mean needs a float type. 16-bit floats are summed
        in float32 and rounded once; with several hosts, bfloat16 is rounded in each host, too. Integers wrap. `name` is
        compared between ranks and appears in errors; threads other than the communicator's owner must give a name.
        `block_size` overrides `protocol.block_size`: elements, a multiple of 8.

        A list, tuple or dict of arrays, possibly nested, is a group: all its arrays are combined in place, and the
        group is returned. Arrays of up to 512 KiB travel together, one exchange for each dtype. Larger arrays travel
        separately, at the same time. Keys and shapes are the same on all ranks. Groups allow no `out` and `block_size`.
        In a group a block may hold elements of several arrays, so a -0 may stay where a single array would get +0.

        `priority`: 1 for an urgent tensor, 0 for any other, the same on all ranks. None: tensors of up to
        `protocol.urgent_bytes` are urgent, but not groups. If that is not 0, urgent tensors have a separate channel:
        they do not wait for other collectives, and may be complete before them. Sums are the same. Other collectives,
        and tensors with a larger `block_size` than `protocol.block_size`, are never urgent.

        `codec` overrides `protocol.codec` for sums and means of float32. It encodes blocks on their way to aggregators
        and back, in fewer bytes and not exactly. "none": no codec; "bf16", "fp16", "int8", "natural", "onebit", "qsgd",
        "scaled_sign", "sign", "ternary", or "module:Class" for your own codec. In a group it encodes the arrays of
        float32; small arrays share blocks. All ranks get the same result. Ranks of one host share memory and use no
        codec between them: there "sign" is a sum, not a vote.

        A sum that is zero may be -0 where NumPy gives +0, the same on all ranks. In a block that is zero on all ranks
        -0 becomes +0.

        Raises UsageError for unsuitable arguments, for arrays that a collective under way uses, for a missing name in
        another thread, and for a name that belongs to another thread; AbortedError or its subclass
        CollectiveTimeoutError when the job failed; ClosedError after `shutdown`.
        """
        channel = self._channel_for(x, priority, block_size)
        return self._start_allreduce(channel, x, out, op=op, name=name, block_size=block_size, codec=codec).wait()

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
        """Start an `allreduce` and return its handle. Collectives of one priority complete in the order of their
        starts.

        The arrays belong to the collective until the handle is done. Raises the errors of `allreduce`, but a failure
        after the start is raised by the handle's `wait`. The same holds for all methods that end with `_async`.
        """
        channel = self._channel_for(x, priority, block_size)
        return self._in_background(
            channel,
            lambda: self._start_allreduce(channel, x, out, op=op, name=name, block_size=block_size, codec=codec),
        )

    def reduce(self, x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = "") -> NDArray[S] | None:
        """Combine `x` of all ranks as `allreduce` does, for the root alone: replace the root's `x` and return it there.

        The others' `x` is only read; they get None. The result travels to all ranks, not only to the root. Raises the
        errors of `allreduce`.
        """
        return self._start(single.reduction_at_root, x, root, op, name).wait()

    def reduce_async(
        self, x: NDArray[S], root: int = 0, *, op: Op = "sum", name: str = ""
    ) -> Handle[NDArray[S] | None]:
        """Start a `reduce`; see `allreduce_async`."""
        return self._start_async(single.reduction_at_root, x, root, op, name)

    def broadcast(self, x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S]:
        """Replace `x` on all ranks by the `x` of `root`, bit by bit; return it. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises the errors of `allreduce`.
        """
        return self._start(single.copy_of_root, x, root, name).wait()

    def broadcast_async(self, x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S]]:
        """Start a `broadcast`; see `allreduce_async`."""
        return self._start_async(single.copy_of_root, x, root, name)

    def allgather(self, x: NDArray[S], *, name: str = "") -> NDArray[S]:
        """Return the `x` of all ranks, (size, *x.shape), bit by bit. Any dtype without Python objects.

        `x`: a C-contiguous array, of the same dtype and shape on all ranks. Raises the errors of `allreduce`.
        """
        return self._start(single.all_parts, x, name).wait()

    def allgather_async(self, x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
        """Start an `allgather`; see `allreduce_async`."""
        return self._start_async(single.all_parts, x, name)

    def allgather_ragged(self, x: NDArray[S], *, name: str = "") -> list[NDArray[S]]:
        """Return the `x` of all ranks in a list, bit by bit. The length of the first dimension may differ.

        `x`: a C-contiguous array of at least one dimension, of any dtype without Python objects; dtype and
        `x.shape[1:]` are the same on all ranks. If it has more bytes than `protocol.max_part_bytes` (1 GiB), all ranks
        raise UsageError. Raises the errors of `allreduce`, too.
        """
        return self._start(ragged.ragged_parts, x, name).wait()

    def allgather_ragged_async(self, x: NDArray[S], *, name: str = "") -> Handle[list[NDArray[S]]]:
        """Start an `allgather_ragged`; see `allreduce_async`."""
        return self._start_async(ragged.ragged_parts, x, name)

    def gather(self, x: NDArray[S], root: int = 0, *, name: str = "") -> NDArray[S] | None:
        """Return the `x` of all ranks, (size, *x.shape), on the root; None on the others.

        The parts travel to all ranks, not only to the root. Otherwise as `allgather`.
        """
        return self._start(single.parts_at_root, x, root, name).wait()

    def gather_async(self, x: NDArray[S], root: int = 0, *, name: str = "") -> Handle[NDArray[S] | None]:
        """Start a `gather`; see `allreduce_async`."""
        return self._start_async(single.parts_at_root, x, root, name)

    def scatter(self, out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = "") -> NDArray[S]:
        """Replace `out` on each rank by the root's `parts[rank]`, bit by bit; return it.

        `out`: a C-contiguous array, of the same dtype and shape on all ranks; `parts`: (size, *out.shape) of the same
        dtype on the root, ignored elsewhere. Every part travels to all ranks. Raises the errors of `allreduce`.
        """
        return self._start(single.part_of_root, out, parts, root, name).wait()

    def scatter_async(
        self, out: NDArray[S], parts: NDArray[S] | None = None, root: int = 0, *, name: str = ""
    ) -> Handle[NDArray[S]]:
        """Start a `scatter`; see `allreduce_async`."""
        return self._start_async(single.part_of_root, out, parts, root, name)

    def alltoall(self, x: NDArray[S], *, name: str = "") -> NDArray[S]:
        """Send part `x[r]` to rank r; return the parts that the ranks have sent here, (size, *x.shape[1:]), bit by bit.

        `x`: a C-contiguous array of `size` parts, of the same dtype and shape on all ranks. All parts travel to all
        ranks, so this moves `size` times as many bytes as are needed. Raises the errors of `allreduce`.
        """
        return self._start(single.exchanged_parts, x, name).wait()

    def alltoall_async(self, x: NDArray[S], *, name: str = "") -> Handle[NDArray[S]]:
        """Start an `alltoall`; see `allreduce_async`."""
        return self._start_async(single.exchanged_parts, x, name)

    def broadcast_object(self, x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Any:
        """Return the root's `x` on all ranks: the object itself on the root, an equal object elsewhere. The others' `x`
        is ignored.

        `x` is plain data: None, bool, numbers of up to some 4,000 digits, str, bytes, tuples, lists, dicts, sets, dates
        (whose tzinfo is None or a plain offset), arrays. It is nested up to 64 deep, and has up to 65,536 keys that are
        neither str nor bytes. With `trust`, on all ranks, it is anything that can be pickled; then each rank and each
        aggregator of the job can run code in this process. It takes up to `protocol.max_part_bytes` (1 GiB).

        Raises UsageError on all ranks for other objects of the root, and the job goes on. On the other ranks it also
        raises UsageError for bytes of a peer that are no such object. Raises the errors of `allreduce`, too.
        """
        return self._start(ragged.object_of_root, x, root, name, trust).wait()

    def broadcast_object_async(self, x: object, root: int = 0, *, name: str = "", trust: bool = False) -> Handle[Any]:
        """Start a `broadcast_object`; see `allreduce_async`."""
        return self._start_async(ragged.object_of_root, x, root, name, trust)

    def allgather_object(self, x: object, *, name: str = "", trust: bool = False) -> list[Any]:
        """Return a list with an object equal to the `x` of each rank. `broadcast_object` says what `x` may be. If the
        `x` of one rank is anything else, all ranks raise UsageError."""
        return self._start(ragged.all_objects, x, name, trust).wait()

    def allgather_object_async(self, x: object, *, name: str = "", trust: bool = False) -> Handle[list[Any]]:
        """Start an `allgather_object`; see `allreduce_async`."""
        return self._start_async(ragged.all_objects, x, name, trust)

    def reduce_scatter(self, x: NDArray[S], *, op: Op = "sum", name: str = "") -> NDArray[S]:
        """Return this rank's part of `allreduce(x)`: part `rank` of `numpy.array_split(result, size)`. `x` is kept.

        Needs a temporary array of the size of `x`, and moves as many bytes as an allreduce. Raises the errors of
        `allreduce`.
        """
        return self._start(single.reduced_part, x, op, name).wait()

    def reduce_scatter_async(self, x: NDArray[S], *, op: Op = "sum", name: str = "") -> Handle[NDArray[S]]:
        """Start a `reduce_scatter`; see `allreduce_async`."""
        return self._start_async(single.reduced_part, x, op, name)

    def barrier(self, *, name: str = "") -> None:
        """Return when all ranks have called it. Raises the errors of `allreduce`."""
        self._start(single.barrier, name).wait()

    def barrier_async(self, *, name: str = "") -> Handle[None]:
        """Start a `barrier`; its handle is done when all ranks have started theirs. See `allreduce_async`."""
        return self._start_async(single.barrier, name)

    def allreduce_rows(
        self, indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = ""
    ) -> Rows[S]:
        """Sum rows of a tall matrix by number, if each rank has few of its rows, as in the gradient of an embedding.

        `indices`: integers (n,), row numbers below `n_rows`, in any order, duplicates allowed (they are added first, in
        the order given); `values`: (n, row length). n may be 0 and differ between ranks; `n_rows`, dtype and row length
        may not. `op`: sum or mean; mean divides by the number of all ranks, even if some lack the row. Returns
        (indices, values) of the union of all ranks' rows: int64 (m,) ascending, and (m, row length).

        Raises UsageError for unsuitable arrays, among them rows that fit no slot. Raises the errors of `allreduce`,
        too.
        """
        return self._start(single.rows, indices, values, n_rows, op=op, name=name).wait()

    def allreduce_rows_async(
        self, indices: Array, values: NDArray[S], n_rows: int, *, op: RowOp = "sum", name: str = ""
    ) -> Handle[Rows[S]]:
        """Start an `allreduce_rows`; see `allreduce_async`."""
        return self._start_async(single.rows, indices, values, n_rows, op=op, name=name)

    def allreduce_rows_into(
        self, out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
    ) -> NDArray[S]:
        """`allreduce_rows` with a dense result: `out`, (n_rows, row length), gets the sums in their rows, and zeros in
        the others. Returns `out`.

        Raises UsageError if `out` does not fit, and the errors of `allreduce_rows`.
        """
        return self._start(single.rows_into, out, indices, values, op=op, name=name).wait()

    def allreduce_rows_into_async(
        self, out: NDArray[S], indices: Array, values: NDArray[S], *, op: RowOp = "sum", name: str = ""
    ) -> Handle[NDArray[S]]:
        """Start an `allreduce_rows_into`; see `allreduce_async`."""
        return self._start_async(single.rows_into, out, indices, values, op=op, name=name)

    def allreduce_tables(self, tables: Sequence[Table], *, op: RowOp = "sum", name: str = "") -> list[Rows[Any]]:
        """`allreduce_rows` for several tables at once: tables of one dtype and row length travel in one exchange.

        `tables`: a list of (indices, values, n_rows). Returns (indices, values) of each. Raises the errors of
        `allreduce_rows`.
        """
        return self._start_tables(tables, op, name).wait()

    def allreduce_tables_async(
        self, tables: Sequence[Table], *, op: RowOp = "sum", name: str = ""
    ) -> Handle[list[Rows[Any]]]:
        """Start an `allreduce_tables`; see `allreduce_async`."""
        return self._in_background(self._rank_channels.ordinary, lambda: self._start_tables(tables, op, name))

    def refuse(self, error: Exception) -> None:
        """Refuse the next collective of the other ranks, because of `error`. For programs that find by themselves,
        before they call it, that this rank cannot take part.

        If all ranks refuse, the job goes on. Otherwise all ranks get an AbortedError that says what this rank has
        refused; ranks that wait already get it at once. Returns before the others know. Does nothing if the other ranks
        know of the error, or if the job is over. Raises nothing.
        """
        tell_ranks(self._rank_channels, error)

    # An `except` costs nothing unless an error is raised. Errors after the start of a call are not handled here.

    def _channel_for(self, x: object, priority: object, block_size: object) -> CallChannel:
        try:
            return self._rank_channels.channel_for(x, priority, block_size)
        except Exception as error:
            self.refuse(error)
            raise

    def _start(
        self, make: Callable[Concatenate[CallContext, P], Call[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        context, engine = self._rank_channels.ordinary
        try:
            [handle] = engine.submit(make(context, *args, **kwargs))
        except Exception as error:
            self.refuse(error)
            raise
        return handle

    def _start_async(
        self, make: Callable[Concatenate[CallContext, P], Call[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]:
        return self._in_background(self._rank_channels.ordinary, lambda: self._start(make, *args, **kwargs))

    def _start_allreduce(
        self, channel: CallChannel, x: Any, out: Any, *, op: Op, name: str, block_size: int | None, codec: str | None
    ) -> Handle[Any]:
        context, engine = channel
        try:
            if not isinstance(x, GROUPS):
                call = single.reduction(
                    context, "allreduce", x, op=op, name=name, out=out, block_size=block_size, codec=codec
                )
                return engine.submit(call)[0]
            if out is not None or block_size is not None:
                raise UsageError(
                    "out and block_size go with a single array; a group is combined in place, in blocks of usual size"
                )
            handles = engine.submit(*batched.arrays(context, x, op=op, name=name, codec=codec))
        except Exception as error:
            self.refuse(error)
            raise
        return HandleGroup(handles, lambda _: x)

    def _start_tables(self, tables: Sequence[Table], op: RowOp, name: str) -> Handle[list[Rows[Any]]]:
        context, engine = self._rank_channels.ordinary
        try:
            batch = batched.tables(context, tables, op, name)
            handles = engine.submit(*batch.calls)
        except Exception as error:
            self.refuse(error)
            raise
        return HandleGroup(handles, batch.result)

    def _in_background(self, channel: CallChannel, start: Callable[[], Handle[T]]) -> Handle[T]:
        if not self.drives_in_background and self._rank_channels.urgent.engine is self._rank_channels.ordinary.engine:
            return start()
        try:
            channel.engine.drive_in_background()  # first: if there is no room for a thread, nothing is started
        except Exception as error:
            self.refuse(error)
            raise
        handle = start()
        channel.engine.drive_in_background()  # now there is something to drive
        return handle

    # collectives that run a program on the shards

    def state_bytes(self, tensors: Iterable[tuple[int, int]], columns: int, cells: int = 0) -> int:
        """The bytes of state on the shard that keeps the most, for states with `columns` columns and `cells` cells.
        `tensors`: for each tensor its number of elements, and its block size. For `create_group`."""
        sharding = self._rank_channels.ordinary.context.sharding._replace(slot_bytes=0)  # no host sends sums there
        total = 0
        for elements, block_size in tensors:
            layout = Layout(elements, block_size).dealt(
                sharding.shards, sharding.stripe_blocks, sharding.whole_bytes, block_size * NUMBER_BYTES
            )
            blocks = max(layout.stripes(shard).count(layout.blocks) for shard in range(min(2, sharding.shards)))
            total += blocks * row_numbers(columns, cells, block_size) * NUMBER_BYTES
        return total

    def fused_allreduce(
        self, x: Array | None, program: BlockProgram,
        *, out: Array, op: RowOp = "sum", name: str = "", block_size: int | None = None, wanted: bool = True,
    ) -> Fused:  # fmt: skip
        """Sum `x` of all ranks, let each shard run `program` on the sum of each of its blocks, and put the results into
        `out`, the same on all ranks. Source: FusedAllReduce of CoCoNet (https://arxiv.org/abs/2105.05720).

        `x`, `out`: C-contiguous arrays of float32 of one shape, which do not overlap. `x` None: this rank contributes
        nothing. Blocks that are zero on all ranks are not sent, the program does not run on them, and `out` keeps its
        values there, unless `program.every_block`. `op`: sum or mean. `wanted` False: this rank drops the results, and
        `out` only gives the shape. `name`, `block_size`: as for `allreduce`; a block has up to 16,384 elements.

        Raises UsageError for unsuitable arguments, and if ranks exchange in memory. Raises the errors of `allreduce`,
        too. A program whose state finds no room ends the job.
        """
        return self._start(
            fused_reduction, x, program, out=out, op=op, name=name, block_size=block_size, wanted=wanted
        ).wait()

    def fused_allreduce_async(self, x: Array | None, program: BlockProgram, **options: Any) -> Handle[Fused]:
        """Start a `fused_allreduce`, which has the same options; see `allreduce_async`."""
        options = {"op": "sum", "name": "", "block_size": None, "wanted": True} | options
        return self._start_async(fused_reduction, x, program, **options)

    def fused_allreduce_rows(
        self, indices: Array, values: Array, program: BlockProgram,
        *, n_rows: int, out: Array | None = None, op: RowOp = "sum", name: str = "", wanted: bool = True,
    ) -> FusedRows:  # fmt: skip
        """As `fused_allreduce`, for rows of a tall matrix as in `allreduce_rows`. A block is a row.

        `out`, (n_rows, row length): the result of each row is also written there; the other rows stay as they are.
        `wanted` False: this rank gets no rows. Raises the errors of `fused_allreduce`.
        """
        return self._start(
            fused_rows, indices, values, program, n_rows=n_rows, out=out, op=op, name=name, wanted=wanted
        ).wait()

    def fused_allreduce_rows_async(
        self, indices: Array, values: Array, program: BlockProgram, **options: Any
    ) -> Handle[FusedRows]:
        """Start a `fused_allreduce_rows`, which has the same options; see `allreduce_async`."""
        options = {"out": None, "op": "sum", "name": "", "wanted": True} | options
        return self._start_async(fused_rows, indices, values, program, **options)


def _weak_call(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls `method` without keeping its communicator alive: a communicator that refers to itself would
    keep its memory until the cycle collector runs."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (method := reference()) is not None:
            method()

    return call
