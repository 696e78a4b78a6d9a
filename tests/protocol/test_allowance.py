"""Jobs of teams on one shard: what they may take together, and that no other has a part in them."""

from __future__ import annotations

import dataclasses

import pytest
from test_admission_machine import LIMITS, hello, refusal

from omnireduce.core.wire.control import Pending, Refused
from omnireduce.protocol.joining.admission import Admission, Admit, Answer
from omnireduce.support.config.schema import TeamLimits


def test_a_team_takes_no_more_than_its_terms_allow() -> None:
    """Beside the limits of the shard, which hold for all; who has gone counts no more."""
    for terms, limit in {
        TeamLimits(
            max_jobs=1
        ): "1 jobs of team 'one' are here already, and max_jobs is 1, in one.toml on the aggregator: raise",
        TeamLimits(
            max_ranks=3
        ): "2 ranks of other jobs of team 'one' and 2 of this one are more than max_ranks, 3, in one.toml",
        TeamLimits(
            max_bytes=2 << 20
        ): "1572864 bytes of slots and state of other jobs of team 'one' and 1572864 of this one are more",
    }.items():
        admission = Admission(dataclasses.replace(LIMITS, max_jobs=9))
        (first,) = admission.hello(1, hello(0, job="one.a", team="one", slots=8), 0.0, terms)
        assert isinstance(first.message, Pending)  # type: ignore[union-attr]
        (answer,) = admission.hello(2, hello(0, job="one.b", team="one", slots=8), 0.0, terms)
        assert isinstance(answer, Answer)
        assert isinstance(answer.message, Refused)
        assert limit in answer.message.reason
        assert answer.message.temporary
        for key, team in ((3, ""), (4, "two")):
            (other,) = admission.hello(key, hello(0, job=f"of{team}", team=team, slots=8), 0.0)
            assert isinstance(other.message, Pending)  # type: ignore[union-attr]
        (second,) = admission.hello(5, hello(1, job="one.a", team="one", slots=8), 0.0, terms)
        assert isinstance(second, Admit)
        assert refusal(list(admission.hello(6, hello(0, job="one.b", team="one", slots=8), 0.0, terms))) == (
            answer.message.reason
        )
        admission.finished(second.generation, 0.0)
        admission.released(second.generation)
        (later,) = admission.hello(7, hello(0, job="one.b", team="one", slots=8), 0.0, terms)
        assert isinstance(later.message, Pending)  # type: ignore[union-attr]


@pytest.mark.parametrize("survivor", [False, True])
@pytest.mark.parametrize("team", ["", "two"])
def test_a_job_is_of_one_team(team: str, survivor: bool) -> None:
    """A rank with another secret learns nothing about the job, does not disturb it, and its ranks do not hear of it."""
    admission = Admission(LIMITS)
    elastic = {"min_ranks": 1, "last_call_s": 5.0} if survivor else {}
    survives = {"survived": 7} if survivor else {}
    membership_of = {"job": "shared", **elastic}
    list(admission.hello(1, hello(0, team="one", **membership_of), 0.0))
    stranger = hello(0, team=team, host="secret-host", **membership_of, **survives)
    own = f"to team '{team}'" if team else "to workers without a team"
    expected = (
        f"the job 'shared' that is here does not belong {own}: choose another cluster.job, or give all workers of the "
        "job the same security.team"
    )
    assert refusal(list(admission.hello(2, stranger, 0.0))) == expected
    assert [pending_job.note for pending_job in admission._pending_jobs.values()] == [""]
    admitted = list(admission.hello(3, hello(1, team="one", **membership_of), 0.0))
    assert isinstance(admitted[0], Admit)
    assert refusal(list(admission.hello(4, stranger, 0.0))) == expected
    assert [(pending_job.name, pending_job.team) for pending_job in admission.pending_jobs(0.0)] == []


def test_a_status_says_of_which_team_a_job_is() -> None:
    admission = Admission(LIMITS)
    list(admission.hello(1, hello(0, team="one"), 0.0))
    assert [(pending_job.name, pending_job.team) for pending_job in admission.pending_jobs(0.0)] == [("job", "one")]
