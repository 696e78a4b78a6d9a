"""Several collectives under way, threads that wait, and limits on waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import SLOWNESS, WAIT_S, Daemon, Ranks, configured, run_job, start_job, unique_job
from oracle import assert_results, reduce_in_rank_order
from tensors import Array, sparse

from omnireduce import AbortedError, ClosedError, CollectiveTimeoutError, Communicator, Config, Handle


def wait_for(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_many_in_flight_complete_in_order(config: Config) -> None:
    """Far more collectives than slots, of several sizes, dtypes and operations. The last one is waited for first."""
    cases = [("float32", 70_000, "sum"), ("int8", 5, "max"), ("float16", 3000, "mean"), ("int64", 0, "sum")] * 8

    def run(comm: Communicator) -> list[Array]:
        tensors = [sparse(comm.rank, dtype, (n,), seed=i) for i, (dtype, n, _) in enumerate(cases)]
        handles = [comm.allreduce_async(x, op=op) for x, (_, _, op) in zip(tensors, cases, strict=True)]
        handles[-1].wait()
        assert all(handle.done() for handle in handles)
        assert all(handle.wait() is x for handle, x in zip(reversed(handles), reversed(tensors), strict=True))
        return tensors

    results = run_job(config, 3, run)
    for i, (dtype, n, op) in enumerate(cases):
        expected = reduce_in_rank_order([sparse(rank, dtype, (n,), seed=i) for rank in range(3)], op)
        assert_results([result[i] for result in results], expected)


def test_work_goes_on_while_nobody_waits(config: Config) -> None:
    """A rank that never waits for its first handle still does its part: the others complete."""
    others_are_done = threading.Event()

    def run(comm: Communicator) -> Array:
        x = sparse(comm.rank, "float32", (2_000_000,), density=1.0)
        if comm.rank:
            comm.allreduce(x)
            others_are_done.set()
            return x
        handle = comm.allreduce_async(x)
        wait_for(others_are_done)
        return handle.wait()

    results = run_job(config, 2, run)
    tensors = [sparse(rank, "float32", (2_000_000,), density=1.0) for rank in range(2)]
    assert_results(results, reduce_in_rank_order(tensors, "sum"))


def test_done_becomes_true_without_a_wait(local: Config) -> None:
    def run(comm: Communicator) -> None:
        handle = comm.allreduce_async(np.ones(10))
        deadline = time.monotonic() + WAIT_S
        while not handle.done():
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)

    run_job(local, 2, run)


def test_wait_with_a_limit_can_be_repeated(config: Config) -> None:
    late = threading.Event()

    def run(comm: Communicator) -> list[float]:
        x = np.ones(1000)
        if comm.rank:
            wait_for(late)
            return comm.allreduce(x).tolist()
        handle = comm.allreduce_async(x)
        for limit in (0.0, 0.01, 0.05):
            with pytest.raises(TimeoutError, match="still under way") as caught:
                handle.wait(limit)
            assert not isinstance(caught.value, AbortedError)
            assert not handle.done()
        late.set()
        assert handle.wait(WAIT_S) is x
        assert handle.wait(0.0) is x
        return x.tolist()

    assert run_job(config, 2, run) == [[2.0] * 1000] * 2


def test_waiting_in_a_loop_ends_when_the_job_does(daemon: Daemon) -> None:
    """The error of a dead job is none that means "wait again", and it does not grow when it is raised again."""
    over = threading.Event()

    def run(comm: Communicator) -> set[int]:
        if comm.rank:
            wait_for(over)
            return set()
        handle = comm.allreduce_async(np.ones(10))
        depths = set()
        for _ in range(3):
            with pytest.raises(CollectiveTimeoutError, match="rank 1") as caught:
                wait_again_and_again(handle)
            depths.add(len(caught.traceback))
        over.set()
        return depths

    depths, _ = run_job(configured(daemon.addresses, "cluster.timeout_s=0.3"), 2, run)
    assert len(depths) == 1


def wait_again_and_again(handle: Handle[Array]) -> Array:
    while True:
        try:
            return handle.wait(0.05)
        except TimeoutError:
            continue


def test_threads_wait_for_one_handle_and_for_several(config: Config) -> None:
    """Every thread is woken, whichever drives the engine; a thread with a time limit leaves the others alone."""
    late = threading.Event()

    def run(comm: Communicator) -> None:
        tensors = [np.full(5000, float(i)) for i in range(6)]
        if comm.rank:
            wait_for(late)
            for x in tensors:
                comm.allreduce(x)
            return
        handles = [comm.allreduce_async(x) for x in tensors]
        waiting = Ranks(12, lambda i: handles[i % 6].wait(WAIT_S)[0])
        with pytest.raises(TimeoutError):
            handles[0].wait(0.02)
        late.set()
        assert waiting.results() == [2.0 * (i % 6) for i in range(12)]

    run_job(config, 2, run)


def test_threads_submit_collectives_of_several_communicators(local: Config) -> None:
    """Each thread has a job of its own on the same shards."""

    def work(thread: int) -> list[float]:
        def run(comm: Communicator) -> float:
            return sum(float(comm.allreduce(np.full(300, thread + 1.0))[7]) for _ in range(20))

        return run_job(local, 2, run)

    assert Ranks(4, work).results() == [[40.0 * (thread + 1)] * 2 for thread in range(4)]


def test_threads_share_one_communicator(local: Config) -> None:
    """They submit by turns, so that the order is the same on every rank, and wait all at once."""

    def run(comm: Communicator) -> list[float]:
        mine = [threading.Semaphore(int(thread == 0)) for thread in range(3)]

        def work(thread: int) -> float:
            handles = []
            for _ in range(10):
                assert mine[thread].acquire(timeout=WAIT_S)
                handles.append(comm.allreduce_async(np.full(3000, float(thread)), name=f"of thread {thread}"))
                mine[(thread + 1) % 3].release()
            return sum(float(handle.wait()[-1]) for handle in handles)

        return Ranks(3, work).results()

    assert run_job(local, 2, run) == [[0.0, 20.0, 40.0]] * 2


@pytest.mark.parametrize("waited_for", [True, False])
def test_shutdown_aborts_what_is_under_way(config: Config, waited_for: bool) -> None:
    """On the rank itself, where another thread drives, and on all others; nobody waits for the rank that is late."""
    begun, over = threading.Event(), threading.Event()

    def shut_down(comm: Communicator) -> str:
        handle = comm.allreduce_async(np.ones(1000))
        waiting = Ranks(int(waited_for), lambda _: handle.wait())
        with pytest.raises(TimeoutError):
            handle.wait(0.05)  # by the end of it another thread drives
        begun.set()
        comm.shutdown()
        over.set()
        assert handle.done()
        assert all(isinstance(error, ClosedError) for error in waiting.outcomes())
        with pytest.raises(ClosedError) as caught:
            handle.wait()
        return str(caught.value)

    def run(comm: Communicator) -> str:
        comm.barrier()  # rank 0 may have joined all shards before the others have
        if comm.rank == 0:
            return shut_down(comm)
        wait_for(begun if comm.rank == 1 else over)
        with pytest.raises(AbortedError, match=r"^rank 0 ") as caught:
            comm.allreduce(np.ones(1000))
        return caught.value.reason

    started = time.monotonic()
    own, *others = run_job(config, 3, run)
    assert "was shut down while this collective was under way" in own
    assert others == ["shut down with a collective under way"] * 2
    assert time.monotonic() - started < 5 * SLOWNESS


def test_use_after_shutdown(config: Config) -> None:
    def run(comm: Communicator) -> None:
        handle = comm.allreduce_async(np.ones(3))
        handle.wait()
        comm.shutdown()
        comm.shutdown()
        for call in (
            lambda: comm.allreduce(np.ones(3)),
            lambda: comm.allreduce_async(np.ones(3)),
            lambda: comm.broadcast(np.ones(3)),
            lambda: comm.allgather(np.ones(3)),
            lambda: comm.reduce_scatter(np.ones(3)),
            lambda: comm.allreduce_rows(np.arange(1), np.ones((1, 8)), 3),
            comm.barrier,
        ):
            with pytest.raises(ClosedError, match="shut down; make a new one"):
                call()
        assert handle.done()
        assert handle.wait().tolist() == [2.0] * 3
        assert comm.statistics().collectives == 1

    run_job(config, 2, run)


def test_an_exception_inside_the_context_names_this_rank(config: Config) -> None:
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError("a bug in the training loop")
        comm.allreduce(np.ones(10))

    first, second = start_job(config, 2, run).outcomes()
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, AbortedError)
    assert first.culprit.startswith("rank 1 (host ")
    assert first.reason == "left because of ZeroDivisionError: a bug in the training loop"


def test_after_an_abort_every_call_raises_the_same_and_a_new_generation_may_join(config: Config) -> None:
    job, joined = unique_job("again"), threading.Barrier(2)

    def run(comm: Communicator) -> None:
        joined.wait(WAIT_S)  # an abort before that would be an error of joining
        if comm.rank == 1:
            raise ZeroDivisionError
        with pytest.raises(AbortedError) as first:
            comm.allreduce(np.ones(10))
        with pytest.raises(AbortedError) as second:
            comm.barrier()
        assert str(first.value) == str(second.value)

    for _ in range(3):
        good, bad = start_job(config, 2, run, job).outcomes()
        assert good is None
        assert isinstance(bad, ZeroDivisionError)
        assert run_job(config, 2, lambda comm: comm.allreduce(np.ones(2)).tolist(), job) == [[2.0, 2.0]] * 2


def test_jobs_of_one_rank(by_shards: Config) -> None:
    def run(comm: Communicator) -> list[float]:
        x = comm.allreduce(sparse(0, "float32", (5000,)))
        assert x.tolist() == sparse(0, "float32", (5000,)).tolist()
        comm.barrier()
        return comm.allgather(np.arange(3.0)).tolist()

    assert run_job(by_shards, 1, run) == [[[0.0, 1.0, 2.0]]]


def test_spinning_for_long_changes_nothing(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "transport.spin_us=1000")
    assert run_job(config, 3, lambda comm: float(comm.allreduce(np.ones(100))[0])) == [3.0] * 3


STARTED: dict[str, Callable[[Communicator], Handle[Any]]] = {
    "allreduce": lambda comm: comm.allreduce_async(np.full(3, comm.rank + 1)),
    "rows": lambda comm: comm.allreduce_rows_async(np.array([comm.rank]), np.ones((1, 2)), 5, op="mean"),
    "broadcast": lambda comm: comm.broadcast_async(np.full(2, comm.rank, np.int16), root=1),
    "allgather": lambda comm: comm.allgather_async(np.array([comm.rank, 7])),
    "reduce_scatter": lambda comm: comm.reduce_scatter_async(np.arange(5)),
    "barrier": lambda comm: comm.barrier_async(),
}


def as_lists(result: Any) -> Any:
    if isinstance(result, tuple):
        return [each.tolist() for each in result]
    return None if result is None else result.tolist()


def test_every_collective_has_an_async_form(config: Config) -> None:
    """All under way at once, waited for in another order than they were started, twice."""

    def run(comm: Communicator) -> dict[str, Any]:
        handles = {what: start(comm) for what, start in STARTED.items()}
        results = {what: as_lists(handle.wait()) for what, handle in reversed(handles.items())}
        assert {what: as_lists(handle.wait()) for what, handle in handles.items()} == results
        assert handles["reduce_scatter"].wait() is handles["reduce_scatter"].wait()
        return results

    same = {
        "allreduce": [3, 3, 3], "rows": [[0, 1], [[0.5, 0.5], [0.5, 0.5]]], "broadcast": [1, 1],
        "allgather": [[0, 7], [1, 7]], "barrier": None,
    }  # fmt: skip
    assert run_job(config, 2, run) == [same | {"reduce_scatter": part} for part in ([0, 2, 4], [6, 8])]


def test_a_handle_can_be_awaited(config: Config) -> None:
    """Several at once, one that has been waited for already, and one whose job ends."""

    async def together(comm: Communicator) -> list[int]:
        handles = [comm.allreduce_async(np.full(1, n)) for n in range(3)]
        results = await asyncio.gather(*handles)
        group = [np.ones(3), np.ones(3, np.int8)]
        assert await comm.allreduce_async(group) is group
        assert group[0].tolist() == group[1].tolist() == [2, 2, 2]
        return [int((await handle)[0]) for handle in handles] + [int(result[0]) for result in results]

    def run(comm: Communicator) -> list[int]:
        result = asyncio.run(together(comm))
        if comm.rank == 0:

            async def alone() -> None:
                await comm.barrier_async()

            with pytest.raises(AbortedError, match="shut down"):
                asyncio.run(alone())
        return result

    assert run_job(config, 2, run) == [[0, 2, 4, 0, 2, 4]] * 2


def test_no_thread_waits_for_what_is_awaited(daemon: Daemon) -> None:
    """More collectives than the event loop has threads, which stay free for others."""
    go = threading.Event()

    async def wait_for_all(comm: Communicator, count: int) -> list[Any]:
        tasks = [asyncio.ensure_future(comm.allreduce_async(np.ones(3))) for _ in range(count)]
        for _ in range(2):  # during the first all have begun to wait
            assert await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(None, int), WAIT_S) == 0
        go.set()
        return await asyncio.gather(*tasks)

    def run(comm: Communicator) -> list[float]:
        if comm.rank == 1:
            assert go.wait(WAIT_S)
            return [float(comm.allreduce(np.ones(3))[0]) for _ in range(100)]
        return [float(each[0]) for each in asyncio.run(wait_for_all(comm, 100))]

    assert run_job(configured(daemon.addresses), 2, run) == [[2.0] * 100] * 2


def test_a_coroutine_that_is_cancelled_leaves_its_collective_alone(daemon: Daemon) -> None:
    go = threading.Event()

    async def give_up(comm: Communicator, x: Any) -> Handle[Any]:
        handle = comm.allreduce_async(x)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle, 0.01)
        return handle

    def run(comm: Communicator) -> list[float]:
        x = np.ones(3)
        if comm.rank == 1:
            assert go.wait(WAIT_S)
            return list(comm.allreduce(x))
        handle = asyncio.run(give_up(comm, x))
        go.set()  # the loop is closed by now
        return list(handle.wait(WAIT_S))

    assert run_job(configured(daemon.addresses), 2, run) == [[2.0] * 3] * 2


def test_it_says_who_it_is(local: Config) -> None:
    def run(comm: Communicator) -> tuple[str, str]:
        before = repr(comm)
        comm.shutdown()
        return before, repr(comm)

    for rank, (before, after) in enumerate(run_job(local, 2, run)):
        assert f"rank {rank} of 2 in job '" in before
        assert "by memory+shm" in before
        assert after == before[:-1] + ", shut down>"


def test_without_a_background_thread_collectives_go_on_while_somebody_waits(config: Config) -> None:
    """For none of them in particular."""

    def run(comm: Communicator) -> tuple[float, bool]:
        comm.drives_in_background = False
        first, second = (comm.allreduce_async(np.full(100_000, n)) for n in (1.0, 2.0))
        result = second.wait()[0]
        assert first.done()
        return float(result), comm._engine._background is None

    assert run_job(config, 2, run) == [(4.0, True)] * 2
