"""Log lines: one for each event, as `key=value` text or as JSON, with the job and the rank that it is about.

The library logs by `logging` under "omnireduce"; the program decides where the lines go. A record has a text. Further
fields are in `extra`:

    log.warning("rank %d left", rank, extra=tagged("rank_left", job=job, rank=rank))

`start_logs` is for programs: it writes the lines of this process to standard error. A full disk stops a host. So lines
that peers can cause have limits: lines a second for each event, and bytes a minute.

`show_debug_lines` is for the library in a program of a user: debug lines that were asked for appear, no matter how the
program logs.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, TextIO

from omnireduce.support.config.schema import Log

# events without limits, because no peer can cause them
UNLIMITED_EVENTS = {"compiling", "kernels_ready", "ready", "stopping", "stopped", "metrics", "metrics_open", "gave_up"}
UNLIMITED_EVENTS |= {"failed", "reloaded", "reload_failed"}
LINES_PER_SECOND = 20  # of each other event
BYTES_PER_MINUTE = 400_000  # of all these events together
BYTES_PER_MINUTE_OF_EVENT = 60_000  # of each of them
BYTES_PER_MINUTE_OF_DAEMON = 900_000  # of all processes of a daemon
MAX_LINE_BYTES = 4096
MIN_BYTES_PER_MINUTE = 4 * MAX_LINE_BYTES  # of a process, no matter how many processes there are
_PLAIN = re.compile(r"[\w.:@+/-]+\Z")  # needs no quotes


def tagged(name: str, **fields: object) -> dict[str, object]:
    """The `extra` of a log call: the name of the event, and its fields. Fields that are None are left out."""
    return {"event": name, "fields": fields}


class BoundLog(logging.LoggerAdapter[logging.Logger]):
    """A logger that adds `fields` to every record, such as the job and rank that the record is about."""

    def __init__(self, logger: logging.Logger, **fields: object) -> None:
        super().__init__(logger)
        self._fields = fields

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        extra = kwargs.get("extra") or {}
        kwargs["extra"] = {**extra, "fields": {**self._fields, **extra.get("fields", {})}}
        return msg, kwargs


def start_logs(settings: Log, processes: int = 1, **fields: object) -> None:
    """Write the log lines of this process to standard error from now on, each with `fields`. `processes`: the number of
    processes of the program, which share the limit of bytes."""
    handler = LimitedHandler(sys.stderr, processes)
    handler.setFormatter(_formatter(settings, fields))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def show_debug_lines(settings: Log, **fields: object) -> None:
    """If `log.level` is debug, write all lines of the library to standard error from now on, each with `fields`. A line
    that the program's own logging takes is not written twice."""
    if settings.level != "debug":
        return
    library_logger = logging.getLogger("omnireduce")
    for old_handler in [
        old_handler for old_handler in library_logger.handlers if isinstance(old_handler, _FallbackHandler)
    ]:
        library_logger.removeHandler(old_handler)
    handler = _FallbackHandler(sys.stderr)
    handler.setFormatter(_formatter(settings, fields))
    library_logger.addHandler(handler)
    library_logger.setLevel(logging.DEBUG)
    library_logger.disabled = False  # `logging.config` disables each logger that exists before it


def _formatter(settings: Log, fields: Mapping[str, object]) -> logging.Formatter:
    return (JsonLines if settings.format == "json" else TextLines)(fields)


def logs_are_json() -> bool:
    """Whether `start_logs` was told to write JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def report_left_out() -> None:
    """Write how many lines were left out before this second, if any. Programs call this now and then."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LimitedHandler):
            handler.report_left_out(time.time())


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines within the limits above. A separate line says how many lines were left out.

    This line comes before the next line of a later second, or when `report_left_out` is called. If this minute's bytes
    are used up, it comes in the next minute.
    """

    def __init__(self, stream: TextIO, processes: int = 1) -> None:
        super().__init__(stream)
        self._limit_bytes = min(BYTES_PER_MINUTE, max(MIN_BYTES_PER_MINUTE, BYTES_PER_MINUTE_OF_DAEMON // processes))
        self._event_limit_bytes = min(BYTES_PER_MINUTE_OF_EVENT, max(2 * MAX_LINE_BYTES, self._limit_bytes // 4))
        self._second = self._minute = 0
        self._lines = Counter[str]()  # lines of each event in this second
        self._bytes = Counter[str]()  # bytes of each event in this minute
        self._left_out = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it."""
        self._pass_time(record.created)
        event = getattr(record, "event", "message")
        if event not in UNLIMITED_EVENTS and not self._has_room(event):
            self._left_out[event] += 1
            return
        try:
            line = self.format(record) + self.terminator
        except Exception:
            self.handleError(record)
            return
        if event not in UNLIMITED_EVENTS:
            self._lines[event] += 1
            self._bytes[event] += len(line.encode(errors="replace"))
        self._write(line, record)

    def _has_room(self, event: str) -> bool:
        """Whether there is room for one more line of any length."""
        in_minute = (
            self._bytes[event] + MAX_LINE_BYTES <= self._event_limit_bytes
            and self._bytes.total() + MAX_LINE_BYTES <= self._limit_bytes
        )
        return in_minute and self._lines[event] < LINES_PER_SECOND

    def report_left_out(self, now: float) -> None:
        """Write how many lines were left out before the second of `now`."""
        if self._left_out:
            with self.lock or nullcontext():
                self._pass_time(now)

    def _pass_time(self, now: float) -> None:
        if int(now) == self._second:
            return
        self._second = int(now)
        self._lines.clear()
        if int(now) // 60 != self._minute:
            self._minute = int(now) // 60
            self._bytes.clear()
        if self._left_out and self._bytes.total() + MAX_LINE_BYTES <= self._limit_bytes:
            counts = dict(self._left_out.most_common())
            self._left_out.clear()
            text = f"{sum(counts.values())} lines were too many for the log"
            record = logging.makeLogRecord({"name": __name__, "msg": text, "created": now, "levelno": logging.WARNING})
            record.__dict__ |= {"levelname": "WARNING", **tagged("left_out", events=counts)}
            line = self.format(record) + self.terminator
            self._bytes["left_out"] += len(line.encode(errors="replace"))
            self._write(line, record)

    def _write(self, line: str, record: logging.LogRecord) -> None:
        try:
            self.stream.write(line)
            self.flush()
        except Exception:
            self.handleError(record)


class _FallbackHandler(LimitedHandler):
    """Writes the lines that no handler of the root logger takes."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(record.levelno >= handler.level for handler in logging.getLogger().handlers):
            super().emit(record)


class _LineFormatter(logging.Formatter):
    def __init__(self, fields: Mapping[str, object], write: Callable[[dict[str, object]], str]) -> None:
        super().__init__()
        self._fields, self._write = fields, write

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "message"),
            "pid": record.process,
            **self._fields,
            **getattr(record, "fields", {}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = {key: value for key, value in line.items() if value is not None}
        written = self._write(fields)
        room = MAX_LINE_BYTES // 2
        while len(written.encode(errors="replace")) >= MAX_LINE_BYTES:  # >=, because the end of the line counts, too
            fields = {key: _shorten(value, room) for key, value in fields.items()}
            written, room = self._write(fields), room // 2
        return written


class JsonLines(_LineFormatter):
    """Each record as one JSON object on one line."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields, lambda line: json.dumps(line, default=str))


class TextLines(_LineFormatter):
    """Each record as `key=value` pairs on one line; a value that is no plain word is in quotes."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields, lambda line: " ".join(f"{key}={_text(value)}" for key, value in line.items()))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=not text.isprintable())


def _shorten(value: object, limit: int) -> object:
    """A number as it is. Any other value as a text; a text with more than `limit` characters loses its middle."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= limit or isinstance(value, int | float):
        return value
    return f"{text[: limit // 2]} [...] {text[len(text) - limit // 2 :]}"
