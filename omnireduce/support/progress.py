"""Progress of long work: lines if there is no terminal, and a thread to report if the work itself cannot.

Under mpirun both output streams are pipes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import click

EVERY_S = 5.0  # seconds of work between two lines; shorter work has none

_T = TypeVar("_T")


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)


class PlainProgress:
    """Writes a line about every `EVERY_S` seconds, the first line after that time.

    `now` is the time when the work starts, in seconds of any monotonic clock.
    """

    def __init__(self, now: float, write: Callable[[str], None] = _to_stderr) -> None:
        self._due = now + EVERY_S
        self._write = write

    def write_if_due(self, line: str, now: float) -> None:
        """Write `line`, which describes the progress now, if it is time."""
        if now >= self._due:
            self._due = now + EVERY_S
            self._write(line)

    def follow(self, items: Sequence[_T], label: str, clock: Callable[[], float] = time.monotonic) -> Iterator[_T]:
        """Yield `items`, and write now and then which item comes: "`label` 7 of 20"."""
        for number, item in enumerate(items, 1):
            self.write_if_due(f"{label} {number} of {len(items)}", clock())
            yield item


class Throttle:
    """Passes on the first call, and afterwards at most one call in `EVERY_S` seconds."""

    def __init__(self, report: Callable[[float, float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock, self._due = report, clock, -math.inf

    def __call__(self, completed: float, total: float) -> None:
        if (now := self._clock()) >= self._due:
            self._due = now + EVERY_S
            self._report(completed, total)


class Ticker:
    """Calls `report` every `every_s` seconds, in a separate thread, while the block runs; never, if no thread can be
    started. Once `report` has raised, it is not called any more, and `check` raises the error."""

    def __init__(self, report: Callable[[], None], every_s: float) -> None:
        self._report, self._every_s, self._stop = report, every_s, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="omnireduce-progress", daemon=True)

    def check(self) -> None:
        """Raise the error of `report`, if it has raised one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._every_s):
                self._report()
        except BaseException as error:  # `check` raises it in the waiting thread
            self._error = error

    def __enter__(self) -> Ticker:
        with suppress(RuntimeError):  # the system has no room for a thread, or Python is about to end
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        if kind is None:
            self.check()
