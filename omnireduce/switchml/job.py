"""One all-reduce that a context is asked for."""

from __future__ import annotations

import asyncio
import enum
import itertools
import statistics
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import OmniReduceError, UsageError, a_type
from omnireduce.runtime.rank.calls.arguments import flat_view


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of some numbers, such as the sizes of jobs in elements. `stdev` is for the population, not for a
    sample. Without numbers all are 0."""

    sum: float
    mean: float
    max: float
    min: float
    median: float
    stdev: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The distribution of `values`."""
        ordered = sorted(values) or [0]
        mean = statistics.fmean(ordered)
        return cls(
            sum(ordered), mean, ordered[-1], ordered[0], statistics.median(ordered), statistics.pstdev(ordered, mean)
        )

    def __str__(self) -> str:
        return (
            f"Sum: {self.sum} Mean: {self.mean:.6g} Max: {self.max} Min: {self.min} Median: {self.median:.6g} "
            f"Stdev: {self.stdev:.6g}"
        )


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals of a context since it was made, or since `Context.reset_stats`.

    `jobs_finished` are those whose sum is there, `jobs_failed` those that have none; the others are under way.
    `sizes` are those of the submitted jobs. `sent_bytes` and `received_bytes` are those of this rank since the context
    was started last, framing included.
    """

    jobs_submitted: int
    jobs_finished: int
    jobs_failed: int
    sizes: Distribution
    sent_bytes: int
    received_bytes: int

    def __str__(self) -> str:
        return (
            f"Jobs submitted: #{self.jobs_submitted}#\nJobs finished: #{self.jobs_finished}#\n"
            f"Jobs failed: #{self.jobs_failed}#\nJob sizes: {self.sizes}\n"
            f"Bytes sent: #{self.sent_bytes}#\nBytes received: #{self.received_bytes}#"
        )


class Pending(Protocol):
    """An all-reduce that was started: see `Handle`."""

    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> object: ...


class Starter(Protocol):
    """A starter of jobs, such as a communicator."""

    def allreduce_async(self, x: Array, *, out: Array | None = ..., name: str = ...) -> Pending: ...


DTYPES = (np.dtype(np.float32), np.dtype(np.int32))
_numbers = itertools.count()


class JobState(enum.Enum):
    """INIT: not submitted. QUEUED: a job before it uses the same memory. RUNNING: the ranks exchange it. FINISHED: the
    sum is there. FAILED: `Job.error` says why there is none."""

    INIT = "init"
    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class Job:
    """The sum of `x` of all ranks, element by element, which goes to `out` (None: to `x` itself).

    `x`, `out`: C-contiguous arrays of NumPy or tensors of torch on the processor, of float32 or int32, of one shape and
    one type. Without `out`, `x` is replaced; with it, `x` is only read. Both belong to the job until it is over.
    `Context.submit` starts it.

    Attributes, not to be changed: `id`, a number that no other job of this process has; `x` and `out`, as arrays.

    Raises UsageError for unsuitable arrays.
    """

    def __init__(self, x: Any, out: Any = None) -> None:
        self.id = next(_numbers)
        self.x, self.out = _memory_of(x, "x"), _memory_of(x if out is None else out, "out")
        if self.x.dtype not in DTYPES:
            raise UsageError(f"x is of {self.x.dtype}, expected float32 or int32; omnireduce.allreduce has other types")
        if self.out.dtype != self.x.dtype or self.out.shape != self.x.shape:
            mismatch = f"out is {self.out.dtype}{list(self.out.shape)}, x is {self.x.dtype}{list(self.x.shape)}"
            raise UsageError(f"{mismatch}: expected the same")
        flat_view(self.x, "x", writable=False)
        flat_view(self.out, "out", writable=True, advice="pass another out")
        self.in_place = self.x.ctypes.data == self.out.ctypes.data
        if not self.in_place and np.may_share_memory(self.x, self.out):
            raise UsageError("out overlaps x; to work in place, leave it out")
        self._changed = threading.Condition()
        self._submitted = False
        self._handle: Pending | None = None
        self._error: OmniReduceError | None = None

    def __repr__(self) -> str:
        return f"<omnireduce.switchml.Job {self.id}: {self.x.dtype}[{self.x.size}], {self.state.value}>"

    @property
    def state(self) -> JobState:
        """The state of the job now."""
        if self._handle is None:
            if self._error is not None:
                return JobState.FAILED
            return JobState.QUEUED if self._submitted else JobState.INIT
        if not self._handle.done():
            return JobState.RUNNING
        return JobState.FINISHED if self.error is None else JobState.FAILED

    @property
    def error(self) -> OmniReduceError | None:
        """The error with which the job failed; None if it has not failed."""
        if self._error is None and self._handle is not None and self._handle.done():
            try:
                self._handle.wait()
            except OmniReduceError as error:
                self._error = error
        return self._error

    def wait(self, timeout_s: float | None = None) -> Array:
        """Wait until the job is over; return `out`. Any thread may wait, also several.

        Raises TimeoutError after `timeout_s` seconds (None: no such limit; `cluster.timeout_s` always applies): the job
        then goes on, and may be waited for again. Raises AbortedError when a rank or an aggregator has failed, and says
        which; ClosedError when the context was stopped; UsageError for a job that nobody has submitted.
        """
        if not self._submitted:
            raise UsageError(f"job {self.id} was not submitted: nothing to wait for; Context.submit starts it")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            is_decided = self._changed.wait_for(lambda: self._handle is not None or self._error is not None, timeout_s)
        try:
            if not is_decided:
                raise TimeoutError
            if self._handle is not None and self._error is None:
                self._handle.wait(None if end is None else max(0.0, end - time.monotonic()))
        except TimeoutError:
            raise TimeoutError(f"job {self.id} is not over after {timeout_s:g} s; it goes on") from None
        error = self.error
        if error is not None:
            raise error
        return self.out

    def __await__(self) -> Generator[Any, None, Array]:
        """`await job` in a coroutine does what `wait` does, while the event loop goes on."""
        return (yield from asyncio.get_running_loop().run_in_executor(None, self.wait).__await__())

    # for the context

    def collides(self, other: Job) -> bool:
        """Whether one of both writes what the other one uses."""
        pairs = ((self.out, other.out), (self.out, other.x), (self.x, other.out))
        return any(np.may_share_memory(a, b) for a, b in pairs)

    def enter(self) -> None:
        """It belongs to a context now. Raises UsageError when it does already."""
        if self._submitted:
            raise UsageError(f"job {self.id} was submitted before; make another one")
        self._submitted = True

    def start(self, starter: Starter, name: str) -> None:
        """Let the ranks exchange it as the collective `name`. Raises what `Communicator.allreduce_async` raises."""
        x, out = (self.out, None) if self.in_place else (self.x, self.out)
        handle = starter.allreduce_async(x, out=out, name=name)
        with self._changed:
            self._handle = handle
            self._changed.notify_all()

    def fail(self, error: OmniReduceError) -> None:
        """It was not started, and will not be."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self.state in (JobState.FINISHED, JobState.FAILED)


def _memory_of(x: Any, name: str) -> Array:
    """An array, or the memory of a tensor of torch as one. Raises UsageError for anything else."""
    if type(x).__module__.partition(".")[0] == "torch":
        if x.device.type != "cpu":
            raise UsageError(
                f"{name} is on {x.device}, expected a tensor on the processor; omnireduce.torch takes both"
            )
        try:
            x = x.detach().numpy()
        except (TypeError, RuntimeError) as error:  # sparse, or of a type that NumPy has not
            raise UsageError(f"{name}: {error}") from None
    if not isinstance(x, np.ndarray):
        raise UsageError(f"{name} is {a_type(x)}, expected an array of NumPy or a tensor of torch")
    return x
