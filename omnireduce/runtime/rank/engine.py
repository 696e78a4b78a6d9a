"""Engine of a communicator: one thread at a time drives the machine, and the others wait.

A thread that waits for a collective drives the machine itself: nothing is handed over between threads on that path.
A thread that starts collectives takes a turn now and then, because it may never have to wait. A background thread
drives only while asynchronous collectives are under way and no thread waits.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.control import Cause
from omnireduce.errors import ClosedError, OmniReduceError, UsageError, fault_of_codec
from omnireduce.protocol.collective.effects import End, error_of
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.driver import flush_before_close
from omnireduce.runtime.rank.calls.arguments import Names
from omnireduce.runtime.rank.calls.single import Call
from omnireduce.runtime.rank.handles import EngineObserver, SingleHandle, check_fits, check_free
from omnireduce.runtime.rank.poller import Poller
from omnireduce.runtime.rank.threads import ParallelDriver
from omnireduce.support.exit_gate import exit_gate
from omnireduce.support.logs import BoundLog, tagged
from omnireduce.transport.base import Link

P = ParamSpec("P")
T = TypeVar("T")
Instance = TypeVar("Instance", bound="Interruptible")


class ThreadState(threading.local):
    """The state of one thread: the number of nested calls under way, and functions to call after them."""

    depth = 0
    deferred: tuple[Callable[[], None], ...] = ()


class Interruptible:
    """Base of a class whose calls signal handlers may interrupt."""

    _thread_state: ThreadState

    @property
    def inside(self) -> bool:
        """Whether this thread is in a call. For code outside the call that means: it runs in a signal handler that has
        interrupted the call."""
        return self._thread_state.depth > 0

    def afterwards(self, function: Callable[[], None], *, first: bool = False) -> None:
        """Call `function` when the outermost call of this thread is over, perhaps before others."""
        self._thread_state.deferred = (
            (function, *self._thread_state.deferred) if first else (*self._thread_state.deferred, function)
        )

    def _refuse_nested(self) -> None:
        """Raise UsageError in a call inside another call."""
        if self._thread_state.depth > 1:
            raise UsageError(
                "a collective from a signal handler (or another callback) that interrupts a collective of the same "
                "thread would wait for itself; let the handler set a flag, and call it from the program"
            )


def entering(method: Callable[Concatenate[Instance, P], T]) -> Callable[Concatenate[Instance, P], T]:
    """Count `method` as a call; after the outermost call, call the functions that `afterwards` was given meanwhile."""

    @functools.wraps(method)
    def entered(self: Instance, /, *args: P.args, **kwargs: P.kwargs) -> T:
        state = self._thread_state
        outer_depth = state.depth
        state.depth = outer_depth + 1  # no handler runs between an assignment and `try`, or at the start of `finally`
        try:
            return method(self, *args, **kwargs)
        finally:
            state.depth = outer_depth
            if state.deferred and not outer_depth:
                deferred, state.deferred = state.deferred, ()
                for function in deferred:
                    function()

    return entered


class Open(Protocol):
    """A communicator that has not left its job."""

    def _abandon(self) -> None:
        """In a forked child: close everything, and send nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the job, because of `error` if there is one."""


class _Process:
    """The open communicators of this process, and the exception that ends it."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Open] = weakref.WeakSet()
        self._ended_by: BaseException | None = None
        self._hook = self._remember  # kept as one object: `is` has to recognise it
        # The hook that this one has replaced; None: this one is not in place.
        self._replaced_hook: Callable[..., object] | None = None
        self._lock = threading.RLock()  # a signal handler may interrupt its owner

    def opened(self, communicator: Open) -> None:
        with self._lock:
            self.open.add(communicator)
            if self._replaced_hook is None:
                self._replaced_hook, sys.excepthook = sys.excepthook, self._hook

    def closed(self, communicator: Open) -> None:
        with self._lock:
            self.open.discard(communicator)
            self._restore()

    def _restore(self) -> None:
        """If no communicator is open, forget the exception, and restore the old hook, unless it was replaced again."""
        if self.open:
            return
        self._ended_by = None
        if sys.excepthook is self._hook and self._replaced_hook is not None:
            sys.excepthook, self._replaced_hook = self._replaced_hook, None

    def _remember(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not hasattr(sys, "ps1"):  # an interactive session goes on
            self._ended_by = error
        hook = sys.__excepthook__ if self._replaced_hook is None else self._replaced_hook
        hook(kind, error, trace)

    def abandon_in_child(self) -> None:
        """In a forked child: close the parent's connections without a word. The child must not keep them open after the
        parent's death."""
        self._lock = threading.RLock()  # perhaps another thread of the parent held it
        for communicator in list(self.open):
            communicator._abandon()
        self.open.clear()
        self._restore()

    def leave_all(self) -> None:
        """At the end of the process: leave all jobs. If an exception ended the process, tell it to the other ranks."""
        error = self._ended_by
        for communicator in list(self.open):
            communicator.__exit__(None if error is None else type(error), error, None)


_process = _Process()
opened, closed = _process.opened, _process.closed


def is_by_exception() -> bool:
    """Whether an exception ends this process."""
    return _process._ended_by is not None


os.register_at_fork(after_in_child=_process.abandon_in_child)
atexit.register(exit_gate.close)  # after the next one: the last that is registered is called first
atexit.register(_process.leave_all)


SMALL_BYTES = 1 << 20  # the largest tensor that is worth polling for: its exchange is mostly short waits
FORKED = "was forked from the process that joined; connect anew in it"
READS = 20  # reads of all links within the time limit, to find parts of messages
READ_EVERY_S = 0.01  # the longest time between two reads of the links, even if the rank never has to wait
GOODBYE_S = 2.0  # the longest wait of a shutdown for the aggregators' answers, and of an abort for its last words


class Engine(Interruptible):
    """Drives a rank's machine over `links` (one per shard); its warnings go to `log`. `eventfds`: an eventfd for each
    rank that shares this host's memory; the engine closes them."""

    def __init__(
        self, machine: RankMachine, links: Sequence[Link], spin_s: float, log: BoundLog, eventfds: Sequence[int] = ()
    ) -> None:
        self._poller = Poller(links, machine.host, eventfds)  # first: it may fail
        self._machine, self._links = machine, links
        self._longest_spin_s, self._spin_s, self._read_at = spin_s, spin_s, 0.0
        self._driver = ParallelDriver(
            machine, links, time.monotonic,
            on_finish=self._on_finish, on_end=self._on_end,
            on_warn=lambda warning: log.warning(warning.text, extra=tagged("waiting")),
            on_wake=self._poller.wake_rank,
        )  # fmt: skip
        self._driver.read_all_s = machine.timeout_s / READS
        self._handles: dict[int, SingleHandle[Any]] = {}
        self.names = Names()
        self._start_afresh()
        self._has_left = False  # this process has shut the communicator down
        self.is_closed = False  # the shutdown is complete
        self.on_closed: Callable[[], None] = lambda: None  # called once when closed, perhaps for a signal handler
        self.observer: EngineObserver | None = None  # set if a profile or a timeline is wanted
        self.make_ready: Callable[[Descriptor], None] | None = None  # makes the kernels ready that a collective needs
        self.refused: tuple[SingleHandle[Any], str] | None = None  # the last call that this rank has refused, and why
        self.other_engine: Callable[[], Engine | None] | None = None  # the engine of the communicator's other channel
        self._other_end_cause: Cause | None = None  # why the other channel has ended

    def _start_afresh(self) -> None:
        """No thread drives, waits or holds the lock."""
        # Locked by `with self._lock`, never by `with self._changed`. A lock and its `with` are written in C, so Ctrl-C
        # cannot come between them. It can come inside the methods of a condition, which would stay locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._driving, self._waiters = False, 0
        self._background: threading.Thread | None = None
        self._thread_state = ThreadState()
        self._asked_to_leave = False  # set by a shutdown in a signal handler that interrupts a call
        # The exception that interrupted a call. The call is half done, so the job has to end. It is noted by an
        # assignment, because no other signal handler can come before that. The lock is kept until the job has ended.
        self._interrupted_by = ""
        self._leaving_thread = 0  # the thread that shuts down

    @entering
    def exclusively(self, function: Callable[[], T]) -> T:
        """Call `function`, which uses the machine's state, while no thread drives; return its result. Raises UsageError
        in a nested call."""
        self._refuse_nested()
        with self._lock:
            return function()

    @entering
    def submit(self, *calls: Call[Any]) -> list[SingleHandle[Any]]:
        """Start collectives, all or none.

        Raises UsageError when another collective under way uses their arrays or a block does not fit a slot, when a
        name belongs to another thread, and when this thread is inside the engine already; the error of the job's end
        when it is over.
        """
        self._refuse_nested()
        if self.make_ready is not None:
            self._refuse_if_over()
            for call in calls:
                self.make_ready(call.descriptor)
        handles = [SingleHandle(self, call) for call in calls]
        with self._lock:
            self._refuse_if_over()
            for call in calls:
                check_fits(call.operand.block_bytes, self._machine.largest_block_bytes)
            other_engine = None if self.other_engine is None else self.other_engine()
            check_free(
                handles, self._handles.values() if other_engine is None else self._in_use(other_engine), self.names
            )
            now = time.monotonic()
            if self.observer is not None:
                calls = self.observer.watch(calls, handles)
            try:
                for call, handle in zip(calls, handles, strict=True):
                    number = self._machine.submit(call.descriptor, call.operand, now, call.codec)
                    self._handles[number] = handle
                spins_long = self._machine.host is not None or sum(call.operand.nbytes for call in calls) <= SMALL_BYTES
                self._spin_s = self._longest_spin_s / (1 if spins_long else 10)
                self._driver.push()  # the driving thread keeps the deadline
                if self._driving:  # the driver may be blocked without waiting for our output to drain
                    self._poller.wake()
                elif now >= self._read_at:
                    self._read_at = now + READ_EVERY_S
                    self._driver.turn()
            except BaseException as error:
                self._interrupted_by = error.__class__.__name__
                self._leave(fault_of_codec(error))
                raise
        return handles

    def _in_use(self, other_engine: Engine) -> Collection[SingleHandle[Any]]:
        """The collectives under way in both channels. Raises the error of the other channel's end."""
        if other_engine._machine.ended is not None:
            raise other_engine.end_error()
        return [*self._handles.values(), *list(other_engine._handles.values())]

    @entering
    def wait(self, handle: SingleHandle[Any], timeout_s: float | None = None) -> None:
        """Drive, or let another thread drive, until `handle` is finished. Raises TimeoutError after `timeout_s`."""
        if not handle.finished:
            self._refuse_nested()
        deadline = None if timeout_s is None else time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        with self._lock:
            self._waiters += 1
            try:
                in_time = self._wait(handle, deadline)
            except BaseException as error:
                self._interrupted_by = error.__class__.__name__
                self._leave(fault_of_codec(error))
                raise
            finally:
                self._waiters -= 1
                self._changed.notify_all()
        if not in_time:
            raise TimeoutError("the collective is still under way")

    def _wait(self, handle: SingleHandle[Any], deadline: float | None) -> bool:
        """Return whether `handle` is finished; False if the time is over."""
        while not handle.finished and not self._settle_end(handle):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if self._wants_to_leave:
                self._leave()
            elif self._driving:
                self._poller.wake()
                self._await_change(None if deadline is None else max(0.0, deadline - time.monotonic()))
            else:
                self._drive(lambda: handle.finished, deadline)
        return True

    def _await_change(self, timeout_s: float | None = None) -> None:
        try:
            self._changed.wait(timeout_s)
        except BaseException:  # Ctrl-C inside the condition: it may not hold the lock again
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._lock.acquire()
            raise

    def _settle_end(self, handle: SingleHandle[Any]) -> bool:
        """Finish handles that an interrupted abort left behind; return whether `handle` is finished."""
        if self._machine.ended is not None and not handle.finished:
            self._on_end(self._machine.ended)
        return handle.finished

    def abandon(self) -> None:
        """In a forked child: close the parent's connections without a word, and refuse further use."""
        self._start_afresh()  # the lock may be held by a thread that this process does not have
        if self.is_closed:
            return
        self.is_closed = True
        self._machine.ended, self._has_left = End(Cause("this process", FORKED)), False
        for handle in self._handles.values():
            handle.abandon()
        self._fail_all()
        for link in self._links:
            link.abandon()
        self._poller.abandon()
        if self._machine.host is not None:
            self._machine.host.close()

    @entering
    def listen(self) -> bool:
        """Read the links, while no thread drives; return whether the job is over."""
        with self._lock:
            if self._machine.ended is None and not self._driving:
                self._driver.turn()
            return self._machine.ended is not None

    @entering
    def drive_in_background(self) -> None:
        """Let a thread drive whenever collectives are under way and no thread waits for them."""
        with self._lock:
            if self._background is None and self._machine.ended is None:
                self._background = threading.Thread(target=self._run_background, name="omnireduce", daemon=True)
                try:
                    self._background.start()
                except RuntimeError:  # no room for a thread; later there may be
                    self._background = None
                    raise
            self._changed.notify_all()

    @entering
    def _run_background(self) -> None:
        with self._lock:
            try:
                while self._machine.ended is None:
                    if self._driving or self._waiters or not self._machine.under_way:
                        self._await_change()
                    elif self._wants_to_leave:
                        self._leave()
                    else:
                        self._drive(lambda: self._waiters > 0 or not self._machine.under_way, None)
            except BaseException as error:
                self._interrupted_by = error.__class__.__name__
                self._leave(fault_of_codec(error))
                raise

    # driving: the lock is held, and released while blocked

    def _drive(self, done: Callable[[], bool], deadline: float | None) -> None:
        self._driving = True
        try:
            self._driver.turn()
            while not done() and self._machine.ended is None and not self._wants_to_leave:
                # Not after the last turn: its credits leave with the first message of the next collective.
                self._driver.flush()
                self._block(deadline)
                if deadline is not None and time.monotonic() >= deadline:
                    return
                self._driver.turn(self._poller.news())
        finally:
            self._driving = False
            self._changed.notify_all()

    def _block(self, deadline: float | None) -> None:
        """Wait for input, first spinning, then on the descriptors; at most until the next deadline."""
        now, waits = time.monotonic(), self._poller.has_something_to_wait_for
        self._poller.watch_all()
        ends = [at for at in (deadline, self._machine.deadline) if at is not None]
        if self._machine.under_way:
            ends.append(self._driver.read_all_at)
        timeout_ms = max(0.0, min(ends) - now) * 1000 + 1 if ends else None
        lock_state = 1, threading.get_ident()
        try:
            self._lock.release()
            if waits:
                self._poller.wait(now + self._spin_s, timeout_ms, self._lock)
            else:
                os.sched_yield()  # another thread may want the lock
                self._poller.check()
        finally:  # `_acquire_restore` is C code: no signal handler can run inside it
            self._lock._acquire_restore(lock_state)  # type: ignore[attr-defined]

    # ends

    def _on_finish(self, collective: int) -> None:
        # Finish it first: if Ctrl-C comes before the next line, the table still has the handle, marked as finished.
        self._handles[collective].finish()
        del self._handles[collective]
        if self._waiters or self._background:
            self._changed.notify_all()

    def end_error(self, *, under_way: bool = False) -> OmniReduceError:
        """The exception that says why the job is over. `under_way`: it is for a collective that was under way then."""
        end = self._machine.ended
        if self._has_left or end is None or end.cause is None:
            when = " while this collective was under way" if under_way else ""
            return ClosedError(f"the communicator was shut down{when}; make a new one to go on")
        return error_of(end.cause)

    def _on_end(self, end: End) -> None:
        self._fail_all()
        self._changed.notify_all()
        self._poller.wake()  # closing a link does not wake a thread that polls it
        if end.cause is not None:
            if not self._has_left and not end.cause.orderly:  # else the other channel ends by itself
                self._end_other_channel(end.cause)
            self._close_links()

    def _end_other_channel(self, cause: Cause) -> None:
        """Let a thread in the other channel end it. No thread may hold both locks at once."""
        other_engine = None if self.other_engine is None else self.other_engine()
        if other_engine is not None:
            other_engine._other_end_cause = cause
            other_engine._poller.wake()

    def _fail_all(self) -> None:
        for handle in self._handles.values():
            if not handle.finished:
                handle.finish(failed=True)
            handle.tell()  # once more, if an interrupt has kept it from the waiting coroutines
        self._handles.clear()

    @entering
    def abort(self, reason: str) -> None:
        """End the job on every rank; `reason` says what happened to this rank."""
        with self._lock:
            self._leave(reason)

    def _refuse_if_over(self) -> None:
        if self._machine.ended is not None or self._leaving_thread or self._asked_to_leave:
            raise self.end_error()

    @property
    def _wants_to_leave(self) -> bool:
        return self._asked_to_leave or bool(self._interrupted_by) or self._other_end_cause is not None

    def _leave(self, reason: str | Cause = "") -> None:
        """End the job, unless it is over. Without a `reason`, this process leaves in order."""
        try:
            if self._interrupted_by and not reason:
                reason = f"interrupted by {self._interrupted_by}"
            reason = reason or self._other_end_cause or ""
            if self._asked_to_leave:
                reason = ""
            self._has_left = self._has_left or (not reason and self._machine.ended is None)
            self._driver.perform(self._machine.leave(reason))
        finally:  # a second interrupt may have cut the first abort short
            if self._machine.ended is not None and self._handles:
                self._on_end(self._machine.ended)

    def shutdown(self) -> bool:
        """Leave the job cleanly: the aggregators confirm, so that this rank may join again at once.

        In a signal handler that interrupts a call of this thread, it only asks that call to leave. Returns whether
        everything is closed.
        """
        if self.inside:
            with self._lock:
                if not self.is_closed:
                    self._asked_to_leave = True
                    self.afterwards(self._shut_down, first=True)
                    self._poller.wake()
        else:
            self._shut_down()
        return self.is_closed

    def _shut_down(self) -> None:
        thread_id, is_leaving = threading.get_ident(), False
        try:
            with self._lock:
                while self._leaving_thread not in (0, thread_id) and self._background is not threading.current_thread():
                    self._await_change(GOODBYE_S)  # another thread shuts down
                if self._leaving_thread or self.is_closed:
                    return
                is_leaving, self._leaving_thread = True, thread_id
                self._leave()
                while self._driving:
                    self._await_change()
                self._await_goodbyes()
                self._close_links()
                self._changed.notify_all()  # an interrupt may have kept the end from waiting threads
            background = self._background
            if background is not None and background is not threading.current_thread() and background.is_alive():
                background.join()  # not a thread whose start was interrupted
            self._release()
            self.on_closed()
        finally:
            if is_leaving:
                self._leaving_thread = 0
                with self._lock:
                    self._changed.notify_all()

    def _await_goodbyes(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        while not self._machine.said_goodbye and not all(link.over for link in self._links):
            if time.monotonic() >= deadline:
                break
            self._driver.flush()
            self._block(deadline)
            self._driver.turn(self._poller.news())

    def _release(self) -> None:
        with self._lock:
            # The old driver refers back to this engine. Without it the slots are freed with the last reference to the
            # engine, not with the next run of the cycle collector.
            self._driver = ParallelDriver(self._machine, (), time.monotonic)
            if self._machine.shard_threads is not None:
                self._machine.shard_threads.pool.close()
            self._poller.close()
            if self._machine.host is not None:
                self._machine.host.close()
            self.is_closed = True

    def _close_links(self) -> None:
        deadline = time.monotonic() + GOODBYE_S
        for shard, link in enumerate(self._links):
            flush_before_close(link, deadline)
            self._poller.forget(shard)
            link.close()
