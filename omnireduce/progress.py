"""Progress of long work where no terminal can show it: under mpirun both output streams are pipes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import click

EVERY_S = 5.0  # seconds of work between two lines; shorter work says nothing

_T = TypeVar("_T")


def _to_stderr(line: str) -> None:
    click.echo(line, err=True)


class PlainProgress:
    """Writes a line about every `EVERY_S` seconds, the first of them after that time.

    `now` is the time when the work starts, in seconds of any monotonic clock.
    """

    def __init__(self, now: float, write: Callable[[str], None] = _to_stderr) -> None:
        self._due = now + EVERY_S
        self._write = write

    def at(self, line: str, now: float) -> None:
        """The work has come as far as `line` says; write that if it is time to."""
        if now >= self._due:
            self._due = now + EVERY_S
            self._write(line)

    def follow(self, items: Sequence[_T], what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[_T]:
        """Yield `items`, saying now and then which one of them comes: "`what` 7 of 20"."""
        for number, item in enumerate(items, 1):
            self.at(f"{what} {number} of {len(items)}", clock())
            yield item
