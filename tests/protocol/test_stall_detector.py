"""A shard that waits, and one that stood still: who lost the time."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.protocol.stalls import LONGEST_PAUSE_S, StallDetector

AFTER_S = 1.0


def turns(quiet: StallDetector, times: Iterable[float]) -> list[float]:
    """For how long the shard stood still before each of its turns at `times`."""
    return [quiet.turn(now) for now in times]


def test_it_says_whom_it_waits_for_after_a_second_and_each_time_that_the_wait_has_doubled() -> None:
    quiet, now, reports = StallDetector(AFTER_S), 0.0, []
    quiet.begin(now)
    while now < 20:
        now = quiet.deadline
        assert quiet.turn(now) == 0
        if quiet.is_due(now):
            reports.append(now - quiet.since)
    assert reports == [1, 2, 4, 8, 16]


def test_time_in_which_it_stood_still_is_no_wait() -> None:
    quiet = StallDetector(AFTER_S)
    quiet.begin(0.0)
    assert turns(quiet, [0.5, 1.5, 31.5]) == [0, 0, 29]
    assert 31.5 - quiet.since == 2.5
    assert quiet.is_due(31.5)


@pytest.mark.parametrize("before", [[], [1.0], [1.0, 2.0]], ids=["none", "one", "two"])
def test_a_pause_is_seen_wherever_it_begins(before: list[float]) -> None:
    """Before, at and after a time when it says whom it waits for."""
    quiet = StallDetector(AFTER_S)
    quiet.begin(0.0)
    for now in before:
        quiet.turn(now)
        quiet.is_due(now)
    begin = before[-1] if before else 0.0
    assert quiet.turn(begin + 10) == 9


def test_a_shard_that_had_nothing_to_do_did_not_stand_still() -> None:
    quiet = StallDetector(AFTER_S)
    quiet.begin(0.0)
    quiet.turn(0.5)
    quiet.begin(100.0)
    assert quiet.turn(100.0) == 0
    assert quiet.deadline == 101


@given(st.lists(st.floats(0, 100), max_size=20))
def test_what_it_waited_and_what_it_stood_still_make_up_all_the_time(gaps: list[float]) -> None:
    quiet, now, still_s = StallDetector(AFTER_S), 0.0, 0.0
    quiet.begin(now)
    for gap in gaps:
        now += gap
        still_s += quiet.turn(now)
        assert quiet.since <= now < quiet.deadline or quiet.is_due(now)
    assert quiet.since == pytest.approx(still_s)


def test_one_warning_of_waits_that_ranks_report_is_enough() -> None:
    quiet = StallDetector(AFTER_S)
    assert quiet.may_warn(5.0, 10.0)
    assert not quiet.may_warn(6.0, 14.9)
    assert quiet.may_warn(1e9, 15.0)
    assert not quiet.may_warn(1e9, 14.9 + LONGEST_PAUSE_S)
    assert quiet.may_warn(1e9, 15.0 + LONGEST_PAUSE_S)
