"""Joining of a worker: cases by name, and any events in any order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from omnireduce.core.wire.control import (
    PROTOCOL_VERSION,
    Aborted,
    Cause,
    Challenge,
    ControlMessage,
    Goodbye,
    Greeting,
    Hello,
    Leave,
    Newcomers,
    Pending,
    Proof,
    RankAssignment,
    Refused,
    Waiting,
    Welcome,
    decode_control,
    encode_control,
)
from omnireduce.errors import AbortedError, OmniReduceError, RefusedError, TransportError
from omnireduce.protocol.collective.effects import SendControl
from omnireduce.protocol.joining.compiling import COMPILING_S
from omnireduce.protocol.joining.worker_joining import Connect, HangUp, Joined, JoinFailed, Joining, Notice
from omnireduce.support.secret import Secret

LIMIT_S = 30.0
SECRET = Secret(b"0123456789abcdef")
NONCE, THEIRS = b"w" * 32, b"a" * 32
HELLO = Hello(PROTOCOL_VERSION, "job", 1, 2, 0, 2, 3, 65536, "host", 7, 64)
ELASTIC = replace(HELLO, world_size=3, min_ranks=1, last_call_s=1.0)
SURVIVOR = replace(ELASTIC, survived=4, ticket=b"t" * 32)
ASSIGNMENT = RankAssignment(0, 2, 9, b"n" * 32)


def machine(hello: Hello = HELLO, secret: Secret | None = None, shards: int = 2) -> Joining:
    return Joining(hello, [f"a:{n}" for n in range(shards)], secret, LIMIT_S, "tcp")


def begun(hello: Hello = HELLO, secret: Secret | None = None, shards: int = 2) -> Joining:
    joining = machine(hello, secret, shards)
    assert list(joining.start(0.0)) == [Connect(0, LIMIT_S)]
    return joining


def receive(joining: Joining, shard: int, *messages: ControlMessage, now: float = 0.0) -> list[Any]:
    return [effect for message in messages for effect in joining.control_received(shard, message, now)]


def after_leaves(effects: Iterable[object]) -> Any:
    """Effects except the Leave messages to aggregators."""
    return [effect for effect in effects if not (isinstance(effect, SendControl) and isinstance(effect.message, Leave))]


def failure(effects: Iterable[object]) -> OmniReduceError:
    hang_up, failed = after_leaves(effects)
    assert hang_up == HangUp()
    assert isinstance(failed, JoinFailed)
    return failed.error


def hello_in(effect: object) -> Hello:
    assert isinstance(effect, SendControl)
    assert isinstance(effect.message, Hello)
    return effect.message


def test_all_aggregators_in_turn_then_all_welcomes() -> None:
    joining = begun()
    first, connect = joining.connected(0, NONCE, 1.0)
    assert (hello_in(first), connect) == (HELLO, Connect(1, LIMIT_S))
    (second,) = joining.connected(1, NONCE, 2.0)
    assert hello_in(second) == replace(HELLO, shard=1)
    assert receive(joining, 1, Pending([0], 1), Welcome(5, whole_bytes=8)) == []
    (joined,) = receive(joining, 0, Welcome(6, whole_bytes=8))
    assert isinstance(joined, Joined)
    assert (joined.rank, joined.size, joined.generation, joined.whole_bytes) == (1, 2, 6, 8)
    assert joining.deadline is None


def test_the_secret_is_proved_before_the_hello() -> None:
    joining = begun(secret=SECRET, shards=1)
    assert list(joining.connected(0, NONCE, 0.0)) == [SendControl(0, Greeting(PROTOCOL_VERSION, NONCE))]
    assert receive(joining, 0, Challenge(THEIRS)) == [SendControl(0, Proof(SECRET.proof("worker", NONCE, THEIRS)))]
    (hello,) = receive(joining, 0, Proof(SECRET.proof("aggregator", NONCE, THEIRS)))
    assert hello_in(hello) == HELLO


def test_who_does_not_prove_itself_gets_no_hello() -> None:
    for answers in ([Welcome(1)], [Challenge(THEIRS), Proof(bytes(32))], [Pending([1], 1)]):
        joining = begun(secret=SECRET, shards=1)
        list(joining.connected(0, NONCE, 0.0))
        effects = receive(joining, 0, *answers)
        assert not any(isinstance(effect, SendControl) and isinstance(effect.message, Hello) for effect in effects)
        assert isinstance(failure(effects[-2:]), TransportError)


def test_an_aggregator_that_is_not_up_yet_is_tried_again() -> None:
    """The same goes for a name that nobody knows yet."""
    joining = begun(shards=1)
    for now in (0.0, 0.1, 0.2):
        assert list(joining.unreachable(0, "Name or service not known", now)) == []
        assert joining.deadline == pytest.approx(now + 0.1)
        assert list(joining.timer(now + 0.1)) == [Connect(0, LIMIT_S)]
    list(joining.unreachable(0, "Name or service not known", 2.0))
    notice, again = joining.timer(2.1)
    text = "waiting for aggregator a:0 since 2 s: Name or service not known"
    assert notice == Notice("waiting_for_aggregator", text, 0)
    assert again == Connect(0, LIMIT_S)
    list(joining.unreachable(0, "Name or service not known", LIMIT_S))
    error = failure(joining.timer(LIMIT_S))
    assert "cannot reach aggregator a:0 by tcp: Name or service not known; is `omnireduce aggregator`" in str(error)


@pytest.mark.parametrize("hello", [HELLO, ELASTIC, SURVIVOR])
def test_a_connection_that_is_lost_before_the_hello_is_made_again(hello: Hello) -> None:
    """Nobody counts on this worker yet. What may be wrong is said after a while, and in the end."""
    joining, hint = begun(hello, SECRET), "; does it want TLS?"
    for now in (0.0, 0.3, 0.6, 0.8):
        assert list(joining.connected(0, NONCE, now, hint)) == [SendControl(0, Greeting(PROTOCOL_VERSION, NONCE))]
        assert list(joining.lost(0, "connection closed", now)) == [HangUp(0)]
        assert joining.deadline == pytest.approx(now + 0.1)
        assert list(joining.timer(now + 0.1)) == [Connect(0, LIMIT_S)]
    list(joining.connected(0, NONCE, 1.9, hint))
    list(joining.lost(0, "connection closed", 1.95))
    notice, again = joining.timer(2.05)
    assert notice.text == "waiting for aggregator a:0 since 2 s: connection closed before the hello; does it want TLS?"
    assert again == Connect(0, LIMIT_S)
    list(joining.connected(0, NONCE, LIMIT_S - 0.01, hint))
    error = failure(joining.timer(LIMIT_S))
    assert "cannot reach aggregator a:0 by tcp: connection closed before the hello; does it want TLS; is" in str(error)


def test_the_connections_before_a_lost_one_stay() -> None:
    joining = begun(secret=SECRET)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Challenge(THEIRS), Proof(SECRET.proof("aggregator", NONCE, THEIRS)))
    list(joining.connected(1, NONCE, 0.0))
    assert list(joining.lost(1, "connection closed", 0.8)) == [HangUp(1)]
    assert list(joining.timer(0.9)) == [Connect(1, LIMIT_S)]
    list(joining.connected(1, NONCE, 1.1))
    receive(joining, 0, Welcome(3))
    receive(joining, 1, Challenge(THEIRS), Proof(SECRET.proof("aggregator", NONCE, THEIRS)), now=1.2)
    (joined,) = receive(joining, 1, Welcome(4), now=1.3)
    assert [welcome.generation for welcome in joined.welcomes] == [3, 4]


def test_what_cannot_get_better_is_final_before_the_hello_too() -> None:
    for answer, expected in ((Refused("no"), "refused: no"), (Challenge(THEIRS), ": no frame (before this worker")):
        joining = begun(secret=SECRET)
        list(joining.connected(0, NONCE, 0.0, "; does it want TLS?"))
        effects = receive(joining, 0, answer)
        if isinstance(answer, Challenge):  # it breaks a rule, or says by TLS that we do
            effects = list(joining.lost(0, "no frame", 1.0, for_good=True))
        text = str(failure(effects))
        assert "aggregator a:0" in text
        assert expected in text
        assert "TLS" not in text  # the answer says what is wrong
    joining = begun()
    list(joining.connected(0, NONCE, 0.0, "; does it want TLS?"))  # the hello is said
    error = failure(joining.lost(0, "connection closed", 1.0))
    assert str(error) == "aggregator a:0: connection closed before this worker was admitted; does it want TLS?"


def test_who_is_missing_is_said_again_and_again_and_in_the_end() -> None:
    """As in an all-reduce, after 1, 2, 4, ... seconds."""
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Pending([0], 1, "rank 0 was refused"))
    for waited_s in (1.0, 2.0, 4.0, 8.0, 16.0):
        assert joining.deadline == waited_s
        assert list(joining.timer(waited_s - 0.1)) == []
        (notice,) = joining.timer(waited_s)
        who = "rank 0 of job 'job' at aggregator a:0 (rank 0 was refused)"
        assert notice == Notice("waiting_for_ranks", f"waiting for {who} since {waited_s:.0f} s")
    assert joining.deadline == LIMIT_S
    error = failure(joining.timer(LIMIT_S))
    assert isinstance(error, RefusedError)
    assert "after cluster.join_timeout_s = 30; were all workers started, with the same world size" in str(error)


def test_ranks_whose_kernels_compile_are_waited_for_and_that_is_said() -> None:
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Pending([0, 3], 2))
    texts = list[str]()
    for now in (20.0, 40.0, 60.0):
        assert receive(joining, 0, Pending([0, 3], 2, compiling=[3]), now=now) == []
        texts += [each.text for each in joining.timer(now)]  # type: ignore[union-attr]
    where = "waiting for rank 0, 3 of job 'job' at aggregator a:0 (the kernels of rank 3 compile)"
    assert texts
    assert all(text.startswith(where) for text in texts)
    receive(joining, 0, Pending([0], 1), now=70.0)
    assert joining.deadline is not None
    assert not [each for each in joining.timer(89.9) if isinstance(each, JoinFailed)]
    error = failure(joining.timer(90.0))  # the last time that it was said was at 60 s
    assert "still waiting for rank 0 of job 'job' at aggregator a:0 after cluster.join_timeout_s = 30" in str(error)


def test_an_aggregator_that_says_for_ever_that_ranks_compile_is_not_believed() -> None:
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    latest = COMPILING_S + 2 * LIMIT_S
    for now in range(20, int(latest), 20):
        receive(joining, 0, Pending([3], 1, compiling=[3]), now=float(now))
        assert not [each for each in joining.timer(float(now)) if isinstance(each, JoinFailed)]
    assert isinstance(failure(joining.timer(latest)), RefusedError)


def test_a_failure_behind_the_last_welcome_ends_it_all_the_same() -> None:
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    (joined, *rest) = receive(joining, 0, Welcome(1), Newcomers(3), Aborted(Cause("rank 0", "died")))
    assert isinstance(joined, Joined)
    assert joining.newcomers == 3
    error = failure(rest)
    assert isinstance(error, AbortedError)
    assert error.culprit == "rank 0"


@pytest.mark.parametrize("others", [[], [Welcome(1)]])
def test_an_aggregator_that_begins_the_job_hears_which_other_one_was_lost(others: list[ControlMessage]) -> None:
    """It may have welcomed all ranks when this worker loses the other one: it would name this worker, else."""
    joining = begun()
    list(joining.connected(0, NONCE, 0.0))
    list(joining.connected(1, NONCE, 0.0))
    receive(joining, 1, *others)
    leave = Leave(Cause("aggregator a:0", "connection closed"))
    assert list(joining.lost(0, "connection closed", 1.0))[:3] == [
        SendControl(0, leave),
        SendControl(1, leave),
        HangUp(),
    ]


def test_an_aggregator_that_begins_the_job_hears_why_another_one_has_ended_it() -> None:
    joining, died = begun(), Cause("rank 0", "died")
    list(joining.connected(0, NONCE, 0.0))
    list(joining.connected(1, NONCE, 0.0))
    assert receive(joining, 0, Aborted(died))[:2] == [SendControl(0, Leave(died)), SendControl(1, Leave(died))]


def test_what_the_other_ranks_hear_of_an_error_is_bounded() -> None:
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    (leave, *_) = receive(joining, 0, Refused("no" * 2048))
    assert decode_control(encode_control(leave.message)) == leave.message


def test_who_has_not_proved_itself_hears_nothing() -> None:
    joining = begun(secret=SECRET)
    list(joining.connected(0, NONCE, 0.0))
    effects = list(joining.failed(TransportError("lost"), 1.0))
    assert effects == after_leaves(effects)


@pytest.mark.parametrize("message", [Goodbye(), Greeting(1, NONCE), Welcome(2)])
def test_what_is_no_answer_to_a_hello(message: ControlMessage) -> None:
    joining = begun(shards=2)
    list(joining.connected(0, NONCE, 0.0))
    error = failure(receive(joining, 0, Welcome(1), message))
    assert f"aggregator a:0 answered the hello with {type(message).__name__}" in str(error)


def test_aggregators_that_disagree_about_whole_tensors() -> None:
    joining = begun()
    list(joining.connected(0, NONCE, 0.0))
    list(joining.connected(1, NONCE, 0.0))
    receive(joining, 0, Welcome(1, whole_bytes=8))
    assert "disagree about which tensors stay whole: up to 8, 0 bytes" in str(failure(receive(joining, 1, Welcome(1))))


def test_aggregators_that_disagree_about_hosts() -> None:
    joining = begun()
    list(joining.connected(0, NONCE, 0.0))
    list(joining.connected(1, NONCE, 0.0))
    receive(joining, 0, Welcome(1, local_ranks=(0, 1), host=0, hosts=1))
    error = failure(receive(joining, 1, Welcome(1, local_ranks=(1,), host=1, hosts=2)))
    assert str(error) == "the aggregators disagree about which ranks share a host"


def test_a_rank_of_a_group_comes_to_the_others_once_the_first_has_welcomed_it() -> None:
    """So none of them knows of an attempt that the first one refused."""
    group = replace(HELLO, job="job+pair.1", parent_rank=3)
    joining = begun(group)
    (first,) = joining.connected(0, NONCE, 1.0)
    assert hello_in(first) == group
    assert receive(joining, 0, Pending([0], 1), Welcome(6), now=2.0) == [Connect(1, LIMIT_S)]
    (second,) = joining.connected(1, NONCE, 2.0)
    assert hello_in(second) == replace(group, shard=1)
    (joined,) = receive(joining, 1, Welcome(5))
    assert isinstance(joined, Joined)
    assert (joined.rank, joined.size, joined.generation) == (1, 2, 6)


# elastic jobs


def seated(hello: Hello = SURVIVOR, secret: Secret | None = None) -> Joining:
    """It has its assignment since 10.0, and connects to the second aggregator."""
    joining = begun(hello)
    (effect,) = joining.connected(0, NONCE, 0.0)
    assert hello_in(effect) == hello
    (connect,) = receive(joining, 0, Welcome(3, assignment=ASSIGNMENT), now=10.0)
    assert connect == Connect(1, 15.0)
    return joining


def test_a_seat_is_taken_to_the_other_aggregators() -> None:
    joining = seated()
    (effect,) = joining.connected(1, NONCE, 10.0)
    assert hello_in(effect) == replace(
        SURVIVOR, shard=1, rank=0, world_size=2, formation=9, min_ranks=0, last_call_s=0.0, survived=0, ticket=b""
    )
    (joined,) = receive(joining, 1, Welcome(8))
    assert (joined.rank, joined.size, joined.generation, joined.assignment) == (0, 2, 3, ASSIGNMENT)


@pytest.mark.parametrize("assignment", [None, RankAssignment(2, 2, 9, b""), RankAssignment(0, 4, 9, b"")])
def test_an_assignment_that_cannot_be(assignment: RankAssignment | None) -> None:
    joining = begun(ELASTIC)
    list(joining.connected(0, NONCE, 0.0))
    effects = receive(joining, 0, Welcome(3, assignment=assignment))
    assert after_leaves(effects)[0] == HangUp()


def test_who_has_a_seat_and_does_not_come_along_tries_again_with_its_new_ticket() -> None:
    joining = seated()
    list(joining.connected(1, NONCE, 10.0))
    hang_up, notice = after_leaves(joining.timer(15.0))
    assert hang_up == HangUp()
    assert "an answer of aggregator a:1 after 5 s, which a worker has from the first aggregator" in notice.text
    assert joining.deadline == pytest.approx(15.1)
    assert list(joining.timer(15.1)) == [Connect(0, LIMIT_S)]
    (effect,) = joining.connected(0, NONCE, 15.1)
    assert hello_in(effect) == replace(SURVIVOR, survived=9, ticket=ASSIGNMENT.ticket)


def test_a_survivor_waits_for_the_proof_of_an_aggregator_that_was_stopped() -> None:
    """It has time left to join, so a proof that is late is not final."""
    joining = begun(SURVIVOR, SECRET)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Challenge(THEIRS), Proof(SECRET.proof("aggregator", NONCE, THEIRS)))
    receive(joining, 0, Welcome(3, assignment=ASSIGNMENT), now=1.0)
    list(joining.connected(1, NONCE, 1.0))  # and then nothing comes
    hang_up, notice = after_leaves(joining.timer(6.0))
    assert hang_up == HangUp()
    assert "no proof of the secret came from aggregator a:1 within 5 s" in notice.text
    assert list(joining.timer(6.1)) == [Connect(0, LIMIT_S)]


def test_an_aggregator_that_had_no_time_to_prove_itself_is_not_blamed_for_that() -> None:
    """The first aggregator gave the place in the last moment."""
    joining = begun(replace(SURVIVOR, survived=0, ticket=b""), SECRET)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Challenge(THEIRS), Proof(SECRET.proof("aggregator", NONCE, THEIRS)))
    receive(joining, 0, Welcome(3, assignment=ASSIGNMENT), now=LIMIT_S - 0.001)
    list(joining.connected(1, NONCE, LIMIT_S - 0.001))
    _, failed = after_leaves(joining.timer(LIMIT_S))
    assert "still waiting for an answer of aggregator a:1 after cluster.join_timeout_s" in str(failed.error)


@pytest.mark.parametrize(
    ("hello", "error", "goes_on"),
    [
        (SURVIVOR, RefusedError("full", temporary=True), True),
        (SURVIVOR, RefusedError("no"), False),
        (SURVIVOR, TransportError("lost"), True),
        (SURVIVOR, AbortedError("rank 1", "died"), True),
        (ELASTIC, TransportError("lost"), False),  # most likely a wrong address
        (ELASTIC, AbortedError("rank 1", "died"), True),
        (HELLO, RefusedError("full", temporary=True), False),
    ],
)
def test_what_is_final(hello: Hello, error: OmniReduceError, goes_on: bool) -> None:
    joining = begun(hello)
    list(joining.connected(0, NONCE, 0.0))
    leave, *effects = joining.failed(error, 1.0)
    assert leave == SendControl(0, Leave(Cause("rank 1 (host host, pid 7)", f"could not begin: {error}")))
    assert effects == [
        HangUp(),
        Notice("joining_again", f"joining once more: {error}") if goes_on else JoinFailed(error),
    ]
    assert (joining.deadline is not None) == goes_on


def test_a_newcomer_with_a_seat_knows_that_the_addresses_are_right() -> None:
    joining = seated(ELASTIC)
    assert list(joining.lost(0, "connection closed", 11.0))[1:] != []
    assert joining.deadline == pytest.approx(11.1)


def test_an_attempt_that_had_no_time_does_not_hide_why_the_others_failed() -> None:
    joining, full = begun(SURVIVOR, SECRET), RefusedError("full", temporary=True)
    list(joining.failed(full, LIMIT_S - 0.5))
    list(joining.timer(LIMIT_S - 0.3))
    list(joining.connected(0, NONCE, LIMIT_S - 0.3))
    assert failure(joining.timer(LIMIT_S)) is full


def test_a_newcomer_waits_for_an_aggregator_that_has_answered_before() -> None:
    """The aggregator may have been started again meanwhile."""
    joining = begun(ELASTIC)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Pending([0], 1))
    assert list(joining.lost(0, "connection closed", 5.0))[1:] != []
    assert joining.deadline == pytest.approx(5.1)


def test_who_waits_for_a_place_or_for_memory_is_told_so() -> None:
    joining = begun(shards=1)
    list(joining.connected(0, NONCE, 0.0))
    receive(joining, 0, Pending([], 0))
    (notice,) = joining.timer(2.0)
    assert notice.text == "waiting for the last generation of job 'job' to go, at aggregator a:0 since 2 s"


def test_a_reason_for_which_attempts_fail_is_said_again() -> None:
    joining, texts = begun(SURVIVOR, shards=1), list[str]()
    now = 0.0
    while now < 10:
        list(joining.connected(0, NONCE, now))
        effects = receive(joining, 0, Refused("full", temporary=True), now=now)
        texts += [effect.text for effect in effects if isinstance(effect, Notice)]
        assert joining.deadline is not None
        now = joining.deadline
        list(joining.timer(now))
    assert texts[0] == "joining once more: aggregator a:0 refused: full"
    assert 3 <= len(texts) <= 5
    assert all(re.search("since [0-9]+ s: aggregator a:0 refused: full", text) for text in texts[1:])


def test_pauses_grow_and_end_with_the_time_to_join() -> None:
    joining, now, pauses = begun(SURVIVOR), 0.0, []
    while joining.deadline is not None:
        effects = list(joining.failed(RefusedError("full", temporary=True), now))
        if joining.deadline is not None:
            pauses.append(round(joining.deadline - now, 3))
            now = joining.deadline
            list(joining.timer(now))
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert now < LIMIT_S
    assert effects[-1] == JoinFailed(effects[-1].error)


MESSAGES: list[ControlMessage] = [
    Challenge(THEIRS),
    Proof(SECRET.proof("aggregator", NONCE, THEIRS)),
    Proof(bytes(32)),
    Pending([0], 1),
    Welcome(1),
    Welcome(2, assignment=ASSIGNMENT),
    Newcomers(1),
    Waiting("x", "rank 1", 1.0),
    Refused("no"),
    Refused("later", temporary=True),
    Aborted(Cause("rank 0", "died")),
    Goodbye(),
]


class Life:
    """A worker and what its driver knows: how many connections there are, which one is wanted, what came of it all."""

    def __init__(self, joining: Joining) -> None:
        self.joining, self.now = joining, 0.0
        self.links, self.wanted = 0, -1
        self.outcome: Joined | JoinFailed | None = None
        self.perform(joining.start(0.0))

    def perform(self, effects: Iterable[object]) -> None:
        for effect in effects:
            assert not isinstance(self.outcome, JoinFailed)
            if isinstance(effect, Connect):
                assert effect.shard == self.links
                self.wanted = effect.shard
            elif isinstance(effect, SendControl):
                assert effect.peer < self.links
            elif isinstance(effect, HangUp):
                self.links, self.wanted, self.outcome = effect.first, -1, None
            elif isinstance(effect, Joined | JoinFailed):
                self.outcome = effect

    def step(self, what: str, shard: int, message: ControlMessage, seconds: float) -> None:
        if what in ("connect", "no") and self.wanted == self.links:
            if what == "connect":
                self.links += 1
                self.perform(self.joining.connected(self.wanted, NONCE, self.now))
            else:
                shard, self.wanted = self.wanted, -1
                self.perform(self.joining.unreachable(shard, "down", self.now))
        elif what in ("told", "lost") and self.links:
            shard %= self.links
            self.perform(
                self.joining.control_received(shard, message, self.now)
                if what == "told"
                else self.joining.lost(shard, "connection closed", self.now)
            )
        else:
            self.now += seconds
            self.perform(self.joining.timer(self.now))


STEPS = st.tuples(
    st.sampled_from(["told", "told", "told", "connect", "connect", "time", "lost", "no"]),
    st.integers(0, 1),
    st.sampled_from(MESSAGES),
    st.sampled_from([0.05, 0.5, 3.0, 31.0]),
)


@settings(max_examples=300)
@given(
    hello=st.sampled_from([HELLO, ELASTIC, SURVIVOR]),
    secret=st.sampled_from([None, SECRET]),
    steps=st.lists(STEPS, max_size=60),
)
def test_any_events_in_any_order(hello: Hello, secret: Secret | None, steps: list[tuple[Any, ...]]) -> None:
    """It never raises, tells only whom it is connected to, and comes to one end in time."""
    life = Life(machine(hello, secret))
    for step in steps:
        if not isinstance(life.outcome, JoinFailed):
            life.step(*step)
    for _ in range(3):  # a pause, and an attempt, may come first
        if life.outcome is None:
            assert life.joining.deadline is not None
            life.step("time", 0, Goodbye(), 2 * LIMIT_S)
    assert life.outcome is not None
    assert life.joining.deadline is None
