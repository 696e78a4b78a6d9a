"""Parts of a timeline as files: the events that each rank has noted, in order.

A part may end in the middle of a line, or of an activity: its rank was killed, or still writes. An activity without an
end ends with the last line.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.timeline import EXCHANGE, INNER, PART_SUFFIX, LineKind
from omnireduce.runtime.tracing.trace import MORE_NS, Origin
from omnireduce.support.files.paths import user_path

Words = list[Any]
_decode = msgspec.json.Decoder().decode


class Event(NamedTuple):
    """An event in a row of `tensor`. `slot`: 0 for the rank's row; another number for a row beside it. `phase`: B and
    E, which nest in each row; C, which belongs to no tensor. `at`: nanoseconds of the rank's clock."""

    tensor: str
    slot: int
    phase: str
    name: str
    at: int
    details: dict[str, Any]


class Part(NamedTuple):
    """The part of one rank. `size`: bytes of the file that were read; `missed`: lines that did not fit."""

    origin: Origin
    path: Path
    size: int
    missed: int = 0


def read_parts(folder: str | Path) -> list[Part]:
    """All parts in `folder`. Other files, and files that were removed meanwhile, are left out."""
    parts = []
    for path in sorted(user_path(folder).glob(f"*{PART_SUFFIX}")):
        with contextlib.suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
            parts.append(_read_part(path))
    return parts


def _read_part(path: Path) -> Part:
    with path.open("rb") as file:
        origin = msgspec.json.decode(file.readline(), type=Origin)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1000))
        last = _line(file.read().rstrip(b"\n").rpartition(b"\n")[2])
        if last is not None and last[0] == LineKind.LAST:
            return Part(msgspec.structs.replace(origin, ended_ns=last[1]), path, size, last[2])
        ended = (last[1] if last is not None else origin.began_ns) + MORE_NS
        if is_written(path):
            ended = 1 << 62
        return Part(msgspec.structs.replace(origin, ended_ns=ended), path, size)


def is_written(path: Path) -> bool:
    """Whether a process still writes this part. False on file systems without locks."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(number)
    return False


def lines_of(part: Part) -> Iterator[Words]:
    """The lines of a part, without the first. Damaged lines are left out."""
    try:
        with part.path.open("rb") as file:
            file.readline()
            while file.tell() < part.size and (line := file.readline()):  # the file may have been replaced
                words = _line(line)
                if words is not None:
                    yield words
    except OSError as error:
        raise UsageError(f"{part.path}: cannot be read: {error.strerror or error}") from None


def _line(text: bytes) -> Words | None:
    try:
        words = _decode(text)
    except msgspec.DecodeError:
        return None
    if not (isinstance(words, list) and len(words) >= 2 and isinstance(words[0], str) and isinstance(words[1], int)):
        return None
    return words if len(words) == LENGTHS.get(words[0]) else None


LENGTHS: dict[str, int] = {
    LineKind.BEGIN: 5,
    LineKind.END: 5,
    LineKind.CYCLE: 2,
    LineKind.STARTED: 6,
    LineKind.DONE: 4,
    LineKind.LAST: 3,
}


def events_of(part: Part) -> Iterator[Event]:
    """The events of a part, in order."""
    return _Reader(part).events()


class _Reader:
    """Turns lines into events that nest."""

    def __init__(self, part: Part) -> None:
        self._part, self._last = part, part.origin.began_ns
        self._open: defaultdict[str, list[str]] = defaultdict(list)  # activities of each tensor
        self._exchanges: dict[str, dict[str, Any]] = {}  # tensors whose exchange is under way, with their totals
        self._collectives: dict[int, tuple[str, int, str]] = {}
        self._used_slots: defaultdict[str, set[int]] = defaultdict(set)  # slots of the rows of each name

    def events(self) -> Iterator[Event]:
        handlers: dict[LineKind, Callable[..., Iterator[Event]]] = {
            LineKind.BEGIN: self._begin,
            LineKind.END: self._end,
            LineKind.STARTED: self._started,
            LineKind.DONE: self._done,
            LineKind.CYCLE: lambda at: iter([Event("", 0, "C", "", at, {})]),
            LineKind.LAST: lambda at, missed: iter(()),
        }
        for kind, at, *rest in lines_of(self._part):
            self._last = max(self._last, at)
            yield from handlers[LineKind(kind)](at, *rest)
        yield from self._close()

    def _begin(self, at: int, tensor: str, activity: str, details: dict[str, Any]) -> Iterator[Event]:
        self._open[tensor].append(activity)
        if activity == EXCHANGE:
            self._exchanges[tensor] = {}
        yield Event(tensor, 0, "B", activity, at, details)

    def _end(self, at: int, tensor: str, activity: str, details: dict[str, Any]) -> Iterator[Event]:
        activities = self._open[tensor]
        if activity not in activities:
            return
        while True:
            innermost = activities.pop()
            event_details = details if innermost == activity else {}
            if innermost == EXCHANGE:
                event_details = self._exchanges.pop(tensor, {}) | event_details
            yield Event(tensor, 0, "E", innermost, at, event_details)
            if innermost == activity:
                return

    def _started(self, at: int, number: int, kind: str, name: str, details: dict[str, Any]) -> Iterator[Event]:
        if name.startswith(INNER):
            self._collectives[number] = "", 0, kind
            return
        row = name or f"{kind} {details.get('dtype', '')}{details.get('shape', '')}"
        slot = 1 if self._open.get(row) else 0  # a queue may have a tensor of this name
        while slot in self._used_slots[row]:
            slot += 1
        self._used_slots[row].add(slot)
        self._collectives[number] = row, slot, kind
        yield Event(row, slot, "B", kind.upper(), at, {})
        yield Event(row, slot, "B", f"OMNIREDUCE_{kind.upper()}", at, {})

    def _done(self, at: int, number: int, details: dict[str, Any]) -> Iterator[Event]:
        row, slot, kind = self._collectives.pop(number, ("", 0, ""))
        if not row:
            for exchange in self._exchanges.values():
                exchange |= details
            return
        self._used_slots[row].discard(slot)
        yield Event(row, slot, "E", f"OMNIREDUCE_{kind.upper()}", at, details)
        yield Event(row, slot, "E", kind.upper(), at, details)

    def _close(self) -> Iterator[Event]:
        unfinished = {"unfinished": True}
        for tensor, activities in self._open.items():
            for activity in reversed(activities):
                yield Event(tensor, 0, "E", activity, self._last, unfinished)
        for row, slot, kind in self._collectives.values():
            if row:
                yield Event(row, slot, "E", f"OMNIREDUCE_{kind.upper()}", self._last, unfinished)
                yield Event(row, slot, "E", kind.upper(), self._last, unfinished)
