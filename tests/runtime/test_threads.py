"""Threads that share a communicator: never a wrong sum, whatever order they come in on each rank."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable

import numpy as np
import pytest
from local_cluster import WAIT_S, Ranks, run_job, start_job

from omnireduce import AbortedError, Communicator, Config, UsageError
from omnireduce.runtime.rank.calls.arguments import NAMES_PER_TABLE, Names

CALLS: dict[str, Callable[[Communicator, str], object]] = {
    "allreduce": lambda comm, name: comm.allreduce(np.ones(10), name=name),
    "allreduce_async": lambda comm, name: comm.allreduce_async(np.ones(10), name=name).wait(),
    "allreduce_rows": lambda comm, name: comm.allreduce_rows(np.array([1]), np.ones((1, 8)), 4, name=name),
    "reduce_scatter": lambda comm, name: comm.reduce_scatter(np.ones(10), name=name),
    "broadcast": lambda comm, name: comm.broadcast(np.ones(10), name=name),
    "allgather": lambda comm, name: comm.allgather(np.ones(10), name=name),
    "barrier": lambda comm, name: comm.barrier(name=name),
}


@pytest.mark.parametrize("names", [("", ""), ("a", "b")], ids=["without names", "with names"])
def test_racing_threads_get_right_sums_or_an_error(local: Config, names: tuple[str, str]) -> None:
    """Two threads per rank, tensors of one shape, pauses that differ: on each rank another one comes first.

    With names the first of each thread come in one order, one by one: those have sums, whatever the race brings.
    """
    sums: list[tuple[float, float]] = []

    def run(comm: Communicator) -> list[object]:
        first_is_done, both_are_done = threading.Event(), threading.Barrier(2)

        def work(thread: int) -> None:
            pause, chance = threading.Event(), random.Random(2 * comm.rank + thread)
            for at in range(50):
                if names[thread] and at == 0 and thread == 1:
                    assert first_is_done.wait(WAIT_S)
                elif names[thread] and at == 1:
                    first_is_done.set()
                    both_are_done.wait(WAIT_S)
                else:
                    pause.wait(chance.random() / 500)
                x = comm.allreduce(np.full(100, 10.0**thread), name=names[thread])
                sums.append((float(x[0]), 2 * 10.0**thread))

        return Ranks(2, work).outcomes()

    for outcome in start_job(local, 2, run).outcomes():
        errors = outcome if isinstance(outcome, list) else [outcome]
        if names == ("", ""):
            assert all(isinstance(error, UsageError) for error in errors)
        else:
            assert all(error is None or isinstance(error, AbortedError) for error in errors)
    assert all(total == expected for total, expected in sums)
    assert len(sums) >= 4 if names[0] else not sums


@pytest.mark.parametrize("what", CALLS)
def test_another_thread_must_name_its_collective(local: Config, what: str) -> None:
    """It is refused on all ranks, and the job goes on."""

    def run(comm: Communicator) -> str:
        owner = threading.current_thread().name
        [error] = Ranks(1, lambda _: CALLS[what](comm, "")).outcomes()
        assert isinstance(error, UsageError)
        Ranks(1, lambda _: CALLS[what](comm, "named")).results()
        CALLS[what](comm, "")
        return str(error).replace(owner, "OWNER")

    for text in run_job(local, 2, run):
        assert re.match(r"a collective without a name from thread 'Thread-\d+ .*', but the communicator belongs", text)
        assert "belongs to thread 'OWNER': the ranks would not know" in text
        assert "Give it name=..., the same on every rank, or make a communicator in this thread" in text


def in_threads(comm: Communicator, names: list[str]) -> list[object]:
    """Call a collective of each name in a thread of its own, one after another. All threads live until the end."""
    turns = [threading.Event() for _ in range(len(names) + 1)]
    turns[0].set()

    def work(thread: int) -> float:
        assert turns[thread].wait(WAIT_S)
        try:
            return float(comm.allreduce(np.full(10, 10.0**thread), name=names[thread])[0])
        finally:
            turns[thread + 1].set()
            assert turns[-1].wait(WAIT_S)

    return Ranks(len(names), work).outcomes()


def test_a_name_belongs_to_the_thread_that_used_it_first(local: Config) -> None:
    """Two threads must not use a name in turn: on another rank the other thread may come first."""

    def run(comm: Communicator) -> list[object]:
        comm.allreduce(np.ones(10), name="owner's")
        result = in_threads(comm, ["g", "g", "other", "owner's", "g"])
        for again in ("owner's", "", "new"):  # the thread that has made the communicator goes on
            comm.allreduce(np.ones(10), name=again)
        return result

    for outcomes in run_job(local, 2, run):
        errors = [str(outcome) for outcome in outcomes if isinstance(outcome, UsageError)]
        assert len(errors) == 3, outcomes
        assert re.match(r"the name 'g' belongs to thread '.*', which used it first; thread '.*' must use", errors[0])


def test_a_name_is_free_when_its_thread_has_ended(local: Config) -> None:
    """A program may start a thread for each step."""

    def run(comm: Communicator) -> float:
        steps = [Ranks(1, lambda _: comm.allreduce(np.ones(10), name="g")).results()[0][0] for _ in range(3)]
        return float(sum(steps))

    assert run_job(local, 2, run) == [6.0, 6.0]


def test_names_are_remembered_up_to_a_limit() -> None:
    """The names in use stay: only those that have not been used for long are forgotten."""
    names, other = Names(), threading.Thread()
    other.is_alive = lambda: True  # type: ignore[method-assign]
    names.claim("kept", other)
    for number in range(5 * NAMES_PER_TABLE):
        names.claim(f"step {number}", other)
        if number % 100 == 0:
            names.claim("kept", other)
    assert len(names) <= 2 * NAMES_PER_TABLE
    names.claim("step 0", threading.current_thread())
    with pytest.raises(UsageError, match="the name 'kept' belongs to thread"):
        names.claim("kept", threading.current_thread())


def test_a_name_is_under_way_in_one_thread_only(local: Config) -> None:
    """Also when the thread that has started it has ended. Rank 1 is late with all of them."""
    goes_on = threading.Event()

    def run(comm: Communicator) -> float:
        if comm.rank == 1:
            assert goes_on.wait(WAIT_S)
            results = [float(comm.allreduce(np.ones(10), name="w")[0]) for _ in range(2)]
            with pytest.raises(UsageError):
                comm.allreduce(np.ones(10), name="w" * 201)
            return sum(results) + sum(float(comm.allreduce(np.ones(10), name=name)[0]) for name in ("other", "w"))
        handles = Ranks(1, lambda _: [comm.allreduce_async(np.ones(10), name="w") for _ in range(2)]).results()[0]
        [error] = Ranks(1, lambda _: comm.allreduce(np.ones(10), name="w")).outcomes()
        assert isinstance(error, UsageError)
        assert re.match(r"a collective named 'w' of thread '.*' is under way; thread '.*' must wait for it", str(error))
        started = Ranks(1, lambda _: comm.allreduce_async(np.ones(10), name="other")).results()
        goes_on.set()
        results = sum(float(handle.wait()[0]) for handle in handles + started)
        [last] = Ranks(1, lambda _: comm.allreduce(np.ones(10), name="w")).results()
        return results + float(last[0])

    assert run_job(local, 2, run) == [8.0, 8.0]


def test_names_that_meet_in_another_order_are_an_error(local: Config) -> None:
    def run(comm: Communicator) -> None:
        for name in ("a", "b") if comm.rank else ("b", "a"):
            Ranks(1, lambda _, name=name: comm.allreduce(np.ones(10), name=name)).results()

    for error in start_job(local, 2, run).outcomes():
        assert isinstance(error, AbortedError)
        assert "rank 0 called allreduce 'b' of float64 (10,), sum; rank 1 called allreduce 'a'" in str(error)


def test_threads_hand_over_the_right_to_start_what_has_no_name(local: Config) -> None:
    """One after another, in one order on both ranks. Who has handed it over has it no longer."""

    def run(comm: Communicator) -> list[float]:
        sums = []

        def turn(number: int) -> None:
            comm.take_over()
            sums.append(float(comm.allreduce(np.full(3, float(number)))[0]))

        for number in range(5):
            Ranks(1, lambda _, number=number: turn(number)).results()
        with pytest.raises(UsageError, match="without a name"):
            comm.barrier()
        comm.take_over()
        comm.barrier()
        return sums

    assert run_job(local, 2, run) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2
