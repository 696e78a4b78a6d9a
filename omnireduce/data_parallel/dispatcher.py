"""The thread that submits to a communicator what all its ranks are ready for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.fusion_buffer import Buffer
from omnireduce.data_parallel.negotiation import Agreement
from omnireduce.data_parallel.operations import (
    JOIN,
    OF_QUEUE,
    REFUSAL,
    Batch,
    Operation,
    Request,
    RowReduction,
    of_nothing,
    refusing,
    together,
)
from omnireduce.data_parallel.queue_timeline import QueueTimeline
from omnireduce.data_parallel.stalls import Ready, in_words, stalls
from omnireduce.errors import AbortedError, ClosedError, UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.engine import FORKED
from omnireduce.runtime.rank.shared_errors import told
from omnireduce.runtime.tracing.timeline import MEMCPY_IN
from omnireduce.support.logs import tagged


class Waiter(Protocol):
    """The part of a dispatcher that a task uses."""

    def wait_for(self, task: Task, timeout_s: float | None) -> None: ...


class FailedTask(NamedTuple):
    """In place of a result."""

    error: Exception


class Task:
    """A collective that was submitted."""

    __slots__ = ("_dispatcher", "error", "is_done", "operation", "result", "since")

    def __init__(self, dispatcher: Waiter, operation: Operation) -> None:
        self._dispatcher, self.operation, self.since = dispatcher, operation, time.monotonic()
        self.is_done = False
        self.result: Any = None
        self.error: BaseException | None = None

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> Any:
        """Return the result. Raises UsageError where ranks differ about it, TimeoutError after `timeout_s` seconds (it
        may be waited for again), and what ends the job."""
        if not self.is_done:
            self._dispatcher.wait_for(self, timeout_s)
        if self.error is not None:
            raise self.error.with_traceback(None)  # it may be that of many tasks
        return self.result


log = logging.getLogger("omnireduce")
MOST_TOLD = 64  # of the collectives that a rank waits for, the oldest
LONGEST_PAUSE_S = 0.05  # between rounds that have brought nothing
MOST_BUFFERS = 256
MARKED_BYTES = 1 << 20  # an array of up to so many is copied, so that a mark can travel with it


class Statistics(NamedTuple):
    """Since a queue began: `rounds` in which ranks agreed, `batches` that were done, and `collectives` in them."""

    rounds: int
    batches: int
    collectives: int


class Dispatcher:
    """Does what the ranks of `comm` submit, in one order, in a thread of its own."""

    def __init__(self, comm: Communicator) -> None:
        queue, stall = comm.config.queue, comm.config.stall
        self._comm, self._cycle_s, self._process = comm, queue.cycle_s, os.getpid()
        of_rank_0 = comm.broadcast(np.array([queue.fusion_bytes]), name=OF_QUEUE + "fusion_bytes")
        self._fusion_bytes = int(of_rank_0[0])  # what travels together is the same on all ranks
        self._machine = Agreement(comm.rank, comm.size, self._fusion_bytes)
        self._warn_s, self._abort_s = stall.warn_s, stall.abort_s
        limits = [limit for limit in (comm.config.cluster.timeout_s, stall.warn_s, stall.abort_s) if limit]
        self._patience_s = min(limits) / 2  # for a batch without a round; then ranks meet in rounds again
        self._timeline = QueueTimeline(comm)
        self._tasks: dict[str, Task] = {}
        self._refused: dict[str, deque[str]] = {}  # by name, why this rank has refused it, each time anew
        self._retried = Counter[str]()  # by name, how many calls wait until what was refused before them is over
        self._memory: dict[str, Array] = {}  # by dtype, that of all buffers
        self._buffers: dict[tuple[Request, ...], Buffer] = {}
        self._lock: Any = threading.RLock()  # a signal handler may close on top of a thread that submits
        self._work, self._over = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waited: list[Task] = []
        self._fresh, self._closing, self._has_ended = False, False, False
        self._error: BaseException | None = None
        self._inspected = 0.0  # when ranks told last what they wait for
        self._batches = self._collectives = 0
        self._thread = threading.Thread(target=self._serve, name="omnireduce-queue", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> Task:
        """This rank is ready for it. What it has refused by the same name comes first. Raises UsageError, and what has
        ended the job."""
        name = operation.request.name
        self._check_process()
        with self._work:
            if self._refused and name == JOIN:
                self._withdraw_refusals()
            elif name in self._refused:
                self._await_refusals(name)
            if self._error is not None:
                raise self._error.with_traceback(None)
            if name in self._tasks or (name == JOIN and self._tasks):
                self._raise_because_of(name)
            task = self._begin(operation)
            self._timeline.submitted(operation.request)
        return task

    def _begin(self, operation: Operation) -> Task:
        self._machine.submit(operation.request)
        task = self._tasks[operation.request.name] = Task(self, operation)
        self._fresh = True
        if self._machine.has_rounds or self._is_next:
            self._work.notify()
        return task

    def refuse(self, name: str, why: str) -> None:
        """This rank refuses what it was asked to do by this name: the others, which wait for it, get an error. What has
        this name and is under way comes first."""
        with self._work:
            if self._error is None and JOIN not in self._tasks and os.getpid() == self._process:
                self._refused.setdefault(name, deque()).append(why)
                self._begin_refusals()

    def _await_refusals(self, name: str) -> None:
        self._retried[name] += 1
        try:
            self._over.wait_for(lambda: name not in self._refused)
        finally:
            self._retried[name] -= 1

    def _begin_refusals(self) -> None:
        for name, reasons in self._refused.items():
            if name not in self._tasks and self._machine.has_room:
                self._begin(refusing(name, reasons[0]))

    def _check_process(self) -> None:
        """Raises ClosedError in a forked child: the thread has stayed with the parent, and perhaps had the lock."""
        if os.getpid() != self._process:
            raise ClosedError(f"this process {FORKED}")

    def _withdraw_refusals(self) -> None:
        """A rank that joins keeps nobody waiting."""
        for name in self._refused:
            if name in self._tasks and self._tasks[name].operation.request.kind == REFUSAL:
                self._machine.withdraw(name)
                del self._tasks[name]
        self._refused.clear()

    def _raise_because_of(self, name: str) -> None:
        if name == JOIN and name not in self._tasks:
            raise UsageError(f"join while '{next(iter(self._tasks))}' is under way: wait for it first")
        raise UsageError(f"'{name}' is under way already: wait for it, or choose another name")

    def wait_for(self, task: Task, timeout_s: float | None) -> None:
        """Return when it is done. Raises TimeoutError."""
        self._check_process()
        with self._over:
            self._waited.append(task)
            self._work.notify()
            try:
                if not self._over.wait_for(lambda: task.is_done, timeout_s):
                    raise TimeoutError(f"'{task.operation.request.name}' is not done after {timeout_s:g} s")
            finally:
                self._waited.remove(task)

    def statistics(self) -> Statistics:
        return Statistics(self._machine.rounds, self._batches, self._collectives)

    def close(self) -> None:
        """End it on all ranks. What is under way elsewhere fails. In a signal handler that interrupts `submit` it
        returns before the thread has ended."""
        if os.getpid() != self._process:
            return
        interrupts = self._lock._is_owned()
        with self._work:
            self._closing = True
            self._work.notify()
            if not interrupts:  # `Thread.join` in a handler on top of itself would wait for ever
                self._over.wait_for(lambda: self._has_ended)

    # the thread

    def _serve(self) -> None:
        pause_s = self._cycle_s
        try:
            while True:
                if not self._machine.has_rounds:
                    self._do_due()
                elif self._meet(pause_s):
                    pause_s = self._cycle_s
                else:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except (AbortedError, ClosedError) as error:
            self._end(error)
        except BaseException as error:  # the others must not wait for this rank
            self._end(error)
            self._comm.__exit__(type(error), error, None)
        finally:
            with self._over:
                self._has_ended = True
                self._over.notify_all()

    def _end(self, error: BaseException) -> None:
        with self._over:
            self._error = error
            for task in self._tasks.values():
                task.error, task.is_done = error, True
            self._tasks.clear()
            self._refused.clear()
            self._over.notify_all()

    @property
    def _program_waits(self) -> bool:
        """Some thread waits for what is not done. One that is done may not have woken yet."""
        return any(not task.is_done for task in self._waited)

    def _meet(self, pause_s: float) -> bool:
        """A round; return whether it brought anything."""
        machine = self._machine
        self._timeline.cycle()
        with self._work:
            if not self._fresh and not self._closing:
                self._work.wait_for(lambda: self._fresh or self._closing, pause_s)
            if self._fresh and not self._program_waits:  # more may come
                self._work.wait_for(lambda: self._program_waits or self._closing, self._cycle_s)
            self._fresh, told = False, machine.news()
            asks = not self._closing, not self._is_inspection_due()
            brought = np.append(machine.bytes_of_round(), np.array(asks, np.uint8))
        least = self._comm.allreduce(brought, op="min", name=OF_QUEUE + "round")
        if not least[-2]:
            raise ClosedError("a rank has closed its queue: it has ended, or called shutdown")
        with self._work:
            batches, has_news = machine.agree(least[:-2])
        if has_news:
            news = self._comm.allgather_object([request.said() for request in told], name=OF_QUEUE + "news")
            with self._work:
                machine.hear([[Request.told(said) for said in of_rank] for of_rank in news])
        if not least[-1]:
            self._inspect()
        for batch in batches:
            self._do(batch)
        return bool(batches) or has_news

    @property
    def _is_next(self) -> bool:
        """Without rounds: whether the thread has something to do."""
        machine = self._machine
        return machine.is_ready or machine.is_stuck(waits=bool(self._waited) and self._program_waits)

    def _do_due(self) -> None:
        """Do the batch that is due, once this rank is ready for it; spoil it if this rank cannot become ready."""
        with self._work:
            self._work.wait_for(lambda: self._closing or self._is_next, self._patience_s)
            batch, ready = self._machine.due, self._machine.is_ready
        if self._do(batch, is_due=True, spoils=not ready):
            with self._work:
                self._machine.done(spoiled=True)

    # batches

    def _do(self, batch: Batch, *, is_due: bool = False, spoils: bool = False) -> bool:
        """Do a batch, or spoil it; return whether it is spoiled. Then its tasks are as before. Only one that is due,
        without a round, can be."""
        if batch.error:
            self._finish(batch, [None], error=told(UsageError(batch.error)))
            return False
        if batch.names == (JOIN,):
            self._finish(batch, [self._machine.last_joined])
            return False
        requests = tuple([self._machine.request(name) for name in batch.names])
        if not spoils:
            self._timeline.agreed(requests)
        if requests in self._buffers or self._fits_a_buffer(requests):
            return self._do_in_buffer(batch, requests, is_due=is_due, spoils=spoils)
        if is_due and self._is_marked(spoils=spoils):
            self._timeline.spoiled(requests)
            return True
        own = [self._operation(request) for request in requests]
        self._timeline.exchanging(requests)
        results: Sequence[Any]
        try:
            results = together(self._comm, own) if isinstance(own[0], RowReduction) else [own[0].run(self._comm)]
        except UsageError as error:  # all ranks have one, or what comes next ends the job
            results = [FailedTask(told(error))] * len(own)
        self._timeline.done(requests)
        self._finish(batch, results, is_due=is_due)
        return False

    def _fits_a_buffer(self, requests: Sequence[Request]) -> bool:
        if requests[0].kind != "allreduce" or not requests[0].shares:
            return False
        return sum(request.nbytes for request in requests) <= max(self._fusion_bytes, MARKED_BYTES)

    def _do_in_buffer(self, batch: Batch, requests: tuple[Request, ...], *, is_due: bool, spoils: bool) -> bool:
        """All-reduces of one type and operation."""
        buffer, own = self._buffer_for(requests), [] if spoils else [self._operation(request) for request in requests]
        if spoils:
            buffer.spoil(self._comm.rank)
        else:
            self._timeline.filling(requests)
            buffer.fill([array for operation in own for array in operation.brought()])
            self._timeline.exchanging(requests, MEMCPY_IN)
        self._comm.allreduce(buffer.whole, op=requests[0].combined_by, name=OF_QUEUE + batch.names[0])
        if buffer.is_spoiled:
            self._timeline.spoiled(requests)
            return True
        self._timeline.emptying(requests)
        results = [self._taken(operation, parts) for operation, parts in zip(own, buffer.parts, strict=True)]
        self._timeline.done(requests)
        self._finish(batch, results, is_due=is_due)
        return False

    def _taken(self, operation: Any, parts: Sequence[Array]) -> Any:
        """The result, or an error of this rank alone: NumPy may raise one if numbers overflow."""
        try:
            return operation.take(parts, self._comm.size)
        except Exception as error:
            return FailedTask(told(error))

    def _buffer_for(self, requests: tuple[Request, ...]) -> Buffer:
        """The buffer of these requests; a new one if they have none yet."""
        buffer = self._buffers.get(requests)
        if buffer is None:
            sizes = [[part.elements for part in request.parts] for request in requests]
            block_size, dtype = self._comm.config.protocol.block_size, requests[0].parts[0].dtype
            elements = Buffer.elements(sizes, block_size)
            if dtype not in self._memory or self._memory[dtype].size < elements:
                self._memory[dtype] = np.empty(elements, dtype)
                self._buffers.clear()
            buffer = Buffer(self._memory[dtype], sizes, requests[0].combined_by, block_size)
            if len(self._buffers) == MOST_BUFFERS:
                self._buffers.clear()
            self._buffers[requests] = buffer
        return buffer

    def _is_marked(self, *, spoils: bool) -> bool:
        """Exchange the mark by itself, before operations that cannot carry it; return whether some rank spoils the
        batch."""
        return bool(self._comm.allreduce(np.full(1, spoils, np.int8), op="max", name=OF_QUEUE + "mark")[0])

    def _operation(self, request: Request) -> Any:
        """The operation of this rank; one without data if this rank has joined."""
        task = self._tasks.get(request.name)
        if task is not None:
            return task.operation
        assert self._comm.rank in self._machine.joined, f"nothing was submitted for {request}"
        return of_nothing(request)

    def _finish(
        self, batch: Batch, results: Sequence[Any], *, is_due: bool = False, error: UsageError | None = None
    ) -> None:
        with self._over:
            if is_due:  # before any thread sees that it is done, and submits it again
                self._machine.done(spoiled=False)
            for name, result in zip(batch.names, results, strict=True):
                task = self._tasks.pop(name, None)
                if task is None:
                    continue
                if task.operation.request.kind == REFUSAL:
                    self._refused[name].popleft()
                if isinstance(result, FailedTask):
                    task.error = result.error
                else:
                    task.result, task.error = result, error
                task.is_done = True
            self._batches += 1
            self._collectives += len(batch.names)
            if self._refused:
                self._refused = {name: reasons for name, reasons in self._refused.items() if reasons}
                self._begin_refusals()
            self._over.notify_all()

    # stalls

    def _is_inspection_due(self) -> bool:
        """Whether something waits for too long, and ranks have not told of it for as long."""
        limits = [limit for limit in (self._warn_s, self._abort_s) if limit]
        now = time.monotonic()
        if not limits or not self._awaited or now - self._inspected < min(limits):
            return False
        return now - min(task.since for task in self._awaited.values()) >= min(limits)

    @property
    def _awaited(self) -> dict[str, Task]:
        """Tasks that this rank waits for. It does not wait for others to come to what it has refused, unless a call
        waits behind that."""
        return {
            name: task
            for name, task in self._tasks.items()
            if task.operation.request.kind != REFUSAL or self._retried[name]
        }

    def _inspect(self) -> None:
        """All ranks tell what they wait for. Raises AbortedError if it is for too long."""
        with self._work:
            now = self._inspected = time.monotonic()
            oldest = sorted(self._awaited.items(), key=lambda item: item[1].since)[:MOST_TOLD]
        own: list[Ready] = [(name, now - task.since) for name, task in oldest if name != JOIN]
        told = self._comm.allgather_object((self._abort_s, own), name=OF_QUEUE + "what is waited for")
        abort_s, waiting = told[0][0], [ready for _, ready in told]
        joined = self._machine.joined
        if self._comm.rank == 0 and self._warn_s:
            for who, what in in_words(stalls(waiting, joined, self._warn_s)):
                log.warning("stalled: %s %s", who, what, extra=tagged("stalled"))
        fatal = in_words(stalls(waiting, joined, abort_s)) if abort_s else []
        if fatal:
            who, what = fatal[0]
            raise AbortedError(who, f"{who} {what}: longer than stall.abort_s, {abort_s:g} s")
