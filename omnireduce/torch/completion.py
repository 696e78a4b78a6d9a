"""Threads that wait for collectives, and then tell who asked for their futures."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple


class Pending(NamedTuple):
    """A collective: `wait` returns, or raises an Exception, when it is over; `tell` is called then."""

    wait: Callable[[], object]
    tell: Callable[[], object]


class Completion:
    """Waits for collectives in the order in which they were started, one thread at a time.

    `tell` runs whatever a user wants to be called, and that may wait for a later collective. So another thread waits
    for the next collective meanwhile. There are as many threads as were ever needed at once. They are daemons: a
    program may end while a collective is under way.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come on top, and close
        self._turn = threading.Condition(self._lock)
        self._pending = deque[Pending]()
        self._is_waiting = False  # a thread waits for a collective, or has been told to
        self._told = False  # to wait, one of the `_idle` threads
        self._idle, self._closed = 0, False

    def add(self, pending: Pending) -> None:
        """Tell when this collective, the latest one, is over. Raises RuntimeError where there is no room for a
        thread."""
        with self._lock:
            self._pending.append(pending)
            self._let_one_wait()

    def close(self) -> None:
        """Let the threads end, once they have told all."""
        with self._lock:
            self._closed = True
            self._turn.notify_all()

    def _let_one_wait(self) -> None:
        """See to it that a thread waits for the next collective. With the lock held."""
        if self._is_waiting or not self._pending:
            return
        if self._idle:
            self._idle, self._told = self._idle - 1, True
            self._turn.notify()
        else:
            threading.Thread(target=self._run, name="omnireduce.torch", daemon=True).start()
        self._is_waiting = True

    def _run(self) -> None:
        is_needed = True
        while is_needed:
            with self._lock:
                pending = self._pending.popleft()
            with suppress(Exception):  # who asks for the result is told
                pending.wait()
            with self._lock:
                self._is_waiting = False
                with suppress(RuntimeError):  # no room for a thread: this one goes on when it has told
                    self._let_one_wait()
            pending.tell()
            del pending  # it may hold tensors
            with self._lock:
                is_needed = self._await_turn()

    def _await_turn(self) -> bool:
        """Be idle until there is a collective to wait for; return whether there is one, rather than an end."""
        if self._pending and not self._is_waiting:
            self._is_waiting = True
            return True
        self._idle += 1
        while not self._told:
            if self._closed:
                self._idle -= 1
                return False
            self._turn.wait()
        self._told = False
        return True
