"""The machines alone: every event in every state, also after the end, and time as an argument."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_bench import BLOCK, BLOCKS, DESCRIPTOR, RANKS, SLOTS, Bench, aggregator, garbage, message, submit, worker
from messages import MESSAGES
from samples import Array

from omnireduce.core.wire.blocks import block_rows, seal
from omnireduce.core.wire.control import (
    Aborted,
    Cause,
    Goodbye,
    Leave,
    Waiting,
)
from omnireduce.protocol.collective.effects import ALL, End, Finish, Send, SendControl, Warn
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine


def one_rank_began(bench: Bench) -> None:
    bench.receive(0, message(0, 2, [0, 1], first=True))
    bench.advance()


def half_merged(bench: Bench) -> None:
    one_rank_began(bench)
    bench.receive(1, message(0, 1, [0], first=True))
    bench.advance()


def complete(bench: Bench) -> None:
    for rank in range(RANKS):
        bench.receive(rank, message(0, BLOCKS, [0], first=True))
    bench.advance()


def results_are_not_taken(bench: Bench) -> None:
    for rank in range(RANKS):
        bench.receive(rank, message(0, 2, [0, 1], first=True))
    bench.advance()
    for at in range(2, BLOCKS, 2):
        for rank in range(RANKS):
            bench.receive(rank, message(0, at + 2, [at, at + 1]))
        bench.advance()
    assert len(bench.under_way) == RANKS * SLOTS


def one_left(bench: Bench) -> None:
    bench.told(0, Leave())


def all_left(bench: Bench) -> None:
    bench.told(0, Leave())
    bench.told(1, Leave())


def aborted(bench: Bench) -> None:
    half_merged(bench)
    bench.perform(bench.machine.abort(Cause("rank 1", "why"), "worker"))  # type: ignore[union-attr]


def lost_one(bench: Bench) -> None:
    half_merged(bench)
    bench.lost(1)


def fresh(bench: Bench) -> None:
    pass


AGGREGATOR_STATES = [
    *(fresh, one_rank_began, half_merged, complete, results_are_not_taken),
    *(one_left, all_left, aborted, lost_one),
]
EVENTS: dict[str, Callable[[Bench, int], Any]] = {
    "advance": lambda bench, peer: bench.advance(),
    "first": lambda bench, peer: bench.receive(peer, message(0, 2, [0, 1], first=True)),
    "next": lambda bench, peer: bench.receive(peer, message(0, 4, [2, 3])),
    "last": lambda bench, peer: bench.receive(peer, message(0, BLOCKS)),
    "whole": lambda bench, peer: bench.receive(peer, message(0, BLOCKS, [0], first=True)),
    "later": lambda bench, peer: bench.receive(peer, message(1, BLOCKS, first=True)),
    "far": lambda bench, peer: bench.receive(peer, message(2**63, BLOCKS, first=True)),
    "garbage": lambda bench, peer: bench.receive(peer, garbage),
    "credited": lambda bench, peer: bench.credit(peer),
    "lost": lambda bench, peer: bench.lost(peer),
    "violated": lambda bench, peer: bench.violate(peer),
    "soon": lambda bench, peer: bench.pass_time(0.1),
    "late": lambda bench, peer: bench.pass_time(1000.0),
    **{
        f"told {type(each).__name__} {number}": lambda bench, peer, each=each: bench.told(peer, each)
        for number, each in enumerate(MESSAGES.values())
    },
}


@pytest.mark.parametrize("state", AGGREGATOR_STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("event", EVENTS)
def test_aggregator_takes_every_event_in_every_state(state: Callable[[Bench], None], event: str) -> None:
    for peer in range(RANKS):
        bench = aggregator()
        state(bench)
        for _ in range(3):
            EVENTS[event](bench, peer)
            bench.advance()


def test_what_breaks_the_rules_ends_a_job_as_a_violation() -> None:
    bench, cause = aggregator(), Cause("rank 1", "protocol error: not a frame")
    bench.violate(1)
    assert bench.ended == End(cause, "violation", 1)
    assert bench.effects[0] == SendControl(ALL, Aborted(cause))
    gone = aggregator()
    one_left(gone)
    gone.violate(0)
    assert gone.ended is None
    at_work = worker()
    packing(at_work)
    at_work.violate(1)
    assert at_work.ended == End(Cause("aggregator b:2", "protocol error: not a frame"))


def submitted(bench: Bench) -> None:
    submit(bench)


def packing(bench: Bench) -> None:
    submit(bench)
    bench.advance()
    assert len(bench.under_way) == 2 * SLOTS


def one_result_came(bench: Bench) -> None:
    packing(bench)
    bench.receive(0, message(0, 1, [0]))


def two_in_flight(bench: Bench) -> None:
    submit(bench, BLOCK)
    submit(bench)
    bench.advance()


def left(bench: Bench) -> None:
    assert isinstance(bench.machine, RankMachine)
    bench.perform(bench.machine.leave())


def left_early(bench: Bench) -> None:
    packing(bench)
    left(bench)


def timed_out(bench: Bench) -> None:
    packing(bench)
    bench.pass_time(60.0)
    assert bench.ended is not None


def was_aborted(bench: Bench) -> None:
    packing(bench)
    bench.told(1, Aborted(Cause("rank 9", "why")))


def violated(bench: Bench) -> None:
    packing(bench)
    bench.receive(1, garbage)
    assert bench.ended is not None


WORKER_STATES = [
    *(fresh, submitted, packing, one_result_came, two_in_flight),
    *(left, left_early, timed_out, was_aborted, violated),
]


@pytest.mark.parametrize("state", WORKER_STATES, ids=lambda state: state.__name__)
@pytest.mark.parametrize("event", [*EVENTS, "leave", "leave because"])
def test_worker_takes_every_event_in_every_state(state: Callable[[Bench], None], event: str) -> None:
    for peer in range(2):
        bench = worker()
        state(bench)
        assert isinstance(bench.machine, RankMachine)
        for _ in range(3):
            if event.startswith("leave"):
                bench.perform(bench.machine.leave(event.removeprefix("leave").strip()))
            else:
                EVENTS[event](bench, peer)
            bench.advance()


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 40))
def test_random_walks(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    for bench, states in ((aggregator(), AGGREGATOR_STATES), (worker(), WORKER_STATES)):
        rng.choice(states)(bench)
        for _ in range(steps):
            EVENTS[rng.choice([*EVENTS])](bench, rng.randrange(2))
            if isinstance(bench.machine, RankMachine) and bench.ended is None and rng.random() < 0.1:
                submit(bench, rng.choice([0, 1, BLOCK, BLOCK * BLOCKS]))


def test_submitting_after_the_end_is_our_own_mistake() -> None:
    bench = worker()
    left(bench)
    with pytest.raises(AssertionError, match="after the end"):
        submit(bench)


def test_a_half_full_result_leaves_when_no_input_waits() -> None:
    bench = aggregator()
    half_merged(bench)
    sent = [effect for effect in bench.effects if isinstance(effect, Send)]
    one_block = message(0, 1, [0])(np.zeros(4096, np.uint8))
    assert [(effect.peers, effect.nbytes) for effect in sent] == [((0, 1), one_block)]


# time


def test_worker_deadline_is_that_of_the_oldest_collective() -> None:
    bench = worker()
    assert bench.machine.deadline is None
    bench.now = 5.0
    submit(bench, 0)
    bench.now = 7.0
    submit(bench, 0)
    assert bench.machine.deadline == 65.0
    bench.advance()
    bench.now = 9.0
    bench.receive(0, message(0, 0))
    assert [effect for effect in bench.effects if isinstance(effect, Finish)] == [Finish(0)]
    assert bench.machine.deadline == 69.0  # time starts again with what becomes the oldest
    bench.pass_time(59.9)
    assert bench.ended is None
    bench.pass_time(0.1)
    assert bench.ended is not None
    assert bench.ended.cause is not None
    assert bench.ended.cause.timeout
    assert bench.machine.deadline is None


def test_a_shard_without_a_block_takes_no_part() -> None:
    bench = worker()
    submit(bench, BLOCK)  # one block: the first shard's
    bench.advance()
    assert [effect.peers for effect in bench.effects if isinstance(effect, Send)] == [(0,)]
    bench.receive(0, message(0, 1, [0]))
    assert [effect for effect in bench.effects if isinstance(effect, Finish)] == [Finish(0)]
    submit(bench)
    bench.advance()
    assert {effect.peers for effect in bench.effects if isinstance(effect, Send)} == {(0,), (1,)}


def test_aggregator_takes_the_collectives_that_it_has_a_part_in() -> None:
    bench = aggregator()
    for number in (3, 7):
        for rank in range(RANKS):
            bench.receive(rank, message(number, BLOCKS, first=True))
            bench.advance()
    assert bench.ended is None
    assert len([effect for effect in bench.effects if isinstance(effect, Send)]) == 2
    bench.receive(0, message(7, BLOCKS, first=True))
    bench.advance()
    assert bench.ended is not None
    assert bench.ended.cause is not None
    assert bench.ended.cause.culprit == "rank 0"
    assert "a message of collective 7, expected 8 or later" in bench.ended.cause.reason


def test_aggregator_tells_ranks_apart_that_skip_different_collectives() -> None:
    bench = aggregator()
    bench.receive(0, message(3, BLOCKS, first=True))
    bench.receive(1, message(4, BLOCKS, first=True))
    bench.advance()
    assert bench.ended is not None
    assert bench.ended.cause is not None
    assert bench.ended.cause.culprit == "ranks 0 and 1"
    assert "rank 0 called allreduce 'w' of float32 (48,), sum" in bench.ended.cause.reason
    assert bench.ended.cause.reason.endswith("as number 4")


def test_aggregator_warns_when_nothing_moves_and_whenever_the_wait_has_doubled() -> None:
    bench = aggregator()
    assert bench.machine.deadline is None
    bench.now = 10.0
    half_merged(bench)
    assert bench.machine.deadline == 11.0
    for now, warnings in [(10.9, 0), (11.0, 1), (11.9, 1), (12.0, 2), (13.9, 2), (14.0, 3)]:
        bench.pass_time(now - bench.now)
        assert sum(isinstance(effect, Warn) for effect in bench.effects) == warnings
    waiting = [effect.message for effect in bench.effects if isinstance(effect, SendControl)]
    assert waiting[-1] == Waiting(f"collective 0 ({DESCRIPTOR})", "rank 1", 4.0)
    bench.receive(1, message(0, BLOCKS, [1]))
    bench.advance()
    assert bench.machine.deadline == 15.0


def test_an_idle_aggregator_has_no_deadline() -> None:
    bench = aggregator()
    complete(bench)
    assert bench.machine.deadline is None
    assert isinstance(bench.machine, ShardMachine)
    assert bench.machine.idle


def test_a_crowd_that_is_waited_for_is_named_in_part() -> None:
    names = [f"rank {rank} (host {'h' * 200}, pid {rank})" for rank in range(1000)]
    machine = ShardMachine(names, np.zeros((2000, 4096), np.uint8), np.zeros((2, 4096), np.uint8))
    for rank in range(999):
        assert [
            effect.message for effect in machine.control_received(rank, Leave(), 0.0) if isinstance(effect, SendControl)
        ] == [Goodbye()]
    slot = machine._arena[1998]
    nbytes = message(0, BLOCKS, first=True)(slot)
    assert list(machine.received(999, 0, nbytes, 0.0)) == []
    effects = list(machine.advance(0.0))
    ends = [effect for effect in effects if isinstance(effect, End)]
    assert ends
    assert ends[0].cause is not None
    assert ends[0].cause.culprit.startswith("rank 0 (host hhh")
    assert ends[0].cause.culprit.endswith("and 995 more")


MINE, OTHERS = 1 << 48, 2 << 48  # marks of an index: worker 0 alone, or worker 1, contributed


@pytest.mark.parametrize(
    ("indices", "left_out", "taken"),
    [
        ([0, 2 | MINE], 1, True),
        ([0, 2 | MINE], 0, True),
        ([0 | MINE, 2 | MINE], 2, True),
        ([0 | MINE, 2 | MINE], 1, False),
        ([0, 2 | OTHERS], 1, False),
        ([0, 2], 1, False),
    ],
)
def test_a_result_may_leave_out_what_this_worker_alone_has(indices: list[int], left_out: int, taken: bool) -> None:
    bench = worker()
    x = submit(bench)
    bench.advance()
    blocks = np.array(indices, np.int64)

    def result(slot: Array) -> int:
        block_rows(slot, BLOCK * 4, x.dtype)[: len(indices) - left_out] = 2
        return seal(slot, 0, BLOCKS, blocks, BLOCK * 4, left_out=left_out)

    bench.receive(0, result)
    if taken:
        assert bench.ended is None
        changed = [index for index in indices if not index & MINE]
        assert [int(value) for value in x.reshape(-1, BLOCK)[:, 0]] == [1 + (at in changed) for at in range(BLOCKS)]
    else:
        assert bench.ended is not None
        assert bench.ended.cause is not None
        assert bench.ended.cause.culprit == "aggregator a:1"
        assert "leaves out other blocks than those that only this rank has brought" in bench.ended.cause.reason


def test_a_worker_may_leave_nothing_out() -> None:
    bench = aggregator()
    first = DESCRIPTOR.encoded
    bench.receive(1, lambda slot: seal(slot, 0, 3, np.array([0, 1]), BLOCK * 4, first, left_out=1))
    bench.advance()
    assert bench.ended is not None
    assert bench.ended.cause is not None
    assert bench.ended.cause.culprit == "rank 1"
    assert "a message that does not fit its collective" in bench.ended.cause.reason
