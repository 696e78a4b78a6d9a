"""The thread that starts a collective on a communicator once all its ranks are ready for it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.fusion_buffer import Buffer
from omnireduce.data_parallel.negotiation import Agreement
from omnireduce.data_parallel.operations import (
    JOIN,
    QUEUE_PREFIX,
    REFUSAL,
    Batch,
    Operation,
    Request,
    RowReduction,
    of_nothing,
    reduce_rows,
    refusing,
)
from omnireduce.data_parallel.overdue_names import Ready, describe_overdue, find_overdue
from omnireduce.data_parallel.queue_timeline import QueueTimeline
from omnireduce.errors import AbortedError, ClosedError, UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.engine import FORKED
from omnireduce.runtime.rank.reported_errors import mark_reported
from omnireduce.runtime.tracing.timeline import MEMCPY_IN
from omnireduce.support.exit_gate import exit_gate
from omnireduce.support.logs import tagged


class FailedTask(NamedTuple):
    """In place of a result."""

    error: Exception


class Task:
    """A collective that was submitted."""

    __slots__ = ("_dispatcher", "error", "is_done", "operation", "result", "since")

    def __init__(self, dispatcher: Dispatcher, operation: Operation) -> None:
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
MAX_REPORTED = 64  # the oldest collectives that a rank waits for
LONGEST_PAUSE_S = 0.05  # between rounds that have brought nothing
MAX_BUFFERS = 256
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
        root_setting = comm.broadcast(np.array([queue.fusion_bytes]), name=QUEUE_PREFIX + "fusion_bytes")
        self._fusion_bytes = int(root_setting[0])  # what travels together is the same on all ranks
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
        self._work, self._task_done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._waited_for: list[Task] = []
        self._has_submissions, self._closing, self._has_ended = False, False, False
        self._error: BaseException | None = None
        self._inspected = 0.0  # when ranks told last what they wait for
        self._batches = self._collectives = 0
        self._thread = threading.Thread(target=self._serve, name="omnireduce-queue", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> Task:
        """Note that this rank is ready for the operation. Collectives of the same name that it has refused come first.
        Raises UsageError, and the error that has ended the job."""
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
                self._raise_name_in_use(name)
            task = self._begin(operation)
            self._timeline.submitted(operation.request)
        return task

    def _begin(self, operation: Operation) -> Task:
        self._machine.submit(operation.request)
        task = self._tasks[operation.request.name] = Task(self, operation)
        self._has_submissions = True
        if self._machine.has_rounds or self._has_work:
            self._work.notify()
        return task

    def refuse(self, name: str, reason: str) -> None:
        """Refuse the next collective of this name: the other ranks, which wait for it, get an error. A collective of
        this name that is under way is finished first."""
        with self._work:
            if self._error is None and JOIN not in self._tasks and os.getpid() == self._process:
                self._refused.setdefault(name, deque()).append(reason)
                self._begin_refusals()

    def _await_refusals(self, name: str) -> None:
        self._retried[name] += 1
        try:
            self._task_done.wait_for(lambda: name not in self._refused)
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

    def _raise_name_in_use(self, name: str) -> None:
        if name == JOIN and name not in self._tasks:
            raise UsageError(f"join while '{next(iter(self._tasks))}' is under way: wait for it first")
        raise UsageError(f"'{name}' is under way already: wait for it, or choose another name")

    def wait_for(self, task: Task, timeout_s: float | None) -> None:
        """Return when it is done. Raises TimeoutError."""
        self._check_process()
        with self._task_done:
            self._waited_for.append(task)
            self._work.notify()
            try:
                if not self._task_done.wait_for(lambda: task.is_done, timeout_s):
                    raise TimeoutError(f"'{task.operation.request.name}' is not done after {timeout_s:g} s")
            finally:
                self._waited_for.remove(task)

    def statistics(self) -> Statistics:
        return Statistics(self._machine.rounds, self._batches, self._collectives)

    def close(self) -> None:
        """End it on all ranks. Collectives under way on other ranks fail. In a signal handler that interrupts `submit`
        it returns before the thread has ended."""
        if os.getpid() != self._process:
            return
        interrupts = self._lock._is_owned()
        with self._work:
            self._closing = True
            self._work.notify()
            if not interrupts:  # `Thread.join` in a handler on top of itself would wait for ever
                self._task_done.wait_for(lambda: self._has_ended)

    # the thread

    def _serve(self) -> None:
        pause_s = self._cycle_s
        try:
            while True:
                if not self._machine.has_rounds:
                    self._run_due_batch()
                elif self._negotiate(pause_s):
                    pause_s = self._cycle_s
                else:
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except (AbortedError, ClosedError) as error:
            self._end(error)
        except BaseException as error:  # the others must not wait for this rank
            self._end(error)
            self._comm.__exit__(type(error), error, None)
        finally:
            with self._task_done:
                self._has_ended = True
                self._task_done.notify_all()

    def _end(self, error: BaseException) -> None:
        self._fail_tasks(error)  # outside the gate: waits end, even if the gate is closed already
        with exit_gate, self._task_done:
            self._tasks.clear()  # it may have the last references to arrays of the user

    def _fail_tasks(self, error: BaseException) -> None:
        with self._task_done:
            self._error = error
            for task in self._tasks.values():
                task.error, task.is_done = error, True
            self._refused.clear()
            self._task_done.notify_all()

    @property
    def _program_waits(self) -> bool:
        """Whether some thread waits for a task that is not done. A thread whose task is done may not have woken yet."""
        return any(not task.is_done for task in self._waited_for)

    def _negotiate(self, pause_s: float) -> bool:
        """A round; return whether it brought anything."""
        machine = self._machine
        self._timeline.cycle()
        with self._work:
            if not self._has_submissions and not self._closing:
                self._work.wait_for(lambda: self._has_submissions or self._closing, pause_s)
            if self._has_submissions and not self._program_waits:  # more may come
                self._work.wait_for(lambda: self._program_waits or self._closing, self._cycle_s)
            self._has_submissions, own_news = False, machine.news()
            consents = not self._closing, not self._is_inspection_due()
            flags = np.append(machine.bytes_of_round(), np.array(consents, np.uint8))
        minimum = self._comm.allreduce(flags, op="min", name=QUEUE_PREFIX + "round")
        if not minimum[-2]:
            raise ClosedError("a rank has closed its queue: it has ended, or called shutdown")
        with self._work:
            batches, has_news = machine.agree(minimum[:-2])
        if has_news:
            all_news = self._comm.allgather_object(
                [request.as_plain() for request in own_news], name=QUEUE_PREFIX + "news"
            )
            with self._work:
                machine.take_news([[Request.from_plain(fields) for fields in rank_news] for rank_news in all_news])
        if not minimum[-1]:
            self._inspect()
        for batch in batches:
            self._run_batch(batch)
        return bool(batches) or has_news

    @property
    def _has_work(self) -> bool:
        """Without rounds: whether the thread has something to do."""
        machine = self._machine
        return machine.is_ready or machine.is_stuck(waits=bool(self._waited_for) and self._program_waits)

    def _run_due_batch(self) -> None:
        """Do the batch that is due, once this rank is ready for it; spoil it if this rank cannot become ready."""
        with self._work:
            self._work.wait_for(lambda: self._closing or self._has_work, self._patience_s)
            batch, ready = self._machine.due, self._machine.is_ready
        if self._run_batch(batch, is_due=True, spoils=not ready):
            with self._work:
                self._machine.finish_due(spoiled=True)

    # batches

    def _run_batch(self, batch: Batch, *, is_due: bool = False, spoils: bool = False) -> bool:
        """Do a batch, or spoil it; return whether it is spoiled. Then its tasks are as before. Only one that is due,
        without a round, can be."""
        with exit_gate:  # this thread may have the last reference to an array of the user
            return self._carry_out(batch, is_due=is_due, spoils=spoils)

    def _carry_out(self, batch: Batch, *, is_due: bool, spoils: bool) -> bool:
        if batch.error:
            self._finish(batch, [None], error=mark_reported(UsageError(batch.error)))
            return False
        if batch.names == (JOIN,):
            self._finish(batch, [self._machine.last_joined])
            return False
        requests = tuple([self._machine.request(name) for name in batch.names])
        if not spoils:
            self._timeline.agreed(requests)
        if requests in self._buffers or self._fits_a_buffer(requests):
            return self._run_in_buffer(batch, requests, is_due=is_due, spoils=spoils)
        if is_due and self._exchange_mark(spoils=spoils):
            self._timeline.spoiled(requests)
            return True
        operations = [self._operation(request) for request in requests]
        self._timeline.exchanging(requests)
        results: Sequence[Any]
        try:
            if isinstance(operations[0], RowReduction):
                results = reduce_rows(self._comm, operations)
            else:
                results = [operations[0].run(self._comm)]
        except UsageError as error:  # all ranks have one, or what comes next ends the job
            results = [FailedTask(mark_reported(error))] * len(operations)
        self._timeline.done(requests)
        self._finish(batch, results, is_due=is_due)
        return False

    def _fits_a_buffer(self, requests: Sequence[Request]) -> bool:
        if requests[0].kind != "allreduce" or not requests[0].fusion_key:
            return False
        return sum(request.nbytes for request in requests) <= max(self._fusion_bytes, MARKED_BYTES)

    def _run_in_buffer(self, batch: Batch, requests: tuple[Request, ...], *, is_due: bool, spoils: bool) -> bool:
        """All-reduces of one type and operation."""
        buffer = self._buffer_for(requests)
        operations = [] if spoils else [self._operation(request) for request in requests]
        if spoils:
            buffer.spoil(self._comm.rank)
        else:
            self._timeline.filling(requests)
            buffer.fill([array for operation in operations for array in operation.inputs()])
            self._timeline.exchanging(requests, MEMCPY_IN)
        self._comm.allreduce(buffer.whole, op=requests[0].combined_by, name=QUEUE_PREFIX + batch.names[0])
        if buffer.is_spoiled:
            self._timeline.spoiled(requests)
            return True
        self._timeline.emptying(requests)
        results = [
            self._take_result(operation, parts) for operation, parts in zip(operations, buffer.parts, strict=True)
        ]
        self._timeline.done(requests)
        self._finish(batch, results, is_due=is_due)
        return False

    def _take_result(self, operation: Any, parts: Sequence[Array]) -> Any:
        """The result, or an error of this rank alone: NumPy may raise one if numbers overflow."""
        try:
            return operation.take(parts, self._comm.size)
        except Exception as error:
            return FailedTask(mark_reported(error))

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
            if len(self._buffers) == MAX_BUFFERS:
                self._buffers.clear()
            self._buffers[requests] = buffer
        return buffer

    def _exchange_mark(self, *, spoils: bool) -> bool:
        """Exchange the mark by itself, before operations that cannot carry it; return whether some rank spoils the
        batch."""
        return bool(self._comm.allreduce(np.full(1, spoils, np.int8), op="max", name=QUEUE_PREFIX + "mark")[0])

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
        with self._task_done:
            if is_due:  # before any thread sees that it is done, and submits it again
                self._machine.finish_due(spoiled=False)
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
            self._task_done.notify_all()

    # overdue names

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
            oldest = sorted(self._awaited.items(), key=lambda item: item[1].since)[:MAX_REPORTED]
        own_waits: list[Ready] = [(name, now - task.since) for name, task in oldest if name != JOIN]
        reports = self._comm.allgather_object((self._abort_s, own_waits), name=QUEUE_PREFIX + "what is waited for")
        abort_s, waiting = reports[0][0], [ready for _, ready in reports]
        joined = self._machine.joined
        if self._comm.rank == 0 and self._warn_s:
            for missing, text in describe_overdue(find_overdue(waiting, joined, self._warn_s)):
                log.warning("stalled: %s %s", missing, text, extra=tagged("stalled"))
        fatal = describe_overdue(find_overdue(waiting, joined, abort_s)) if abort_s else []
        if fatal:
            missing, text = fatal[0]
            raise AbortedError(missing, f"{missing} {text}: longer than stall.abort_s, {abort_s:g} s")
