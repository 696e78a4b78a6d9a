"""Output of ranks as lines, each with the rank before it.

Lines of different ranks never mix, because a line is written when it is complete. A line that is longer than LINE is
cut into several lines, each with its prefix. A carriage return ends a line, too, so each state of a progress bar is a
line.
"""

from __future__ import annotations

import logging
import os
import re
import selectors
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Protocol

from omnireduce.errors import ConfigError
from omnireduce.launch.connection import STDERR, STDOUT
from omnireduce.support.files.paths import user_path
from omnireduce.support.logs import tagged

LINE = 1 << 16  # the longest line in bytes
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}
_AT_ONCE = 4096  # PIPE_BUF: a pipe takes up to this many bytes as a whole
_LINE_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a carriage return at the end may have its line feed in the next piece
log = logging.getLogger("omnireduce")


class Sink(Protocol):
    """A destination of lines."""

    def add(self, data: bytes) -> None:
        """Take some lines."""


class LineSplitter:
    """Cuts output into lines, without their ends."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that are complete now, and pieces of a line that is too long."""
        self._rest += data
        start = 0
        for end in _LINE_ENDS.finditer(self._rest):
            line = bytes(self._rest[start : end.start()])
            if line or end[0] != b"\r":
                yield from _pieces_of_line(line)
            start = end.end()
        del self._rest[:start]
        while len(self._rest) > LINE:
            yield bytes(self._rest[:LINE])
            del self._rest[:LINE]

    def rest(self) -> bytes:
        """The last line, if it has no end."""
        rest = bytes(self._rest).rstrip(b"\r")
        self._rest.clear()
        return rest


def _pieces_of_line(line: bytes) -> Iterator[bytes]:
    yield line[:LINE]
    for start in range(LINE, len(line), LINE):
        yield line[start : start + LINE]


class LossReport:
    """Logs once that output is lost. A full disk does not end a job."""

    def __init__(self) -> None:
        self._is_reported = False

    def report(self, destination: str, error: OSError) -> None:
        """Log that output could not be written to `destination`."""
        if not self._is_reported:
            self._is_reported = True
            text = f"{destination}: {error.strerror}; output that does not fit is lost, and the job goes on"
            log.warning("%s", text, extra=tagged("output_lost"))


class PrefixedOutput:
    """The lines of all processes of a job. `sinks`: one for each stream. With `folder` each rank's output also goes to
    files there, unchanged: FOLDER/rank.N/stdout and stderr. Raises ConfigError if these cannot be made."""

    def __init__(
        self, sinks: dict[int, Sink], *, timestamps: bool = False, folder: str | None = None, ranks: int = 0
    ) -> None:
        self._sinks, self._timestamps = sinks, timestamps
        self._lines: dict[tuple[str, int], LineSplitter] = {}
        self._files: dict[tuple[str, int], IO[bytes]] = {}
        self._loss_report = LossReport()
        digits = len(str(max(0, ranks - 1)))
        for rank in range(ranks if folder is not None else 0):
            self._open(user_path(folder or ""), rank, digits)

    def _open(self, folder: Path, rank: int, digits: int) -> None:
        rank_folder = folder / f"rank.{rank:0{digits}}"
        try:
            rank_folder.mkdir(parents=True, exist_ok=True)
            for stream, name in STREAM_NAMES.items():
                self._files[str(rank), stream] = open(rank_folder / name, "wb", buffering=0)  # noqa: SIM115  see `close`
        except OSError as error:
            raise ConfigError(f"--output-filename: {rank_folder} cannot be written: {error.strerror}") from None

    def feed(self, name: str, stream: int, data: bytes) -> None:
        """Take output of process `name`."""
        if (name, stream) in self._files:
            try:
                self._files[name, stream].write(data)
            except OSError as error:
                self._loss_report.report(f"--output-filename: {STREAM_NAMES[stream]} of rank {name}", error)
        prefix = self._prefix(name, stream)
        lines = self._lines.setdefault((name, stream), LineSplitter())
        text = b"".join(prefix + line + b"\n" for line in lines.feed(data))
        if text:
            self._sinks[stream].add(text)

    def finish(self, name: str) -> None:
        """Write the last line of process `name`, if it has no end."""
        for stream in STREAM_NAMES:
            rest = self._lines.pop((name, stream), LineSplitter()).rest()
            if rest:
                self._sinks[stream].add(self._prefix(name, stream) + rest + b"\n")

    def close(self) -> None:
        """Write the last lines of all processes, and close the files."""
        for name, _ in list(self._lines):
            self.finish(name)
        for file in self._files.values():
            file.close()

    def _prefix(self, name: str, stream: int) -> bytes:
        time_text = time.ctime() if self._timestamps else ""
        return f"{time_text}[{name}]<{STREAM_NAMES[stream]}>:".encode()


class UnchangedOutput:
    """Unchanged output, for launchers that have their own prefixes."""

    def __init__(self, sinks: dict[int, Sink]) -> None:
        self._sinks = sinks

    def feed(self, _: str, stream: int, data: bytes) -> None:
        """Take output of a process."""
        self._sinks[stream].add(data)

    def finish(self, _: str) -> None:
        """Do nothing: output is passed on at once."""

    def close(self) -> None:
        """Do nothing: output is passed on at once."""


class DescriptorSink:
    """A sink that never blocks: it keeps output that the descriptor does not take, and `is_full` says if it is much.

    `is_broken`: the descriptor has no reader any more.
    """

    def __init__(self, descriptor: int, limit_bytes: int = 1 << 20) -> None:
        self.descriptor, self._limit_bytes, self._waiting = descriptor, limit_bytes, bytearray()
        self.is_broken = False
        self.always_takes = not _can_wait_for(descriptor)
        self._loss_report = LossReport()

    def add(self, data: bytes) -> None:
        """Take some lines. A file, which always takes output, gets them at once."""
        if self.is_broken:
            return
        self._waiting += data
        while self.always_takes and self._waiting:
            self.write_some()

    @property
    def waits(self) -> bool:
        """Whether output waits to be written."""
        return bool(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether ranks that write should wait."""
        return len(self._waiting) > self._limit_bytes

    def write_some(self) -> None:
        """Write a piece; call this when the descriptor is writable."""
        try:
            del self._waiting[: os.write(self.descriptor, self._waiting[:_AT_ONCE])]
        except BlockingIOError:
            pass
        except OSError as error:
            self._waiting.clear()
            if self.always_takes:
                self._loss_report.report(STREAM_NAMES.get(self.descriptor, "a sink"), error)
            else:
                self.is_broken = True


def _can_wait_for(descriptor: int) -> bool:
    """Whether a selector accepts it: a pipe, a socket or a terminal. It does not accept files and /dev/null, which
    always take output."""
    with selectors.DefaultSelector() as selector:
        try:
            selector.register(descriptor, selectors.EVENT_WRITE)
        except PermissionError:
            return False
    return True


class TextSink:
    """A sink that writes to a text stream at once, such as the output of a notebook."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def add(self, data: bytes) -> None:
        """Take some lines."""
        self._write(data.decode(errors="replace"))
