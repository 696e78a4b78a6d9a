"""Ranks agree on what is done, in one order, whatever the order in which they become ready."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnireduce.data_parallel.negotiation import ALIKE_STEPS, MAX_NAMES, MAX_PENDING, Agreement
from omnireduce.data_parallel.operations import JOIN, Batch, Request, TensorType, fused
from omnireduce.errors import UsageError

SEEDS = st.integers(0, 2**32 - 1)
WAIT = "wait for "


def request(name: str, op: str = "sum", elements: int = 3) -> Request:
    return Request(name, "allreduce", op, (TensorType("float32", (elements,)),))


class Ranks:
    """Programs of several ranks, which submit requests and wait for them."""

    def __init__(self, programs: Sequence[Sequence[Request | str]], fusion_bytes: int = 100, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.machines = [Agreement(rank, len(programs), fusion_bytes) for rank in range(len(programs))]
        self.programs = [list(program) for program in programs]
        self.batches: list[Batch] = []

    def waits(self, rank: int) -> bool:
        program = self.programs[rank]
        return bool(program) and isinstance(program[0], str) and program[0] in self.machines[rank].pending

    def run(self) -> None:
        while any(self.programs) or any(machine.pending for machine in self.machines):
            moved = self._go_on() if self.rng.random() < 0.7 else False
            if not moved and not self._exchange():
                assert self._go_on(), "nobody can go on"

    def _go_on(self) -> bool:
        able = [rank for rank, program in enumerate(self.programs) if program and not self.waits(rank)]
        if not able:
            return False
        rank = self.rng.choice(able)
        step = self.programs[rank].pop(0)
        if isinstance(step, Request):
            if step.name in self.machines[rank].pending:  # it belongs to the step before: wait for it first
                self.programs[rank][:0] = [step.name, step]
            else:
                self.machines[rank].submit(step)
        return True

    def _exchange(self) -> bool:
        first, *others = self.machines
        assert all(each.has_rounds == first.has_rounds for each in others)
        return self._round() if first.has_rounds else self._due()

    def _round(self) -> bool:
        if not any(machine.pending for machine in self.machines):
            return False
        total = np.min([machine.bytes_of_round() for machine in self.machines], axis=0)
        news = [machine.news() for machine in self.machines]
        results = [machine.agree(total) for machine in self.machines]
        assert all(result == results[0] for result in results)
        batches, has_news = results[0]
        self.batches += batches
        if has_news:
            for machine in self.machines:
                machine.take_news(news)
        return bool(batches) or has_news

    def _due(self) -> bool:
        batches = [(machine.due, machine.is_ready) for machine in self.machines]
        assert len({batch for batch, _ in batches}) == 1
        stuck = [machine.is_stuck(waits=self.waits(rank)) for rank, machine in enumerate(self.machines)]
        if not all(ready or spoils for (_, ready), spoils in zip(batches, stuck, strict=True)):
            return False
        spoiled = not all(ready for _, ready in batches)
        for machine in self.machines:
            machine.finish_due(spoiled=spoiled)
        if not spoiled:
            self.batches.append(batches[0][0])
        return True


@settings(deadline=None)
@given(seed=SEEDS, ranks=st.integers(1, 4), names=st.integers(1, 9), steps=st.integers(1, 9), data=st.data())
def test_every_rank_does_all_in_one_order(seed: int, ranks: int, names: int, steps: int, data: st.DataObject) -> None:
    """Each step all ranks submit the same names, each in its own order, and wait for them in its own order. Some steps
    have names of their own."""
    rng = random.Random(seed)
    alike = data.draw(st.floats(0, 1))
    programs: list[list[Request | str]] = [[] for _ in range(ranks)]
    expected: list[str] = []
    for step in range(steps):
        all_names = [f"w{i}" for i in range(names)]
        if rng.random() > alike:
            all_names = [*rng.sample(all_names, rng.randint(0, names)), f"only {step}"]
        expected += all_names
        for program in programs:
            submits, waits = (rng.sample(all_names, len(all_names)) for _ in range(2))
            program += [request(each) for each in submits]
            program += waits[: rng.randint(0, len(waits))]
    world = Ranks(programs, fusion_bytes=data.draw(st.sampled_from([0, 30, 1000])), seed=seed)
    world.run()
    done = [name for batch in world.batches for name in batch.names]
    assert sorted(done) == sorted(expected)
    assert not any(batch.error for batch in world.batches)


def test_alike_steps_need_no_rounds() -> None:
    def programs(steps: int) -> list[list[Request | str]]:
        step: list[Request | str] = [*(request(f"w{i}") for i in range(5)), *(f"w{i}" for i in range(5))]
        return [step * steps, list(step) * steps]

    few, many = (Ranks(programs(steps)) for steps in (ALIKE_STEPS + 2, 100))
    few.run()
    many.run()
    assert many.machines[0].rounds == few.machines[0].rounds > 0
    assert not many.machines[0].has_rounds


def test_what_is_waited_for_before_the_rest_of_a_step_needs_no_rounds() -> None:
    """Gradients, and then the mean of a loss: they are never put together, since the loss comes when they are done."""
    gradients = [f"w{i}" for i in range(5)]
    step: list[Request | str] = [*map(request, gradients), *gradients, request("loss"), "loss"]
    few, many = (Ranks([step * steps, step * steps]) for steps in (40, 200))
    few.run()
    many.run()
    assert many.machines[0].rounds == few.machines[0].rounds
    assert not many.machines[0].has_rounds


def test_nothing_is_submitted_after_a_join() -> None:
    world = Ranks([[request("w"), "w"] * (ALIKE_STEPS + 3)])
    world.run()
    [machine] = world.machines
    assert not machine.has_rounds
    machine.submit(Request(JOIN, "join"))
    with pytest.raises(UsageError, match="'w' after join"):
        machine.submit(request("w"))


def test_one_that_does_something_else_brings_the_rounds_back() -> None:
    step: list[Request | str] = [request("a"), request("b"), "a", "b"]
    other: list[Request | str] = [request("b"), "b", request("a"), "a"]
    world = Ranks([step * 20, step * 10 + other * 10], fusion_bytes=0)
    world.run()
    assert len(world.batches) == 40


def test_terms_that_differ_are_told_to_all() -> None:
    world = Ranks([[request("w"), "w"], [request("w", "max"), "w"]])
    world.run()
    [batch] = world.batches
    assert batch.error == (
        "'w' differs between ranks: rank 0 has allreduce sum float32[3], rank 1 has allreduce max float32[3]"
    )


def test_all_may_change_the_terms() -> None:
    old, new = request("w"), request("w", elements=4)
    world = Ranks([[old, "w"] * 9 + [new, "w"] * 9] * 2)
    world.run()
    assert [batch.error for batch in world.batches] == [""] * 18


def joins(program: list[Request | str]) -> list[Request | str]:
    return [*program, Request(JOIN, "join"), JOIN]


@settings(deadline=None)
@given(seed=SEEDS, steps=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_ranks_that_have_joined_hold_up_nobody(seed: int, steps: list[int]) -> None:
    """Each rank has another number of steps, and then joins; after that, all do one step together."""
    step: list[Request | str] = [request("a"), request("b"), "b", "a"]
    world = Ranks([joins(step * each) + joins(step) for each in steps], seed=seed)
    world.run()
    done = [name for batch in world.batches for name in batch.names]
    assert not any(batch.error for batch in world.batches)
    assert (done.count("a"), done.count("b"), done.count(JOIN)) == (max(steps) + 1, max(steps) + 1, 2)
    assert not world.machines[0].joined


def test_the_last_that_joins_is_known_to_all() -> None:
    step: list[Request | str] = [request("a"), "a"]
    world = Ranks([joins(step * 2), joins(step * 5), joins(step * 3)])
    world.run()
    assert {machine.last_joined for machine in world.machines} == {1}


def test_what_needs_data_of_all_fails_once_a_rank_has_joined() -> None:
    gather = Request("g", "allgather", "", (TensorType("float32", ()),))
    world = Ranks([joins([]), joins([gather, "g"])])
    world.run()
    assert [batch.error for batch in world.batches] == [
        "'g' is allgather: rank 0 has joined, and has no data for that", ""
    ]  # fmt: skip


def test_a_rank_joins_when_nothing_is_under_way() -> None:
    machine = Agreement(0, 2, 0)
    machine.submit(request("w"))
    with pytest.raises(UsageError, match="join while 'w' is under way"):
        machine.submit(Request(JOIN, "join"))
    other = Agreement(1, 2, 0)
    other.submit(Request(JOIN, "join"))
    with pytest.raises(UsageError, match="'w' after join"):
        other.submit(request("w"))


def test_what_is_under_way_is_not_submitted_again() -> None:
    machine = Agreement(0, 2, 0)
    machine.submit(request("w"))
    with pytest.raises(UsageError, match="'w' is under way already"):
        machine.submit(request("w"))
    for i in range(1, MAX_PENDING):
        machine.submit(request(f"w{i}"))
    with pytest.raises(UsageError, match="4096 collectives are under way already"):
        machine.submit(request("one more"))


def test_names_that_come_once_are_forgotten() -> None:
    world = Ranks([[request(f"w{i}") for i in range(40)]])
    machine = world.machines[0]
    machine.take_news([[request(f"old {i}") for i in range(MAX_NAMES)]])
    world.run()
    assert len(machine.bytes_of_round()) <= MAX_NAMES + 1
    assert len(world.batches) > 0


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([4, 4, 4], 32, [("r0", "r1"), ("r2",)]),
        ([9, 1, 1], 32, [("r0",), ("r1", "r2")]),
        ([4, 4], 0, [("r0",), ("r1",)]),
    ],
)
def test_requests_share_buffers(sizes: list[int], limit: int, expected: list[tuple[str, ...]]) -> None:
    results = fused([request(f"r{i}", elements=n) for i, n in enumerate(sizes)], limit)
    assert [result.names for result in results] == expected


def test_requests_that_go_between_do_not_end_a_buffer() -> None:
    sums = [request("a"), request("c")]
    alone, maxima = Request("d", "barrier"), [request("b", "max"), request("e", "max")]
    results = fused([sums[0], maxima[0], sums[1], alone, maxima[1]], 100)
    assert [result.names for result in results] == [("a", "c"), ("b", "e"), ("d",)]
