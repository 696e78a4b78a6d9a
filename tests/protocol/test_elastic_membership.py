"""Who is in an elastic job: cases by name, and a random life of a job on its first shard."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omnireduce.config.security import Terms
from omnireduce.protocol.admissions import Admit, Announce, Answer, MembershipEffect, Replace
from omnireduce.protocol.limits import Limits
from omnireduce.protocol.membership import Membership
from omnireduce.protocol.tickets import ticket
from omnireduce.teams import FREE
from omnireduce.wire.control import PROTOCOL_VERSION, Cause, Hello, Pending, Refused

LIMITS = Limits(max_jobs=3, max_world_size=40, max_job_bytes=1 << 26, join_timeout_s=30.0)
SETTLE_S = 5.0
OF_TWO_PAIRS = 2 * (2 + 1) * 4 * 65536  # bytes of slots of two jobs of two ranks: those of each rank, and the results
WHY = "had not left when the others had waited long enough to form the job anew"


def hello(rank: int, *, smallest: int = 1, largest: int = 3, survived: int = 0, **changes: Any) -> Hello:
    """With `survived`, the ticket of that formation."""
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "job": "job", "rank": rank, "world_size": largest}
    fields |= {"shard": 0, "shards": 1, "slots": 4, "slot_bytes": 65536, "host": "h", "pid": 100 + rank}
    fields |= {"stripe_blocks": 64, "smallest": smallest, "settle_s": SETTLE_S, "survived": survived}
    said = Hello(**(fields | changes))
    return replace(said, ticket=ticket(b"", said, survived)) if survived and "ticket" not in changes else said


def last(membership: Membership) -> int:
    """The formation that survivors come from."""
    return max(1, membership._next_generation - 1)


def come(membership: Membership, *ranks: int, now: float = 0.0, survivor: bool = False, **changes: Any) -> list[Any]:
    """Say hello as `ranks`, from connections named after them; return the effects of the last one."""
    effects: list[MembershipEffect] = []
    changes = {"survived": last(membership) if survivor else 0} | changes
    for rank in ranks:
        effects = list(membership.hello(rank, hello(rank, **changes), now))
    return effects


def places(admit: Admit) -> list[tuple[object, int, int]]:
    """Connection, rank and world size of everybody."""
    return [(key, each.rank, each.world_size) for key, each in zip(admit.keys, admit.hellos, strict=True)]


def running(membership: Membership, *ranks: int) -> Admit:
    (admit,) = come(membership, *ranks, largest=len(ranks))
    assert isinstance(admit, Admit)
    return admit


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
    membership.gone(0, 6.0)
    assert not any(isinstance(each, Admit) for each in membership.expire(10.9))
    (admit,) = membership.expire(11.0)
    assert isinstance(admit, Admit)
    assert places(admit) == [(1, 0, 1)]


def test_fewer_than_the_smallest_are_refused_in_the_end() -> None:
    membership = Membership(LIMITS)
    come(membership, 0, smallest=2, survivor=True)
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
    membership.gone(2, 7.25)
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
        membership.gone(2, 6.0 + at / 32)
        assert list(membership.expire(6.0 + at / 32)) == []
    assert membership.deadline is None
    told: list[tuple[float, Announce]] = []
    for at in range(64):  # each stays for long enough to be told of, and no longer
        now = 10.0 + 1.0625 * at
        come(membership, 2, now=now)
        told += [(now + 1, each) for each in membership.expire(now + 1) if isinstance(each, Announce)]
        membership.gone(2, now + 1)
        told += [(now + 1, each) for each in membership.expire(now + 1) if isinstance(each, Announce)]
    assert len(told) == 1, told
    assert told[0] == (11.0, Announce(old.generation, 1))
    now = 1000.0
    assert list(membership.expire(now)) == [Announce(old.generation, 0)]


def test_a_job_without_a_free_place_hears_of_nobody_and_keeps_its_workers() -> None:
    membership = Membership(LIMITS)
    old = running(membership, 1, 2)
    come(membership, 0, 5, largest=2)
    assert {type(each) for each in membership.expire(1.0)} == {Answer}
    assert "2 workers wait to join job 'job' already" in come(membership, 6, largest=2)[0].message.reason
    membership.finished(old.generation, 2.0)
    assert isinstance(come(membership, 2, largest=2, survivor=True, now=2.0)[0], Answer)
    (admit,) = come(membership, 1, largest=2, survivor=True, now=4.0)
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


def shrunk(membership: Membership, largest: int) -> tuple[Admit, list[Any]]:
    """All of eight ranks that run want to go on with `largest`, now; their job, and the other effects."""
    old, effects = running(membership, *range(8)), list[MembershipEffect]()
    for rank in range(8):
        effects += come(membership, rank, survivor=True, largest=largest)
    membership.finished(old.generation, 0.0)
    effects += membership.expire(SETTLE_S)
    (admit,) = (each for each in effects if isinstance(each, Admit))
    assert places(admit) == [(rank, rank, largest) for rank in range(largest)]
    return admit, [each for each in effects if each is not admit]


def test_survivors_who_find_no_place_are_newcomers_to_the_others() -> None:
    """They were in the last generation, but not in this one. So they wait, and do not end it."""
    membership = Membership(LIMITS)
    new, _ = shrunk(membership, 4)
    assert not any(isinstance(each, Replace) for each in membership.expire(1000.0))
    for rank in range(4):
        come(membership, rank + 10, survivor=True, largest=4, now=1000.0)
    membership.finished(new.generation, 1000.0)
    (admit,) = (each for each in membership.expire(1000.0 + SETTLE_S) if isinstance(each, Admit))
    assert admit.keys == [10, 11, 12, 13]  # of those who wait, the members go first


def test_survivors_who_find_no_place_to_wait_may_come_again() -> None:
    membership = Membership(LIMITS)
    _, effects = shrunk(membership, 3)
    refused = {each.key: each.message for each in effects if isinstance(getattr(each, "message", None), Refused)}
    assert refused.keys() == {6, 7}
    assert "6 workers wait to join job 'job' already" in refused[7].reason
    assert all(each.temporary for each in refused.values())
    (answer,) = come(membership, 7, survived=1, largest=3, now=6.0)
    assert answer.message.temporary  # like those who wait, until it has no time left
    (answer,) = come(membership, 8, largest=3, now=6.0)
    assert not answer.message.temporary


@pytest.mark.parametrize("wrong", [{"smallest": 2}, {"largest": 4}, {"settle_s": 9.0}, {"rank": 0}])
def test_a_newcomer_that_disagrees_with_a_survivor_is_the_one_to_go(wrong: dict[str, Any]) -> None:
    membership = Membership(LIMITS)
    old = running(membership, 0, 1)
    rank = wrong.pop("rank", 7)
    list(membership.hello("newcomer", hello(rank, **({"largest": 2} | wrong)), 1.0))
    membership.finished(old.generation, 2.0)
    refused, waits = come(membership, 0, now=2.0, largest=2, survivor=True)
    assert refused.key == "newcomer"
    assert isinstance(refused.message, Refused)
    assert waits == Answer(0, Pending([1], 1))
    (admit,) = come(membership, 1, now=2.0, largest=2, survivor=True)
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def test_a_newcomer_with_other_slots_is_refused_at_once() -> None:
    membership = Membership(LIMITS)
    running(membership, 0, 1)
    assert "slots 8 differs from 4" in come(membership, 2, slots=8)[0].message.reason


def test_an_elastic_job_has_no_more_room_than_others() -> None:
    """But for its last generation, which leaves."""
    membership = Membership(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "smallest": 0, "largest": 1}
    answers = [next(membership.hello(number, hello(0, formation=number, **there), 0.0)) for number in range(1, 9)]
    assert isinstance(answers[0], Admit)
    assert answers[1] == Answer(2, Pending([], 0))  # it waits for the memory of the first
    assert all(isinstance(each.message, Refused) and each.message.temporary for each in answers[2:])
    membership.finished(1, 1.0)
    assert not any(isinstance(each, Admit) for each in membership.expire(1.0))
    membership.released(1)
    assert membership.deadline == 0.0
    (admit,) = membership.expire(2.0)
    assert isinstance(admit, Admit)
    assert (admit.generation, admit.keys) == (2, [2])


def test_a_job_whose_memory_is_not_given_back_is_refused_in_the_end() -> None:
    membership = Membership(Limits(1, 40, 1 << 26, 30.0, max_ranks=1))
    there = {"shard": 1, "shards": 2, "smallest": 0, "largest": 1}
    come(membership, 0, formation=1, **there)
    next(membership.hello("next", hello(0, formation=2, **there), 0.0))
    (answer,) = membership.expire(30.0)
    assert isinstance(answer, Answer)
    assert "waiting for its last generation to give back its memory after 30 s" in answer.message.reason


@pytest.mark.parametrize("ticket_says", [b"", b"x" * 32])
@pytest.mark.parametrize("survived", [1, 2, 99])
def test_who_was_not_in_the_job_ends_nothing(survived: int, ticket_says: bytes) -> None:
    """It waits as a newcomer does, and the job is well."""
    membership = Membership(LIMITS, key=b"of this daemon")
    old = running(membership, 0, 1)
    (answer,) = membership.hello("stranger", hello(2, largest=2, survived=survived, ticket=ticket_says), 1.0)
    assert answer == Answer("stranger", Pending([0, 1], 2))
    assert not any(isinstance(each, Replace) for each in membership.expire(1000.0))
    assert membership._running.keys() == {old.generation}


def test_who_was_left_behind_earlier_is_a_newcomer_to_those_who_went_on() -> None:
    membership = Membership(LIMITS)
    first = running(membership, 0, 1, 2)
    membership.finished(first.generation, 0.0)
    come(membership, 0, 1, survivor=True)
    (second,) = membership.expire(SETTLE_S)
    assert isinstance(second, Admit)
    come(membership, 2, now=6.0, survived=first.hellos[2].formation)
    assert not any(isinstance(each, Replace) for each in membership.expire(1000.0))


@pytest.mark.parametrize("other", [{"team": "other"}, {"job": "other"}, {"launch": "other"}])
def test_a_ticket_is_for_one_team_job_and_launch(other: dict[str, Any]) -> None:
    membership = Membership(LIMITS)
    (there,) = come(membership, 0, 1, largest=2, **other)
    assert isinstance(there, Admit)
    mine = hello(2, largest=2, survived=there.hellos[0].formation)
    (answer,) = membership.hello("foreign", replace(mine, **other), 1.0)
    assert isinstance(answer.message, Pending)
    assert not any(isinstance(each, Replace) for each in membership.expire(1000.0))


def test_after_a_restart_of_the_daemon_survivors_are_believed_but_put_nobody_out() -> None:
    membership = Membership(LIMITS, key=b"new")
    list(membership.hello("newcomer", hello(0), 0.0))
    (answer,) = membership.hello("claims", hello(0, survived=7), 0.0)
    assert "already in job" in answer.message.reason
    assert answer.message.temporary  # the newcomer may give up
    membership.gone("newcomer", 1.0)
    list(membership.hello("claims", hello(0, survived=7), 1.0))
    list(membership.hello("claims, too", hello(2, survived=7), 1.0))
    (admit,) = membership.expire(1.0 + SETTLE_S)
    assert isinstance(admit, Admit)
    assert admit.keys == ["claims", "claims, too"]


def test_a_shard_that_takes_the_place_of_another_knows_its_survivors() -> None:
    said = hello(0, survived=7)
    again = Membership(LIMITS, salt=50)
    list(again.hello("newcomer", hello(0), 0.0))
    refused, waits = again.hello("survivor", said, 0.0)
    assert (refused.key, waits.key) == ("newcomer", "survivor")


def test_who_only_claims_to_survive_keeps_nobody_waiting() -> None:
    """And is no more than a newcomer once a survivor is here."""
    membership = Membership(LIMITS)
    claims: dict[str, Any] = {"ticket": b"", "survived": 7, "largest": 9}
    list(membership.hello("claims", hello(2, **claims), 0.0))
    come(membership, 0, now=0.5, survivor=True, largest=9)
    come(membership, 1, now=1.0, survivor=True, largest=9)
    for number in range(5):
        list(membership.hello(("false", number), hello(10 + number, **claims), 1.5 + number))
        membership.gone(("false", number), 1.6 + number)
    list(membership.expire(5.9))
    assert membership.deadline == 1.0 + SETTLE_S
    membership.gone("claims", 5.95)
    (admit,) = [each for each in membership.expire(1.0 + SETTLE_S) if isinstance(each, Admit)]
    assert places(admit) == [(0, 0, 2), (1, 1, 2)]


def test_claims_and_tickets_do_not_pass_the_size_of_a_job() -> None:
    for claims, most in (({"ticket": b""}, 2), ({}, 5)):
        membership = Membership(LIMITS)
        running(membership, 0, 1, 2)
        come(membership, 5)  # while they are still expected
        membership.finished(1, 0.0)
        answers = [list(membership.hello(rank, hello(rank, survived=1, **claims), 0.0))[-1] for rank in range(10, 20)]
        assert sum(isinstance(each.message, Pending) for each in answers) == most
        assert len(membership._gathering) == 1


@pytest.mark.parametrize("wrong", [{"version": 99}, {"world_size": 41}, {"slots": 1}, {"settle_s": 31.0}])
def test_a_survivor_that_cannot_join_puts_nobody_out(wrong: dict[str, Any]) -> None:
    membership = Membership(LIMITS)
    come(membership, 0, 1)
    answers = list(membership.hello("unfit", replace(hello(1, survived=1), **wrong), 0.0))
    assert [each.key for each in answers] == ["unfit"]
    assert len(membership._gathering) == 1


def test_a_survivor_that_disagrees_with_another_one_puts_nobody_out() -> None:
    """First it is asked what is wrong with it, then the others make way."""
    membership = Membership(LIMITS)
    come(membership, 0, survivor=True)
    come(membership, 1)
    (answer,) = membership.hello("unfit", hello(1, survived=1, settle_s=9.0), 0.0)
    assert answer.key == "unfit"
    assert "settle_s 9.0 differs from 5.0 of rank 0" in answer.message.reason
    assert not answer.message.temporary


def test_a_survivor_for_whom_there_is_no_room_puts_nobody_out() -> None:
    membership, terms = Membership(LIMITS), Terms(max_ranks=5)
    come(membership, 1)
    (answer,) = membership.hello("unfit", hello(1, survived=1, largest=6), 0.0, terms)
    assert answer.key == "unfit"
    assert answer.message.temporary
    refused, waits = membership.hello("fits", hello(1, survived=1, largest=5), 0.0, terms)  # in the newcomer's room
    assert (refused.key, waits) == (1, Answer("fits", Pending([0, 2, 3, 4], 4)))


def test_who_makes_way_for_a_survivor_and_says_that_it_was_in_the_job_may_come_again() -> None:
    membership = Membership(LIMITS, key=b"new")
    list(membership.hello("claims", hello(0, survived=7, largest=4), 0.0))
    survivor = hello(0, survived=1)
    survivor = replace(survivor, ticket=ticket(b"new", survivor, 1))
    refused, waits = membership.hello("survivor", survivor, 0.0)
    assert (refused.key, waits.key) == ("claims", "survivor")
    assert refused.message.temporary
    (again,) = membership.hello("claims", hello(1, survived=7, largest=4), 1.0)
    assert "world_size 4 differs from 3" in again.message.reason
    assert not again.message.temporary  # now it is known to be none


@pytest.mark.parametrize("elastic", [True, False])
def test_no_number_of_a_hello_makes_work(elastic: bool) -> None:
    """Each is bounded before anything is made of it: this would take minutes, or all memory, else."""
    membership = Membership(LIMITS)
    come(membership, 0, 1)
    largest = (1 << 31) - 1
    said = hello(1, largest=largest, survived=1 if elastic else 0, smallest=int(elastic))
    (answer,) = membership.hello("huge", said, 0.0)
    assert "aggregator.max_world_size is 40" in answer.message.reason


def test_other_shards_gather_by_formation() -> None:
    membership = Membership(LIMITS)
    there = {"shard": 1, "shards": 2, "smallest": 0}
    (first,) = come(membership, 0, 1, largest=2, formation=7, **there)
    come(membership, 0, largest=3, formation=8, **there)  # its first shard gave up this formation
    (second,) = come(membership, 0, 1, largest=2, formation=9, **there)
    assert places(first) == places(second) == [(0, 0, 2), (1, 1, 2)]
    assert "already in job" in come(membership, 1, largest=2, formation=9, **there)[0].message.reason


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"smallest": 0}, {}, "smallest 1 differs from 0 of rank 0 (host h, pid 100) in job 'job'"),
        ({}, {"smallest": 0}, "give every worker the same elastic.enabled and elastic.smallest"),
        ({}, {"smallest": 2}, "smallest 2 differs from 1"),
        ({}, {"largest": 4}, "world_size 4 differs from 3"),
        ({}, {"settle_s": 6.0}, "give every worker the same elastic.settle_s"),
        ({}, {"smallest": 4}, "an elastic job of 4 to 3 workers"),
        ({}, {"settle_s": -1.0}, "a job that settles after -1 s"),
        ({}, {"settle_s": float("nan")}, "a job that settles after nan s"),
        ({}, {"formation": 3}, "formation 3 on shard 0"),
        ({}, {"formation": 3, "smallest": 0}, "formation 3 on shard 0"),
        ({}, {"formation": -3, "smallest": 0, "shard": 1, "shards": 2}, "formation -3 on shard 1"),
        ({}, {"formation": 0, "shard": 1, "shards": 2}, "an elastic hello on shard 1"),
        ({}, {"settle_s": 30.0}, "elastic.settle_s is 30 s, expected less than aggregator.join_timeout_s, 30 s"),
    ],
)
def test_workers_that_disagree_are_refused(first: dict[str, Any], second: dict[str, Any], words: str) -> None:
    membership = Membership(LIMITS)
    come(membership, 0, **first)
    (answer,) = come(membership, 1, **second)
    assert isinstance(answer.message, Refused)
    assert words in answer.message.reason


def test_a_plain_worker_cannot_join_an_elastic_job_that_runs() -> None:
    membership = Membership(LIMITS)
    running(membership, 0, 1)
    (answer,) = come(membership, 2, smallest=0)
    assert "is elastic: give every worker the same elastic.enabled" in answer.message.reason


def test_survivors_take_the_room_of_their_last_generation() -> None:
    """Its connections may still be closing."""
    membership = Membership(Limits(3, 40, 1 << 26, 30.0, max_ranks=4))
    membership.finished(running(membership, 0, 1, 2).generation, 0.0)
    assert isinstance(come(membership, 0, survivor=True)[0].message, Pending)
    assert isinstance(come(membership, 0, job="other")[0].message, Refused)


OF_A_FORMATION: dict[str, Any] = {"shard": 1, "shards": 2, "smallest": 0}


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
    membership = Membership(Limits(9, 40, 1 << 26, 30.0, max_ranks=4))
    (there,) = come(membership, 0, 1, 2, **theirs)
    assert isinstance(there, Admit)
    membership.finished(there.generation, 0.0)
    (answer,) = come(membership, 0, **ours)
    assert "aggregator.max_ranks" in answer.message.reason
    assert answer.message.temporary
    membership.released(there.generation)
    assert isinstance(come(membership, 0, **ours)[0].message, Pending)


@pytest.mark.parametrize(
    ("limits", "terms"),
    [
        (Limits(2, 40, 1 << 26, 30.0), FREE),
        (Limits(9, 40, 1 << 26, 30.0, max_ranks=4), FREE),
        (Limits(9, 40, 1 << 26, 30.0, max_bytes=OF_TWO_PAIRS), FREE),
        (LIMITS, Terms(max_jobs=2)),
        (LIMITS, Terms(max_ranks=4)),
        (LIMITS, Terms(max_bytes=OF_TWO_PAIRS)),
    ],
)
def test_a_formation_does_not_start_in_the_room_of_who_gathers(limits: Limits, terms: Terms) -> None:
    """It takes the room of its last generation, and waits for that while the rest is promised to others."""
    membership = Membership(limits)

    def comes(rank: int, largest: int, **changes: Any) -> Any:
        said = hello(rank, largest=largest, shard=1, shards=2, smallest=0, **changes)
        (effect,) = membership.hello(object(), said, 0.0, terms)
        return effect

    first = comes(0, 1, formation=7)
    assert isinstance(comes(0, 2, formation=8, job="other").message, Pending)
    for rank in (0, 1):
        assert isinstance(comes(rank, 2, formation=9).message, Pending)
    membership.finished(first.generation, 0.0)
    membership.released(first.generation)
    assert membership.deadline == 0.0
    (second,) = (each for each in membership.expire(0.0) if isinstance(each, Admit))
    assert [each.formation for each in second.hellos] == [9, 9]
    assert isinstance(comes(1, 2, formation=8, job="other"), Admit)


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
            message = hello(rank, smallest=2, survived=last(membership) if rank in survivors else 0)
            waiting[key] = message
            effects = list(membership.hello(key, message, now))
        elif what == "goes" and waiting:
            gone = data.draw(st.sampled_from(sorted(waiting)))
            del waiting[gone]
            membership.gone(gone, now)
        elif what == "ends" and job is not None:
            membership.finished(job.generation, now)
            membership.released(job.generation)
            job = None
        for effect in effects + list(membership.expire(now)):
            if isinstance(effect, Admit):
                assert job is None
                job = effect
                asked = [waiting.pop(key) for key in effect.keys]
                assert [each.rank for each in asked] == sorted(each.rank for each in asked)
                assert [each.rank for each in effect.hellos] == list(range(len(asked)))
                assert len(asked) == 3 or (len(asked) == 2 and any(each.survived for each in asked))
                survivors, announced = {each.rank for each in asked}, 0
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
        known = {key for each in membership._gathering.values() for key, *_ in each.attendees.values()}
        assert known == waiting.keys()
