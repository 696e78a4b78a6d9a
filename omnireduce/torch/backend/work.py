"""Collectives under way, as torch wants them."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from typing import Any, List, NamedTuple  # noqa: UP035 - TorchScript knows no other

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from omnireduce.errors import CollectiveTimeoutError
from omnireduce.runtime.rank.calls.single import once
from omnireduce.runtime.rank.handles import Handle
from omnireduce.support.exit_gate import exit_gate
from omnireduce.torch.tensors import gpus_of


def _wait_and_return(over: torch.jit.Future[int], tensors: List[Tensor]) -> List[Tensor]:  # noqa: UP006
    torch.jit.wait(over)
    return tensors


def _fork_wait(over: torch.jit.Future[int], tensors: List[Tensor]) -> torch.jit.Future[List[Tensor]]:  # noqa: UP006
    return torch.jit.fork(_wait_and_return, over, tensors)


_compiling = threading.RLock()  # two threads that ignore warnings at the same time restore the filters wrongly


@cache
def _compiled_fork() -> Any:
    with _compiling, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that torch.jit is old: nothing else makes such a future
        return torch.jit.script(_fork_wait)


def typed_future(over: Any, tensors: List[Tensor]) -> Any:  # noqa: UP006
    """A future that has these tensors, or the error of the future `over`, once that is complete. Its callbacks run in
    threads of torch, for which the end of the process does not wait."""
    return _compiled_fork()(over, tensors)


class Pending(NamedTuple):
    """A collective: `wait` returns, or raises an Exception, when it is over; `notify` is called then."""

    wait: Callable[[], object]
    notify: Callable[[], object]


class Completion:
    """Waits for collectives in the order in which they were started, one thread at a time.

    `notify` runs whatever a user wants to be called, and that may wait for a later collective. So another thread waits
    for the next collective meanwhile. There are as many threads as were ever needed at once. They are daemons: a
    program may end while a collective is under way. It then fails, and the end of the program waits for the thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come on top, and close
        self._turn = threading.Condition(self._lock)
        self._pending = deque[Pending]()
        self._is_waiting = False  # a thread waits for a collective, or has been told to
        self._has_turn = False  # to wait, one of the `_idle` threads
        self._idle, self._closed = 0, False

    def add(self, pending: Pending) -> None:
        """Tell when this collective, the latest one, is over. Raises RuntimeError where there is no room for a
        thread."""
        with self._lock:
            self._pending.append(pending)
            self._ensure_waiter()

    def close(self) -> None:
        """Let the threads end, once they have told all."""
        with self._lock:
            self._closed = True
            self._turn.notify_all()

    def _ensure_waiter(self) -> None:
        """Make sure that a thread waits for the next collective. The caller holds the lock."""
        if self._is_waiting or not self._pending:
            return
        if self._idle:
            self._idle, self._has_turn = self._idle - 1, True
            self._turn.notify()
        else:
            threading.Thread(target=self._run, name="omnireduce.torch", daemon=True).start()
        self._is_waiting = True

    def _run(self) -> None:
        is_needed = True
        while is_needed:
            with exit_gate:
                self._complete_next()
            with self._lock:
                is_needed = self._await_turn()

    def _complete_next(self) -> None:
        with self._lock:
            pending = self._pending.popleft()
        with suppress(Exception):  # who asks for the result is told
            pending.wait()
        with self._lock:
            self._is_waiting = False
            with suppress(RuntimeError):  # no room for a thread: this one goes on when it has told
                self._ensure_waiter()
        pending.notify()

    def _await_turn(self) -> bool:
        """Be idle until there is a collective to wait for; return whether there is one, rather than an end."""
        if self._pending and not self._is_waiting:
            self._is_waiting = True
            return True
        self._idle += 1
        while not self._has_turn:
            if self._closed:
                self._idle -= 1
                return False
            self._turn.wait()
        self._has_turn = False
        return True


NO_LIMIT = timedelta(0)


def as_torch_error(error: Exception) -> RuntimeError:
    """The error that users of torch expect, from one of ours. The time limit in it is one that they gave to torch."""
    text = str(error).replace("raise cluster.timeout_s", "raise that")
    limit = " (the timeout of the process group)" if isinstance(error, CollectiveTimeoutError) else ""
    backend_error: RuntimeError = dist.DistBackendError(f"omnireduce: {text}{limit}")
    return backend_error


class Outcome:
    """Outcome of the collective behind `handle`. `finish` makes its tensors of its result; it is called once, in
    whatever thread comes first. `is_known`: the tensors are there, or the collective has failed."""

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], Sequence[Tensor]]) -> None:
        self._handle, self.is_known = handle, False
        self._tensors = once(lambda: list(finish(handle.wait())))

    def wait(self, timeout: timedelta = NO_LIMIT) -> list[Tensor]:
        """Return the tensors. Raises RuntimeError that says why the collective failed, or that it takes longer than
        `timeout` (0: no such limit)."""
        try:
            self._handle.wait(timeout.total_seconds() or None)
            tensors = self._tensors()
        except TimeoutError as error:
            raise dist.DistBackendError(f"omnireduce: {error} after {timeout.total_seconds():g} s") from error
        except Exception as error:  # also a bug: who waits for the future must hear of it
            self.is_known = True
            raise as_torch_error(error) from error
        self.is_known = True
        return tensors


class FinishedWork(dist._Work):
    """A collective that is over. `finish` makes its tensors of `result`. Raises RuntimeError where that fails."""

    def __init__(self, result: Any, finish: Callable[[Any], Sequence[Tensor]]) -> None:
        super().__init__()
        try:
            self._tensors = list(finish(result))
        except Exception as error:
            raise as_torch_error(error) from error

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future(devices=gpus_of(self._tensors))
        future.set_result(self._tensors)
        return _adapt_for_hooks(future, self._tensors)


class OutcomeWork(dist._Work):
    """A collective that is over when its result is in the tensors of the user. Who waits for it without a limit has
    `limit` (0: none). `tensors`: those of the user. Torch wants futures to know their GPUs: it makes streams wait.

    A thread of `completion` goes on with it until then. Nothing here refers back to this object: the tensors are free
    as soon as nobody refers to it.
    """

    def __init__(
        self,
        outcome: Outcome,
        completion: Completion,
        limit: timedelta = NO_LIMIT,
        tensors: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self._outcome, self._limit, self._tensors = outcome, limit, tensors
        self._over: Future[None] = Future(devices=gpus_of(tensors))
        completion.add(Pending(outcome.wait, partial(self._over.set_result, None)))

    def is_completed(self) -> bool:
        return self._outcome.is_known

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> RuntimeError | None:
        """Why the collective failed; None if it did not, or is under way."""
        try:
            if self.is_completed():
                self._outcome.wait()
        except RuntimeError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return self._outcome.wait()

    def wait(self, timeout: timedelta = NO_LIMIT) -> bool:
        """Return True once the collective is over. Raises RuntimeError that says why it failed, or that it takes longer
        than `timeout` (0: no such limit)."""
        self._outcome.wait(timeout or self._limit)
        return True

    def get_future(self) -> Future[list[Tensor]]:
        outcome = self._outcome
        # A callback that raises, not `set_exception`: that ends the process in the backward pass of torch 2.13.
        return _adapt_for_hooks(self._over.then(lambda _: outcome.wait()), self._tensors)


def _adapt_for_hooks(future: Future[list[Tensor]], tensors: Sequence[Tensor]) -> Future[list[Tensor]]:
    """A future with these tensors that torch's built-in hook for float16 understands, too. On a GPU it does not: a
    future of TorchScript knows no devices."""
    if tensors and all(tensor.is_cpu and tensor.dtype == torch.float16 for tensor in tensors):
        typed: Future[list[Tensor]] = typed_future(future, list(tensors))
        return typed
    return future
