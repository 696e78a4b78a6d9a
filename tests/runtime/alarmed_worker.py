"""Rank 0 of two, for tests: SIGALRM comes again and again in the middle of collectives, and its handler raises ERROR.

Whatever it interrupts, a result is right, and a collective that was cut short has no result. One job after another is
ended so; of each a line of JSON says how.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable

import numpy as np
from local_cluster import configured
from transports import over

from omnireduce import AbortedError, Communicator
from omnireduce.runtime.rank.calls import single
from omnireduce.runtime.rank.threads import Threads

SIZE, JOBS = 1 << 20, 6


def _write_to_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        os.write(writing, b"?")
    finally:
        os.close(writing)


def _raising(error: BaseException) -> Callable[[], None]:
    def handle() -> None:
        raise error

    return handle


ERRORS: dict[str, Callable[[], None]] = {
    "TimeoutError": _raising(TimeoutError("mine")),
    "ConnectionError": _raising(ConnectionError("mine")),
    "BlockingIOError": _raising(BlockingIOError("mine")),
    "BrokenPipeError": _write_to_nobody,  # it has a number, as the system's errors about a peer do
}


def settings_of(kind: str) -> tuple[str, ...]:
    """The settings for this kind of job."""
    return (*over("tcp"), "transport.threads=3") if kind == "threads" else over(kind)


class Alarm:
    """While armed, the signal's handler raises."""

    def __init__(self, name: str) -> None:
        self.armed, self._raise = False, ERRORS[name]
        signal.signal(signal.SIGALRM, lambda number, frame: self._handle())

    def _handle(self) -> None:
        if self.armed:
            self.armed = False
            self._raise()


def one_job(comm: Communicator, alarm: Alarm, chance: random.Random) -> dict[str, object]:
    """Go on until an alarm has ended the job; how many results were wrong, and what the handler's error has done. It
    may take long: where the other rank is always ahead, there is nothing to wait for, and nothing to interrupt."""
    wrong, report, number = 0, "", -1
    while True:
        number += 1
        x = np.full(SIZE, number + 1, np.float32)
        try:
            handle = comm._start(single.reduction, "allreduce", x, op="sum", name="")
        except AbortedError as error:  # the alarm came when the collective before was complete
            return {"wrong": wrong, "raised": report, "reason": error.reason, "culprit": error.culprit}
        report = ""
        try:
            alarm.armed = True
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0002, 0.006))
            handle.wait()
            alarm.armed = False
        except OSError as error:
            report = type(error).__name__
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            handle.wait()
        except AbortedError as error:
            return {"wrong": wrong, "raised": report, "reason": error.reason, "culprit": error.culprit}
        wrong += not bool((x == 2 * number + 2).all())


def main() -> None:
    address, job, kind, name = sys.argv[1:]
    Threads.worth_bytes = 0
    alarm, chance = Alarm(name), random.Random(name)
    for number in range(JOBS):
        config = configured(address.split(","), *settings_of(kind), "cluster.timeout_s=20")
        with Communicator(config, rank=0, size=2, job=f"{job}-{number}") as comm:
            sys.stdout.write(json.dumps(one_job(comm, alarm, chance)) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
