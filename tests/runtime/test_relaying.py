"""Admission on a relay, between made-up workers and a made-up upstream: no job begins without all, nothing is kept."""

from __future__ import annotations

import dataclasses
import selectors
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.harness.inproc import InprocLink, pair
from omnireduce.core.wire.control import (
    MAX_RELAYS,
    NONCE_BYTES,
    PROTOCOL_VERSION,
    Aborted,
    Cause,
    Challenge,
    ControlMessage,
    Greeting,
    Hello,
    Leave,
    Pending,
    Proof,
    RankAssignment,
    Refused,
    Waiting,
    Welcome,
    decode_control,
    encode_control,
)
from omnireduce.protocol.joining.admission import AdmissionEffect, Admit, Answer
from omnireduce.protocol.joining.limits import Limits
from omnireduce.runtime.shard.relay_admission import RETRY_S, Connected, Relaying, Upstream
from omnireduce.support.secret import Secret
from omnireduce.transport.base import Control, Lost

UP, NAME = "top:7400", "relay:7400"
LIMITS = Limits(max_jobs=2, max_world_size=40, max_job_bytes=1 << 26, join_timeout_s=30.0)


def hello(rank: int, **changes: Any) -> Hello:
    result = Hello(
        PROTOCOL_VERSION, "job", rank, 4, shard=0, shards=1, slots=2, slot_bytes=65536, host="h", pid=rank + 100,
        stripe_blocks=64,
    )  # fmt: skip
    return replace(result, **changes)


class Watched(selectors.BaseSelector):
    """Remembers what to call for each link."""

    def __init__(self) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        assert (events, fileobj in self._keys) == (selectors.EVENT_READ, False)
        self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        raise NotImplementedError

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class Bench:
    """A relay whose connections are made when the test says so. `answers`: what its workers were told."""

    def __init__(self, secret: Secret | None = None, limits: Limits = LIMITS) -> None:
        self.now, self.calls, self.effects = 0.0, list[Connected](), list[AdmissionEffect]()
        self.watched = Watched()
        self.relaying = Relaying(
            NAME, limits, Upstream([UP], self._connect),
            selector=self.watched, clock=lambda: self.now, answer=self._take, secret_of=lambda team: secret,
        )  # fmt: skip

    def _connect(self, address: str, timeout_s: float, done: Connected) -> Callable[[], object]:
        self.calls.append(done)
        return lambda: self.calls.remove(done) if done in self.calls else None

    def _take(self, effects: Iterable[AdmissionEffect]) -> None:
        self.effects += effects

    def come(self, rank: int, **changes: Any) -> None:
        self._take(self.relaying.hello(f"worker {rank}", hello(rank, **changes), self.now))

    def connect(self) -> InprocLink:
        """Make the connection that was asked for first; return the upstream's end."""
        ours, theirs = pair(UP, NAME)
        self.calls.pop(0)(ours)
        return theirs

    def say(self, link: InprocLink, *messages: ControlMessage) -> None:
        """Let the upstream say this, all at once, and the relay hear it."""
        for message in messages:
            link.send_control(encode_control(message))
        self.hear(link)

    def hear(self, link: InprocLink) -> None:
        link.flush()
        calls = [key.data for key in self.watched.get_map().values() if key.fileobj.other_end is link]
        for call in calls:
            call()

    def told(self, rank: int) -> list[ControlMessage]:
        return [
            effect.message for effect in self.effects if isinstance(effect, Answer) and effect.key == f"worker {rank}"
        ]

    def refusal(self, rank: int) -> Refused:
        """The last that this worker was told."""
        message = self.told(rank)[-1]
        assert isinstance(message, Refused)
        return message

    @property
    def admitted(self) -> list[Admit]:
        return [effect for effect in self.effects if isinstance(effect, Admit)]

    def is_empty(self) -> bool:
        relaying = self.relaying
        return not (self.watched.get_map() or relaying._uplinks or relaying._pending_jobs or relaying._welcome)


def heard(link: InprocLink) -> list[ControlMessage | Lost]:
    """Messages at the upper end of an uplink."""
    results: list[ControlMessage | Lost] = []
    for event in link.poll():
        assert isinstance(event, Control | Lost)
        results.append(event if isinstance(event, Lost) else decode_control(event.body))
    return results


def welcome(rank: int, relayed: int = 2, **changes: Any) -> Welcome:
    return replace(Welcome(7, relayed=relayed), **changes)


def two() -> tuple[Bench, InprocLink, InprocLink]:
    bench = Bench()
    bench.come(3)
    bench.come(1)
    return bench, bench.connect(), bench.connect()


def test_a_hello_goes_up_with_the_name_of_the_relay() -> None:
    bench = Bench()
    bench.come(2, memory="0" * 32, team="t", relays=("below:1",), relay=b"below")
    (message,) = heard(bench.connect())
    assert isinstance(message, Hello)
    assert (message.relays, message.rank, message.team, message.verbs) == ((NAME, "below:1"), 2, "", None)
    assert message.memory not in ("", "0" * 32)  # ranks behind another relay say something else


def test_who_refuses_a_group_goes_up_and_is_no_job_that_gathers() -> None:
    """It opens no way around the limits, or into a relay that drains."""
    bench = Bench(limits=dataclasses.replace(LIMITS, max_jobs=0))
    bench.come(1, job="job+g.1", parent_rank=1, refuses="because")
    assert (bench.relaying.gathers, bench.relaying.pending_jobs(0.0)) == (0, [])
    bench.come(2, job="job+g.1", parent_rank=2)
    assert "aggregator.max_jobs" in bench.refusal(2).reason
    uplink = bench.connect()
    (message,) = heard(uplink)
    assert isinstance(message, Hello)
    assert message.refuses == "because"
    bench.say(uplink, Refused("because"))
    assert bench.refusal(1).reason.endswith("because")
    assert bench.is_empty()


def test_a_job_begins_when_all_behind_the_relay_are_welcome() -> None:
    bench, third, first = two()
    bench.say(third, Pending([0], 1), welcome(3))
    assert bench.admitted == []
    assert bench.told(3) == [Pending([0], 1)]
    bench.say(first, welcome(1))
    (admit,) = bench.admitted
    assert [each.rank for each in admit.hellos] == [1, 3]
    assert admit.keys == ["worker 1", "worker 3"]
    assert admit.relayed is not None
    assert [each.generation for each in admit.relayed.welcomes] == [7, 7]
    assert bench.is_empty()


def test_welcomes_of_two_generations_begin_nothing() -> None:
    bench, third, first = two()
    bench.say(third, welcome(3))
    bench.say(first, welcome(1, generation=8))
    assert bench.admitted == []


def test_who_goes_does_not_count_any_more() -> None:
    """Its uplink says why it goes, and closes."""
    bench, third, first = two()
    bench.say(third, welcome(3))
    heard(third)
    bench.relaying.connection_ended("worker 3", 0.0, Cause("rank 3", "has had enough"))
    bench.say(first, welcome(1))
    assert bench.admitted == []
    leave, lost = heard(third)
    assert leave == Leave(Cause("rank 3", "has had enough"))
    assert isinstance(lost, Lost)
    bench.relaying.connection_ended("worker 1", 0.0)
    assert bench.is_empty()


def test_what_comes_behind_the_welcome_counts() -> None:
    bench, third, first = two()
    bench.say(first, welcome(1))
    cause = Cause("rank 0", "is gone")
    bench.say(third, welcome(3), Waiting("a sum", "the aggregator", 1.0), Aborted(cause))
    assert bench.admitted == []
    assert bench.told(3) == [Waiting("a sum", f"aggregator {UP}", 1.0), Aborted(cause)]


def test_an_upstream_that_is_not_up_yet_is_tried_again() -> None:
    bench = Bench()
    bench.come(0)
    for number in range(3):
        bench.calls.pop(0)("Connection refused")
        assert bench.relaying.deadline == bench.now + RETRY_S
        assert list(bench.relaying.expire(bench.now)) == []
        bench.now += RETRY_S
        assert list(bench.relaying.expire(bench.now)) == []
        assert len(bench.calls) == 1, number
    bench.calls.pop(0)("Connection refused")
    bench.now = LIMITS.join_timeout_s
    (answer,) = bench.relaying.expire(bench.now)
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert answer.message.temporary
    assert "could not be reached: Connection refused" in answer.message.reason
    assert bench.is_empty()


def test_nobody_connects_for_a_worker_that_has_gone() -> None:
    bench = Bench()
    bench.come(0)
    (done,) = bench.calls
    bench.relaying.connection_ended("worker 0", 0.0)
    assert bench.calls == []
    ours, theirs = pair(UP, NAME)
    done(ours)  # it was under way
    (lost,) = heard(theirs)
    assert isinstance(lost, Lost)
    assert bench.is_empty()


def test_a_worker_waits_for_a_connection_no_longer_than_for_others() -> None:
    bench = Bench()
    bench.come(0)
    bench.now = bench.relaying.deadline or 0.0
    assert bench.now == LIMITS.join_timeout_s
    (answer,) = bench.relaying.expire(bench.now)
    assert isinstance(answer, Answer)
    assert isinstance(answer.message, Refused)
    assert "could not be reached: no answer" in answer.message.reason
    assert bench.calls == []


def test_two_relays_of_one_name_are_told_apart() -> None:
    messages = []
    for bench in (Bench(), Bench()):
        bench.come(0, memory="0" * 32)
        messages += heard(bench.connect())
    one, other = messages
    assert isinstance(one, Hello)
    assert isinstance(other, Hello)
    assert one.relays == other.relays
    assert one.relay != other.relay
    assert one.memory != other.memory


def test_a_refusal_says_whose_it_is() -> None:
    bench = Bench()
    bench.come(0)
    bench.say(bench.connect(), Refused("world size 9; aggregator.max_world_size is 4: raise it"))
    (refused,) = bench.told(0)
    start = f"aggregator {UP}, the upstream of relay {NAME}, refused: "
    assert refused == Refused(f"{start}world size 9; aggregator.max_world_size is 4: raise it")


def test_an_elastic_job_takes_the_room_of_its_last_generation() -> None:
    bench, elastic = Bench(limits=dataclasses.replace(LIMITS, max_jobs=1)), {"min_ranks": 1, "world_size": 2}
    bench.come(0, **elastic)
    assignment = RankAssignment(0, 2, 5, b"")
    bench.say(bench.connect(), welcome(0, relayed=1, assignment=assignment))
    bench.come(1, **elastic)
    assert bench.told(1) == []
    bench.come(2, job="other")
    assert len(bench.told(2)) == 1
    refused = bench.refusal(2)
    assert "aggregator.max_jobs" in refused.reason


def test_secrets_are_proved_before_the_hello() -> None:
    secret = Secret(b"a secret of sixteen bytes")
    bench = Bench(secret)
    bench.come(0)
    link = bench.connect()
    (greeting,) = heard(link)
    assert isinstance(greeting, Greeting)
    bench.say(link, Challenge(b"n" * NONCE_BYTES))
    (proof,) = heard(link)
    assert isinstance(proof, Proof)
    bench.say(link, Proof(secret.proof("aggregator", greeting.nonce, b"n" * NONCE_BYTES)))
    (message,) = heard(link)
    assert isinstance(message, Hello)


def test_a_connection_that_is_lost_before_the_hello_is_made_again() -> None:
    bench = Bench(Secret(b"a secret of sixteen bytes"))
    bench.come(0)
    link = bench.connect()
    link.close()
    bench.hear(link)
    (pending,) = bench.told(0)
    assert isinstance(pending, Pending)
    assert f"aggregator {UP}, the upstream of relay {NAME}, could not be reached" in pending.note
    bench.now = RETRY_S
    assert list(bench.relaying.expire(bench.now)) == []
    assert len(bench.calls) == 1


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([Welcome(7)], "does not know that this is a relay"),
        ([Welcome(7, relayed=2), Welcome(7, relayed=2)], "answered the hello with Welcome"),
        ([Leave()], "answered the hello with Leave"),
    ],
)
def test_an_upstream_that_makes_no_sense_is_named(messages: list[ControlMessage], expected: str) -> None:
    bench = Bench()
    bench.come(0)
    bench.say(bench.connect(), *messages)
    assert len(bench.told(0)) == 1
    refused = bench.refusal(0)
    assert f"aggregator {UP}, the upstream of relay {NAME}," in refused.reason
    assert expected in refused.reason
    assert bench.is_empty()


def test_ranks_that_are_told_different_things_are_refused() -> None:
    bench, third, first = two()
    bench.say(third, welcome(3, whole_bytes=8))
    bench.say(first, welcome(1))
    assert all("told the ranks of one job different things" in bench.refusal(rank).reason for rank in (1, 3))
    assert bench.is_empty()


def test_a_circle_of_relays_has_an_end() -> None:
    bench = Bench()
    bench.come(0, relays=("other:1",) * MAX_RELAYS, relay=b"other")
    assert len(bench.told(0)) == 1
    refused = bench.refusal(0)
    assert "circle" in refused.reason
    assert bench.calls == []


def test_limits_count_jobs_that_gather_and_that_run() -> None:
    bench = Bench()
    bench.come(0, job="one", world_size=1)
    bench.say(bench.connect(), welcome(0, relayed=1))
    bench.come(1, job="two")
    bench.come(2, job="two")
    bench.come(3, job="three")
    assert len(bench.told(3)) == 1
    refused = bench.refusal(3)
    assert "aggregator.max_jobs" in refused.reason
    bench.relaying.finished(bench.admitted[0].generation, 0.0)
    bench.relaying.released(bench.admitted[0].generation)
    bench.come(4, job="three", world_size=5)
    assert bench.told(4) == []


def test_a_job_that_needs_more_than_was_allowed_does_not_begin() -> None:
    """The first rank seemed to need less."""
    limits = dataclasses.replace(LIMITS, max_job_bytes=12 * 65536)
    bench = Bench(limits=limits)
    bench.come(3)
    bench.come(1)
    third, first = bench.connect(), bench.connect()
    bench.relaying._uplinks["worker 1"].hello = hello(1, slot_bytes=1 << 20)  # as if nobody had looked
    bench.say(third, welcome(3))
    bench.say(first, welcome(1))
    assert bench.admitted == []
    assert all("more than this relay may take" in bench.refusal(rank).reason for rank in (1, 3))
    assert bench.is_empty()


def test_a_fault_of_ours_costs_one_worker_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, third, first = two()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(bench.relaying, "_handle_control", fail)
        bench.say(third, welcome(3))
    assert len(bench.told(3)) == 1
    assert "could not be served by the relay: MemoryError()" in bench.refusal(3).reason
    bench.say(first, welcome(1, relayed=1))
    assert len(bench.admitted) == 1


def test_a_relay_that_drains_admits_nobody() -> None:
    bench, third, first = two()
    bench.effects += bench.relaying.turn_away()
    bench.come(5, world_size=9)
    for rank in (1, 3, 5):
        assert len(bench.told(rank)) == 1
        refused = bench.refusal(rank)
        assert "shutting down" in refused.reason
    assert isinstance(heard(third)[-1], Lost)
    assert isinstance(heard(first)[-1], Lost)
    assert bench.is_empty()


def test_a_relay_passes_on_that_kernels_compile() -> None:
    """The rank that compiles may join by another connection."""
    bench = Bench()
    bench.come(1, compiling=True)
    link = bench.connect()
    (message,) = heard(link)
    assert isinstance(message, Hello)
    assert (message.compiling, message.relays) == (True, (NAME,))
    assert bench.relaying.rival(hello(1)) is None
    assert [(pending_job.joined, pending_job.missing) for pending_job in bench.relaying.pending_jobs(0.0)] == [(0, [])]
    bench._take(bench.relaying.hello("itself", hello(1), bench.now))
    assert bench.relaying.rival(hello(1)) == "itself"
    bench.say(bench.connect(), Pending([0], 1, compiling=[2]))
    assert [effect.message for effect in bench.effects if isinstance(effect, Answer)] == [
        Pending([0], 1, compiling=[2])
    ]
    bench.relaying.connection_ended("worker 1", 0.0)
    assert [type(each) for each in heard(link)] == [Leave, Lost]
