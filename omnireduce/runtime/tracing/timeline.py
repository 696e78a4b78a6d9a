"""A rank's part of the timeline: the activities of each of its tensors, with times.

A part is a file of lines, one for each event, written as it happens. If the rank is killed, all its notes are there,
except a line that it was writing just then. `merge` makes one timeline of the parts and traces of all ranks and shards.
The names of activities are Horovod's.

Each line is a list of JSON: a letter of `LineKind`, the time in nanoseconds of the monotonic clock, and the details of
the event. The first line is the `Origin` of the part.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from enum import StrEnum
from operator import index
from pathlib import Path
from typing import Any

import msgspec

from omnireduce.runtime.tracing.trace import Origin, now, stamped

log = logging.getLogger("omnireduce")
PART_SUFFIX = ".events"
MAX_LINE_BYTES = 4096  # bytes; a longer line is written without its details
NEGOTIATE = "NEGOTIATE_"  # before the name of the collective
QUEUE = "QUEUE"
MEMCPY_IN = "MEMCPY_IN_FUSION_BUFFER"
MEMCPY_OUT = "MEMCPY_OUT_FUSION_BUFFER"
EXCHANGE = "OMNIREDUCE_ALLREDUCE"
CYCLE = "CYCLE_START"
INNER = "queue: "  # the beginning of the names of collectives that a queue starts for its tensors


class LineKind(StrEnum):
    """The kinds of a line, and the details that follow the time."""

    BEGIN = "B"  # tensor, activity, details
    END = "E"  # tensor, activity, details
    CYCLE = "C"
    STARTED = "S"  # number of a collective, its kind, name, details
    DONE = "D"  # the number, details
    LAST = "L"  # the number of lines that did not fit


class NoTimeline:
    """Takes the place of a timeline when none is recorded. Its methods do nothing.

    A caller that would have to compute the arguments asks `is_on` first. `Communicator.timeline` is the timeline of a
    rank; it may change at any time, so callers read it anew for each event.
    """

    is_on = False
    marks_cycles = False

    def begin(self, tensor: str, activity: str, **details: object) -> None:
        """`tensor` enters `activity`. Activities of one tensor nest: the last to begin is the first to end.

        In the order of Horovod: `NEGOTIATE_ALLREDUCE` from the submission until all ranks are known to be ready, with a
        tick for each rank that has begun it; then `ALLREDUCE` around all the rest, and in it `QUEUE` until its turn
        comes, `MEMCPY_IN_FUSION_BUFFER`, `OMNIREDUCE_ALLREDUCE`, `MEMCPY_OUT_FUSION_BUFFER`. Any other name may be
        used, too. `details` are shown with it: numbers, texts, and lists of them.
        """

    def end(self, tensor: str, activity: str, **details: object) -> None:
        """`tensor` leaves `activity`, and all activities that it has entered since. An end without a begin is ignored.

        For `ALLREDUCE`, `details` are `dtype` (its name), `shape` (a list), and `bytes`. A collective whose name begins
        with `INNER` was started by a queue. It has no row. Its bytes, blocks and non-zero blocks are added to the
        `OMNIREDUCE_ALLREDUCE` of each tensor that is in this activity when the collective is complete.
        """

    def cycle(self) -> None:
        """The queue begins to look for tensors that it can combine. Noted only if `marks_cycles`."""


OFF = NoTimeline()


class Timeline(NoTimeline):
    """The part of a rank, `origin`: the file `JOB-rankN.events` in `folder`, with up to `max_lines`. It replaces an
    older file.

    Any thread may call its methods. They raise nothing: a failure is logged, and ends the part. Each writes one line,
    which takes some microseconds. Construction raises OSError.
    """

    is_on = True

    def __init__(self, folder: Path, origin: Origin, max_lines: int, *, marks_cycles: bool = False) -> None:
        self.marks_cycles = marks_cycles
        self.origin = stamped(origin)
        self.path = folder / f"{origin.job}-{origin.kind}{origin.number}{PART_SUFFIX}"
        self._lock = threading.RLock()  # a signal handler may interrupt its owner
        self._lines_left, self._missed = max_lines, 0
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(partial, flags, 0o666)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed, or the process is gone
        self._write(self._encode(self.origin) + b"\n")
        partial.replace(self.path)  # so a reader always sees a whole first line, and a locked file

    def begin(self, tensor: str, activity: str, **details: object) -> None:
        self._note(LineKind.BEGIN, tensor, activity, details)

    def end(self, tensor: str, activity: str, **details: object) -> None:
        self._note(LineKind.END, tensor, activity, details)

    def cycle(self) -> None:
        if self.marks_cycles:
            self._note(LineKind.CYCLE)

    def started(self, number: int, kind: str, name: str, details: dict[str, Any]) -> None:
        """A collective is started; `number` is unique."""
        self._note(LineKind.STARTED, number, kind, name, details)

    def done(self, number: int, details: dict[str, Any]) -> None:
        """Collective `number` is complete, or has failed."""
        self._note(LineKind.DONE, number, details)

    def close(self) -> None:
        """Write how many lines are missing, and close the file. May be called twice."""
        with self._lock:
            if self._file >= 0:
                self._write(self._encode([LineKind.LAST, now(), self._missed]) + b"\n")
                self.abandon()

    def abandon(self) -> None:
        """In a forked child: close the file. The parent keeps its lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _note(self, kind: LineKind, *details: object) -> None:
        with self._lock:
            if self._lines_left <= 0 or self._file < 0:
                self._missed += 1
                return
            self._lines_left -= 1
            at = now()  # with the lock held: times ascend
            text = self._encode([kind, at, *details]) + b"\n"
            if len(text) > MAX_LINE_BYTES:
                text = self._encode([kind, at, *(_shortened(detail) for detail in details)]) + b"\n"
            self._write(text)

    def _write(self, text: bytes) -> None:
        try:
            if os.write(self._file, text) == len(text):
                return
            reason = "no space is left"
        except OSError as error:
            reason = error.strerror or str(error)
        self._lines_left = 0
        log.warning("%s: the timeline cannot be written: %s", self.path, reason)


def _plain(x: object) -> object:
    """Numbers of NumPy as numbers, and other values as text."""
    try:
        return index(x)  # type: ignore[arg-type]
    except TypeError:
        return str(x)


def _shortened(x: object) -> object:
    if isinstance(x, str):
        return x[:200]
    return {} if isinstance(x, dict) else x
