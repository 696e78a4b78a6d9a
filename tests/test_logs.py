"""Log lines: what is in them, and that each stays one line."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnireduce.aggregator.children import process_count
from omnireduce.errors import UsageError
from omnireduce.support.cli import reporting_errors
from omnireduce.support.config import Log, load_config
from omnireduce.support.logs import (
    BYTES_PER_MINUTE_OF_EVENT,
    LINES_PER_SECOND,
    MAX_LINE_BYTES,
    UNLIMITED_EVENTS,
    BoundLog,
    JsonLines,
    LimitedHandler,
    TextLines,
    report_left_out,
    show_debug_lines,
    start_logs,
    tagged,
)

log = logging.getLogger("omnireduce.test_logs")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The root logger is everybody's, and that of the library is all its tests'."""
    root, ours = logging.getLogger(), logging.getLogger("omnireduce")
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # `start_logs` would close them
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.handlers.clear()
    ours.setLevel(logging.NOTSET)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: capsys.readouterr().err.splitlines()


def test_a_line_of_json(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(format="json"), shard="a:7400")
    log.warning("rank %d is late", 1, extra=tagged("waiting", job="train", rank=1, ranks=None))
    [line] = lines()
    report = json.loads(line)
    assert list(report) == ["time", "level", "event", "pid", "shard", "job", "rank", "message"]
    assert report["time"].endswith("+00:00")
    assert (report["level"], report["event"], report["shard"]) == ("warning", "waiting", "a:7400")
    assert (report["job"], report["rank"], report["message"]) == ("train", 1, "rank 1 is late")


def test_a_line_of_text(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(), shard="[::1]:7400")
    log.info("job 'x' \"y\"", extra=tagged("waiting", job="x", ranks=[1, 2], empty=""))
    [line] = lines()
    assert " level=info event=waiting pid=" in line
    assert line.endswith(r"""shard="[::1]:7400" job=x ranks="[1, 2]" empty="" message="job 'x' \"y\"" """.strip())


@pytest.mark.parametrize("settings", [Log(), Log(format="json")], ids=lambda each: each.format)
def test_every_event_is_one_line(settings: Log, lines: Callable[[], list[str]]) -> None:
    start_logs(settings)
    log.info("two\nlines\u2028and\x1b[31m", extra=tagged("odd", value="a\nb"))
    try:
        raise ValueError("no\nway")
    except ValueError:
        log.exception("a bug")
    logging.getLogger("elsewhere").warning("not ours")
    result = lines()
    assert len(result) == 3, result
    assert "Traceback" in result[1]
    assert "test_logs.py" in result[1]
    assert "not ours" in result[2]


def test_the_level_counts(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(level="warning"))
    log.info("quiet")
    log.warning("loud")
    assert ["loud" in line for line in lines()] == [True]


@pytest.mark.parametrize("formatter", [JsonLines, TextLines])
def test_fields_of_a_bound_log_join_those_of_the_record(
    formatter: type[JsonLines], caplog: pytest.LogCaptureFixture
) -> None:
    bound = BoundLog(log, job="j", rank=0)
    with caplog.at_level("INFO", logger=log.name):
        bound.info("plain")
        bound.info("tagged", extra=tagged("left", rank=2, seconds=1.5))
    first, second = (formatter({}).format(record) for record in caplog.records)
    assert "left" in second
    if formatter is JsonLines:
        assert (json.loads(first)["rank"], json.loads(first)["event"]) == (0, "message")
        assert {"job": "j", "rank": 2, "seconds": 1.5}.items() <= json.loads(second).items()
    else:
        assert "event=message" in first
        assert "job=j rank=2 seconds=1.5" in second


@pytest.mark.parametrize(
    ("settings", "expected"), [(Log(), "Error: two lines"), (Log(format="json"), "two lines")], ids=["text", "json"]
)
def test_the_error_that_ends_a_program(settings: Log, expected: str, lines: Callable[[], list[str]]) -> None:
    start_logs(settings)
    with pytest.raises(SystemExit), reporting_errors():
        raise UsageError("two\nlines")
    [line] = lines()
    if settings.format == "json":
        assert (json.loads(line)["event"], json.loads(line)["level"]) == ("failed", "critical")
        line = json.loads(line)["message"]
    assert line == expected


def with_dict(**more: Any) -> None:
    """As programs configure logging that show little on a terminal. It closes all handlers that there are: not those of
    libraries that other tests have imported, which may close pytest's own files."""
    logging._handlerList.clear()
    quiet = {"class": "logging.StreamHandler", "level": "WARNING"}
    logging.config.dictConfig({"version": 1, "handlers": {"a": quiet}, "root": {"handlers": ["a"]}, **more})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda: None, lambda: None),
        (lambda: logging.basicConfig(level="INFO"), lambda: None),
        (lambda: None, lambda: logging.basicConfig(level="INFO")),
        (lambda: logging.basicConfig(level="INFO"), lambda: logging.basicConfig(level="WARNING", force=True)),
        (with_dict, lambda: None),
        (lambda: None, lambda: with_dict(disable_existing_loggers=False)),
        (lambda: start_logs(Log()), lambda: None),
    ],
)
def test_debug_lines_that_were_asked_for_do_not_depend_on_the_programs_logging(
    before: Callable[[], None], after: Callable[[], None], lines: Callable[[], list[str]]
) -> None:
    """Each is there once, also when the process joins a second job."""
    logging.getLogger().handlers.clear()  # pytest's own, which take all lines
    before()
    for _ in range(2):
        show_debug_lines(Log(level="debug"), rank=3)
    after()
    logging.getLogger("omnireduce").debug("a detail")
    logging.getLogger("omnireduce").warning("a warning")
    result = "\n".join(lines())
    assert (result.count("a detail"), result.count("a warning")) == (1, 1)


def test_debug_lines_of_the_library_that_nobody_asked_for(lines: Callable[[], list[str]]) -> None:
    show_debug_lines(Log(), rank=3)
    logging.getLogger("omnireduce").debug("a detail")
    logging.getLogger("omnireduce").info("a word")
    assert lines() == []


class Flood:
    """A limited handler and what it has written, at a time of the test's choice."""

    def __init__(self, processes: int = 1) -> None:
        self.stream = io.StringIO()
        self.handler = LimitedHandler(self.stream, processes)
        self.handler.setFormatter(JsonLines({}))
        self.bytes = 0

    def log(self, second: float, event: str, text: str = "x", **options: Any) -> list[dict[str, Any]]:
        """Log a record; return the lines that this wrote."""
        self.handler.handle(logging.makeLogRecord({"created": second, "msg": text, **tagged(event), **options}))
        return self.written()

    def written(self) -> list[dict[str, Any]]:
        text = self.stream.getvalue()
        self.bytes += len(text.encode())
        self.stream.seek(0)
        self.stream.truncate()
        assert all(len(line.encode()) < MAX_LINE_BYTES for line in text.splitlines())
        return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("event", ["refused", "job_ended", "waiting", "hello", "message"])
def test_of_every_event_there_are_a_few_lines_a_second(event: str) -> None:
    """The next line of a later second says what was left out, whatever that line is about."""
    flood = Flood()
    assert len([each for i in range(50) for each in flood.log(7.0 + i / 100, event)]) == LINES_PER_SECOND
    [other] = flood.log(7.5, "no_verbs")
    assert other["event"] == "no_verbs"
    summary, line = flood.log(9.0, "no_verbs")
    assert (summary["event"], summary["level"], summary["events"][event]) == (
        "left_out",
        "warning",
        50 - LINES_PER_SECOND,
    )
    assert summary["message"] == f"{50 - LINES_PER_SECOND} lines were too many for the log"
    assert line["event"] == "no_verbs"
    assert len(flood.log(9.1, event)) == 1
    assert len(flood.log(5.0, event)) == 1  # a clock that is set back


def test_what_was_left_out_is_told_without_a_further_line() -> None:
    flood = Flood()
    for _ in range(LINES_PER_SECOND + 3):
        flood.log(7.0, "refused")
    flood.handler.report_left_out(7.9)
    assert flood.written() == []
    flood.handler.report_left_out(8.0)
    [summary] = flood.written()
    assert summary["events"] == {"refused": 3}
    flood.handler.report_left_out(9.0)
    assert flood.written() == []


@pytest.mark.parametrize("text", ["x", "y" * 500, "z" * 100_000, "\u0007" * 3000])
def test_a_flood_of_anything_has_a_bound(text: str) -> None:
    """All events of the product at once, for two minutes; what no peer can cause comes through all the while."""
    flood, events, ready = Flood(), sorted(all_events() - UNLIMITED_EVENTS), 0
    for second in range(600, 720):
        for event in events:
            for _ in range(LINES_PER_SECOND + 1):
                flood.log(second, event, text)
        ready += sum(each["event"] == "ready" for each in flood.log(second, "ready"))
    assert ready == 120
    assert 2 * BYTES_PER_MINUTE_OF_EVENT < flood.bytes < 1_000_000
    assert flood.log(720.0, "refused")[-1]["event"] == "refused"


@pytest.mark.parametrize("shards", [1, 4, 48])
@pytest.mark.parametrize("metrics", ["", "127.0.0.1:0"])
def test_the_processes_of_a_daemon_share_a_bound(shards: int, metrics: str) -> None:
    """Each may be flooded with all events. What was left out still is told, if later."""
    settings = [f"aggregator.shards={shards}", f"metrics.listen={metrics}"]
    count = process_count(load_config(overrides=settings, environ={}))
    assert count == shards + 1 + bool(metrics)
    flood, events, left_out, lines = Flood(count), sorted(all_events() - UNLIMITED_EVENTS - {"left_out"}), 0, 0
    for second in range(600, 661):
        for event in events:
            for _ in range(LINES_PER_SECOND + 1):
                results = flood.log(second, event, "y" * 500)
                left_out += sum(sum(result["events"].values()) for result in results if result["event"] == "left_out")
                lines += sum(result["event"] != "left_out" for result in results)
        if second == 659:
            assert 2 * MAX_LINE_BYTES < flood.bytes < 1_000_000 / count
    assert left_out + lines > 60 * len(events) * (LINES_PER_SECOND + 1)


def test_a_long_traceback_keeps_its_ends() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("the end " + "." * 10_000)

    flood = Flood()
    try:
        deep(300)
    except ValueError:
        [line] = flood.log(1.0, "internal_error", "a bug " * 5000, exc_info=sys.exc_info())
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("...")
    assert line["message"].startswith("a bug")
    assert line["time"].startswith("1970")


def test_a_flood_on_standard_error(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(format="json", level="debug"))
    for number in range(1000):
        log.warning("refused %d", number, extra=tagged("refused", peer="p"))
        log.debug("hello %d", number, extra=tagged("hello"))
    for _ in range(20):
        log.info("ready", extra=tagged("ready"))
    reports = [json.loads(line) for line in lines()]
    assert sum(report["event"] == "ready" for report in reports) == 20
    seconds = {report["time"][:19] for report in reports}
    for event in ("refused", "hello"):
        assert 0 < sum(report["event"] == event for report in reports) <= LINES_PER_SECOND * len(seconds) < 1000
    report_left_out()


def all_events() -> set[str]:
    root = Path(__file__).parent.parent
    folders = ("omnireduce", "aggregator", "worker")
    sources = [file.read_text() for folder in folders for file in root.rglob(f"{folder}/**/*.py")]
    names = {name for source in sources for name in re.findall(r'(?:tagged|log_fields)\(\s*"(\w+)"', source)}
    return names | {f"{kind}_{what}" for kind in ("shard", "monitor") for what in ("died", "killed")}


def test_every_event_is_in_the_documentation() -> None:
    root, events = Path(__file__).parent.parent, all_events()
    rows = (root / "docs" / "operations.md").read_text().split("| event | level |")[1].split("\n\n")[0].splitlines()
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert {"refused", "job_started", "metrics_request"} <= events
    assert events <= documented
    assert events >= UNLIMITED_EVENTS


def test_standard_error_is_the_place() -> None:
    start_logs(Log())
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr
