"""Worker processes, forked by a server that has imported everything: one is there within milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from local_cluster import WAIT_S

from omnireduce.protocol.joining.pending_job import worker_name

from . import worker
from .worker import ARE_YOU_THERE, FINISH, Order, Report


def _nursery() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", worker.__name__])
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))  # so that the server finds its imports
    try:
        forkserver.ensure_running()
    finally:
        if kept is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = kept
    return context


class WorkerProcess:
    """One worker process that serves orders by a pipe. It is killed at the end of the `with` block."""

    def __init__(self, *arguments: Any, target: Callable[..., None] = worker.serve) -> None:
        context = _nursery()
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def name(self, rank: int) -> str:
        """Its name in errors, as this rank."""
        return worker_name(rank, socket.gethostname(), self.pid)

    def tell(self, order: object) -> None:
        self.pipe.send(order)

    def hear(self, *events: str, within_s: float = WAIT_S) -> Report:
        """The next report of one of these events; others before it are skipped. Fails when none comes in time."""
        deadline, seen = time.monotonic() + within_s, []
        while self.pipe.poll(max(0.0, deadline - time.monotonic())):
            try:
                data: Report = self.pipe.recv()
            except (EOFError, ConnectionError):
                raise AssertionError(f"process {self.pid} is gone, status {self._process.exitcode}") from None
            if data.event in events:
                return data
            seen.append(data)
        raise AssertionError(f"process {self.pid} reports no {' or '.join(events)} within {within_s:g} s, but {seen}")

    def ask(self, within_s: float = WAIT_S) -> Report:
        """Ask for the state of its job: `there` after one more round, or its end."""
        self.tell(ARE_YOU_THERE)
        return self.hear("there", "error", "wrong", "left", within_s=within_s)

    def expect_progress(self) -> None:
        """It completes one more round of its job, and all before were right."""
        status = self.ask()
        assert status.event == "there", f"process {self.pid}: {status}"

    def finish(self) -> None:
        """It ends its job, as soon as all ranks were told so; `expect_left` waits for that."""
        self.tell(FINISH)

    def expect_left(self) -> None:
        report = self.hear("left", "error", "wrong")
        assert report.event == "left", f"process {self.pid}: {report}"

    def signal(self, number: int) -> float:
        """Send a signal; return the time just before."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def close(self) -> None:
        self._process.kill()  # nothing happens where it has just ended by itself
        self._process.join()
        self.pipe.close()


def silent_until(members: Sequence[WorkerProcess], moment: float) -> None:
    """Wait for a moment; a member that reports before then has failed by itself."""
    ready = connection.wait([member.pipe for member in members], max(0.0, moment - time.monotonic()))
    for member in members:
        assert member.pipe not in ready, f"before any fault process {member.pid} says {member.pipe.recv()}"


def complete(members: Sequence[WorkerProcess], orders: Iterable[Order]) -> None:
    """Run a job of a few rounds from its begin to its end: all ranks join, their sums are right, all leave."""
    for member, order in zip(members, orders, strict=True):
        member.tell(order)
    for member in members:
        member.expect_left()
