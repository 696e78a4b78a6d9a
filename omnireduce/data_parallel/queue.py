"""Collectives that ranks submit in any order, by name."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from omnireduce.data_parallel.agreement import Agreement
from omnireduce.data_parallel.buffers import Buffer
from omnireduce.data_parallel.requests import Batch, Request
from omnireduce.dtypes import Array
from omnireduce.errors import ClosedError, OmniReduceError, UsageError
from omnireduce.runtime.member.communicator import Communicator

PAUSES_S = 0.001, 0.05  # between rounds that have brought nothing


class Task:
    """An all-reduce of `x` into `out` that was submitted. Its queue does it."""

    def __init__(self, queue: Queue, request: Request, x: Array, out: Array, op: str) -> None:
        self.request, self.x, self.out, self.op = request, x, out, op
        self._queue, self.is_done, self.error = queue, False, None

    error: OmniReduceError | None

    def done(self) -> bool:
        """Whether `wait` would return (or raise) at once."""
        return self.is_done

    def wait(self, timeout_s: float | None = None) -> Array:
        """Return `out`, which has the result. Raises UsageError where ranks differ about it, TimeoutError after
        `timeout_s` seconds (it may be waited for again), and what ends the job."""
        self._queue.wait_for(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.out


class Statistics(NamedTuple):
    """Since the queue began: `rounds` in which ranks agreed, `batches` that were done, and `tensors` in them."""

    rounds: int
    batches: int
    tensors: int


class Queue:
    """Submits to `comm` what all its ranks are ready for. One thread of its own does the work.

    Small arrays of one dtype and operation share a buffer of up to `fusion_bytes`. Each rank has one queue for a
    communicator, and closes it before the communicator.
    """

    def __init__(self, comm: Communicator, *, fusion_bytes: int = 1 << 20) -> None:
        self._comm, self._block_size = comm, comm.config.protocol.block_size
        self._machine, self._fusion_bytes = Agreement(comm.rank, comm.size, fusion_bytes), fusion_bytes
        self._tasks: dict[str, Task] = {}
        self._memory: dict[str, Array] = {}  # by dtype
        self._changed = threading.Condition()
        self._waited: list[Task] = []
        self._fresh, self._closing = False, False
        self._error: OmniReduceError | None = None
        self._batches = self._tensors = 0
        self._thread = threading.Thread(target=self._serve, name="omnireduce-queue", daemon=True)
        self._thread.start()

    def allreduce_async(self, x: Array, *, name: str, op: str = "sum", out: Array | None = None) -> Task:
        """Start an all-reduce of `x`, in place unless there is an `out`. `name` is the same on all ranks. Raises
        UsageError for a name that is under way, and ClosedError."""
        out = x if out is None else out
        request = Request(name, "allreduce", op, str(x.dtype), x.shape)
        task = Task(self, request, x, out, op)
        with self._changed:
            if self._error is not None:
                raise self._error
            self._machine.submit(request)
            self._tasks[name], self._fresh = task, True
            self._changed.notify_all()
        return task

    def wait_for(self, task: Task, timeout_s: float | None) -> None:
        with self._changed:
            self._waited.append(task)
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(lambda: task.is_done, timeout_s):
                    raise TimeoutError(f"'{task.request.name}' is not done after {timeout_s:g} s")
            finally:
                self._waited.remove(task)

    @property
    def _program_waits(self) -> bool:
        """Some thread waits for what is not done. One that is done may not have woken yet."""
        return any(not each.is_done for each in self._waited)

    def statistics(self) -> Statistics:
        return Statistics(self._machine.rounds, self._batches, self._tensors)

    def close(self) -> None:
        """End the queues of all ranks. What is under way elsewhere fails."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    # the thread

    def _serve(self) -> None:
        pause_s = PAUSES_S[0]
        try:
            while True:
                if not self._machine.has_rounds:
                    self._do_due()
                elif self._meet(pause_s):
                    pause_s = PAUSES_S[0]
                else:
                    pause_s = min(2 * pause_s, PAUSES_S[1])
        except OmniReduceError as error:
            self._end(error)

    def _end(self, error: OmniReduceError) -> None:
        with self._changed:
            self._error = error
            for task in self._tasks.values():
                task.error, task.is_done = error, True
            self._tasks.clear()
            self._changed.notify_all()

    def _meet(self, pause_s: float) -> bool:
        """A round; return whether it brought anything."""
        machine = self._machine
        with self._changed:
            self._changed.wait_for(lambda: self._fresh or self._closing, pause_s)
            self._fresh, told = False, machine.news()
            brought = np.append(machine.bytes_of_round(), np.uint8(not self._closing))
        least = self._comm.allreduce(brought, op="min", name="queue: round")
        if not least[-1]:
            raise ClosedError("a rank has closed its queue")
        with self._changed:
            batches, has_news = machine.agree(least[:-1])
        if has_news:
            news = self._comm.allgather_object([tuple(each) for each in told], name="queue: news")
            with self._changed:
                machine.hear([[Request(*each) for each in of_rank] for of_rank in news])
        for batch in batches:
            self._do(batch)
        return bool(batches) or has_news

    def _do_due(self) -> None:
        """The batch that is due, once this rank is ready or cannot be."""
        machine = self._machine
        with self._changed:
            self._changed.wait_for(
                lambda: machine.due()[1] or self._closing or machine.is_stuck(waits=self._program_waits)
            )
            batch, ready = machine.due()
        spoiled = self._do(batch, spoils=not ready, may_spoil=True)
        with self._changed:
            machine.done(spoiled=spoiled)

    def _do(self, batch: Batch, *, spoils: bool = False, may_spoil: bool = False) -> bool:
        """Do a batch, or spoil it; return whether it is spoiled. Then its tasks are as before."""
        if batch.error:
            self._finish(batch, UsageError(batch.error))
            return False
        first = self._machine.request(batch.names[0])
        if first.nbytes > self._fusion_bytes:
            return self._do_alone(first, spoils=spoils, may_spoil=may_spoil)
        sizes = [self._machine.request(name).elements for name in batch.names]
        memory = self._memory_for(first.dtype, Buffer.elements(sizes, self._block_size))
        buffer = Buffer(memory, sizes, first.op, self._block_size)
        if spoils:
            buffer.spoil()
        else:
            buffer.fill([self._tasks[name].x for name in batch.names])
        self._comm.allreduce(buffer.whole, op=first.op, name=f"queue: {first.name}")
        if buffer.is_spoiled:
            return True
        for name, part in zip(batch.names, buffer.parts(), strict=True):
            out = self._tasks[name].out
            out[...] = part.reshape(out.shape)
        self._finish(batch)
        return False

    def _do_alone(self, request: Request, *, spoils: bool, may_spoil: bool) -> bool:
        """One that is too large for a buffer. A mark goes before it."""
        if may_spoil:
            mark = np.full(1, spoils, np.int8)
            if self._comm.allreduce(mark, op="max", name="queue: mark")[0]:
                return True
        task = self._tasks[request.name]
        self._comm.allreduce(task.x, out=None if task.out is task.x else task.out, op=task.op, name="queue: alone")
        self._finish(Batch((request.name,)))
        return False

    def _memory_for(self, dtype: str, elements: int) -> Array:
        found = self._memory.get(dtype)
        if found is None or found.size < elements:
            found = self._memory[dtype] = np.empty(elements, dtype)
        return found

    def _finish(self, batch: Batch, error: OmniReduceError | None = None) -> None:
        with self._changed:
            for name in batch.names:
                task = self._tasks.pop(name)
                task.error, task.is_done = error, True
            self._batches += 1
            self._tensors += len(batch.names)
            self._changed.notify_all()
