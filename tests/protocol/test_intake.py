"""Jobs that a draining shard still takes, the end of the shard, and jobs that somebody has ended."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_hellos import LIMITS, come, hello, running

from omnireduce.core.wire.control import Pending, Refused
from omnireduce.protocol.joining.admission import Admission, Admit, Answer
from omnireduce.protocol.joining.intake import DRAINING, MAX_ENDED, SHUTTING_DOWN, Intake

FIXED = {"min_ranks": 0, "last_call_s": 0.0}
WHY = "the operator ended this job"


def drained(admission: Admission) -> Admission:
    admission.intake.drain(admission.hellos_in_memory)
    return admission


def refusal(effects: list[Any]) -> tuple[str, bool]:
    (answer,) = effects
    assert isinstance(answer.message, Refused)
    return answer.message.reason, answer.message.temporary


def test_a_job_that_gathers_may_begin_and_a_new_one_may_not() -> None:
    admission = Admission(LIMITS)
    come(admission, 0, max_ranks=2, **FIXED)
    drained(admission)
    assert refusal(come(admission, 1, max_ranks=2, job="new", **FIXED)) == (DRAINING, True)
    (admit,) = come(admission, 1, max_ranks=2, **FIXED)
    assert isinstance(admit, Admit)
    assert refusal(come(admission, 0, max_ranks=2, **FIXED)) == (DRAINING, True)  # a second start of it is a new job


def test_an_elastic_job_may_be_formed_anew_and_taken_up_again() -> None:
    admission = Admission(LIMITS)
    first = running(admission, 0, 1)
    drained(admission)
    assert isinstance(come(admission, 5, max_ranks=2)[0].message, Pending)  # it was started again
    admission.connection_ended(5, 0.0)
    admission.finished(first.generation, 0.0)
    admission.released(first.generation)
    come(admission, 0, max_ranks=2, survivor=True)
    (again,) = come(admission, 1, max_ranks=2, survivor=True)
    assert isinstance(again, Admit)
    assert refusal(come(admission, 2, max_ranks=1, job="other")) == (DRAINING, True)


def test_a_formation_of_a_job_that_began_while_it_drained_is_known() -> None:
    admission, there = Admission(LIMITS), {"shard": 1, "shards": 2, "min_ranks": 0, "max_ranks": 2}
    come(admission, 0, formation=7, **there)
    drained(admission)
    assert isinstance(come(admission, 1, formation=7, **there)[0], Admit)
    assert isinstance(come(admission, 2, formation=8, **(there | {"max_ranks": 3}))[0].message, Pending)
    assert refusal(come(admission, 1, formation=8, job="new", **there)) == (DRAINING, True)


def test_what_is_taken_back_is_forgotten() -> None:
    admission = drained(Admission(LIMITS))
    admission.intake.resume()
    assert isinstance(come(admission, 0)[0].message, Pending)
    assert refusal(list(admission.turn_away())) == (SHUTTING_DOWN, True)
    for change in (admission.intake.resume, lambda: admission.intake.drain([])):
        change()  # a shard that stops goes on to stop
        assert refusal(come(admission, 1)) == (SHUTTING_DOWN, True)


def test_a_job_that_was_ended_does_not_come_back() -> None:
    """Not its survivors, nor those of its launch who are started again; who waits for it is refused at once."""
    admission = Admission(LIMITS)
    old = running(admission, 0, 1)
    come(admission, 7, max_ranks=2)
    answers = list(admission.end(lambda spec: spec.job == "job", WHY, 5.0))
    assert answers == [Answer(7, Refused(WHY))]
    admission.finished(old.generation, 5.0)
    assert refusal(come(admission, 0, max_ranks=2, survivor=True, now=6.0)) == (WHY, False)
    assert isinstance(come(admission, 1, max_ranks=2, now=6.0)[0].message, Pending)  # by hand: perhaps another start
    admission.connection_ended(1, 6.0)
    late = 5.0 + LIMITS.join_timeout_s
    assert isinstance(come(admission, 0, max_ranks=2, survivor=True, now=late)[0].message, Pending)


def test_survivors_that_have_left_before_the_shard_hears_of_the_end_are_refused() -> None:
    """Another shard has told them. Those of a later start, which has the same name, are not meant."""
    admission = Admission(LIMITS)
    old = running(admission, 0, 1)
    admission.finished(old.generation, 4.0)
    assert list(admission.end(lambda spec: spec.job == "job", WHY, 5.0)) == []
    assert refusal(come(admission, 0, max_ranks=2, survivor=True, now=6.0)) == (WHY, False)
    new = running(admission, 2, 3)
    admission.finished(new.generation, 6.0)
    survivor = hello(2, max_ranks=2, survived=new.hellos[0].formation, ticket=new.hellos[0].ticket)
    (answer,) = admission.hello(2, survivor, 7.0)
    assert isinstance(answer.message, Pending)


def test_of_a_launch_nobody_comes_back() -> None:
    admission = Admission(LIMITS)
    come(admission, 0, launch="one", max_ranks=2, **FIXED)
    list(admission.end(lambda spec: True, WHY, 0.0))
    assert refusal(come(admission, 1, launch="one", max_ranks=2, **FIXED)) == (WHY, False)
    assert isinstance(come(admission, 1, launch="two", max_ranks=2, **FIXED)[0].message, Pending)
    assert isinstance(come(admission, 0, launch="one", max_ranks=2, job="other", **FIXED)[0].message, Pending)


def test_only_those_that_are_meant_end() -> None:
    admission = Admission(LIMITS)
    come(admission, 0, job="a")
    come(admission, 1, job="b")
    assert list(admission.end(lambda spec: spec.job == "b", WHY, 0.0)) == [Answer(1, Refused(WHY))]
    assert admission.gathers == 1


def test_a_shard_remembers_a_bounded_number_of_jobs() -> None:
    intake = Intake(30.0)
    for number in range(MAX_ENDED + 3):
        intake.end(hello(0, job=f"job{number}", launch="x"), WHY, 0.0)
    assert len(intake._ended) == MAX_ENDED
    assert intake.objection(hello(0, job="job2", launch="x"), 1.0, gathers=False) == ("", False)
    assert intake.objection(hello(0, job="job3", launch="x"), 1.0, gathers=False) == (WHY, False)
    intake.end(hello(0, job="late", launch="x"), WHY, 40.0)
    assert len(intake._ended) == 1


@pytest.mark.parametrize("state", ["open", "draining"])
def test_a_second_drain_changes_nothing(state: str) -> None:
    intake = Intake(30.0)
    if state == "draining":
        intake.drain([hello(0)])
    intake.drain([])
    assert intake.objection(hello(1, survived=3), 0.0, gathers=False)[0] == ("" if state == "draining" else DRAINING)
