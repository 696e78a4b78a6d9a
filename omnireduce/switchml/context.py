"""The context of a process: it joins the ranks, takes jobs, and leaves.

Jobs are started in the order in which they are submitted, which must be the same on every rank. They overlap: many may
be under way together. Only a job that uses memory which an earlier one still uses waits in a queue, and those behind it
do, too, so that the order stays the same. While there is a queue, a thread starts its jobs as memory becomes free.

When that is differs between ranks. So each job goes out under its number: where another collective comes before it on
one rank and after it on another, all ranks get an error that names both, and no wrong sum.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from omnireduce.core.dtypes import Array
from omnireduce.errors import ClosedError, OmniReduceError, UsageError, in_a_line
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.global_communicator import connect
from omnireduce.runtime.rank.launcher_detection import own_launch
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.support.config import Config
from omnireduce.support.exit_gate import exit_gate
from omnireduce.support.logs import tagged
from omnireduce.switchml.dummy import DUMMY_THREADS, DummyCommunicator, DummyExchange
from omnireduce.switchml.job import Distribution, Job, JobState, Starter, Stats
from omnireduce.switchml.packets import Exchange, InstantStarter, PacketStarter, ServiceExchange
from omnireduce.switchml.settings import Settings, load_settings

_log = logging.getLogger("omnireduce")


class ContextState(enum.Enum):
    """CREATED: never started. STARTING: it joins the other ranks. RUNNING: it takes jobs. STOPPING, STOPPED: it takes
    none; once it is STOPPED it may be started again."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Context:
    """The jobs of this rank. `Context.instance()` is the one of this process; a program may make others.

    Any thread may call any method. `with Context.instance() as context:` starts it, unless it runs, and stops it in the
    end. After `stop` it may be started again; all ranks do that. When the job of the ranks was aborted, stop it first.
    """

    _instance: ClassVar[Context | None] = None
    _instance_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = ContextState.CREATED
        self._comm: Communicator | DummyCommunicator | None = None
        self._starter: Starter | None = None
        self._queue = deque[Job | Exception]()  # an error stands for a refused job
        self._running: list[Job] = []
        self._started_counts = Counter[int]()  # number of jobs in each generation of the communicator
        self._thread: threading.Thread | None = None  # starts the jobs in the queue
        self.reset_stats()

    @classmethod
    def instance(cls) -> Context:
        """The context of this process; the first call makes it."""
        with cls._instance_lock:
            if Context._instance is None:
                Context._instance = Context()
            return Context._instance

    @property
    def state(self) -> ContextState:
        """The state of the context now."""
        return self._state

    @property
    def communicator(self) -> Communicator | DummyCommunicator:
        """The communicator of the context: rank, size, configuration, and all collectives that SwitchML lacks.

        They take part in the order of jobs, so call them when no job is in the queue, after `wait_for_all_jobs` for
        example. Else jobs may come before them on one rank and after them on another, which ends the job of the ranks
        with AbortedError. The thread that has called `start` need not name them. With the dummy backend there are only
        `rank`, `size`, `config`, `barrier` and `allreduce`, which reach nobody. Raises UsageError before the first
        start.
        """
        if self._comm is None:
            raise UsageError("the context was never started; call start() first")
        return self._comm

    def start(
        self, config: str | Path | Config | Settings | None = None, *, rank: int | None = None, size: int | None = None
    ) -> Self:
        """Join the other ranks; return this context once all are there.

        `config`: a file like SwitchML's `switchml.cfg`, a TOML file, a Config, what `load_settings` returns, or None
        for the files that it looks for. `rank` and `size` come from the launcher unless given, and without a launcher
        from `switchml.cfg`. Without aggregators in the configuration, rank 0 starts one.

        Raises UsageError when the context runs already; ConfigError; what `omnireduce.connect` raises. Then it may be
        started again.
        """
        with self._changed:
            if self._state not in (ContextState.CREATED, ContextState.STOPPED):
                raise UsageError(f"the context is {self._state.value}; stop it before it is started again")
            self._state = ContextState.STARTING
        comm, starter = None, None
        try:
            settings = load_settings(config) if config is None or isinstance(config, str | Path) else config
            if isinstance(settings, Config):
                settings = Settings(settings)
            rank_and_size = (settings.rank, settings.size) if rank is None and size is None else (rank, size)
            comm, starter = _open(settings, *rank_and_size)
            if comm.rank == 0 and settings.unused:
                text = "%s: these keys mean nothing here: %s"
                _log.info(text, settings.source, ", ".join(settings.unused), extra=tagged("switchml_cfg"))
        finally:
            with self._changed:
                self._comm, self._starter = comm or self._comm, starter
                self._started_counts.clear()
                self._state = ContextState.STOPPED if comm is None else ContextState.RUNNING
                self._changed.notify_all()
        return self

    def stop(self) -> None:
        """Leave the other ranks. May be called twice; raises nothing.

        Jobs that are not over fail with ClosedError, and whoever waits for them wakes. On the other ranks they fail
        with AbortedError. A signal handler lets another thread do this: it may have interrupted a call of its own.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._state not in (ContextState.STARTING, ContextState.STOPPING))
            if self._state is not ContextState.RUNNING:
                return
            self._state = ContextState.STOPPING
            while self._queue:
                job = self._queue.popleft()
                if isinstance(job, Job):
                    job.fail(ClosedError(f"the context was stopped before job {job.id} was begun"))
                    self._count(job)
            self._changed.notify_all()
        try:
            if isinstance(self._starter, PacketStarter):
                self._starter.stop()
            self.communicator.shutdown()
        finally:
            with self._changed:
                self._count_finished_jobs()
                self._state = ContextState.STOPPED
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self if self._state is ContextState.RUNNING else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._state is ContextState.RUNNING:
            self.communicator.__exit__(kind, error, trace)  # so that the other ranks hear of it
        self.stop()

    # jobs

    def allreduce_async(self, x: Any, out: Any = None, *, op: str = "sum") -> Job:
        """Submit the sum of `x` of all ranks as a job, and return the job: see `Job`.

        Raises UsageError for unsuitable arrays, for an `op` other than "sum", and unless the context runs; what
        `Communicator.allreduce_async` raises.
        """
        with report_errors_to(self):
            if op != "sum":
                raise UsageError(f"op is {op!r}, expected 'sum', as in SwitchML; omnireduce.allreduce has the others")
            job = Job(x, out)
        self.submit(job)
        return job

    def refuse(self, error: Exception) -> None:
        """Let the other ranks know that this one refuses the job which they submit: see `Communicator.refuse`. Does
        nothing where the context does not run."""
        with self._changed:
            if self._state is ContextState.RUNNING and not self._queue:
                self.communicator.refuse(error)
            elif self._state is ContextState.RUNNING:
                self._queue.append(error)  # in its turn

    def allreduce(self, x: Any, out: Any = None, *, op: str = "sum", timeout_s: float | None = None) -> Array:
        """`allreduce_async`, then `Job.wait`."""
        return self.allreduce_async(x, out, op=op).wait(timeout_s)

    def submit(self, job: Job) -> None:
        """Start a job, or put it behind those whose memory it needs. All ranks submit the same jobs in the same order.

        Raises UsageError unless the context runs, and for a job that was submitted before; what
        `Communicator.allreduce_async` raises, and then the job has failed with it.
        """
        with self._changed:
            if self._state is not ContextState.RUNNING:
                raise UsageError(f"the context is {self._state.value} and takes no jobs; call start() first")
            self._count_finished_jobs()
            with report_errors_to(self):
                job.enter()
            self._submitted[job.x.size] += 1
            if self._queue or self._find_collision(job) is not None:
                self._ensure_thread()
                self._queue.append(job)
                self._changed.notify_all()
            else:
                self._begin(job)

    def wait_for_all_jobs(self, timeout_s: float | None = None) -> None:
        """Wait until no job is under way or in the queue.

        Raises TimeoutError after `timeout_s` seconds (None: no such limit), and the jobs go on; once all are over, the
        error of the first that has failed.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            jobs = [*self._running, *(queued for queued in self._queue if isinstance(queued, Job))]
        first_error = None
        for job in jobs:
            try:
                job.wait(None if end is None else max(0.0, end - time.monotonic()))
            except OmniReduceError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    @property
    def stats(self) -> Stats:
        """Counters of the work so far. Raises nothing, even after `stop`."""
        with self._changed:
            self._count_finished_jobs()
            statistics = None if self._comm is None else self._comm.statistics()
            return Stats(
                jobs_submitted=self._submitted.total(),
                jobs_finished=self._ended[JobState.FINISHED],
                jobs_failed=self._ended[JobState.FAILED],
                sizes=Distribution.of(self._submitted.elements()),
                sent_bytes=0 if statistics is None else statistics.sent_bytes,
                received_bytes=0 if statistics is None else statistics.received_bytes,
            )

    def reset_stats(self) -> None:
        """Count jobs anew from now on. Jobs under way count when they end."""
        with self._changed:
            self._count_finished_jobs()
            self._submitted, self._ended = Counter[int](), Counter[JobState]()

    # all with the lock held

    def _begin(self, job: Job) -> None:
        """Let the ranks exchange a job. Where that raises, the job has failed."""
        generation, starter = self.communicator.generation, self._starter
        assert starter is not None
        self._started_counts[generation] += 1  # a rank that comes new to an elastic job counts as the others do
        try:
            job.start(starter, f"switchml job {self._started_counts[generation]}")
        except OmniReduceError as error:
            job.fail(error)
            self._count(job)
            raise
        self._running.append(job)

    def _begin_or_refuse(self, job: Job | Exception) -> None:
        if isinstance(job, Job):
            self._begin(job)
        else:
            self.communicator.refuse(job)

    def _count_finished_jobs(self) -> None:
        """Count the jobs that are over."""
        for job in [job for job in self._running if job.over]:
            self._running.remove(job)
            self._count(job)

    def _count(self, job: Job) -> None:
        self._ended[job.state] += 1

    def _find_collision(self, job: Job) -> Job | None:
        return next((running for running in self._running if not running.over and running.collides(job)), None)

    # the queue

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._start_jobs, name="omnireduce-switchml", daemon=True)
            self._thread.start()

    def _start_jobs(self) -> None:
        """Start the jobs of the queue in their order, until the context stops."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._state is not ContextState.RUNNING)
                if self._state is not ContextState.RUNNING:
                    self._thread = None
                    return
                job = self._queue[0]
                blocking = self._find_collision(job) if isinstance(job, Job) else None
                if blocking is None:
                    self._queue.popleft()
                    with suppress(OmniReduceError):  # the job has it
                        self._begin_or_refuse(job)
            if blocking is not None:
                with exit_gate, suppress(OmniReduceError):
                    blocking.wait()


def _open(settings: Settings, rank: int | None, size: int | None) -> tuple[Communicator | DummyCommunicator, Starter]:
    """The communicator of a context, and the starter of its jobs. Raises ConfigError, and what `connect` raises."""
    config, packet_settings = settings.config, settings.in_packets
    comm: Communicator | DummyCommunicator
    if packet_settings is None or packet_settings.dummy is None:
        comm, threads = connect(config, rank=rank, size=size), 1  # ranks are in step: more threads gain nothing
        exchange: Exchange = ServiceExchange(comm)
        starter: Starter = comm
    else:
        launch = own_launch(rank=rank, size=size)
        comm, threads = DummyCommunicator(config, launch.rank, launch.size), config.transport.threads or DUMMY_THREADS
        exchange = DummyExchange(comm.size, packet_settings.dummy, threads)
        if comm.rank == 0:
            text = "backend = dummy: nothing is exchanged, and a sum is what this rank has, times the number of ranks"
            _log.warning("%s: %s", settings.source, text, extra=tagged("switchml_dummy"))
    if settings.completes_instantly:
        return comm, InstantStarter()
    if packet_settings is None:
        return comm, starter
    batch = max(1, packet_settings.max_outstanding_packets // threads)
    try:
        processors = [packet_settings.processor(comm.size, packet_settings.packet_numel, batch) for _ in range(threads)]
    except BaseException as error:  # it is a user's own, and may raise anything, also SystemExit
        comm.__exit__(type(error), error, error.__traceback__)
        raise UsageError(
            f"the prepostprocessor {packet_settings.processor.__name__} cannot be made: {in_a_line(error)}"
        ) from error
    return comm, PacketStarter(exchange, processors)
