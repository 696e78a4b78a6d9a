"""The machine of a relay: who it waits for, what it tells its upstream of that, and what it takes from there."""

from __future__ import annotations

import numpy as np
import pytest

from omnireduce.core.descriptor import describe
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import Aborted, Goodbye, Leave, Report, Waiting
from omnireduce.protocol.collective.effects import Effect, End, ReturnCredit, Send, SendControl
from omnireduce.protocol.relay import RelayMachine

SLOTS, SLOT_BYTES, UP = 2, 8192, 3
DESCRIPTOR = describe("allreduce", "", "float32", (64,), "sum", 8)  # 8 blocks
NOTHING = np.empty(0, np.int64)
NAMES = ["rank 4 (h)", "rank 5 (h)", "rank 6 (h)"]


class Bench:
    """A relay of ranks 4, 5 and 6. The last two come through a relay below it, for which rank 5 sends."""

    def __init__(self) -> None:
        self.arena = np.zeros((3 * SLOTS, SLOT_BYTES), np.uint8)
        self.results, self.sums = (np.zeros((SLOTS, SLOT_BYTES), np.uint8) for _ in range(2))
        self.machine = RelayMachine(
            NAMES, self.arena, self.results, self.sums,
            upstream="top:1", numbers=[4, 5, 6], delegates=[0, 1], readers=[0, 1],
        )  # fmt: skip

    def bring(
        self, member: int, frontier: int, *, first: bool = True, number: int = 0, now: float = 0.0
    ) -> list[Effect]:
        """A message without blocks."""
        row = self.arena[member * SLOTS]
        extra = DESCRIPTOR.encoded if first else b""
        nbytes = seal(row, number, frontier, NOTHING, DESCRIPTOR.block_bytes, extra)
        return [*self.machine.received(member, 0, nbytes, now), *self.machine.advance(now)]

    def result(self, frontier: int, *, number: int = 0, slot: int = 0, peer: int = UP) -> list[Effect]:
        """One of the upstream."""
        nbytes = seal(self.results[slot], number, frontier, NOTHING, DESCRIPTOR.block_bytes)
        return list(self.machine.received(peer, slot, nbytes, 0.0))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_sum_goes_up_when_all_who_send_have_sent(bench: Bench) -> None:
    assert not [each for each in bench.bring(0, 8) if isinstance(each, Send)]
    effects = bench.bring(1, 8)
    assert [effect.peers for effect in effects if isinstance(effect, Send)] == [(UP,)]
    assert not bench.machine.idle  # its results are to come
    (send,) = bench.result(8)
    assert isinstance(send, Send)
    assert list(send.peers) == [0, 1]
    assert bench.machine.idle


def test_the_credit_goes_up_when_all_readers_have_given_theirs(bench: Bench) -> None:
    bench.bring(0, 8)
    bench.bring(1, 8)
    bench.result(8, slot=1)
    assert list(bench.machine.credited(1, 1, 0.0)) == []
    assert list(bench.machine.credited(0, 1, 0.0)) == [ReturnCredit(UP, 1)]


@pytest.mark.parametrize(
    ("frontier", "number", "peer"), [(9, 0, UP), (8, 1, UP), (8, 0, UP + 1)], ids=["too far", "another", "for another"]
)
def test_a_result_that_cannot_be_ends_the_job(bench: Bench, frontier: int, number: int, peer: int) -> None:
    bench.bring(0, 8)
    bench.bring(1, 8)
    effects = bench.result(frontier, number=number, peer=peer)
    (end,) = [effect for effect in effects if isinstance(effect, End)]
    assert end.kind == "violation"
    assert end.cause is not None
    assert end.cause.culprit == "aggregator top:1"
    sent = [effect for effect in effects if isinstance(effect, SendControl)]
    assert {effect.peer for effect in sent if isinstance(effect.message, Aborted)} == {0, 1, 2}
    assert {effect.peer for effect in sent if isinstance(effect.message, Leave)} == {3, 4, 5}


def test_results_before_anything_was_sent_are_refused(bench: Bench) -> None:
    bench.bring(0, 8)
    assert [each for each in bench.result(0) if isinstance(each, End)]


def test_who_is_late_is_told_above_and_below(bench: Bench) -> None:
    bench.bring(0, 8)
    effects = list(bench.machine.timer(1.5))
    messages = [(effect.peer, effect.message) for effect in effects if isinstance(effect, SendControl)]
    assert [(peer, each.behind) for peer, each in messages if isinstance(each, Report)] == [(UP, [5])]
    waits = [(peer, each.who) for peer, each in messages if isinstance(each, Waiting)]
    assert waits == [(rank, NAMES[1]) for rank in range(3)]
    taken_back = [each for each in bench.bring(1, 8, now=1.6) if isinstance(each, SendControl)]
    assert taken_back == [SendControl(UP, Report())]


def test_a_relay_below_says_whom_it_waits_for(bench: Bench) -> None:
    bench.bring(0, 8)
    assert list(bench.machine.control_received(1, Report(what="a sum", behind=[6], total=1, waited_s=1.0), 1.0)) == []
    wait = bench.machine.waiting(1.5)
    assert wait is not None
    assert (wait.ranks, wait.who) == ([6], NAMES[2])


def test_a_silent_upstream_is_named_after_a_while(bench: Bench) -> None:
    """Once it speaks, it says itself whom it waits for."""
    bench.bring(0, 8)
    bench.bring(1, 8)
    messages = []
    for now in (1.0, 2.0, 4.0):
        messages.append([each for each in bench.machine.timer(now) if isinstance(each, SendControl)])
        list(bench.machine.advance(now))
    assert [bool(message) for message in messages] == [False, True, True]
    (passed,) = bench.machine.control_received(UP + 2, Waiting("a sum", "the aggregator", 4.0), 5.0)
    assert passed == SendControl(2, Waiting("a sum", "aggregator top:1", 4.0))
    assert not [each for each in bench.machine.timer(8.0) if isinstance(each, SendControl)]


def test_a_member_that_waits_for_the_upstream_is_not_late(bench: Bench) -> None:
    """Another member has begun the next collective already."""
    bench.bring(0, 8)
    bench.bring(1, 8)
    bench.bring(0, 8, number=1)
    wait = bench.machine.waiting(1.5)
    assert wait is not None
    assert (wait.what, wait.ranks, wait.who) == ("collective 0", [], "aggregator top:1")
    bench.result(8)
    wait = bench.machine.waiting(1.5)
    assert wait is not None
    assert (wait.ranks, wait.who) == ([5], NAMES[1])


def test_a_member_has_left_when_the_upstream_says_so(bench: Bench) -> None:
    assert list(bench.machine.control_received(0, Leave(), 0.0)) == [SendControl(UP, Leave())]
    assert not bench.machine.has_left(0)
    assert list(bench.machine.control_received(UP, Goodbye(), 0.0)) == [SendControl(0, Goodbye())]
    assert bench.machine.has_left(0)
    assert bench.machine.has_left(UP)
    for member in (1, 2):
        assert bench.machine.ended is None
        list(bench.machine.control_received(member, Leave(), 0.0))
        list(bench.machine.lost(member, "connection closed", 0.0))  # it does not wait for the Goodbye
    assert bench.machine.ended == End(None)


def test_a_float16_tensor_goes_up_rank_by_rank() -> None:
    bench, half = Bench(), describe("allreduce", "", "float16", (64,), "sum", 8)
    for member, expected in ((1, UP + 1), (2, UP + 2), (0, UP)):
        row = bench.arena[member * SLOTS]
        nbytes = seal(row, 0, 8, NOTHING, half.block_bytes, half.encoded)
        effects = [*bench.machine.received(member, 0, nbytes, 0.0), *bench.machine.advance(0.0)]
        sends = [effect for effect in effects if isinstance(effect, Send)]
        if member == 2:  # a member that sends no sums begins nothing
            assert [each.peers for each in sends] == [(expected,)]
        returned = [effect for effect in effects if isinstance(effect, ReturnCredit)]
        assert returned == ([ReturnCredit(0, 0)] if member == 0 else [])
    assert list(bench.machine.credited(UP + 1, 0, 0.0)) == [ReturnCredit(1, 0)]
    assert bench.machine.passing[1] == set()


def test_who_leaves_although_results_are_to_come_ends_the_job(bench: Bench) -> None:
    """Above it could be too late to see, and the others would wait for its credits."""
    bench.bring(0, 8)
    bench.bring(1, 8)
    effects = list(bench.machine.control_received(1, Leave(), 0.0))
    (end,) = [effect for effect in effects if isinstance(effect, End)]
    assert end.kind == "left"
    assert end.cause is not None
    assert end.cause.culprit == NAMES[1]
    causes = {
        effect.peer: effect.message.cause
        for effect in effects
        if isinstance(effect, SendControl) and isinstance(effect.message, Leave)
    }
    assert causes == {UP: end.cause, UP + 2: end.cause}


def test_a_goodbye_that_nobody_asked_for_is_a_violation(bench: Bench) -> None:
    (end,) = [each for each in bench.machine.control_received(UP, Goodbye(), 0.0) if isinstance(each, End)]
    assert end.kind == "violation"


def test_a_wait_for_readers_is_taken_back_when_they_have_read(bench: Bench) -> None:
    bench.bring(0, 8)
    bench.bring(1, 8)
    bench.result(4, slot=0)
    bench.result(4, slot=1)
    list(bench.machine.credited(0, 0, 0.5))
    messages = [each.message for each in bench.machine.timer(1.5) if isinstance(each, SendControl) and each.peer == UP]
    assert [message.behind for message in messages if isinstance(message, Report)] == [[4, 5]]
    assert list(bench.machine.credited(1, 0, 1.6)) == [SendControl(UP, Report()), ReturnCredit(UP, 0)]


def test_a_relay_below_says_who_has_not_read(bench: Bench) -> None:
    bench.bring(0, 8)
    bench.bring(1, 8)
    for slot in range(2):
        bench.result(4, slot=slot)
        list(bench.machine.credited(0, slot, 0.5))
    list(bench.machine.control_received(1, Report(what="collective 0", behind=[6], total=1, waited_s=1.0), 1.2))
    wait = bench.machine.waiting(1.5)
    assert wait is not None
    assert (wait.ranks, wait.who) == ([6], NAMES[2])


def test_reports_without_end_are_a_violation(bench: Bench) -> None:
    answers = [bench.machine.control_received(0, Report(), 0.0) for _ in range(101)]
    ends = [effect for effects in answers for effect in effects if isinstance(effect, End)]
    assert [end.kind for end in ends] == ["violation"]


def test_reports_of_ranks_that_share_all_in_memory_go_up() -> None:
    bench = Bench()
    bench.machine = RelayMachine(
        NAMES, bench.arena, bench.results, bench.sums, upstream="top:1", numbers=[0, 1, 2], readers=[0, 1, 2],
        in_memory=True,
    )  # fmt: skip
    report = Report(collectives=3, blocks=9)
    assert list(bench.machine.control_received(0, report, 0.0)) == [SendControl(UP, report)]
    assert bench.machine.account.total().collectives == 3


def test_who_waits_for_credits_from_above_is_not_late() -> None:
    bench, half = Bench(), describe("allreduce", "", "float16", (64,), "sum", 8)
    for member, frontier in ((0, 8), (1, 4)):
        nbytes = seal(bench.arena[member * SLOTS], 0, frontier, NOTHING, half.block_bytes, half.encoded)
        list(bench.machine.received(member, 0, nbytes, 0.0))
    nbytes = seal(bench.arena[2 * SLOTS], 0, 8, NOTHING, half.block_bytes, half.encoded)
    list(bench.machine.received(2, 0, nbytes, 0.0))
    list(bench.machine.advance(0.0))
    wait = bench.machine.waiting(1.5)
    assert wait is not None
    assert (wait.ranks, wait.who) == ([], "aggregator top:1")


def test_the_uplink_of_the_sums_stays_until_they_are_done() -> None:
    """Its rank may have no part in a collective, and leave before the others."""
    bench = Bench()
    bench.machine = RelayMachine(
        NAMES, bench.arena, bench.results, bench.sums,
        upstream="top:1", numbers=[4, 5, 6], delegates=[1, 2], readers=[1, 2],
    )  # fmt: skip
    bench.bring(1, 8)
    bench.bring(2, 8)
    assert list(bench.machine.control_received(0, Leave(), 0.0)) == []
    list(bench.machine.lost(0, "connection closed", 0.0))
    assert bench.machine.has_left(0)
    assert not bench.machine.has_left(UP)
    assert bench.result(8)[-1] == SendControl(UP, Leave())
    assert bench.machine.has_left(UP)
