"""The supervisor's child processes: each is forked with a pipe whose end tells it to stop, and has a few lives."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from typing import Literal

RESTART_WINDOW_S = 60.0
RESTARTS_PER_WINDOW = 5


class Deaths:
    """Counts deaths within the last RESTART_WINDOW_S."""

    def __init__(self) -> None:
        self._at: list[float] = []

    @property
    def count(self) -> int:
        return len(self._at)

    def one_too_many(self) -> bool:
        """Count one more, now; return whether to give up."""
        now = time.monotonic()
        self._at = [at for at in self._at if now - at < RESTART_WINDOW_S] + [now]
        return self.count > RESTARTS_PER_WINDOW


@dataclass(eq=False)
class Child:
    """A process that runs `run(stop_pipe)`, which returns once that pipe is closed. `address` is where it serves."""

    kind: Literal["shard", "monitor"]
    address: str
    run: Callable[[int], None]
    deaths: Deaths
    process: ForkProcess
    stop: int  # closing this descriptor asks it to stop

    @property
    def name(self) -> str:
        return f"{self.kind} {self.address}"


class Family:
    """All children, in the order in which they were started; one that is started again keeps its place."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("fork")
        self.members: list[Child] = []

    def start(
        self, kind: Literal["shard", "monitor"], address: str, run: Callable[[int], None], deaths: Deaths
    ) -> None:
        """Fork one more child."""
        self.members.append(Child(kind, address, run, deaths, *self._forked(f"{kind} {address}", run)))

    def restart(self, child: Child) -> None:
        """Fork it anew, after its end."""
        child.process, child.stop = self._forked(child.name, child.run)

    def hang_up(self) -> None:
        """Send SIGHUP to all that live: they read their files again."""
        for child in self.members:
            pid = child.process.pid
            if pid is not None and child.process.is_alive():
                os.kill(pid, signal.SIGHUP)

    def bury(self, child: Child) -> int:
        """Take note of its end; return its exit status."""
        child.process.join()
        os.close(child.stop)
        child.stop = -1
        status = child.process.exitcode
        assert status is not None
        return status

    def stop(self, children: Sequence[Child], timeout_s: float) -> list[Child]:
        """Ask them to stop and wait for that; return those that had to be killed."""
        for child in children:
            os.close(child.stop)
            child.stop = -1
        deadline, killed = time.monotonic() + timeout_s, []
        for child in children:
            child.process.join(max(0.0, deadline - time.monotonic()))
            if child.process.is_alive():
                child.process.kill()
                child.process.join()
                killed.append(child)
        return killed

    def _forked(self, name: str, run: Callable[[int], None]) -> tuple[ForkProcess, int]:
        theirs, ours = os.pipe()
        process = self._context.Process(target=self._live, args=(run, theirs, ours), name=name)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it waits until the child waits for it
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(theirs)
        return process, ours

    def _live(self, run: Callable[[int], None], stop_pipe: int, stop: int) -> None:
        signal.set_wakeup_fd(-1)
        for descriptor in (stop, *(child.stop for child in self.members if child.stop >= 0)):
            os.close(descriptor)  # the supervisor's ends: a copy here would keep the pipes open
        run(stop_pipe)
        os.close(stop_pipe)
