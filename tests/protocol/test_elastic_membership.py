"""Members of an elastic job: cases by name, and a random life of a job on its first shard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from elastic_hellos import LIMITS, SETTLE_S, WHY, come, hello, last, places, running
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from omnireduce.core.wire.control import Cause, Pending, Refused
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.membership import Admit, Announce, Answer, Membership, MembershipEffect, Replace


def test_it_starts_when_all_are_here() -> None:
    admit = running(Membership(LIMITS), 2, 0, 1)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_without_a_survivor_it_waits_for_all() -> None:
    membership = Membership(LIMITS)
    assert come(membership, 0, 2) == [Answer(2, Pending([1], 1))]
    assert list(membership.expire(20.0)) == [Answer(0, Pending([1], 1)), Answer(2, Pending([1], 1))]
    refused = list(membership.expire(30.0))
    assert [each.key for each in refused if isinstance(each, Answer)] == [0, 2]


def test_survivors_start_with_fewer_when_they_have_settled() -> None:
    membership = Membership(LIMITS)
    membership.finished(running(membership, 0, 1, 2).generation, 10.0)
    come(membership, 2, now=10.0, survivor=True)
    come(membership, 1, now=12.0, survivor=True)
    assert membership.deadline == 11.0  # the news that rank 2 is not alone
    list(membership.expire(16.9))
    assert membership.deadline == 12.0 + SETTLE_S
    (admit,) = membership.expire(17.0)
    assert isinstance(admit, Admit)
    assert places(admit) == [(1, 0, 2), (2, 1, 2)]


def test_who_comes_or_goes_starts_the_wait_anew() -> None:
    membership = Membership(LIMITS)
    come(membership, 0, now=0.0, survivor=True)
    come(membership, 1, now=3.0, survivor=True)
    membership.connection_ended(0, 6.0)
    assert not any(isinstance(each, Admit) for each in membership.expire(10.9))
    (admit,) = membership.expire(11.0)
    assert isinstance(admit, Admit)
    assert places(admit) == [(1, 0, 1)]


def test_fewer_than_the_smallest_are_refused_in_the_end() -> None:
    membership = Membership(LIMITS)
    come(membership, 0, min_ranks=2, survivor=True)
    assert list(membership.expire(29.0)) == []
    (answer,) = membership.expire(30.0)
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert "still waiting for rank 1, 2 after 30 s" in answer.message.reason


def with_a_free_place(membership: Membership) -> Admit:
    """Ranks 0 and 1 of up to three run since 5.0."""
    come(membership, 0, 1, survivor=True)
    (admit,) = membership.expire(SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]
    return admit


def test_a_job_that_is_well_goes_on_and_hears_of_newcomers() -> None:
    membership = Membership(LIMITS)
    old = with_a_free_place(membership)
    assert come(membership, 2, now=6.0) == [Answer(2, Pending([0, 1], 2))]
    assert list(membership.expire(7.0)) == [Answer(2, Pending([0, 1], 2)), Announce(old.generation, 1)]
    assert membership.deadline is None
    assert list(membership.expire(1000.0)) == []  # it waits as long as it likes
    membership.finished(old.generation, 1000.0)
    assert isinstance(come(membership, 0, now=1001.0, survivor=True)[0], Answer)
    (admit,) = come(membership, 1, now=1002.0, survivor=True)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]


def test_a_newcomer_that_gives_up_is_taken_back() -> None:
    membership = Membership(LIMITS)
    old = with_a_free_place(membership)
    come(membership, 2, now=6.0)
    list(membership.expire(7.0))
    membership.connection_ended(2, 7.25)
    assert list(membership.expire(7.25)) == []
    assert membership.deadline == 8.0
    assert list(membership.expire(8.0)) == [Announce(old.generation, 0)]
    assert membership.deadline is None


def test_newcomers_that_come_and_go_make_no_news_for_the_others() -> None:
    """They may do so many times a second, and each piece of news goes to every rank."""
    membership = Membership(LIMITS)
    old = with_a_free_place(membership)
    for at in range(64):
        come(membership, 2, now=6.0 + at / 32)
        membership.connection_ended(2, 6.0 + at / 32)
        assert list(membership.expire(6.0 + at / 32)) == []
    assert membership.deadline is None
    announcements: list[tuple[float, Announce]] = []
    for at in range(64):  # each stays for long enough to be told of, and no longer
        now = 10.0 + 1.0625 * at
        come(membership, 2, now=now)
        announcements += [(now + 1, each) for each in membership.expire(now + 1) if isinstance(each, Announce)]
        membership.connection_ended(2, now + 1)
        announcements += [(now + 1, each) for each in membership.expire(now + 1) if isinstance(each, Announce)]
    assert len(announcements) == 1, announcements
    assert announcements[0] == (11.0, Announce(old.generation, 1))
    now = 1000.0
    assert list(membership.expire(now)) == [Announce(old.generation, 0)]


def test_a_job_without_a_free_place_hears_of_nobody_and_keeps_its_workers() -> None:
    membership = Membership(LIMITS)
    old = running(membership, 1, 2)
    come(membership, 0, 5, max_ranks=2)
    assert {type(each) for each in membership.expire(1.0)} == {Answer}
    assert "2 workers wait to join job 'job' already" in come(membership, 6, max_ranks=2)[0].message.reason
    membership.finished(old.generation, 2.0)
    assert isinstance(come(membership, 2, max_ranks=2, survivor=True, now=2.0)[0], Answer)
    (admit,) = come(membership, 1, max_ranks=2, survivor=True, now=4.0)
    assert places(admit) == [(1, 0, 2), (2, 1, 2)]


def test_newcomers_fill_the_places_of_those_who_do_not_come_back() -> None:
    membership = Membership(LIMITS)
    old = running(membership, 0, 1, 2)
    come(membership, 5)
    membership.finished(old.generation, 1.0)
    come(membership, 0, 1, now=2.0, survivor=True)
    (admit,) = membership.expire(2.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 3), (1, 1, 3), (5, 2, 3)]


def test_who_stays_in_the_old_generation_is_not_waited_for() -> None:
    """A rank that is stopped between the agreement to form the job anew and its own call."""
    membership = Membership(LIMITS)
    old = running(membership, 0, 1, 2)
    membership.departed(old.generation, 0)
    membership.departed(old.generation, 1)
    come(membership, 0, 1, now=1.0, survivor=True)
    assert membership.deadline == 2.0  # news of who is missing
    list(membership.expire(2.0))
    assert membership.deadline == 1.0 + SETTLE_S
    assert list(membership.expire(6.0)) == [Replace(old.generation, Cause("rank 2", WHY))]
    membership.finished(old.generation, 6.0)
    (admit,) = membership.expire(6.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def shrunk(membership: Membership, max_ranks: int) -> tuple[Admit, list[Any]]:
    """All of eight ranks that run want to go on with `max_ranks`, now; their job, and the other effects."""
    old, effects = running(membership, *range(8)), list[MembershipEffect]()
    for rank in range(8):
        effects += come(membership, rank, survivor=True, max_ranks=max_ranks)
    membership.finished(old.generation, 0.0)
    effects += membership.expire(SETTLE_S)
    (admit,) = (effect for effect in effects if isinstance(effect, Admit))
    assert places(admit) == [(rank, rank, max_ranks) for rank in range(max_ranks)]
    return admit, [effect for effect in effects if effect is not admit]


def test_survivors_who_find_no_place_are_newcomers_to_the_others() -> None:
    """They were in the last generation, but not in this one. So they wait, and do not end it."""
    membership = Membership(LIMITS)
    new, _ = shrunk(membership, 4)
    assert not any(isinstance(each, Replace) for each in membership.expire(1000.0))
    for rank in range(4):
        come(membership, rank + 10, survivor=True, max_ranks=4, now=1000.0)
    membership.finished(new.generation, 1000.0)
    (admit,) = (each for each in membership.expire(1000.0 + SETTLE_S) if isinstance(each, Admit))
    assert admit.keys == [10, 11, 12, 13]  # members go before others that wait


def test_survivors_who_find_no_place_to_wait_may_come_again() -> None:
    membership = Membership(LIMITS)
    _, effects = shrunk(membership, 3)
    refused = {
        effect.key: effect.message for effect in effects if isinstance(getattr(effect, "message", None), Refused)
    }
    assert refused.keys() == {6, 7}
    assert "6 workers wait to join job 'job' already" in refused[7].reason
    assert all(each.temporary for each in refused.values())
    (answer,) = come(membership, 7, survived=1, max_ranks=3, now=6.0)
    assert answer.message.temporary  # like those who wait, until it has no time left
    (answer,) = come(membership, 8, max_ranks=3, now=6.0)
    assert not answer.message.temporary


@pytest.mark.parametrize("wrong", [{"min_ranks": 2}, {"max_ranks": 4}, {"last_call_s": 9.0}, {"rank": 0}])
def test_a_newcomer_that_disagrees_with_a_survivor_is_the_one_to_go(wrong: dict[str, Any]) -> None:
    membership = Membership(LIMITS)
    old = running(membership, 0, 1)
    rank = wrong.pop("rank", 7)
    list(membership.hello("newcomer", hello(rank, **({"max_ranks": 2} | wrong)), 1.0))
    membership.finished(old.generation, 2.0)
    refused, waits = come(membership, 0, now=2.0, max_ranks=2, survivor=True)
    assert refused.key == "newcomer"
    assert isinstance(refused.message, Refused)
    assert waits == Answer(0, Pending([1], 1))
    (admit,) = come(membership, 1, now=2.0, max_ranks=2, survivor=True)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def test_a_newcomer_with_other_slots_is_refused_at_once() -> None:
    membership = Membership(LIMITS)
    running(membership, 0, 1)
    assert "slots 8 differs from 4" in come(membership, 2, slots=8)[0].message.reason


def test_an_elastic_job_has_no_more_room_than_others() -> None:
    """But for its last generation, which leaves."""
    membership = Membership(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "min_ranks": 0, "max_ranks": 1}
    answers = [next(membership.hello(number, hello(0, formation=number, **there), 0.0)) for number in range(1, 9)]
    assert isinstance(answers[0], Admit)
    assert answers[1] == Answer(2, Pending([], 0))  # it waits for the memory of the first
    assert all(isinstance(answer.message, Refused) and answer.message.temporary for answer in answers[2:])
    membership.finished(1, 1.0)
    assert not any(isinstance(each, Admit) for each in membership.expire(1.0))
    membership.released(1)
    assert membership.deadline == 0.0
    (admit,) = membership.expire(2.0)
    assert isinstance(admit, Admit)
    assert (admit.generation, admit.keys) == (2, [2])


def test_a_job_whose_memory_is_not_given_back_is_refused_in_the_end() -> None:
    membership = Membership(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "min_ranks": 0, "max_ranks": 1}
    come(membership, 0, formation=1, **there)
    next(membership.hello("next", hello(0, formation=2, **there), 0.0))
    (answer,) = membership.expire(30.0)
    assert isinstance(answer, Answer)
    assert "waiting for its last generation to give back its memory after 30 s" in answer.message.reason


def admitted(effects: Iterable[MembershipEffect], waiting: list[object]) -> list[int]:
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
    membership = Membership(Limits(max_jobs, 40, 1 << 26, 30.0))
    waiting, running, over = list[object](), list[int](), list[int]()
    for what, job, number in events:
        if what == "h":
            there = {"shard": 1, "shards": 2, "min_ranks": 0, "formation": 1 + number % 3, "job": job}
            waiting.append(object())
            request = hello(0, max_ranks=1 + number % 2, **there)
            running += admitted(membership.hello(waiting[-1], request, 0.0), waiting)
        elif what == "g" and waiting:
            membership.connection_ended(waiting.pop(number % len(waiting)), 0.0)
        elif what == "f" and running:
            over.append(running.pop(number % len(running)))
            membership.finished(over[-1], 0.0)
        elif what == "r" and over:
            membership.released(over.pop(number % len(over)))
        if membership.deadline == 0.0:
            running += admitted(membership.expire(0.0), waiting)
        assert not any(membership._may_start(pending_job, 0.0) for pending_job in membership._pending_jobs.values())


@settings(max_examples=200)
@seed(11)
@given(st.data())
def test_a_random_life(data: st.DataObject) -> None:
    """Nobody is forgotten, nobody is in two generations, one generation at a time runs, of a size that was agreed."""
    membership, now, waiting, job, survivors = Membership(LIMITS), 0.0, {}, None, set[int]()
    announced = 0
    for key in range(data.draw(st.integers(5, 40))):
        now += data.draw(st.sampled_from([0.0, 0.5, 2.0, 6.0, 31.0]))
        what = data.draw(st.sampled_from(["comes", "comes", "comes", "goes", "ends", "time"]))
        effects: list[MembershipEffect] = []
        if what == "comes":
            rank = data.draw(st.integers(0, 5))
            message = hello(rank, min_ranks=2, survived=last(membership) if rank in survivors else 0)
            waiting[key] = message
            effects = list(membership.hello(key, message, now))
        elif what == "goes" and waiting:
            gone = data.draw(st.sampled_from(sorted(waiting)))
            del waiting[gone]
            membership.connection_ended(gone, now)
        elif what == "ends" and job is not None:
            membership.finished(job.generation, now)
            membership.released(job.generation)
            job = None
        for effect in effects + list(membership.expire(now)):
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
                membership.finished(job.generation, now)
                membership.released(job.generation)
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
            key for pending_job in membership._pending_jobs.values() for key, *_ in pending_job.waiting_ranks.values()
        }
        assert known == waiting.keys()
