"""A rank that refuses by itself to come to a group: those who wait for it hear it at once, once, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_admission_machine import LIMITS, hello, join

from omnireduce.core.wire.control import Pending, Refused
from omnireduce.protocol.joining.admission import Admission, Admit, Answer
from omnireduce.protocol.joining.checks import malformed
from omnireduce.protocol.joining.failed_launches import MAX_FAILED_LAUNCHES

JOB, GROUP, WHY = "job", "job+pair.1", "ranks [7]: expected different ranks from 0 to 3"
RANKS = 4


def running(**changes: Any) -> Admission:
    """A shard on which a job of four ranks runs."""
    admission = Admission(LIMITS)
    (admit,) = join(admission, *range(RANKS), world_size=RANKS, **changes)
    assert isinstance(admit, Admit)
    return admission


def come(admission: Admission, rank: int, at: int, size: int, now: float = 0.0, **changes: Any) -> list[Any]:
    """Rank `rank` of the job says hello as rank `at` of the group."""
    request = hello(at, size, **({"job": GROUP, "pid": 100 + rank, "parent_rank": rank} | changes))
    return list(admission.hello((rank, now), request, now))


def refuse(admission: Admission, who: int, now: float = 0.0, **changes: Any) -> list[Any]:
    """Rank `who` of the job refuses to come to the group."""
    fields = {"job": GROUP, "rank": who, "pid": 100 + who, "parent_rank": who, "refuses": WHY, "world_size": RANKS}
    return list(admission.hello((who, "refuses", now), hello(**(fields | changes)), now))


def refused_by(rank: int) -> Refused:
    return Refused(f"group '{GROUP}' cannot start: rank {rank} (host h, pid {100 + rank}) has refused: {WHY}")


@pytest.mark.parametrize("launch", ["", "mpirun-7"])
def test_who_waits_and_who_comes_later_hears_it_and_the_next_attempt_is_sound(launch: str) -> None:
    admission = running(launch=launch)
    come(admission, 2, 0, 3, launch=launch)
    first, other = refuse(admission, 3, launch=launch)
    assert first.message == Refused(WHY)
    assert (other.key, other.message) == ((2, 0.0), refused_by(3))
    assert [each.message for each in come(admission, 3, 1, 3, 1.0, launch=launch)] == [Pending([0, 2], 2)]
    assert [each.message for each in come(admission, 0, 2, 3, 1.0, launch=launch)] == [refused_by(3)]
    come(admission, 2, 0, 3, 2.0, launch=launch)
    assert isinstance(come(admission, 0, 2, 3, 2.0, launch=launch)[0], Admit)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"team": "another"}, id="another team"),
        pytest.param({"launch": "another"}, id="another launch"),
        pytest.param({"host": "elsewhere"}, id="another host"),
        pytest.param({"pid": 7}, id="another process"),
        pytest.param({"job": "jo+pair.1"}, id="the group of another job"),
        pytest.param({"job": JOB}, id="no group"),
        pytest.param({"rank": 4, "parent_rank": 4, "pid": 104}, id="a rank that the job has not"),
        pytest.param({"rank": 2}, id="two ranks"),
        pytest.param({"parent_rank": -1}, id="no rank of a job"),
        pytest.param({"refuses": "\n"}, id="what cannot be shown"),
        pytest.param({"min_ranks": 1}, id="an elastic group"),
        pytest.param({"shard": 1, "shards": 2}, id="another shard"),
        pytest.param({"version": 3}, id="another version"),
    ],
)
def test_a_stranger_ends_no_gathering(changes: dict[str, Any]) -> None:
    admission = running()
    come(admission, 0, 0, 2)
    assert [each.key for each in refuse(admission, 3, **changes)] == [(3, "refuses", 0.0)]
    assert isinstance(come(admission, 1, 1, 2)[0], Admit)


def test_a_gathering_of_another_team_under_the_same_name_goes_on() -> None:
    admission = running(team="red")
    come(admission, 0, 0, 2, team="blue")
    assert len(refuse(admission, 3, team="red")) == 1
    assert isinstance(come(admission, 1, 1, 2, team="blue")[0], Admit)


def test_who_has_left_the_job_refuses_nothing_any_more() -> None:
    admission = running()
    admission.departed(1, 3)
    come(admission, 0, 0, 2)
    assert len(refuse(admission, 3)) == 1


def test_it_is_forgotten_after_the_time_to_join_and_only_few_are_remembered() -> None:
    admission = running()
    refuse(admission, 3)
    for number in range(10 * MAX_FAILED_LAUNCHES):
        refuse(admission, 3, job=f"job+group-{number}.1", now=1.0)
    assert len(admission._failed_launches._failed) == MAX_FAILED_LAUNCHES
    refuse(admission, 3, now=2.0)
    assert isinstance(come(admission, 0, 0, 2, now=32.0)[0].message, Pending)


def test_a_rank_that_refuses_has_a_size_and_a_reason_that_can_be() -> None:
    fields = {"job": GROUP, "parent_rank": 3, "refuses": WHY}
    assert malformed(hello(3, 2, **fields)) == ""
    assert "exist" in malformed(hello(3, 0, **fields))
    assert "exist" in malformed(hello(3, 2, **(fields | {"refuses": ""})))


class Attempt(NamedTuple):
    """Ranks of the job that are in the group, and those of them that refuse it."""

    ranks: list[int]
    refusing: set[int]


class Attempts:
    """Ranks that make their attempts to form a group one after another. Other ranks than the last time come when all
    know what became of that. `heard`: by attempt and rank what became of it."""

    def __init__(self, attempts: list[Attempt], *, knows_size: bool) -> None:
        self.admission, self._attempts, self._knows_size = running(), attempts, knows_size
        self._keys, self._waiting = count(), dict[Any, int]()
        self._left = {
            rank: [at for at, attempt in enumerate(attempts) if rank in attempt.ranks] for rank in range(RANKS)
        }
        self.heard = dict[tuple[int, int], str]()

    @property
    def ready(self) -> list[int]:
        """The ranks that can begin their next attempt."""
        waiting, next_of = self._waiting.values(), {rank: left[0] for rank, left in self._left.items() if left}
        oldest = min(next_of.values(), default=0)
        same = list(takewhile(lambda each: each.ranks == self._attempts[oldest].ranks, self._attempts[oldest:]))
        return [rank for rank, at in next_of.items() if at < oldest + len(same) and rank not in waiting]

    def begin(self, rank: int) -> None:
        key, at = next(self._keys), self._left[rank][0]
        ranks, refusing = self._attempts[at]
        fields = {"job": GROUP, "pid": 100 + rank, "parent_rank": rank}
        if rank in refusing:
            request = hello(rank, len(ranks) if self._knows_size else RANKS, refuses=f"attempt {at}", **fields)
        else:
            request = hello(ranks.index(rank), len(ranks), **fields)
        self._waiting[key] = rank
        for effect in self.admission.hello(key, request, 0.0):
            self._deal(effect)

    def _deal(self, effect: Any) -> None:
        if isinstance(effect, Admit):
            for key in effect.keys:
                self._end(key, "admitted")
            self.admission.finished(effect.generation, 0.0)
            self.admission.released(effect.generation)
        elif isinstance(effect, Answer) and isinstance(effect.message, Refused):
            self._end(effect.key, effect.message.reason)

    def _end(self, key: Any, outcome: str) -> None:
        rank = self._waiting.pop(key)
        self.heard[self._left[rank].pop(0), rank] = outcome

    def expected(self) -> Iterator[tuple[tuple[int, int], str]]:
        """Outcome that each rank must see of each attempt."""
        for at, (ranks, refusing) in enumerate(self._attempts):
            for rank in ranks:
                yield (at, rank), f"attempt {at}" if refusing else "admitted"


@st.composite
def attempts_of(draw: st.DrawFn, *, all_may_refuse: bool) -> list[Attempt]:
    """The same ranks several times in a row, then others. Where all refuse and none knows how many they are, the shard
    cannot know when all know."""
    attempts = list[Attempt]()
    for _ in range(draw(st.integers(1, 3))):
        ranks = draw(st.permutations(range(RANKS)))[: draw(st.integers(2, RANKS))]
        refusing = st.sets(st.sampled_from(ranks), max_size=len(ranks) - (not all_may_refuse))
        attempts += [Attempt(ranks, each) for each in draw(st.lists(refusing, min_size=1, max_size=3))]
    return attempts


@given(data=st.data(), order=st.lists(st.integers(0, RANKS - 1), max_size=40), knows_size=st.booleans())
def test_whoever_comes_first_each_attempt_ends_alike_on_all_its_ranks(
    data: st.DataObject, order: list[int], *, knows_size: bool
) -> None:
    attempts = Attempts(data.draw(attempts_of(all_may_refuse=knows_size)), knows_size=knows_size)
    for choice in order:
        if attempts.ready:
            attempts.begin(attempts.ready[choice % len(attempts.ready)])
    while attempts.ready:
        attempts.begin(attempts.ready[0])
    for key, outcome in attempts.expected():
        assert attempts.heard[key].endswith(outcome)
    assert not attempts.admission._failed_launches._failed
