"""The public API of a worker: collectives on NumPy arrays over the aggregators of one job."""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import replace

from omnireduce.config import Config, check_config
from omnireduce.config.schema import JOB_ALLOWED, JOB_PATTERN
from omnireduce.errors import ClosedError, UsageError, left_because
from omnireduce.kernels.warm import Progress
from omnireduce.logs import BoundLog
from omnireduce.protocol.collective.rank import WorkerMachine
from omnireduce.runtime.member import ending
from omnireduce.runtime.member.agreement import check_agreement
from omnireduce.runtime.member.calls import check_codec_of
from omnireduce.runtime.member.channel import Channel, join_urgent
from omnireduce.runtime.member.compiling import make_kernels_ready, progress_of, say_trouble, tell_aggregators
from omnireduce.runtime.member.embedded import Embedded, embed
from omnireduce.runtime.member.engine import Engine
from omnireduce.runtime.member.fused import FusedCollectives
from omnireduce.runtime.member.group_configuration import check_group, config_of_group, job_of_group, refuse_to_come
from omnireduce.runtime.member.launcher import Launch, check_told_apart, identity_of, job_name
from omnireduce.runtime.member.numbers import whole
from omnireduce.runtime.member.pool import Pool
from omnireduce.runtime.member.profiler import Profiler
from omnireduce.runtime.member.rank_channels import RankChannels
from omnireduce.runtime.member.refusals import names_told, reason_of, settle, told
from omnireduce.runtime.member.rendezvous import Arrival, hello_of, join_beside
from omnireduce.runtime.member.statistics import Statistics, statistics_of
from omnireduce.runtime.tracing.timeline import NoTimeline
from omnireduce.runtime.tracing.trace import check_trace
from omnireduce.secret import Secret, load_secret
from omnireduce.transport.base import Link
from omnireduce.wire.control import Hello

MOST_RANKS = (1 << 31) - 1


class Communicator(FusedCollectives):
    """Membership of this process in one job; every rank must call the same collectives in the same order. (Urgent ones
    have an order of their own: see `allreduce`.)

    `config` says where the aggregators are and how to reach them, `rank` of `size` who this worker is, `job` the job
    (None: as `cluster.job` says). Construction returns once all ranks have joined.

    Where `config` names no aggregators, rank 0 starts one for this job. All ranks must then be on one host; the
    aggregator ends when rank 0 has shut down or is gone.

    Several threads may share it. Only one of them may start a collective without a name: the thread that has made the
    communicator, or has called `reform` last. The others must name theirs, with the same names on every rank: the names
    say which threads' tensors belong together. It is an error when named ones meet in another order on another rank. A
    name belongs to the thread that used it first, until that thread has ended, or until `reform`: use other names in
    each thread. Handles may be waited for in any thread. Another thread can become the one whose collectives need no
    name: see `take_over`.

    Set `drives_in_background` to False in a program where some thread waits whenever a collective is under way: then no
    thread of the communicator's own competes with it. With `protocol.urgent_bytes` there are such threads all the same:
    who waits for an urgent collective does nothing for the others.

    A signal handler may call `shutdown`, nothing else, while its thread is in a collective.

    Attributes, not to be changed: `rank`, `size`, `local_rank` and `local_size` (each None where the launcher did not
    say it) of this worker, `config`, `transport` ("shm", "tcp", "verbs", "memory", which ranks of one host share, or
    several joined by "+"), `shards`, the number of aggregators, `generation`, the number that the first one gave
    this membership, and `formation`, an object of its own for this communicator, and another one after `reform`.

    With `elastic.enabled` the job can be formed anew after a fault: see `reform`. A worker that is started again waits
    until the others call `reform`.

    Raises ConfigError; UsageError for a `job` or `rank` that cannot be; TransportError when an aggregator cannot be
    reached; RefusedError when it does not admit this worker, or ranks are missing after `cluster.join_timeout_s`;
    AbortedError when another rank failed meanwhile.
    """

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
        rank, size = whole(rank, "rank"), whole(size, "size")
        if not 0 <= rank < size <= MOST_RANKS:
            raise UsageError(f"rank {rank} of {size}: expected 0 <= rank < size <= {MOST_RANKS}")
        self.config = config
        self.local_rank = None if local_rank is None else whole(local_rank, "local_rank")
        self.local_size = None if local_size is None else whole(local_size, "local_size")
        name = job or job_name(config, None)
        if not re.match(JOB_PATTERN, name):
            raise UsageError(f"job {name!r}: expected {JOB_ALLOWED}")
        if config.elastic.enabled and config.elastic.smallest > size:
            raise UsageError(f"elastic.smallest is {config.elastic.smallest}, expected at most the size, {size}")
        check_trace(config.trace)
        check_codec_of(config.protocol)
        self._log = BoundLog(logging.getLogger("omnireduce"), job=name, rank=rank)
        self._job, self._largest = name, size
        self._profiler = Profiler(config.trace, name, self._log)
        self._pools = Pool(), Pool()  # of each channel
        self._groups = set[Communicator]()  # that this one has created, until they are shut down
        self.rank, self.drives_in_background = rank, True
        self._name_in_parent, self._rank_in_parent = "", -1 if _parent is None else _parent.rank
        self._gave_up = False  # `shutdown` was called
        self._on_shutdown: Callable[[Communicator], None] = lambda _: None
        is_named = config.cluster.job != "auto" or name != job_name(config, None)
        self._embedded: Embedded | None = None
        if config.cluster.aggregators:
            check_told_apart(config, rank, size, is_named=is_named)
        else:
            place = Launch(rank, size, self.local_rank, None, "arguments", self.local_size)
            self._embedded = embed(config, place, name, is_named=is_named)
        self._own_secret: Secret | None = None if _parent is None else _parent._own_secret
        try:
            progress = progress_of(rank, self._log)
            make_kernels_ready(
                config, progress, lambda: self._meet(progress),
                lambda over: tell_aggregators(self.config, self._hello, self._own_secret, over),
            )  # fmt: skip
            say_trouble(self._log, is_first=0 in (rank, self.local_rank))
            self._form(self._hello, None if _parent is None else _parent._engine)
        except BaseException:
            self._end_embedded()
            raise

    def _meet(self, progress: Progress) -> None:
        """Find out where the aggregators are, and what to say to them."""
        if self._embedded is not None:
            self.config = self._embedded.meet(progress)
            self._own_secret = self._embedded.secret
        self._hello = self._make_hello()

    def _make_hello(self) -> Hello:
        config, rank, size = self.config, self.rank, self._largest
        hello = hello_of(config, self._job, identity_of(config, rank, size), rank, size)
        if config.elastic.enabled:
            hello = replace(hello, smallest=config.elastic.smallest, settle_s=config.elastic.settle_s)
        return replace(hello, parent_rank=self._rank_in_parent)

    def reform(self, *, smallest: int | None = None, largest: int | None = None) -> None:
        """Leave the job if it still runs, and form it anew with all who do the same, and those who wait to join.

        For after an AbortedError, or when `newcomers` is not 0. Afterwards `rank`, `size`, `generation` and
        `statistics` are new. A process may have another rank, but the order of ranks stays that in which they were
        launched. The job starts again with `largest` workers (None: as many as were launched). It also starts with
        `smallest` or more (None: `elastic.smallest`) when no other has come for `elastic.settle_s`. All workers give
        the same numbers.

        Returns when this worker is in such a job. Raises what construction raises. Raises RefusedError when fewer than
        `smallest` have come after `cluster.join_timeout_s`, or when there was no place for this worker; it may then be
        called again. Collectives under way in other threads raise. Raises UsageError in a signal handler that
        interrupts a collective; ClosedError when a signal handler or another thread calls `shutdown` meanwhile.
        """
        smallest = self.config.elastic.smallest if smallest is None else whole(smallest, "smallest")
        largest = max(self._largest, smallest) if largest is None else whole(largest, "largest")
        if not 1 <= smallest <= largest <= MOST_RANKS:
            raise UsageError(f"from {smallest} to {largest} workers: expected 1 <= smallest <= largest <= {MOST_RANKS}")
        if any(channel.engine.inside for channel in self._channels):
            raise UsageError("reform in a signal handler that interrupts a collective; let the handler set a flag")
        if self._gave_up and self._embedded is not None:
            raise UsageError("the aggregator of this job has ended with shutdown; make a new communicator")
        self._gave_up = False
        self._end_groups()
        self._hang_up()
        hello = replace(self._hello, world_size=largest, smallest=smallest, settle_s=self.config.elastic.settle_s)
        if self._seat is not None:
            hello = replace(hello, survived=self._seat.formation, ticket=self._seat.ticket)
        self._form(hello)

    def create_group(self, ranks: Sequence[int] | None = None, *, name: str, state_bytes: int = 0) -> Communicator:
        """A communicator of their own for these ranks (None: all) on the same aggregators. They alone call this.

        The first of `ranks` is rank 0 there, and so on. What goes through it is apart from what goes through this one:
        so each may have an order of its own. `name`: letters, digits, "." and "-"; no other group of this communicator
        has it, nor do other ranks use it at the same time. Give other ranks another name: some may be late, or may not
        have heard of an attempt that was refused. It ends with this one, and with `reform`. It knows nothing of
        `protocol.urgent_bytes` and `elastic`.
        `state_bytes` is its `protocol.state_bytes`.

        Raises UsageError for ranks or a name that cannot be, or without this rank, and on all ranks that meet where
        they name other ranks; RefusedError where another rank has raised UsageError by itself, or has called
        `refuse_group`; otherwise what construction raises.
        """
        config, size, job = None, None, job_of_group(self._job, name, self.generation)
        try:
            ranks = range(self.size) if ranks is None else [whole(rank, "rank") for rank in ranks]
            check_group(ranks, self.rank, self.size, name, [group._name_in_parent for group in self._groups])
            size = len(ranks)
            config = config_of_group(self.config, self._hello.launch, whole(state_bytes, "state_bytes"))
            group = Communicator(config, rank=ranks.index(self.rank), size=size, job=job, _parent=self)
        except Exception as error:
            if config is None:
                self.refuse_group(error, name=name, size=size)
            told(error, job)
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
        """Let the ranks that call `create_group` with this `name` know that this one does not, because of `error`: they
        raise RefusedError, now or when they come. For programs that find by themselves that they cannot create it.
        `size`: of the group (None: not known). Does nothing where they know of the error. Raises nothing.
        """
        job = job_of_group(self._job, name, self.generation)
        if self.size > 1 and not self._engine.is_closed and job not in names_told(error):
            hello = replace(self._hello, job=job, rank=self.rank, world_size=size or self.size, parent_rank=self.rank)
            refuse_to_come(self.config, hello, reason_of(told(error, job)), self._own_secret)

    def take_over(self) -> None:
        """From now on, this thread is the one that may start collectives without a name.

        For programs in which several threads start collectives one after another, in an order that is the same on every
        rank. Such a program keeps a lock from here until the collective is started. It does not `reform` meanwhile.
        """
        if self._member.owner is not threading.current_thread():
            self._member = self._member.owned_by(threading.current_thread())

    @property
    def _engine(self) -> Engine:
        return self._channels[0].engine

    @property
    def _links(self) -> list[Link]:
        return self._channels[0].links

    @property
    def _machine(self) -> WorkerMachine:
        return self._channels[0].machine

    @property
    def timeline(self) -> NoTimeline:
        """What notes the way of tensors, or `OFF`. It may change at any time."""
        return self._profiler.timeline

    def start_timeline(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Begin a timeline of this rank in the file `path`, which is one for all ranks that call this with it.

        As `trace.timeline` does for the whole of a job. Each rank leaves its part in the folder `path`.parts beside it,
        or in `trace.folder`. `mark_cycles`: also note when a queue looks for tensors to combine. Without
        `trace.timeline` or `trace.folder` the rank shows what its collectives do, but no waits and messages; daemons
        show nothing. `path` is valid JSON at any time. Raises UsageError if it cannot be written, when a timeline is
        being recorded, and after `shutdown`.
        """
        self._profiler.start(path, mark_cycles)

    def stop_timeline(self) -> None:
        """End the timeline, and write it; does nothing when there is none. The last rank to do so, or to leave, writes
        what all of them have noted."""
        self._profiler.stop()

    @property
    def newcomers(self) -> int:
        """How many workers wait to join this job, as far as this rank has heard; they join when all `reform` it."""
        self._engine.listen()  # it may have been idle for long
        return self._machine.newcomers

    def _form(self, hello: Hello, parent: Engine | None = None) -> None:
        """Become a rank of a generation of the job, while `parent` lasts. Raises ClosedError when `shutdown` is called
        meanwhile."""
        secret = load_secret(self.config.security) if self._own_secret is None else self._own_secret
        self._enter(join_beside(parent, self.config, hello, secret, lambda: self._gave_up), hello, secret)
        if self._gave_up:  # called after the join; perhaps only the old engine was asked to leave
            self._hang_up()
            self._end_embedded()
            raise ClosedError("the communicator was shut down while it joined; make a new one to go on")

    def _enter(self, arrival: Arrival, hello: Hello, secret: Secret | None) -> None:
        self._seat = arrival.joined.seat
        channels = [Channel(self.config, self._job, arrival, self._pools[0])]
        if self.config.protocol.urgent_bytes:
            try:
                pool, gave_up = self._pools[1], lambda: self._gave_up
                channels.append(join_urgent(channels[0], self.config, hello, secret, gave_up, pool))
            except BaseException as error:
                if not self._gave_up:
                    channels[0].engine.abort(left_because(error))
                channels[0].engine.shutdown()
                raise
        first, last = channels[0], channels[-1]
        self._channels, joined = channels, first.joined
        self._member = RankChannels(first.way, last.way, self.config.protocol.urgent_bytes)
        self.rank, self.size, self.generation = joined.rank, joined.size, joined.generation
        self.formation = object()
        self.transport = "+".join(sorted(first.kinds | last.kinds))
        self.shards = len(first.links)
        if first is not last:
            first.engine.other, last.engine.other = weakref.ref(last.engine), weakref.ref(first.engine)
            last.engine.names = first.engine.names
        for channel in channels:
            channel.engine.on_closed = _weakly(self._has_closed)
        self._profiler.opened(self.rank, self.size, channels)
        ending.opened(self)

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
        """Leave the job. Collectives under way are aborted on all ranks. May be called twice; raises nothing.

        In a signal handler that interrupts a collective it returns at once. The collective then leaves the job, closes
        everything and raises ClosedError. A `reform` that joins meanwhile raises ClosedError soon.
        """
        self._gave_up = True
        self._end_groups()
        if self._hang_up():
            self._end_embedded()
        self._on_shutdown(self)

    @property
    def is_shut_down(self) -> bool:
        """`shutdown` was called, and `reform` was not since."""
        return self._gave_up

    def _hang_up(self) -> bool:
        """Return whether all is closed; else the call that a signal handler interrupts will do that."""
        inside = [channel for channel in self._channels if channel.engine.inside]
        with ExitStack() as stack:
            for channel in inside or self._channels:
                stack.callback(channel.engine.shutdown)
                stack.callback(settle, channel.engine)  # before that
        return all(channel.engine.is_closed for channel in self._channels)

    def _has_closed(self) -> None:
        """A channel has closed. After a shutdown that a signal handler asked for, the others follow."""
        for channel in self._channels if self._gave_up else ():
            if not channel.engine.is_closed:
                channel.engine.shutdown()
        if not all(channel.engine.is_closed for channel in self._channels):
            return
        ending.closed(self)
        self._profiler.closed()
        if self._gave_up:
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
        """What this worker has moved so far. Raises nothing, also after `shutdown`."""
        return statistics_of(self._channels)


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A communicator that refers to itself would keep its memory until the cycle collector runs."""
    known = weakref.WeakMethod(method)

    def call() -> None:
        if (method := known()) is not None:
            method()

    return call
