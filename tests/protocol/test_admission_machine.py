"""Members of jobs: cases by name, and a random life of a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from omnireduce.core.wire.control import PROTOCOL_VERSION, Hello, Pending, Refused
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect, Admit, Answer
from omnireduce.protocol.joining.compiling import COMPILING_S
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.pending_job import member_name
from omnireduce.support.config.schema import TeamLimits
from omnireduce.support.teams import NO_LIMITS

LIMITS = Limits(max_jobs=3, max_world_size=40, max_job_bytes=1 << 26, join_timeout_s=30.0)
TEAM_TERMS = TeamLimits(max_jobs=2, max_ranks=3)
TIGHT = dataclasses.replace(LIMITS, max_ranks=5, max_bytes=2 << 20)


def hello(rank: int, world_size: int = 2, **changes: Any) -> Hello:
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "job": "job", "rank": rank, "world_size": world_size}
    fields |= {
        "shard": 0,
        "shards": 1,
        "slots": 4,
        "slot_bytes": 65536,
        "host": "h",
        "pid": 100 + rank,
        "stripe_blocks": 64,
    }
    return Hello(**(fields | changes))


def join(admission: Admission, *ranks: int, world_size: int = 2, now: float = 0.0, **changes: Any) -> list[Any]:
    """Say hello as `ranks`, from connections named (job, rank); return the effects of the last one."""
    effects: list[AdmissionEffect] = []
    for rank in ranks:
        message = hello(rank, world_size, **changes)
        effects = list(admission.hello((message.job, rank), message, now))
    return effects


def refusal(effects: list[Any]) -> str:
    (answer,) = effects
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    return answer.message.reason


def test_the_last_rank_starts_the_job_in_rank_order() -> None:
    admission = Admission(LIMITS)
    assert join(admission, 2, world_size=3) == [Answer(("job", 2), Pending([0, 1], 2))]
    assert join(admission, 0, world_size=3) == [Answer(("job", 0), Pending([1], 1))]
    (admit,) = join(admission, 1, world_size=3)
    assert (admit.generation, admit.job) == (1, "job")
    assert admit.keys == [("job", 0), ("job", 1), ("job", 2)]
    assert [each.rank for each in admit.hellos] == [0, 1, 2]
    assert admission.deadline is None


def test_a_job_of_one_starts_at_once() -> None:
    (admit,) = join(Admission(LIMITS), 0, world_size=1)
    assert isinstance(admit, Admit)


def test_jobs_with_different_names_are_apart() -> None:
    admission = Admission(LIMITS)
    join(admission, 0, job="a")
    join(admission, 0, job="b")
    (first,) = join(admission, 1, job="b")
    (second,) = join(admission, 1, job="a")
    assert [(each.generation, each.job) for each in (first, second)] == [(1, "b"), (2, "a")]


def test_launches_never_meet_whatever_their_job_is_called() -> None:
    admission = Admission(LIMITS)
    join(admission, 0, launch="a")
    (answer,) = admission.hello("b0", hello(0, launch="b"), 0.0)
    assert answer.message.missing == [1]
    (first,) = admission.hello("b1", hello(1, launch="b"), 0.0)
    assert (first.generation, first.keys) == (1, ["b0", "b1"])
    (second,) = admission.hello("a1", hello(1, launch="a"), 0.0)
    assert (second.generation, second.keys) == (2, [("job", 0), "a1"])


def test_who_waits_hears_of_another_launch_of_the_same_name() -> None:
    """It may be that their ranks belong together."""
    admission = Admission(LIMITS)
    join(admission, 0, launch="a")
    (answer,) = admission.hello("b1", hello(1, launch="b"), 0.0)
    assert "rank 0 (host h, pid 100) waits for a job of this name, too, but in another launch (b and a)" in (
        answer.message.note
    )
    notes = {each.key: each.message.note for each in admission.expire(1.0)}
    assert (
        "rank 1 (host h, pid 101) waits for a job of this name, too, but in another launch (a and b)"
        in (notes["job", 0])
    )


def test_all_who_wait_get_one_list_of_the_missing() -> None:
    """All ranks that wait get the same list, whatever the order in which ranks come and go."""
    admission = Admission(LIMITS)
    join(admission, 7, 3, 5, 0, world_size=40)
    admission.connection_ended(("job", 3), 0.0)
    admission.connection_ended(("job", 3), 0.0)  # only once
    answers = list(admission.expire(1.0))
    assert {answer.key for answer in answers} == {("job", rank) for rank in (7, 5, 0)}
    missing = [rank for rank in range(40) if rank not in (7, 5, 0)]
    assert all(answer.message is answers[0].message for answer in answers)
    assert answers[0].message == Pending(missing[:16], 37)
    assert join(admission, 3, world_size=40)[0].message.total_missing == 36


def test_many_missing_ranks_are_named_in_part() -> None:
    (answer,) = join(Admission(LIMITS), 3, world_size=40)
    assert answer.message == Pending([0, 1, 2, *range(4, 17)], 39)


def test_those_who_wait_hear_of_newcomers_at_most_once_a_second() -> None:
    """With N ranks that come at once, N messages and not N²."""
    admission = Admission(LIMITS)
    for rank in range(30):
        (answer,) = join(admission, rank, world_size=32, now=10.0 + rank / 100)
        assert answer.key == ("job", rank)
    assert admission.deadline == 11.0
    assert list(admission.expire(10.99)) == []
    news = Pending([30, 31], 2)
    assert list(admission.expire(11.0)) == [Answer(("job", rank), news) for rank in range(30)]
    assert admission.deadline == 40.0
    assert list(admission.expire(20.0)) == []
    admission.connection_ended(("job", 29), 0.0)
    assert admission.deadline == 12.0
    assert next(admission.expire(20.0)) == Answer(("job", 0), Pending([29, 30, 31], 3))


def test_those_who_wait_hear_who_was_refused_and_why() -> None:
    """Until that rank joins; the others that come learn it, too."""
    admission = Admission(LIMITS)
    join(admission, 0, world_size=4)
    reason = refusal(join(admission, 1, world_size=2))
    note = f"rank 1 (host h, pid 101) was refused: {reason}"
    assert join(admission, 2, world_size=4) == [Answer(("job", 2), Pending([1, 3], 2, note))]
    assert list(admission.expire(1.0)) == [Answer(("job", rank), Pending([1, 3], 2, note)) for rank in (0, 2)]
    refusal(list(admission.hello("x", hello(-1, 4), 1.0)))
    assert join(admission, 1, world_size=4) == [Answer(("job", 1), Pending([3], 1))]
    assert list(admission.expire(2.0)) == [Answer(("job", rank), Pending([3], 1)) for rank in (0, 2, 1)]


def test_a_job_that_expires_says_who_was_refused() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    reason = refusal(join(admission, 1, world_size=3))
    assert f"after 30 s (rank 1 (host h, pid 101) was refused: {reason})" in refusal(list(admission.expire(30.0)))


def test_a_rank_cannot_join_twice() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    again = hello(0, host="other", pid=7)
    assert "rank 0 (host h, pid 100) is already in job 'job'" in refusal(list(admission.hello("new", again, 0.0)))
    (admit,) = join(admission, 1)
    assert admit.keys == [("job", 0), ("job", 1)]
    assert "rank 0 (host h, pid 100) is already in job 'job'" in refusal(list(admission.hello("new", again, 0.0)))


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 3},
        {"shards": 2},
        {"shards": 2, "shard": 1},
        {"slots": 5},
        {"slot_bytes": 131072},
        {"stripe_blocks": 32},
    ],
)
def test_ranks_that_disagree_are_refused(changes: dict[str, int]) -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    reason = refusal(list(admission.hello("new", hello(1, **changes), 0.0)))
    name = next(iter(changes))
    assert reason.startswith(f"{name} {changes[name]} differs from ")
    assert "rank 0 (host h, pid 100) in job 'job'" in reason
    assert reason.endswith(
        "the same protocol." + name
        if name.startswith(("slot", "stripe", "whole"))
        else "list cluster.aggregators in the same order on every worker"
        if name == "shards"
        else "different jobs under different names (cluster.job)"
    )
    assert isinstance(join(admission, 1)[0], Admit)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": PROTOCOL_VERSION + 1}, f"protocol version {PROTOCOL_VERSION + 1}"),
        ({"rank": -1}, "rank -1 of 2 does not exist"),
        ({"rank": 2}, "rank 2 of 2 does not exist"),
        ({"world_size": 0}, "rank 0 of 0 does not exist"),
        ({"world_size": -(2**62)}, "does not exist"),
        ({"world_size": 41}, "world size 41; aggregator.max_world_size is 40"),
        ({"world_size": 2**62}, "aggregator.max_world_size is 40"),
        ({"shard": 1}, "shard 1 of 1 does not exist"),
        ({"shard": -1}, "shard -1 of 1 does not exist"),
        ({"shards": 0}, "shard 0 of 0 does not exist"),
        ({"slots": 1}, "1 slots; expected 2 to 64"),
        ({"slots": 65}, "65 slots; expected 2 to 64"),
        ({"slot_bytes": 65536 - 4096}, "slots of 61440 bytes"),
        ({"slot_bytes": 65536 + 8}, "slots of 65544 bytes"),
        ({"slot_bytes": (64 << 20) + 4096}, "slots of"),
        ({"slots": 64, "slot_bytes": 1 << 20}, f"the job needs {3 * 64 << 20} bytes of slots and state"),
        ({"slots": 64, "slot_bytes": 1 << 20}, "raise it on the aggregator, or lower protocol.slots, protocol.slot"),
        ({"state_bytes": 1 << 30}, "or protocol.state_bytes"),
        ({"job": ""}, "job ''; expected a string of 1 to 128 characters out of A-Z"),
        ({"job": "j" * 129}, "expected a string of 1 to 128 characters"),
        ({"job": "two\nlines"}, r"job 'two\nlines'; expected a string"),
        ({"job": "j\n"}, r"job 'j\n'; expected a string"),
        ({"host": "h" * 256}, "expected at most 255 characters"),
        ({"host": "\x1b[2J"}, r"host '\x1b[2J'; expected at most 255 characters that can be printed"),
        ({"timeout_s": 0.0}, "a time-out of 0 s"),
        ({"timeout_s": float("nan")}, "a time-out of nan s"),
    ],
)
def test_a_hello_out_of_range_is_refused(changes: dict[str, Any], words: str) -> None:
    admission = Admission(LIMITS)
    assert words in refusal(list(admission.hello("key", hello(**({"rank": 0} | changes)), 0.0)))
    assert admission.deadline is None


def test_no_more_jobs_than_allowed() -> None:
    admission = Admission(LIMITS)
    (running,) = join(admission, 0, job="a", world_size=1)
    join(admission, 0, job="b")
    join(admission, 0, job="c")
    assert "3 jobs are here already" in refusal(join(admission, 0, job="d"))
    assert isinstance(join(admission, 1, job="c")[0], Admit)  # it was counted already
    admission.finished(running.generation, 0.0)
    assert join(admission, 0, job="d") == [Answer(("d", 0), Pending([1], 1))]


def test_no_more_ranks_than_allowed() -> None:
    """All ranks of a pending job count, even those that have not come. Ranks of an ended job count until they go."""
    admission = Admission(dataclasses.replace(LIMITS, max_ranks=5))
    (running,) = join(admission, 0, 1, job="a")
    join(admission, 0, job="b")
    reason = "4 ranks of other jobs and 2 of this one are more than aggregator.max_ranks, 5: raise it, or wait"
    assert refusal(join(admission, 0, job="c")) == reason
    assert isinstance(join(admission, 1, job="b")[0], Admit)  # it was counted already
    admission.finished(running.generation, 0.0)
    assert refusal(join(admission, 0, job="c")) == reason
    admission.released(running.generation)
    assert join(admission, 0, job="c") == [Answer(("c", 0), Pending([1], 1))]


def test_no_more_memory_than_allowed() -> None:
    """The limit is for all jobs together; each has 3 × 4 slots."""
    each = 3 * 4 * 65536
    admission = Admission(dataclasses.replace(LIMITS, max_bytes=2 * each))
    (running,) = join(admission, 0, 1, job="a")
    join(admission, 0, job="b")
    reason = (
        f"{2 * each} bytes of slots and state of other jobs and {each} of this one are more than aggregator.max_bytes"
    )
    assert reason in refusal(join(admission, 0, job="c"))
    admission.connection_ended(("b", 0), 0.0)
    assert isinstance(join(admission, 0, job="c")[0], Answer)
    assert reason in refusal(join(admission, 0, job="d"))
    admission.finished(running.generation, 0.0)
    assert reason in refusal(join(admission, 0, job="d"))
    admission.released(running.generation)
    assert isinstance(join(admission, 0, job="d")[0].message, Pending)


def test_a_rank_that_goes_while_the_job_gathers_may_come_again() -> None:
    admission = Admission(LIMITS)
    join(admission, 0, 1, world_size=3)
    admission.connection_ended(("job", 0), 0.0)
    assert list(admission.expire(1.0)) == [Answer(("job", 1), Pending([0, 2], 2))]
    join(admission, 0, world_size=3)
    assert isinstance(join(admission, 2, world_size=3)[0], Admit)


def test_the_last_one_to_go_takes_the_job_along() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    admission.connection_ended(("job", 0), 0.0)
    assert admission.deadline is None
    join(admission, 0, 1, world_size=3)  # another size: nothing was left of the first one


def test_going_unknown_is_nothing() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    admission.connection_ended("stranger", 0.0)
    admission.departed(99, 0)
    admission.finished(99, 0.0)
    assert isinstance(join(admission, 1)[0], Admit)


def test_a_new_generation_gathers_while_the_old_one_leaves() -> None:
    admission = Admission(LIMITS)
    (old,) = join(admission, 0, 1)
    admission.departed(old.generation, 1)
    assert join(admission, 1) == [Answer(("job", 1), Pending([0], 1))]
    assert "already in job" in refusal(join(admission, 0))
    admission.departed(old.generation, 0)
    (new,) = join(admission, 0)
    assert new.generation == old.generation + 1
    admission.finished(old.generation, 0.0)
    assert "already in job" in refusal(join(admission, 0))
    admission.finished(new.generation, 0.0)
    assert isinstance(join(admission, 0)[0], Answer)


def test_gathering_for_too_long_is_refused() -> None:
    admission = Admission(LIMITS)
    join(admission, 1, world_size=4, now=5.0)
    join(admission, 3, world_size=4, now=20.0)
    join(admission, 0, job="later", now=6.0)
    assert len(list(admission.expire(34.0))) == 2
    assert admission.deadline == 35.0
    assert list(admission.expire(34.9)) == []
    answers = list(admission.expire(35.0))
    assert {answer.key for answer in answers} == {("job", 1), ("job", 3)}
    assert all("waiting for rank 0, 2 after 30 s" in refusal([answer]) for answer in answers)
    assert admission.deadline == 36.0


def test_an_expired_job_of_many_ranks_is_described_in_few_words() -> None:
    admission = Admission(Limits(3, 100_000, 1 << 40, 30.0))
    join(admission, 0, world_size=100_000)
    assert len(refusal(list(admission.expire(30.0)))) < 1000


def test_a_shard_that_stops_refuses_those_who_wait_and_those_who_come() -> None:
    admission = Admission(LIMITS)
    join(admission, 0)
    (running,) = join(admission, 0, 1, job="running")
    assert refusal(list(admission.turn_away())) == "the aggregator is shutting down"
    assert admission.deadline is None
    assert "shutting down" in refusal(join(admission, 1))
    admission.finished(running.generation, 0.0)
    assert list(admission.turn_away()) == []


class Life(RuleBasedStateMachine):
    """Connections that come, wait, are admitted and go, in any order."""

    hellos = Bundle("hellos")
    generations = Bundle("generations")
    over = Bundle("over")

    @initialize()
    def start(self) -> None:
        self.admission = Admission(TIGHT)
        self.now = 0.0
        self.next_key = 0
        self.held: dict[int, Hello] = {}  # by generation, one of its ranks, until it is released
        self.waiting: dict[Hashable, Hello] = {}  # by connection
        self.running: dict[int, dict[int, Hello]] = {}  # by generation, the ranks that are still there
        self.started = 0

    def read(self, effects: Iterable[AdmissionEffect]) -> list[int]:
        """Keep the model in step; return the generations that started."""
        started = []
        for effect in effects:
            if isinstance(effect, Admit):
                self.admitted(effect)
                started.append(effect.generation)
            elif isinstance(effect.message, Refused):
                del self.waiting[effect.key]
            else:
                mine = self.waiting[effect.key]
                ranks = {each.rank for each in self.waiting.values() if each.job == mine.job}
                missing = [rank for rank in range(mine.world_size) if rank not in ranks]
                assert (effect.message.missing, effect.message.total_missing) == (missing[:16], len(missing))
        return started

    def admitted(self, admit: Admit) -> None:
        assert self.admission.intake.state != "closed"
        assert admit.generation > self.started
        self.started = admit.generation
        requests = [msgspec.structs.replace(each, formation=0, ticket=b"") for each in admit.hellos]
        assert [self.waiting.pop(key) for key in admit.keys] == requests
        assert [each.rank for each in admit.hellos] == list(range(admit.hellos[0].world_size))
        agreed = {(each.job, each.team, each.world_size, each.shards, each.shard, each.slots) for each in admit.hellos}
        assert len(agreed) == 1
        there = {(rank.job, rank.rank) for ranks in self.running.values() for rank in ranks.values()}
        assert not any((admit.job, rank) in there for rank in range(len(admit.keys)))
        self.held[admit.generation] = admit.hellos[0]
        self.running[admit.generation] = {each.rank: each for each in admit.hellos}

    @rule(
        target=generations,
        job=st.sampled_from("abcde"),
        rank=st.integers(0, 2),
        world_size=st.sampled_from([1, 2, 2, 2, 3]),
        slots=st.sampled_from([4, 4, 4, 5]),
        team=st.sampled_from(["", "", "", "one"]),
    )
    def comes(self, job: str, rank: int, world_size: int, slots: int, team: str) -> Any:
        self.next_key += 1
        message = hello(rank, world_size, job=job, slots=slots, team=team)
        terms = TEAM_TERMS if team else NO_LIMITS
        self.waiting[self.next_key] = message
        before = {key: each for key, each in self.waiting.items() if key != self.next_key}
        others = [each for each in before.values() if each.job == job]
        agrees = all(
            (each.world_size, each.slots, each.team) == (world_size, slots, team) and each.rank != rank
            for each in others
        )
        is_there = any(
            each.job == job and each.rank == rank for ranks in self.running.values() for each in ranks.values()
        )
        held = self.held
        of_others = any(held[each].job == job and held[each].team != team for each in self.running)
        jobs = len({each.job for each in before.values()}) + len(self.running)
        loads = [*{each.job: each for each in before.values()}.values(), *self.held.values(), message]
        ranks = sum(load.world_size for load in loads)
        memory = sum((load.world_size + 1) * load.slots * load.slot_bytes for load in loads)
        room = bool(others) or (jobs < TIGHT.max_jobs and ranks <= TIGHT.max_ranks and memory <= TIGHT.max_bytes)
        own = sum(load.world_size for load in loads if load.team == team)
        own_jobs = {each.job for each in before.values() if each.team == team}
        own_running = sum(held[each].team == team for each in self.running)
        fits = bool(others) or (own <= terms.max_ranks and len(own_jobs) + own_running < terms.max_jobs)
        fair = fits and not of_others
        welcome = (
            rank < world_size and agrees and not is_there and room and fair and self.admission.intake.state != "closed"
        )
        started = self.read(self.admission.hello(self.next_key, message, self.now, terms))
        assert bool(started) == (welcome and len(others) + 1 == world_size)
        assert (self.next_key in self.waiting or bool(started)) == welcome
        return multiple(*started)

    @rule(data=st.data())
    def goes_while_waiting(self, data: st.DataObject) -> None:
        if self.waiting:
            key = data.draw(st.sampled_from(sorted(self.waiting)))  # type: ignore[type-var]
            del self.waiting[key]
            self.admission.connection_ended(key, 0.0)

    @rule(generation=generations, rank=st.integers(0, 2))
    def departs(self, generation: int, rank: int) -> None:
        self.admission.departed(generation, rank)
        self.running.get(generation, {}).pop(rank, None)

    @rule(target=over, generation=consumes(generations))
    def finishes(self, generation: int) -> int:
        self.admission.finished(generation, 0.0)
        self.running.pop(generation, None)
        return generation

    @rule(generation=consumes(over))
    def is_released(self, generation: int) -> None:
        self.admission.released(generation)
        del self.held[generation]

    @rule(seconds=st.sampled_from([1.0, 15.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = any(
            self.now - pending_job.since >= LIMITS.join_timeout_s
            for pending_job in self.admission._pending_jobs.values()
        )
        before = len(self.waiting)
        self.read(self.admission.expire(self.now))
        assert (len(self.waiting) < before) == due

    @rule(really=st.integers(0, 9))
    def stops(self, really: int) -> None:
        if really == 0:
            self.read(self.admission.turn_away())
            assert not self.waiting

    @invariant()
    def deadlines_are_ahead(self) -> None:
        deadline = self.admission.deadline
        assert (deadline is not None) == bool(self.waiting)
        assert deadline is None or deadline <= self.now + LIMITS.join_timeout_s


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=40)


def test_member_name() -> None:
    assert member_name(hello(3, 4, host="node7", pid=12)) == "rank 3 (host node7, pid 12)"


# ranks whose kernels compile


def compile_as(admission: Admission, rank: int, now: float = 0.0, **changes: Any) -> list[Any]:
    """Say as `rank`, from a connection named ("compiles", rank), that it will come."""
    return list(admission.hello(("compiles", rank), hello(rank, 3, compiling=True, **changes), now))


def test_time_does_not_go_by_while_kernels_compile() -> None:
    admission, limit_s = Admission(LIMITS), LIMITS.join_timeout_s
    assert compile_as(admission, 2) == [Answer(("compiles", 2), Pending([], 0))]
    assert admission.gathers == 0
    assert admission.deadline == COMPILING_S
    assert join(admission, 0, world_size=3) == [Answer(("job", 0), Pending([1, 2], 2, compiling=[2]))]
    for second in (1, 2, 3 * limit_s):  # said again and again
        assert admission.deadline <= second  # type: ignore[operator]
        expected = [Answer(("job", 0), Pending([1, 2], 2, compiling=[2]))]
        assert list(admission.expire(second)) == expected
    admission.connection_ended(("compiles", 2), 3 * limit_s)
    assert join(admission, 2, world_size=3, now=3 * limit_s) == [Answer(("job", 2), Pending([1], 1))]
    assert not [each for each in admission.expire(4 * limit_s - 0.5) if isinstance(each.message, Refused)]  # type: ignore[union-attr]
    late = list(admission.expire(4 * limit_s))
    assert {each.key for each in late} == {("job", 0), ("job", 2)}  # type: ignore[union-attr]
    assert all(isinstance(each.message, Refused) for each in late)  # type: ignore[union-attr]


def test_a_rank_that_compiles_for_too_long_is_waited_for_no_more() -> None:
    admission = Admission(LIMITS)
    compile_as(admission, 1)
    join(admission, 0, world_size=3, now=10.0)
    assert not refused(admission.expire(COMPILING_S - 1.0))
    assert refused(admission.expire(COMPILING_S)) == [("compiles", 1)]
    assert refused(admission.expire(COMPILING_S + LIMITS.join_timeout_s)) == [("job", 0)]
    assert admission.deadline is None


def test_a_rank_that_says_again_and_again_that_it_compiles_keeps_a_job_for_a_bounded_time() -> None:
    admission, limit_s = Admission(LIMITS), LIMITS.join_timeout_s
    join(admission, 0, world_size=3)
    for now in range(10, int(COMPILING_S), 10):
        admission.connection_ended(("compiles", 1), now - 5.0)
        compile_as(admission, 1, now=float(now))
        assert not refused(admission.expire(float(now)))
    (answer,) = [each for each in admission.expire(COMPILING_S) if isinstance(each, Answer)]
    assert answer == Answer(("job", 0), Pending([1, 2], 2, compiling=[]))
    assert refused(admission.expire(COMPILING_S + limit_s)) == [("job", 0)]


def test_ranks_that_compile_count_as_ranks_that_a_shard_and_a_team_may_have() -> None:
    admission = Admission(TIGHT)  # five ranks

    def compiles(number: int, **changes: Any) -> list[Any]:
        request = hello(0, 1, job=f"job{number}", compiling=True, **changes)
        return list(admission.hello(number, request, 0.0, TEAM_TERMS if changes else NO_LIMITS))

    assert [compiles(number, team="red") for number in range(3)] == [
        [Answer(number, Pending([], 0))] for number in range(3)
    ]
    assert "3 ranks of team 'red' compile already, which is max_ranks in red.toml" in refusal(compiles(3, team="red"))
    assert [compiles(number)[0].message for number in (4, 5)] == [Pending([], 0)] * 2
    assert "5 ranks compile already, which is aggregator.max_ranks" in refusal(compiles(6))
    admission.connection_ended(0, 1.0)
    assert compiles(7, team="red") == [Answer(7, Pending([], 0))]


def test_nobody_waits_for_who_is_here_or_can_never_come_though_it_says_that_it_compiles() -> None:
    admission = Admission(LIMITS)
    join(admission, 0, world_size=3)
    (first, second) = (each.message for each in compile_as(admission, 0) + list(admission.expire(1.0)))
    assert "rank 0 (host h, pid 100) is already in job 'job'" in first.reason
    assert second.compiling == []
    other = list(admission.hello("other", hello(2, 4, compiling=True), 1.0))
    assert "world_size 4 differs from 3" in refusal(other)
    assert refused(admission.expire(LIMITS.join_timeout_s)) == [("job", 0)]


def test_of_several_connections_of_a_rank_that_compiles_the_last_one_counts() -> None:
    admission = Admission(LIMITS)
    for number, now in enumerate((0.0, 5.0)):
        list(admission.hello(("again", number), hello(1, 3, compiling=True), now))
    join(admission, 0, world_size=3, now=5.0)
    admission.connection_ended(("again", 0), 6.0)
    (answer,) = admission.expire(10.0)
    assert answer == Answer(("job", 0), Pending([1, 2], 2, compiling=[1]))
    join(admission, 1, world_size=3, now=11.0)
    (answer, *_) = admission.expire(12.0)
    assert answer == Answer(("job", 0), Pending([2], 1, compiling=[]))


def refused(effects: Iterable[AdmissionEffect]) -> list[Hashable]:
    return [effect.key for effect in effects if isinstance(effect, Answer) and isinstance(effect.message, Refused)]


@pytest.mark.parametrize("changes", [{"team": "other"}, {"job": "other"}, {"launch": "other"}])
def test_others_that_compile_keep_nobody_waiting(changes: dict[str, str]) -> None:
    admission = Admission(LIMITS)
    compile_as(admission, 1, **changes)
    (answer,) = join(admission, 0, world_size=3)
    assert answer.message.compiling == []
    assert refused(admission.expire(LIMITS.join_timeout_s)) == [("job", 0)]


def test_a_job_starts_though_the_connection_of_a_rank_that_compiled_is_still_there() -> None:
    admission = Admission(LIMITS)
    compile_as(admission, 1)
    join(admission, 0, 2, world_size=3)
    (admit,) = join(admission, 1, world_size=3)
    assert admit.keys == [("job", 0), ("job", 1), ("job", 2)]
    admission.connection_ended(("compiles", 1), 1.0)


def test_who_compiles_is_told_at_once_that_it_cannot_join() -> None:
    admission = Admission(LIMITS)
    assert "rank 5 of 3 does not exist" in refusal(compile_as(admission, 5))
    list(admission.turn_away())
    assert "shutting down" in refusal(compile_as(admission, 1))


def test_who_compiles_is_told_when_the_aggregator_stops() -> None:
    admission = Admission(LIMITS)
    compile_as(admission, 1)
    assert refused(admission.turn_away()) == [("compiles", 1)]
