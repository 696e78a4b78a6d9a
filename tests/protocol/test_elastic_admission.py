"""Members of an elastic job: cases by name, and a random life of a job on its first shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from elastic_hellos import LIMITS, SETTLE_S, WHY, come, hello, last, places, running
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from omnireduce.core.wire.control import Cause, Pending, Refused
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect, Admit, Announce, Answer, Replace
from omnireduce.protocol.joining.limits import Limits


def test_it_starts_when_all_are_here() -> None:
    admit = running(Admission(LIMITS), 2, 0, 1)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_without_a_survivor_it_waits_for_all() -> None:
    admission = Admission(LIMITS)
    assert come(admission, 0, 2) == [Answer(2, Pending([1], 1))]
    assert list(admission.expire(20.0)) == [Answer(0, Pending([1], 1)), Answer(2, Pending([1], 1))]
    refused = list(admission.expire(30.0))
    assert [each.key for each in refused if isinstance(each, Answer)] == [0, 2]


def test_survivors_start_with_fewer_when_they_have_settled() -> None:
    admission = Admission(LIMITS)
    admission.finished(running(admission, 0, 1, 2).generation, 10.0)
    come(admission, 2, now=10.0, survivor=True)
    come(admission, 1, now=12.0, survivor=True)
    assert admission.deadline == 11.0  # the news that rank 2 is not alone
    list(admission.expire(16.9))
    assert admission.deadline == 12.0 + SETTLE_S
    (admit,) = admission.expire(17.0)
    assert isinstance(admit, Admit)
    assert places(admit) == [(1, 0, 2), (2, 1, 2)]


def test_who_comes_or_goes_starts_the_wait_anew() -> None:
    admission = Admission(LIMITS)
    come(admission, 0, now=0.0, survivor=True)
    come(admission, 1, now=3.0, survivor=True)
    admission.connection_ended(0, 6.0)
    assert not any(isinstance(each, Admit) for each in admission.expire(10.9))
    (admit,) = admission.expire(11.0)
    assert isinstance(admit, Admit)
    assert places(admit) == [(1, 0, 1)]


def test_fewer_than_the_smallest_are_refused_in_the_end() -> None:
    admission = Admission(LIMITS)
    come(admission, 0, min_ranks=2, survivor=True)
    assert list(admission.expire(29.0)) == []
    (answer,) = admission.expire(30.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert "still waiting for rank 1, 2 after 30 s" in answer.message.reason


def with_a_free_place(admission: Admission) -> Admit:
    """Ranks 0 and 1 of up to three run since 5.0."""
    come(admission, 0, 1, survivor=True)
    (admit,) = admission.expire(SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]
    return admit


def test_a_job_that_is_well_goes_on_and_hears_of_newcomers() -> None:
    admission = Admission(LIMITS)
    old = with_a_free_place(admission)
    assert come(admission, 2, now=6.0) == [Answer(2, Pending([0, 1], 2))]
    assert list(admission.expire(7.0)) == [Answer(2, Pending([0, 1], 2)), Announce(old.generation, 1)]
    assert admission.deadline is None
    assert list(admission.expire(1000.0)) == []  # it waits as long as it likes
    admission.finished(old.generation, 1000.0)
    assert isinstance(come(admission, 0, now=1001.0, survivor=True)[0], Answer)
    (admit,) = come(admission, 1, now=1002.0, survivor=True)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_a_newcomer_that_gives_up_is_taken_back() -> None:
    admission = Admission(LIMITS)
    old = with_a_free_place(admission)
    come(admission, 2, now=6.0)
    list(admission.expire(7.0))
    admission.connection_ended(2, 7.25)
    assert list(admission.expire(7.25)) == []
    assert admission.deadline == 8.0
    assert list(admission.expire(8.0)) == [Announce(old.generation, 0)]
    assert admission.deadline is None


def test_newcomers_that_come_and_go_make_no_news_for_the_others() -> None:
    """They may do so many times a second, and each piece of news goes to every rank."""
    admission = Admission(LIMITS)
    old = with_a_free_place(admission)
    for at in range(64):
        come(admission, 2, now=6.0 + at / 32)
        admission.connection_ended(2, 6.0 + at / 32)
        assert list(admission.expire(6.0 + at / 32)) == []
    assert admission.deadline is None
    announcements: list[tuple[float, Announce]] = []
    for at in range(64):  # each stays for long enough to be told of, and no longer
        now = 10.0 + 1.0625 * at
        come(admission, 2, now=now)
        announcements += [(now + 1, each) for each in admission.expire(now + 1) if isinstance(each, Announce)]
        admission.connection_ended(2, now + 1)
        announcements += [(now + 1, each) for each in admission.expire(now + 1) if isinstance(each, Announce)]
    assert len(announcements) == 1, announcements
    assert announcements[0] == (11.0, Announce(old.generation, 1))
    now = 1000.0
    assert list(admission.expire(now)) == [Announce(old.generation, 0)]


def test_a_job_without_a_free_place_hears_of_nobody_and_keeps_its_workers() -> None:
    admission = Admission(LIMITS)
    old = running(admission, 1, 2)
    come(admission, 0, 5, max_ranks=2)
    assert {type(each) for each in admission.expire(1.0)} == {Answer}
    assert "2 workers wait to join job 'job' already" in come(admission, 6, max_ranks=2)[0].message.reason
    admission.finished(old.generation, 2.0)
    assert isinstance(come(admission, 2, max_ranks=2, survivor=True, now=2.0)[0], Answer)
    (admit,) = come(admission, 1, max_ranks=2, survivor=True, now=4.0)
    assert places(admit) == [(1, 0, 2), (2, 1, 2)]


def test_newcomers_fill_the_places_of_those_who_do_not_come_back() -> None:
    admission = Admission(LIMITS)
    old = running(admission, 0, 1, 2)
    come(admission, 5)
    admission.finished(old.generation, 1.0)
    come(admission, 0, 1, now=2.0, survivor=True)
    (admit,) = admission.expire(2.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (5, 2, 3)]


def test_who_stays_in_the_old_generation_is_not_waited_for() -> None:
    """A rank that is stopped between the agreement to form the job anew and its own call."""
    admission = Admission(LIMITS)
    old = running(admission, 0, 1, 2)
    admission.departed(old.generation, 0)
    admission.departed(old.generation, 1)
    come(admission, 0, 1, now=1.0, survivor=True)
    assert admission.deadline == 2.0  # news of who is missing
    list(admission.expire(2.0))
    assert admission.deadline == 1.0 + SETTLE_S
    assert list(admission.expire(6.0)) == [Replace(old.generation, Cause("rank 2", WHY))]
    admission.finished(old.generation, 6.0)
    (admit,) = admission.expire(6.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def shrunk(admission: Admission, max_ranks: int) -> tuple[Admit, list[Any]]:
    """All of eight ranks that run want to go on with `max_ranks`, now; their job, and the other effects."""
    old, effects = running(admission, *range(8)), list[AdmissionEffect]()
    for rank in range(8):
        effects += come(admission, rank, survivor=True, max_ranks=max_ranks)
    admission.finished(old.generation, 0.0)
    effects += admission.expire(SETTLE_S)
    (admit,) = (effect for effect in effects if isinstance(effect, Admit))
    assert places(admit) == [(rank, rank, max_ranks) for rank in range(max_ranks)]
    return admit, [effect for effect in effects if effect is not admit]


def test_survivors_who_find_no_place_are_newcomers_to_the_others() -> None:
    """They were in the last generation, but not in this one. So they wait, and do not end it."""
    admission = Admission(LIMITS)
    new, _ = shrunk(admission, 4)
    assert not any(isinstance(each, Replace) for each in admission.expire(1000.0))
    for rank in range(4):
        come(admission, rank + 10, survivor=True, max_ranks=4, now=1000.0)
    admission.finished(new.generation, 1000.0)
    (admit,) = (each for each in admission.expire(1000.0 + SETTLE_S) if isinstance(each, Admit))
    assert admit.keys == [10, 11, 12, 13]  # members go before others that wait


def test_survivors_who_find_no_place_to_wait_may_come_again() -> None:
    admission = Admission(LIMITS)
    _, effects = shrunk(admission, 3)
    refused = {
        effect.key: effect.message for effect in effects if isinstance(getattr(effect, "message", None), Refused)
    }
    assert refused.keys() == {6, 7}
    assert "6 workers wait to join job 'job' already" in refused[7].reason
    assert all(each.temporary for each in refused.values())
    (answer,) = come(admission, 7, survived=1, max_ranks=3, now=6.0)
    assert answer.message.temporary  # like those who wait, until it has no time left
    (answer,) = come(admission, 8, max_ranks=3, now=6.0)
    assert not answer.message.temporary


@pytest.mark.parametrize("wrong", [{"min_ranks": 2}, {"max_ranks": 4}, {"last_call_s": 9.0}, {"rank": 0}])
def test_a_newcomer_that_disagrees_with_a_survivor_is_the_one_to_go(wrong: dict[str, Any]) -> None:
    admission = Admission(LIMITS)
    old = running(admission, 0, 1)
    rank = wrong.pop("rank", 7)
    list(admission.hello("newcomer", hello(rank, **({"max_ranks": 2} | wrong)), 1.0))
    admission.finished(old.generation, 2.0)
    refused, waits = come(admission, 0, now=2.0, max_ranks=2, survivor=True)
    assert refused.key == "newcomer"
    assert isinstance(refused.message, Refused)
    assert waits == Answer(0, Pending([1], 1))
    (admit,) = come(admission, 1, now=2.0, max_ranks=2, survivor=True)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def test_a_newcomer_with_other_slots_is_refused_at_once() -> None:
    admission = Admission(LIMITS)
    running(admission, 0, 1)
    assert "slots 8 differs from 4" in come(admission, 2, slots=8)[0].message.reason


def test_an_elastic_job_has_no_more_room_than_others() -> None:
    """But for its last generation, which leaves."""
    admission = Admission(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "min_ranks": 0, "max_ranks": 1}
    answers = [next(admission.hello(number, hello(0, formation=number, **there), 0.0)) for number in range(1, 9)]
    assert isinstance(answers[0], Admit)
    assert answers[1] == Answer(2, Pending([], 0))  # it waits for the memory of the first
    assert all(isinstance(answer.message, Refused) and answer.message.temporary for answer in answers[2:])
    admission.finished(1, 1.0)
    assert not any(isinstance(each, Admit) for each in admission.expire(1.0))
    admission.released(1)
    assert admission.deadline == 0.0
    (admit,) = admission.expire(2.0)
    assert isinstance(admit, Admit)
    assert (admit.generation, admit.keys) == (2, [2])


def test_a_job_whose_memory_is_not_given_back_is_refused_in_the_end() -> None:
    admission = Admission(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "min_ranks": 0, "max_ranks": 1}
    come(admission, 0, formation=1, **there)
    next(admission.hello("next", hello(0, formation=2, **there), 0.0))
    (answer,) = admission.expire(30.0)
    assert isinstance(answer, Answer)
    assert "waiting for its last generation to give back its memory after 30 s" in answer.message.reason


def admitted(effects: Iterable[AdmissionEffect], waiting: list[object]) -> list[int]:
    """The generations that begin. Who is admitted or refused waits no more."""
    begun = []
    for effect in effects:
        if isinstance(effect, Admit):
            begun.append(effect.generation)
            waiting[:] = [key for key in waiting if key not in effect.keys]
        elif isinstance(effect, Answer) and isinstance(effect.message, Refused):
            waiting.remove(effect.key)
    return begun


@settings(max_examples=150)
@seed(5)
@given(st.integers(1, 2), st.lists(st.tuples(st.sampled_from("hhhgfr"), st.sampled_from("ab"), st.integers(0, 7))))
def test_a_formation_starts_as_soon_as_there_is_room(max_jobs: int, events: list[tuple[str, str, int]]) -> None:
    """On a shard beyond the first: also if another job, or one that gathered, has left the room."""
    admission = Admission(Limits(max_jobs, 40, 1 << 26, 30.0))
    waiting, running, over = list[object](), list[int](), list[int]()
    for what, job, number in events:
        if what == "h":
            there = {"shard": 1, "shards": 2, "min_ranks": 0, "formation": 1 + number % 3, "job": job}
            waiting.append(object())
            request = hello(0, max_ranks=1 + number % 2, **there)
            running += admitted(admission.hello(waiting[-1], request, 0.0), waiting)
        elif what == "g" and waiting:
            admission.connection_ended(waiting.pop(number % len(waiting)), 0.0)
        elif what == "f" and running:
            over.append(running.pop(number % len(running)))
            admission.finished(over[-1], 0.0)
        elif what == "r" and over:
            admission.released(over.pop(number % len(over)))
        if admission.deadline == 0.0:
            running += admitted(admission.expire(0.0), waiting)
        assert not any(admission._may_start(pending_job, 0.0) for pending_job in admission._pending_jobs.values())


@settings(max_examples=200)
@seed(11)
@given(st.data())
def test_a_random_life(data: st.DataObject) -> None:
    """Nobody is forgotten, nobody is in two generations, one generation at a time runs, of a size that was agreed."""
    admission, now, waiting, job, survivors = Admission(LIMITS), 0.0, {}, None, set[int]()
    announced = 0
    for key in range(data.draw(st.integers(5, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 2.0, 6.0, 31.0]))
        what = data.draw(st.sampled_from(["comes", "comes", "comes", "goes", "ends", "time"]))
        effects: list[AdmissionEffect] = []
        if what == "comes":
            rank = data.draw(st.integers(0, 5))
            message = hello(rank, min_ranks=2, survived=last(admission) if rank in survivors else 0)
            waiting[key] = message
            effects = list(admission.hello(key, message, now))
        elif what == "goes" and waiting:
            gone = data.draw(st.sampled_from(sorted(waiting)))
            del waiting[gone]
            admission.connection_ended(gone, now)
        elif what == "ends" and job is not None:
            admission.finished(job.generation, now)
            admission.released(job.generation)
            job = None
        for effect in effects + list(admission.expire(now)):
            if isinstance(effect, Admit):
                assert job is None
                job = effect
                requests = [waiting.pop(key) for key in effect.keys]
                assert [request.rank for request in requests] == sorted(request.rank for request in requests)
                assert [each.rank for each in effect.hellos] == list(range(len(requests)))
                assert len(requests) == 3 or (len(requests) == 2 and any(request.survived for request in requests))
                survivors, announced = {request.rank for request in requests}, 0
            elif isinstance(effect, Replace):
                assert job is not None
                assert effect.generation == job.generation
                admission.finished(job.generation, now)
                admission.released(job.generation)
                job = None
            elif isinstance(effect, Announce):
                assert job is not None
                assert effect.generation == job.generation
                assert effect.workers == min(len(waiting), 3 - len(job.keys))
                assert effect.workers != announced
                announced = effect.workers
            elif isinstance(effect.message, Refused):
                del waiting[effect.key]  # type: ignore[arg-type]
        known = {
            key for pending_job in admission._pending_jobs.values() for key, *_ in pending_job.waiting_ranks.values()
        }
        assert known == waiting.keys()
