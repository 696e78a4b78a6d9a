"""Log lines: what is in them, and that each stays one line."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from omnireduce.cli import reporting_errors
from omnireduce.config import Log
from omnireduce.errors import UsageError
from omnireduce.logs import (
    A_SECOND,
    OF_STRANGERS,
    BoundLog,
    FloodFilter,
    JsonLines,
    TextLines,
    start_logs,
    tagged,
)

log = logging.getLogger("omnireduce.test_logs")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The root logger is everybody's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # `start_logs` would close them
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    return lambda: capsys.readouterr().err.splitlines()


def test_a_line_of_json(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(format="json"), shard="a:7400")
    log.warning("rank %d is late", 1, extra=tagged("waiting", job="train", rank=1, ranks=None))
    [line] = lines()
    found = json.loads(line)
    assert list(found) == ["time", "level", "event", "pid", "shard", "job", "rank", "message"]
    assert found["time"].endswith("+00:00")
    assert (found["level"], found["event"], found["shard"]) == ("warning", "waiting", "a:7400")
    assert (found["job"], found["rank"], found["message"]) == ("train", 1, "rank 1 is late")


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
    found = lines()
    assert len(found) == 3, found
    assert "Traceback" in found[1]
    assert "test_logs.py" in found[1]
    assert "not ours" in found[2]


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


@pytest.mark.parametrize("event", sorted(OF_STRANGERS))
def test_of_what_strangers_can_cause_there_are_a_few_lines_a_second(event: str) -> None:
    """Those that are left out are counted on the next line. What jobs cause is not limited."""
    flood = FloodFilter()

    def passes(second: float, event: str) -> list[int]:
        record = logging.makeLogRecord({"created": second, **tagged(event, peer="p")})
        if not flood.filter(record):
            return []
        assert record.fields["peer"] == "p"
        return [record.fields.get("left_out", 0)]

    assert [each for i in range(50) for each in passes(7.0 + i / 100, event)] == [0] * A_SECOND
    assert [each for _ in range(50) for each in passes(7.5, "job_ended")] == [0] * 50
    assert passes(9.0, event) == [50 - A_SECOND]
    assert [each for i in range(50) for each in passes(9.1, event)] == [0] * (A_SECOND - 1)
    assert passes(5.0, event) == [51 - A_SECOND]  # a clock that is set back


def test_a_flood_on_standard_error(lines: Callable[[], list[str]]) -> None:
    start_logs(Log(format="json"))
    for number in range(1000):
        log.warning("refused %d", number, extra=tagged("refused", peer="p"))
        log.warning("ended %d", number, extra=tagged("job_ended"))
    found = [json.loads(line) for line in lines()]
    refused = [each for each in found if each["event"] == "refused"]
    assert len(found) - len(refused) == 1000
    seconds = {each["time"][:19] for each in refused}
    assert len(refused) <= A_SECOND * len(seconds) < 1000


def test_every_event_is_in_the_documentation() -> None:
    root = Path(__file__).parent.parent
    sources = [
        file.read_text()
        for folder in ("omnireduce", "aggregator", "worker")
        for file in root.rglob(f"{folder}/**/*.py")
    ]
    events = {name for source in sources for name in re.findall(r'(?:tagged|about)\(\s*"(\w+)"', source)}
    rows = (root / "docs" / "operations.md").read_text().split("| event | level |")[1].split("\n\n")[0].splitlines()
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert {"refused", "job_started", "metrics_request"} <= events
    assert events <= documented
    assert events >= OF_STRANGERS


def test_standard_error_is_the_place() -> None:
    start_logs(Log())
    [handler] = logging.getLogger().handlers
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr
