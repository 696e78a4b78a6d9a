"""Rank 0 of two, for tests: SIGTERM comes while its main thread is at WHERE, and its handler does WHAT.

WHERE: `blocked`, it drives and waits for input; `turn`, in the middle of a turn; `submit`, while it submits; `waiting`,
another thread drives; `idle`, a background thread drives and the main thread is elsewhere. WHAT: `shutdown`; `exit`,
that and SystemExit; `collective`, calls that it must not make, then `shutdown`; `twice`, two handlers on top of each
other. Events are lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from local_cluster import WAIT_S, configured

from omnireduce import Communicator, Handle, OmniReduceError

SIGNAL = signal.SIGTERM


def report(event: str, **details: object) -> None:
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **details}) + "\n")
    sys.stdout.flush()


class Program:
    """The rank's work until the signal comes, and its signal handler."""

    def __init__(self, comm: Communicator, what: str) -> None:
        self.comm, self.what = comm, what
        self.handled, self.handlers = threading.Event(), 0
        self.handle: Handle[object] | None = None
        signal.signal(SIGNAL, lambda number, frame: self.handler())

    def handler(self) -> None:
        self.handlers += 1
        if self.what == "twice" and self.handlers == 1:
            signal.raise_signal(SIGNAL)
        refused = [_refusal(call) for call in self.forbidden()] if self.what == "collective" else []
        started = time.monotonic()
        self.comm.shutdown()
        report("handled", seconds=time.monotonic() - started, refused=refused)
        self.handled.set()
        if self.what == "exit":
            sys.exit(3)

    def forbidden(self) -> list[Callable[[], object]]:
        results: list[Callable[[], object]] = [
            self.comm.barrier,
            lambda: self.comm.allreduce(np.ones(3)),
            self.comm.reform,
        ]
        return results if self.handle is None else [*results, self.handle.wait]

    def run(self, where: str) -> None:
        """Come to where the signal is to strike, and wait for it."""
        engine, link, host = self.comm._engine, self.comm._channels[0].links[0], self.comm._machine.host
        if where == "blocked":
            _in_a_thread(lambda: _when(lambda: engine._driving))
        elif where == "turn":
            link.poll = _signalling(link.poll)  # type: ignore[method-assign]
        elif where == "submit":
            if host is None:
                link.send = _signalling(link.send)  # type: ignore[method-assign]
            else:
                host.advance = _signalling(host.advance)  # type: ignore[assignment, method-assign]
        elif where == "waiting":
            self.handle = self.comm.allreduce_async(np.ones(10))
            _in_a_thread(self.handle.wait)
            _until(lambda: engine._waiters == 1 and engine._driving)
            _in_a_thread(lambda: _when(lambda: engine._waiters == 2))
            self.handle.wait()
        elif where == "idle":
            self.handle = self.comm.allreduce_async(np.ones(10))
            _until(lambda: engine._driving)
            _in_a_thread(lambda: os.kill(os.getpid(), SIGNAL))
            assert self.handled.wait(WAIT_S)
            self.handle.wait()
        self.comm.allreduce(np.ones(10_000))


def _refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except OmniReduceError as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def _signalling(function: Callable[..., object]) -> Callable[..., object]:
    """`function`, with the signal in its middle the first time."""
    calls = []

    def signalled(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(SIGNAL)
        return function(*arguments)

    return signalled


def _in_a_thread(function: Callable[[], object]) -> None:
    threading.Thread(target=_quietly, args=(function,), daemon=True).start()


def _quietly(function: Callable[[], object]) -> None:
    try:
        function()
    except OmniReduceError as error:
        report("thread", error=type(error).__name__)


def _until(condition: Callable[[], bool]) -> None:
    pause, deadline = threading.Event(), time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the signal's place was not reached"
        pause.wait(0.001)


def _when(condition: Callable[[], bool]) -> None:
    """Send the signal once the condition holds."""
    _until(condition)
    os.kill(os.getpid(), SIGNAL)


def main() -> None:
    addresses, job, where, what, *settings = sys.argv[1:]
    comm = Communicator(configured(addresses.split(","), "cluster.timeout_s=40", *settings), rank=0, size=2, job=job)
    comm.barrier()
    program = Program(comm, what)
    report("joined")
    try:
        program.run(where)
    except OmniReduceError as error:
        closed = comm._engine.is_closed and all(link.over for link in comm._channels[0].links)
        report("outcome", error=type(error).__name__, text=str(error), closed=closed, handlers=program.handlers)


if __name__ == "__main__":
    main()
