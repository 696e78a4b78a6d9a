"""Lines about long work, with a clock that the test moves."""

from __future__ import annotations

import threading

import pytest

from omnireduce.support.progress import EVERY_S, PlainProgress, Throttle, Ticker


def lines_of(seconds_per_item: float, items: int, start: float = 100.0) -> list[str]:
    lines: list[str] = []
    times = iter([start + number * seconds_per_item for number in range(items)])
    progress = PlainProgress(start, lines.append)
    assert list(progress.follow(range(items), "train: step", lambda: next(times))) == list(range(items))
    return lines


def test_short_work_says_nothing() -> None:
    assert lines_of(EVERY_S / 10, 10) == []


def test_long_work_says_where_it_is_at_every_interval() -> None:
    assert lines_of(EVERY_S / 10, 31) == [f"train: step {number} of 31" for number in (11, 21, 31)]


def test_slow_items_get_one_line_each() -> None:
    assert lines_of(3 * EVERY_S, 3) == ["train: step 2 of 3", "train: step 3 of 3"]


def test_the_interval_runs_on_across_parts_of_the_work() -> None:
    lines: list[str] = []
    progress = PlainProgress(0.0, lines.append)
    for now in (0.0, 0.6 * EVERY_S):
        list(progress.follow(range(2), "bench: case 1, round", lambda now=now: now))
    list(progress.follow(range(2), "bench: case 2, round", lambda: 1.2 * EVERY_S))
    assert lines == ["bench: case 2, round 1 of 2"]


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress(0.0).write_if_due("bench: round 7 of 20", EVERY_S)
    assert capsys.readouterr() == ("", "bench: round 7 of 20\n")


def test_seldom() -> None:
    reports, now = list[int](), [100.0]
    tell = Throttle(lambda ready, total: reports.append(ready), lambda: now[0])
    for step in range(31):
        tell(step, 31)
        now[0] += EVERY_S / 10
    assert reports == [0, 10, 20, 30]


def test_a_ticker_hands_on_what_it_raises() -> None:
    calls, is_called = list[int](), threading.Event()

    def tell() -> None:
        calls.append(1)
        is_called.set()
        raise ConnectionResetError

    def tick() -> None:
        with Ticker(tell, 0.001) as ticker:
            assert is_called.wait(30.0)
            while True:
                ticker.check()

    with pytest.raises(ConnectionResetError):
        tick()
    is_called.clear()
    with pytest.raises(ConnectionResetError), Ticker(tell, 0.001):
        assert is_called.wait(30.0)
    with pytest.raises(ValueError, match="the block's own"), Ticker(tell, 60.0):
        raise ValueError("the block's own")
    assert len(calls) == 2
