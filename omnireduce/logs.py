"""Log lines: one for each event, as `key=value` text or as JSON, with the job and the rank that it is about.

The library logs by `logging` under "omnireduce" and leaves it to the program where that goes. What a record tells
beside its text travels in `extra`:

    log.warning("rank %d left", rank, extra=tagged("rank_left", job=job, rank=rank))

`start_logs` is for programs: it writes the lines of this process to standard error, of what strangers can cause a few
a second.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

from omnireduce.config_schema import Log

OF_STRANGERS = {
    *("hello", "refused", "dropped", "turned_away", "accept_failed", "newcomer_lost", "internal_error"),
    "metrics_refused",
}
A_SECOND = 10  # lines of each of these events
_PLAIN = re.compile(r"[\w.:@+/-]+\Z")  # needs no quotes


def tagged(name: str, **fields: object) -> dict[str, object]:
    """The `extra` of a log call: what happened, and its fields. Those that are None are left out."""
    return {"event": name, "fields": fields}


class BoundLog(logging.LoggerAdapter[logging.Logger]):
    """A logger whose every record has `fields` as well, such as the job and rank that it speaks of."""

    def __init__(self, logger: logging.Logger, **fields: object) -> None:
        super().__init__(logger)
        self._fields = fields

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        given = kwargs.get("extra") or {}
        kwargs["extra"] = {**given, "fields": {**self._fields, **given.get("fields", {})}}
        return msg, kwargs


def start_logs(settings: Log, **fields: object) -> None:
    """Write the log lines of this process to standard error from now on, each with `fields`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(FloodFilter())
    handler.setFormatter((JsonLines if settings.format == "json" else TextLines)(fields))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)


def logs_are_json() -> bool:
    """Whether `start_logs` was told to write JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


class FloodFilter(logging.Filter):
    """Passes A_SECOND records of each event that strangers can cause in a second. The next one that passes says in
    `left_out` how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[int, int]] = {}  # by event: the second, and how many came in it

    def filter(self, record: logging.LogRecord) -> bool:
        event = getattr(record, "event", "")
        if event not in OF_STRANGERS:
            return True
        second, count = self._seen.get(event, (0, 0))
        left_out = 0
        if int(record.created) != second:
            left_out, second, count = max(0, count - A_SECOND), int(record.created), 0
        self._seen[event] = second, count + 1
        if left_out:
            record.fields = {**getattr(record, "fields", {}), "left_out": left_out}
        return count < A_SECOND


class _Lines(logging.Formatter):
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
        return self._write({key: value for key, value in line.items() if value is not None})


class JsonLines(_Lines):
    """Each record as one JSON object on one line."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields, lambda line: json.dumps(line, default=str))


class TextLines(_Lines):
    """Each record as `key=value` pairs on one line; a value that is no plain word stands in quotes."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(fields, lambda line: " ".join(f"{key}={_text(value)}" for key, value in line.items()))


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=not text.isprintable())
