"""Survivors of an elastic job, and the proof of it: cases by name."""

from __future__ import annotations

from typing import Any

import pytest
from elastic_hellos import LIMITS, OF_TWO_PAIRS, SETTLE_S, come, hello, places, running
from msgspec.structs import replace

from omnireduce.core.wire.control import Pending, Refused
from omnireduce.protocol.joining.admission import Admission, Admit, Answer, Replace
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.tickets import ticket
from omnireduce.support.config.schema import TeamLimits
from omnireduce.support.teams import NO_LIMITS


@pytest.mark.parametrize("ticket_says", [b"", b"x" * 32])
@pytest.mark.parametrize("survived", [1, 2, 99])
def test_who_was_not_in_the_job_ends_nothing(survived: int, ticket_says: bytes) -> None:
    """It waits as a newcomer does, and the job is well."""
    admission = Admission(LIMITS, key=b"of this daemon")
    old = running(admission, 0, 1)
    (answer,) = admission.hello("stranger", hello(2, max_ranks=2, survived=survived, ticket=ticket_says), 1.0)
    assert answer == Answer("stranger", Pending([0, 1], 2))
    assert not any(isinstance(each, Replace) for each in admission.expire(1000.0))
    assert admission._running.keys() == {old.generation}


def test_who_was_left_behind_earlier_is_a_newcomer_to_those_who_went_on() -> None:
    admission = Admission(LIMITS)
    first = running(admission, 0, 1, 2)
    admission.finished(first.generation, 0.0)
    come(admission, 0, 1, survivor=True)
    (second,) = admission.expire(SETTLE_S)
    assert isinstance(second, Admit)
    come(admission, 2, now=6.0, survived=first.hellos[2].formation)
    assert not any(isinstance(each, Replace) for each in admission.expire(1000.0))


@pytest.mark.parametrize("other", [{"team": "other"}, {"job": "other"}, {"launch": "other"}])
def test_a_ticket_is_for_one_team_job_and_launch(other: dict[str, Any]) -> None:
    admission = Admission(LIMITS)
    (there,) = come(admission, 0, 1, max_ranks=2, **other)
    assert isinstance(there, Admit)
    mine = hello(2, max_ranks=2, survived=there.hellos[0].formation)
    (answer,) = admission.hello("foreign", replace(mine, **other), 1.0)
    assert isinstance(answer.message, Pending)
    assert not any(isinstance(each, Replace) for each in admission.expire(1000.0))


def test_after_a_restart_of_the_daemon_survivors_are_believed_but_put_nobody_out() -> None:
    admission = Admission(LIMITS, key=b"new")
    list(admission.hello("newcomer", hello(0), 0.0))
    (answer,) = admission.hello("claims", hello(0, survived=7), 0.0)
    assert "already in job" in answer.message.reason
    assert answer.message.temporary  # the newcomer may give up
    admission.connection_ended("newcomer", 1.0)
    list(admission.hello("claims", hello(0, survived=7), 1.0))
    list(admission.hello("claims, too", hello(2, survived=7), 1.0))
    (admit,) = admission.expire(1.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert admit.keys == ["claims", "claims, too"]


def test_a_shard_that_takes_the_place_of_another_knows_its_survivors() -> None:
    request = hello(0, survived=7)
    again = Admission(LIMITS, salt=50)
    list(again.hello("newcomer", hello(0), 0.0))
    refused, waits = again.hello("survivor", request, 0.0)
    assert (refused.key, waits.key) == ("newcomer", "survivor")


def test_who_only_claims_to_survive_keeps_nobody_waiting() -> None:
    """And is no more than a newcomer once a survivor is here."""
    admission = Admission(LIMITS)
    claims: dict[str, Any] = {"ticket": b"", "survived": 7, "max_ranks": 9}
    list(admission.hello("claims", hello(2, **claims), 0.0))
    come(admission, 0, now=0.5, survivor=True, max_ranks=9)
    come(admission, 1, now=1.0, survivor=True, max_ranks=9)
    for number in range(5):
        list(admission.hello(("false", number), hello(10 + number, **claims), 1.5 + number))
        admission.connection_ended(("false", number), 1.6 + number)
    list(admission.expire(5.9))
    assert admission.deadline == 1.0 + SETTLE_S
    admission.connection_ended("claims", 5.95)
    (admit,) = [each for each in admission.expire(1.0 + SETTLE_S) if isinstance(each, Admit)]
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def test_claims_and_tickets_do_not_pass_the_size_of_a_job() -> None:
    for claims, limit in (({"ticket": b""}, 2), ({}, 5)):
        admission = Admission(LIMITS)
        running(admission, 0, 1, 2)
        come(admission, 5)  # while they are still expected
        admission.finished(1, 0.0)
        answers = [list(admission.hello(rank, hello(rank, survived=1, **claims), 0.0))[-1] for rank in range(10, 20)]
        assert sum(isinstance(answer.message, Pending) for answer in answers) == limit
        assert len(admission._pending_jobs) == 1


@pytest.mark.parametrize("wrong", [{"version": 99}, {"world_size": 41}, {"slots": 1}, {"last_call_s": 31.0}])
def test_a_survivor_that_cannot_join_puts_nobody_out(wrong: dict[str, Any]) -> None:
    admission = Admission(LIMITS)
    come(admission, 0, 1)
    answers = list(admission.hello("unfit", replace(hello(1, survived=1), **wrong), 0.0))
    assert [answer.key for answer in answers] == ["unfit"]
    assert len(admission._pending_jobs) == 1


def test_a_survivor_that_disagrees_with_another_one_puts_nobody_out() -> None:
    """First it is asked what is wrong with it, then the others make way."""
    admission = Admission(LIMITS)
    come(admission, 0, survivor=True)
    come(admission, 1)
    (answer,) = admission.hello("unfit", hello(1, survived=1, last_call_s=9.0), 0.0)
    assert answer.key == "unfit"
    assert "last_call_s 9.0 differs from 5.0 of rank 0" in answer.message.reason
    assert not answer.message.temporary


def test_a_survivor_for_whom_there_is_no_room_puts_nobody_out() -> None:
    admission, terms = Admission(LIMITS), TeamLimits(max_ranks=5)
    come(admission, 1)
    (answer,) = admission.hello("unfit", hello(1, survived=1, max_ranks=6), 0.0, terms)
    assert answer.key == "unfit"
    assert answer.message.temporary
    refused, waits = admission.hello("fits", hello(1, survived=1, max_ranks=5), 0.0, terms)  # in the newcomer's room
    assert (refused.key, waits) == (1, Answer("fits", Pending([0, 2, 3, 4], 4)))


def test_who_makes_way_for_a_survivor_and_says_that_it_was_in_the_job_may_come_again() -> None:
    admission = Admission(LIMITS, key=b"new")
    list(admission.hello("claims", hello(0, survived=7, max_ranks=4), 0.0))
    survivor = hello(0, survived=1)
    survivor = replace(survivor, ticket=ticket(b"new", survivor, 1))
    refused, waits = admission.hello("survivor", survivor, 0.0)
    assert (refused.key, waits.key) == ("claims", "survivor")
    assert refused.message.temporary
    (again,) = admission.hello("claims", hello(1, survived=7, max_ranks=4), 1.0)
    assert "world_size 4 differs from 3" in again.message.reason
    assert not again.message.temporary  # now it is known to be none


@pytest.mark.parametrize("elastic", [True, False])
def test_no_number_of_a_hello_makes_work(elastic: bool) -> None:
    """Each is bounded before anything is made of it: this would take minutes, or all memory, else."""
    admission = Admission(LIMITS)
    come(admission, 0, 1)
    max_ranks = (1 << 31) - 1
    request = hello(1, max_ranks=max_ranks, survived=1 if elastic else 0, min_ranks=int(elastic))
    (answer,) = admission.hello("huge", request, 0.0)
    assert "aggregator.max_world_size is 40" in answer.message.reason


def test_other_shards_gather_by_formation() -> None:
    admission = Admission(LIMITS)
    there = {"shard": 1, "shards": 2, "min_ranks": 0}
    (first,) = come(admission, 0, 1, max_ranks=2, formation=7, **there)
    come(admission, 0, max_ranks=3, formation=8, **there)  # its first shard gave up this formation
    (second,) = come(admission, 0, 1, max_ranks=2, formation=9, **there)
    assert places(first) == places(second) == [(0, 0, 2), (1, 1, 2)]
    assert "already in job" in come(admission, 1, max_ranks=2, formation=9, **there)[0].message.reason


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"min_ranks": 0}, {}, "min_ranks 1 differs from 0 of rank 0 (host h, pid 100) in job 'job'"),
        ({}, {"min_ranks": 0}, "give every worker the same elastic.enabled and elastic.min_ranks"),
        ({}, {"min_ranks": 2}, "min_ranks 2 differs from 1"),
        ({}, {"max_ranks": 4}, "world_size 4 differs from 3"),
        ({}, {"last_call_s": 6.0}, "give every worker the same elastic.last_call_s"),
        ({}, {"min_ranks": 4}, "an elastic job of 4 to 3 workers"),
        ({}, {"last_call_s": -1.0}, "a job that settles after -1 s"),
        ({}, {"last_call_s": float("nan")}, "a job that settles after nan s"),
        ({}, {"formation": 3}, "formation 3 on shard 0"),
        ({}, {"formation": 3, "min_ranks": 0}, "formation 3 on shard 0"),
        ({}, {"formation": -3, "min_ranks": 0, "shard": 1, "shards": 2}, "formation -3 on shard 1"),
        ({}, {"formation": 0, "shard": 1, "shards": 2}, "an elastic hello on shard 1"),
        ({}, {"last_call_s": 30.0}, "elastic.last_call_s is 30 s, expected less than aggregator.join_timeout_s, 30 s"),
    ],
)
def test_workers_that_disagree_are_refused(first: dict[str, Any], second: dict[str, Any], words: str) -> None:
    admission = Admission(LIMITS)
    come(admission, 0, **first)
    (answer,) = come(admission, 1, **second)
    assert isinstance(answer.message, Refused)
    assert words in answer.message.reason


def test_a_plain_worker_cannot_join_an_elastic_job_that_runs() -> None:
    admission = Admission(LIMITS)
    running(admission, 0, 1)
    (answer,) = come(admission, 2, min_ranks=0)
    assert "is elastic: give every worker the same elastic.enabled" in answer.message.reason


def test_survivors_take_the_room_of_their_last_generation() -> None:
    """Its connections may still be closing."""
    admission = Admission(Limits(3, 40, 1 << 26, 30.0, max_ranks=4))
    admission.finished(running(admission, 0, 1, 2).generation, 0.0)
    assert isinstance(come(admission, 0, survivor=True)[0].message, Pending)
    assert isinstance(come(admission, 0, job="other")[0].message, Refused)


OF_A_FORMATION: dict[str, Any] = {"shard": 1, "shards": 2, "min_ranks": 0}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"team": "other"}, {}),
        ({"team": "other", "formation": 1} | OF_A_FORMATION, {"formation": 2} | OF_A_FORMATION),
        (OF_A_FORMATION, {"formation": 2} | OF_A_FORMATION),  # theirs is not elastic
    ],
    ids=["of another team", "of another team, on another shard", "not elastic"],
)
def test_nobody_takes_the_room_of_a_job_that_is_not_his(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    admission = Admission(Limits(9, 40, 1 << 26, 30.0, max_ranks=4))
    (there,) = come(admission, 0, 1, 2, **theirs)
    assert isinstance(there, Admit)
    admission.finished(there.generation, 0.0)
    (answer,) = come(admission, 0, **ours)
    assert "aggregator.max_ranks" in answer.message.reason
    assert answer.message.temporary
    admission.released(there.generation)
    assert isinstance(come(admission, 0, **ours)[0].message, Pending)


@pytest.mark.parametrize(
    ("limits", "terms"),
    [
        (Limits(2, 40, 1 << 26, 30.0), NO_LIMITS),
        (Limits(9, 40, 1 << 26, 30.0, max_ranks=4), NO_LIMITS),
        (Limits(9, 40, 1 << 26, 30.0, max_bytes=OF_TWO_PAIRS), NO_LIMITS),
        (LIMITS, TeamLimits(max_jobs=2)),
        (LIMITS, TeamLimits(max_ranks=4)),
        (LIMITS, TeamLimits(max_bytes=OF_TWO_PAIRS)),
    ],
)
def test_a_formation_does_not_start_in_the_room_of_who_gathers(limits: Limits, terms: TeamLimits) -> None:
    """It takes the room of its last generation, and waits for that while the rest is promised to others."""
    admission = Admission(limits)

    def comes(rank: int, max_ranks: int, **changes: Any) -> Any:
        request = hello(rank, max_ranks=max_ranks, shard=1, shards=2, min_ranks=0, **changes)
        (effect,) = admission.hello(object(), request, 0.0, terms)
        return effect

    first = comes(0, 1, formation=7)
    assert isinstance(comes(0, 2, formation=8, job="other").message, Pending)
    for rank in (0, 1):
        assert isinstance(comes(rank, 2, formation=9).message, Pending)
    admission.finished(first.generation, 0.0)
    admission.released(first.generation)
    assert admission.deadline == 0.0
    (second,) = (each for each in admission.expire(0.0) if isinstance(each, Admit))
    assert [each.formation for each in second.hellos] == [9, 9]
    assert isinstance(comes(1, 2, formation=8, job="other"), Admit)
