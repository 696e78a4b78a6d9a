"""Collectives under way in torch: waits, futures, callbacks, threads, limits and errors."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from groups import options, run_gloo, run_group, start_group
from local_cluster import WAIT_S, Daemon, Ranks, eventually
from torch import Tensor

from omnireduce.torch import ProcessGroup
from omnireduce.torch.backend.group_job import GroupJob
from omnireduce.torch.backend.work import Completion, Pending

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_future_has_the_tensors(dtype: torch.dtype) -> None:
    def run(group: ProcessGroup, rank: int) -> bool:
        x = torch.ones(8, 3, dtype=dtype).t()  # not contiguous: the result is copied back
        work = allreduce(group, x)
        [result] = work.get_future().then(lambda future: future.value()).wait()
        return (
            result is not None and torch.equal(result, torch.full((3, 8), 2.0, dtype=dtype)) and torch.equal(x, result)
        )

    assert run_group(2, run) == [True, True]


def test_a_collective_is_complete_when_its_tensor_has_the_result() -> None:
    """Also where the result is copied back, or has other rows than the tensor had; nobody waits."""

    def run(group: ProcessGroup, rank: int) -> tuple[float, float]:
        turned = torch.ones(8, 3).t()
        sparse = torch.sparse_coo_tensor([[rank]], torch.ones(1, 2), (4, 2), check_invariants=True)
        for x in (turned, sparse):
            work = allreduce(group, x)
            assert eventually(work.is_completed)
        return float(turned[0, 0]), float(sparse._values().sum())

    assert run_group(2, run) == [(2.0, 4.0)] * 2


def test_a_call_that_has_waited_says_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(group: ProcessGroup, rank: int) -> list[float]:
        x = torch.ones(8, 3).t()
        work = group.allreduce([x], options("Allreduce", asyncOp=False))
        assert (work.is_completed(), work.is_success(), work.exception(), work.wait()) == (True, True, None, True)
        assert work.result()[0] is x
        return [float(x[0, 0]), float(work.get_future().wait()[0].sum())]

    def fails(tensors: object, copies: object) -> None:
        raise MemoryError("no room")

    assert run_group(2, run) == [[2.0, 48.0]] * 2
    monkeypatch.setattr("omnireduce.torch.backend.process_group.put_back", fails)
    with pytest.raises(RuntimeError, match="omnireduce: no room"):
        run_group(2, run)


@pytest.mark.parametrize("waits", [True, False], ids=["waited for", "not waited for"])
def test_tensors_are_free_when_nobody_refers_to_their_collective(waits: bool) -> None:
    """At once, not when the collector of cycles runs."""

    def run(group: ProcessGroup, rank: int) -> bool:
        x = torch.ones(8, 3).t()
        known = weakref.ref(x)
        work = group.allreduce([x], options("Allreduce", asyncOp=not waits))
        work.get_future().wait()
        del work, x
        return eventually(lambda: known() is None)

    gc.disable()
    try:
        assert run_group(2, run) == [True, True]
    finally:
        gc.enable()


def test_a_wait_that_breaks_does_not_keep_the_others_from_hearing() -> None:
    """A wait may fail if memory is used up, for example."""
    completion, completed = Completion(), queue.SimpleQueue[int]()

    def breaks() -> None:
        raise MemoryError

    for number, wait in enumerate((breaks, list, breaks, list)):
        completion.add(Pending(wait, partial(completed.put, number)))
    assert [completed.get(timeout=WAIT_S) for _ in range(4)] == [0, 1, 2, 3]
    completion.close()


def test_threads_of_a_group_that_is_destroyed_end() -> None:
    before = threading.active_count()

    def run(group: ProcessGroup, rank: int) -> None:
        works = [allreduce(group, torch.ones(3)) for _ in range(5)]
        works[-1].wait()

    run_group(2, run)
    assert eventually(lambda: threading.active_count() <= before)


@pytest.mark.parametrize("had_joined", [True, False])
def test_a_group_that_was_destroyed_says_so_at_once(had_joined: bool) -> None:
    """It does not wait for the other rank, which does nothing."""

    def run(group: ProcessGroup, rank: int) -> None:
        if not had_joined:
            group._job.leave()
            group._job = GroupJob(group._gloo, timedelta(seconds=WAIT_S))  # as of a group that is not the first one
        if rank == 0:
            group.shutdown()
            allreduce(group, torch.ones(3))

    error, other = start_group(2, run).outcomes()
    assert other is None
    assert isinstance(error, RuntimeError)
    assert "omnireduce: this process group was destroyed; make a new one to go on" in str(error)


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


def test_a_call_may_have_a_limit() -> None:
    """As in `dist.barrier(timeout=)`; the collective goes on."""
    may_go_on = threading.Event()

    def run(group: ProcessGroup, rank: int) -> None:
        if rank == 1:
            assert may_go_on.wait(WAIT_S)
        for is_async in (True, False):
            opts = options("Barrier", asyncOp=is_async)
            if rank == 1:
                group.barrier(opts).wait()
                continue
            opts.timeout = timedelta(seconds=0.01)
            with pytest.raises(RuntimeError, match=r"omnireduce: the collective is still under way after 0\.01 s"):
                group.barrier(opts).wait()
        may_go_on.set()
        group.barrier().wait()

    run_group(2, run)


def test_a_rank_that_refuses_to_join_is_named_to_the_others() -> None:
    """They would wait for it on the aggregators. The next collective is sound."""

    def run(gloo: dist.ProcessGroup, rank: int) -> str:
        job = GroupJob(gloo, timedelta(seconds=WAIT_S))
        proper, job._timeout_s = job._timeout_s, -1.0 if rank == 1 else job._timeout_s
        with pytest.raises(RuntimeError) as caught:
            job.start(lambda comm: None)
        job._timeout_s = proper
        assert job.start(lambda comm: comm.allreduce(np.ones(3))).tolist() == [3, 3, 3]
        job.leave()
        return str(caught.value)

    first, second, last = run_gloo(3, run)
    assert "cluster.timeout_s" in second
    assert first == last == second.replace("omnireduce: ", "omnireduce: rank 1: ")


def test_ranks_that_disagree_are_told() -> None:
    def run(group: ProcessGroup, rank: int) -> None:
        allreduce(group, torch.ones(3 + rank)).wait()

    for error in start_group(2, run).outcomes():
        assert isinstance(error, RuntimeError)
        assert "omnireduce: ranks 0 and 1: submitted different collectives: " in str(error)
        assert "float32 (3,)" in str(error)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("call", ["allreduce", "allreduce_coalesced", "reduce", "broadcast", "reduce_scatter"])
def test_what_one_rank_refuses_is_told(call: str, is_async: bool) -> None:
    """Before it was started, whatever it is: here two tensors, or none, where one is expected, or what is no tensor."""
    kind = {"allreduce_coalesced": "AllreduceCoalesced", "reduce_scatter": "ReduceScatter"}.get(call, call.title())
    x = torch.ones(3)
    good: tuple[object, ...] = ([x], [[x] * 2]) if call == "reduce_scatter" else ([x],)
    wrong: tuple[object, ...] = ([x], [[x]]) if call == "reduce_scatter" else ([x, x],)
    wrong = (["x"],) if call == "allreduce_coalesced" else wrong

    def run(group: ProcessGroup, rank: int) -> str:
        group.barrier().wait()
        with pytest.raises(Exception, match=r"expected|attribute|refused") as caught:
            getattr(group, call)(*(wrong if rank == 1 else good), options(kind, asyncOp=is_async)).wait()
        return str(caught.value) if rank != 1 else ""

    result = run_group(2, run)[0]
    assert result.startswith("omnireduce: rank 1 (host "), result
    assert "refused collective 1, which rank 0 called as" in result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # futures of float16 are for torch's C++, too
def test_a_rank_that_is_late_is_named_in_the_future(aggregators: Daemon, dtype: torch.dtype) -> None:
    """After the time limit of the group."""
    both = threading.Barrier(2)

    def run(group: ProcessGroup, rank: int) -> str:
        if rank == 1:
            both.wait(WAIT_S)
            return ""
        future = allreduce(group, torch.ones(3, dtype=dtype)).get_future()
        with pytest.raises(RuntimeError) as caught:
            future.then(lambda found: found.value()).wait()
        both.wait(WAIT_S)
        return str(caught.value)

    error, _ = start_group(2, run, timeout_s=0.5).results()
    assert "omnireduce: rank 1 (" in error
    assert "not complete after 0.5 s (the timeout of the process group)" in error  # torch's tests look for "timeout"


def test_what_cannot_be_joined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIREDUCE_CLUSTER_AGGREGATORS", "127.0.0.1:1")
    monkeypatch.setenv("OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S", "0.2")
    for error in start_group(2, lambda group, rank: None).outcomes():
        assert isinstance(error, RuntimeError)
        assert "omnireduce: " in str(error)
        assert "127.0.0.1:1" in str(error)


def test_torch_may_ask_what_else_a_group_can_do() -> None:
    """As `init_process_group` does, where a rank has a `device_id`."""

    def run(group: ProcessGroup, rank: int) -> tuple[bool, bool]:
        able = group._get_backend(torch.device("cuda", 0))
        return able.supports_splitting, able.supports_tensor_alloc(torch.device("cuda", 0))

    assert run_group(1, run) == [(False, False)]
