"""Lines about long work, with a clock that the test moves."""

from __future__ import annotations

import pytest

from omnireduce.progress import EVERY_S, PlainProgress


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
    PlainProgress(0.0).at("bench: round 7 of 20", EVERY_S)
    assert capsys.readouterr() == ("", "bench: round 7 of 20\n")
