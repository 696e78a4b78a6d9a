"""What torch does with collectives under way: waits, futures, callbacks, threads, limits and errors."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from groups import options, run_group, start_group
from local_cluster import WAIT_S, Daemon, Ranks
from torch import Tensor

from omnireduce.torch import ProcessGroup

pytestmark = pytest.mark.usefixtures("aggregators")


def allreduce(group: ProcessGroup, x: Tensor) -> dist._Work:
    return group.allreduce([x], options("Allreduce"))


def test_many_under_way_are_waited_for_last_to_first() -> None:
    def run(group: ProcessGroup, rank: int) -> list[float]:
        tensors = [torch.full((1 + 1000 * (n % 3),), float(n)) for n in range(60)]
        works = [allreduce(group, x) for x in tensors]
        for work in reversed(works):
            assert work.wait()
            assert work.is_completed()
            assert work.is_success()
            assert work.exception() is None
        return [float(x[0]) for x in tensors]

    assert run_group(2, run) == [[2.0 * n for n in range(60)]] * 2


def test_a_future_has_the_tensors() -> None:
    def run(group: ProcessGroup, rank: int) -> bool:
        x = torch.ones(8, 3).t()  # not contiguous: the result is copied back
        work = allreduce(group, x)
        [found] = work.get_future().then(lambda future: future.value()).wait()
        return found is not None and torch.equal(found, torch.full((3, 8), 2.0)) and torch.equal(x, found)

    assert run_group(2, run) == [True, True]


def test_callbacks_may_wait_for_other_collectives() -> None:
    """Deeper than a machine has processors, as some gradient hooks do."""
    depth = 12

    def run(group: ProcessGroup, rank: int) -> float:
        first = torch.ones(1)

        def again(future: torch.futures.Future[list[Tensor]], left: int) -> Tensor:
            [x] = future.value()
            if not left:
                return x
            nested = allreduce(group, x.clone()).get_future()
            return nested.then(lambda found: again(found, left - 1)).wait()

        return float(allreduce(group, first).get_future().then(lambda found: again(found, depth)).wait())

    assert run_group(2, run) == [2.0 ** (depth + 1)] * 2


def test_threads_may_take_turns() -> None:
    """Each collective is started by another thread, in one order: as the backward pass does."""

    def run(group: ProcessGroup, rank: int) -> list[float]:
        results = []
        for turn in range(20):
            x = torch.full((5,), float(turn))
            Ranks(1, lambda _, x=x: allreduce(group, x).wait()).results()
            results.append(float(x[0]))
        return results

    assert run_group(3, run) == [[3.0 * turn for turn in range(20)]] * 3


def test_a_wait_may_have_a_limit() -> None:
    may_go_on = threading.Event()

    def run(group: ProcessGroup, rank: int) -> float:
        x = torch.ones(3)
        if rank == 1:
            assert may_go_on.wait(WAIT_S)
        work = allreduce(group, x)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"omnireduce: the collective is still under way after 0\.01 s"):
                work.wait(timedelta(seconds=0.01))
            may_go_on.set()
        work.wait()
        return float(x[0])

    assert run_group(2, run) == [2.0, 2.0]


def test_ranks_that_disagree_are_told() -> None:
    def run(group: ProcessGroup, rank: int) -> None:
        allreduce(group, torch.ones(3 + rank)).wait()

    for error in start_group(2, run).outcomes():
        assert isinstance(error, RuntimeError)
        assert "omnireduce: ranks 0 and 1: submitted different collectives: " in str(error)
        assert "float32 (3,)" in str(error)


def test_a_rank_that_is_late_is_named_in_the_future(aggregators: Daemon) -> None:
    """After the time limit of the group."""
    both = threading.Barrier(2)

    def run(group: ProcessGroup, rank: int) -> str:
        if rank == 1:
            both.wait(WAIT_S)
            return ""
        future = allreduce(group, torch.ones(3)).get_future()
        with pytest.raises(RuntimeError) as caught:
            future.then(lambda found: found.value()).wait()
        both.wait(WAIT_S)
        return str(caught.value)

    said, _ = start_group(2, run, timeout_s=0.5).results()
    assert "omnireduce: rank 1 (" in said
    assert "not complete after 0.5 s" in said


def test_what_cannot_be_joined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIREDUCE_CLUSTER_AGGREGATORS", "127.0.0.1:1")
    monkeypatch.setenv("OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S", "0.2")
    for error in start_group(2, lambda group, rank: None).outcomes():
        assert isinstance(error, RuntimeError)
        assert "omnireduce: " in str(error)
        assert "127.0.0.1:1" in str(error)
