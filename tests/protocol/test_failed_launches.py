"""A launch of which one rank was refused for good: nobody waits for it, and no stranger can bring that about."""

from __future__ import annotations

from typing import Any

import pytest
from test_admission_machine import LIMITS, TIGHT, hello, join, refusal

from omnireduce.core.wire.control import PROTOCOL_VERSION, Pending, Refused
from omnireduce.protocol.joining.admission import Admission, Admit, Answer
from omnireduce.protocol.joining.failed_launches import MAX_FAILED_LAUNCHES

LAUNCH = "mpirun-7"
WHY = "job 'job' cannot start: rank 1 (host h, pid 101) was refused: "


def gathered(*ranks: int, world_size: int = 4, **changes: Any) -> Admission:
    admission = Admission(LIMITS)
    join(admission, *ranks, world_size=world_size, launch=LAUNCH, **changes)
    return admission


def refusals(effects: list[Any]) -> dict[Any, Refused]:
    results = {effect.key: effect.message for effect in effects if isinstance(effect, Answer)}
    return {key: message for key, message in results.items() if isinstance(message, Refused)}


@pytest.mark.parametrize(
    "changes",
    [{"slots": 5}, {"stripe_blocks": 32}, {"shards": 2}, {"min_ranks": 1}, {"version": PROTOCOL_VERSION + 1}],
)
def test_all_who_wait_are_refused_at_once_with_the_reason(changes: dict[str, Any]) -> None:
    admission = gathered(0, 2)
    refused = refusals(join(admission, 1, world_size=4, launch=LAUNCH, **changes))
    assert list(refused) == [("job", 1), ("job", 0), ("job", 2)]
    reason = refused["job", 1].reason
    assert not reason.startswith(WHY)
    assert refused["job", 0] == refused["job", 2] == Refused(WHY + reason)
    assert admission.deadline is None
    assert admission.pending_jobs(1.0) == []


def test_a_rank_with_another_world_size_or_beyond_the_limits_dooms_them_too() -> None:
    assert len(refusals(join(gathered(0, 2), 1, world_size=3, launch=LAUNCH))) == 3
    assert len(refusals(join(gathered(0, 2), 1, world_size=41, launch=LAUNCH))) == 3


def test_who_comes_later_is_told_at_once() -> None:
    admission = gathered(0)
    join(admission, 1, world_size=4, launch=LAUNCH, slots=5)
    for rank in (2, 3):
        assert refusal(join(admission, rank, world_size=4, launch=LAUNCH, now=29.0)).startswith(WHY)
    assert admission.deadline is None


def test_a_rank_that_compiles_hears_it_when_it_comes() -> None:
    """It says many times that it compiles, and does not read what is wrong with it. That is no other start."""
    admission = gathered(0)
    join(admission, 1, world_size=4, launch=LAUNCH, slots=5)
    for attempt in range(3):
        compiles = hello(2, 4, launch=LAUNCH, compiling=True)
        assert refusals(list(admission.hello(("compiles", attempt), compiles, 0.0))) == {}
        admission.connection_ended(("compiles", attempt), 1.0)
    for rank in (2, 3):
        assert refusal(join(admission, rank, world_size=4, launch=LAUNCH, now=2.0)).startswith(WHY)


def test_a_launch_that_starts_again_is_not_held_to_it() -> None:
    admission = gathered(0)
    join(admission, 1, world_size=4, launch=LAUNCH, slots=5)
    assert join(admission, 0, world_size=4, launch=LAUNCH) == [Answer(("job", 0), Pending([1, 2, 3], 3))]
    assert isinstance(join(admission, 1, 2, 3, world_size=4, launch=LAUNCH)[0], Admit)


def test_it_is_forgotten_after_the_time_to_join() -> None:
    admission = gathered(0)
    join(admission, 1, world_size=4, launch=LAUNCH, slots=5)
    assert refusals(join(admission, 2, world_size=4, launch=LAUNCH, now=30.0)) == {}


def test_a_shard_remembers_few_of_them() -> None:
    admission = Admission(LIMITS)
    for number in range(10 * MAX_FAILED_LAUNCHES):
        join(admission, 0, world_size=4, launch=f"l{number}")
        join(admission, 1, world_size=4, launch=f"l{number}", slots=5)
    assert len(admission._failed_launches._failed) == MAX_FAILED_LAUNCHES
    assert refusals(join(admission, 2, world_size=4, launch="l0")) == {}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rank": 0, "slots": 5}, id="the rank is here"),
        pytest.param({"rank": 3, "world_size": 5, "slots": 5}, id="no rank of this job"),
        pytest.param({"launch": "another", "slots": 5}, id="another launch"),
        pytest.param({"launch": "", "slots": 5}, id="no launch"),
        pytest.param({"team": "another", "slots": 5}, id="another team"),
        pytest.param({"slots": 1}, id="malformed"),
        pytest.param({"host": "\n", "slots": 5}, id="malformed, and different"),
        pytest.param({"rank": -1, "slots": 5}, id="a rank that cannot be"),
        pytest.param({"job": "other", "slots": 5}, id="another job"),
    ],
)
def test_a_stranger_ends_no_gathering(changes: dict[str, Any]) -> None:
    admission = gathered(0, 2, world_size=3)
    fields = {"rank": 1, "world_size": 3, "launch": LAUNCH} | changes
    assert set(refusals(list(admission.hello("stranger", hello(**fields), 0.0)))) <= {"stranger"}
    assert isinstance(join(admission, 1, world_size=3, launch=LAUNCH)[0], Admit)


def test_without_a_launch_a_rank_may_come_again_with_other_settings() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    assert list(refusals(join(admission, 1, slots=5))) == [("job", 1)]
    assert isinstance(join(admission, 1)[0], Admit)


def test_a_group_needs_no_launch() -> None:
    """Its name says to which generation of which job it belongs: nobody else's is called so."""
    admission = Admission(LIMITS)
    group = {"job": "job+pair.1", "world_size": 3}
    join(admission, 1, 2, parent_rank=5, **group)
    assert list(refusals(join(admission, 0, slots=5, **group))) == [("job+pair.1", 0)]  # no rank of a job
    (_, *others) = refusals(join(admission, 0, slots=5, parent_rank=3, **group)).items()
    assert [key for key, _ in others] == [("job+pair.1", 1), ("job+pair.1", 2)]
    assert all("cannot start: rank 0 (host h, pid 100) was refused: " in each.reason for _, each in others)


def test_a_duplicate_of_a_rank_that_still_leaves_ends_no_gathering() -> None:
    admission = gathered(0, 1, world_size=2)
    admission.departed(1, 0)
    join(admission, 0, launch=LAUNCH)
    twin = list(admission.hello("twin", hello(1, launch=LAUNCH, slots=5), 0.0))
    assert list(refusals(twin)) == ["twin"]
    admission.departed(1, 1)
    assert isinstance(join(admission, 1, launch=LAUNCH)[0], Admit)


def test_a_refusal_that_passes_ends_no_gathering() -> None:
    admission = Admission(TIGHT)
    join(admission, 0, world_size=5, job="large", launch=LAUNCH)
    join(admission, 0, launch=LAUNCH)
    assert list(refusals(join(admission, 1, world_size=5, job="third", launch=LAUNCH))) == [("third", 1)]
    assert len(admission.pending_jobs(0.0)) == 1


@pytest.mark.parametrize("changes", [{"min_ranks": 1}, {"shard": 1, "shards": 2, "formation": 7}])
def test_an_elastic_job_waits_for_others(changes: dict[str, Any]) -> None:
    admission = gathered(0, **changes)
    assert list(refusals(join(admission, 1, world_size=4, launch=LAUNCH, slots=5, **changes))) == [("job", 1)]
    assert len(admission.pending_jobs(0.0)) == 1
