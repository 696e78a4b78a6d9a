"""Contexts and jobs of SwitchML's front, on a real aggregator: states, order, ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import SETTLE, WAIT_S, Daemon, Ranks, configured, eventually, unique_job

from omnireduce.errors import AbortedError, ClosedError, ConfigError, OmniReduceError, UsageError
from omnireduce.support.config import Config
from omnireduce.switchml import Context, ContextState, Distribution, Job, JobState


@pytest.fixture
def alone() -> Config:
    """One rank, which starts an aggregator."""
    return configured([])


def pair(daemon: Daemon) -> list[Context]:
    """Two ranks of a job that has begun."""
    config = configured(daemon.addresses, f"cluster.job={unique_job('switchml')}")
    results: list[Context] = Ranks(2, lambda rank: Context().start(config, rank=rank, size=2)).results()
    return results


def failure(function: Callable[[], object]) -> OmniReduceError:
    with pytest.raises(OmniReduceError) as caught:
        function()
    return caught.value


def test_a_context_runs_more_than_once(alone: Config) -> None:
    context = Context()
    assert context.state is ContextState.CREATED
    for _ in range(2):
        with context.start(alone) as found:
            assert (found, context.state) == (context, ContextState.RUNNING)
            assert context.allreduce(np.ones(5, np.int32)).tolist() == [1] * 5
        assert context.state is ContextState.STOPPED
        context.stop()
    assert context.stats.jobs_finished == 2


def test_there_is_one_instance() -> None:
    assert Context.instance() is Context.instance()
    assert Context.instance() is not Context()


def test_what_a_context_refuses_leaves_it_as_it_was(alone: Config) -> None:
    context, x = Context(), np.ones(3, np.float32)
    assert "the context is created and takes no jobs" in str(failure(lambda: context.allreduce(x)))
    assert "never started" in str(failure(lambda: context.communicator))
    with pytest.raises(ConfigError, match="no such file"):
        context.start("none.toml")
    assert context.state is ContextState.STOPPED
    with context.start(alone):
        assert "the context is running; stop it" in str(failure(lambda: context.start(alone)))
        assert "expected 'sum'" in str(failure(lambda: context.allreduce(x, op="mean")))
        job = context.allreduce_async(x)
        assert "was submitted before" in str(failure(lambda: context.submit(job)))
        assert job.wait().tolist() == [1, 1, 1]
    assert "the context is stopped" in str(failure(lambda: context.allreduce(x)))
    assert (context.stats.jobs_submitted, context.stats.jobs_finished) == (1, 1)


def test_a_distribution_is_that_of_its_numbers() -> None:
    assert Distribution.of([4, 1, 1, 2]) == Distribution(sum=8, mean=2, max=4, min=1, median=1.5, stdev=1.5**0.5)
    assert Distribution.of([]) == Distribution(0, 0, 0, 0, 0, 0)
    assert str(Distribution.of([10, 20])) == "Sum: 30 Mean: 15 Max: 20 Min: 10 Median: 15 Stdev: 5"


READ_ONLY = np.ones(3, np.float32)
READ_ONLY.flags.writeable = False
LONG = np.ones(6, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([1.0, 2.0],), "x is a list, expected an array of NumPy or a tensor of torch"),
        ((np.ones(3),), "x is of float64, expected float32 or int32"),
        ((np.ones(3, np.float32), np.ones(3, np.int32)), r"out is int32\[3\], x is float32\[3\]: expected the same"),
        ((np.ones(3, np.float32), np.ones(4, np.float32)), r"out is float32\[4\], x is float32\[3\]"),
        ((LONG[::2],), "x is not C-contiguous"),
        ((READ_ONLY,), "out is read-only"),
        ((LONG[:4], LONG[2:]), "out overlaps x"),
    ],
)
def test_arrays_that_no_job_takes(arrays: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Job(*arrays)


def test_jobs_go_through_their_states(daemon: Daemon) -> None:
    """The second rank submits late: until then the first job runs, and the second one, of the same memory, waits."""
    first, second = pair(daemon)
    x, source, out = np.full(100, 3, np.int32), np.ones(100, np.float32), np.zeros(100, np.float32)
    jobs = [Job(x), Job(x), Job(source, out)]
    assert [job.state for job in jobs] == [JobState.INIT] * 3
    with pytest.raises(UsageError, match="was not submitted"):
        jobs[0].wait()
    for job in jobs:
        first.submit(job)
    assert [job.state for job in jobs] == [JobState.RUNNING, JobState.QUEUED, JobState.QUEUED]
    for job in jobs:
        with pytest.raises(TimeoutError, match=f"job {job.id} is not over after 0.001 s; it goes on"):
            job.wait(0.001)
    with pytest.raises(TimeoutError):
        first.wait_for_all_jobs(0.001)
    y = np.full(100, 4, np.int32)
    others = [Job(y), Job(y), Job(np.full(100, 2, np.float32), np.empty(100, np.float32))]
    for job in others:
        second.submit(job)
    for context in (first, second):
        context.wait_for_all_jobs(WAIT_S)
    assert {job.state for job in (*jobs, *others)} == {JobState.FINISHED}
    assert {job.error for job in (*jobs, *others)} == {None}
    assert (set(x), set(y), set(source), set(out)) == ({14}, {14}, {1.0}, {3.0})
    assert first.stats.sizes.sum == 300
    for context in (first, second):
        context.stop()


def behind_another(daemon: Daemon, run: Callable[[Context, Job, threading.Event], object]) -> list[Any]:
    """`run` on two ranks after their second job, which is in the queue of rank 0: rank 1 begins the first one only when
    rank 0 has set the event."""
    config, begun = configured(daemon.addresses, f"cluster.job={unique_job('switchml')}"), threading.Event()

    def start(rank: int) -> object:
        with Context().start(config, rank=rank, size=2) as context:
            x = np.ones(8, np.float32)
            if rank == 1:
                assert begun.wait(WAIT_S)
            first = context.allreduce_async(x)
            if rank == 1:
                first.wait(WAIT_S)
            second = context.allreduce_async(x)
            assert rank == 1 or second.state is JobState.QUEUED
            return run(context, second, begun)

    return Ranks(2, start).results()


def test_a_job_meets_no_other_collective(daemon: Daemon) -> None:
    """The other one comes before the job on rank 0, and after it on rank 1. Both are sums of eight numbers."""

    def run(context: Context, job: Job, begun: threading.Event) -> str:
        if context.communicator.rank == 0:
            context.communicator.allreduce_async(np.full(8, 100, np.float32))
            begun.set()
        error = failure(lambda: job.wait(WAIT_S))
        assert isinstance(error, AbortedError)
        return str(error)

    for reason in behind_another(daemon, run):
        assert "'switchml job 2'" in reason


def test_other_collectives_need_no_name_when_jobs_are_over(daemon: Daemon) -> None:
    """Though another thread has started a job."""

    def run(context: Context, job: Job, begun: threading.Event) -> list[float]:
        begun.set()
        context.wait_for_all_jobs(WAIT_S)
        return [float(job.out[0]), float(context.communicator.allreduce(np.full(8, 100, np.float32))[0])]

    assert behind_another(daemon, run) == [[4.0, 200.0]] * 2


def test_a_rank_that_comes_new_counts_jobs_as_the_others_do(daemon: Daemon) -> None:
    """Rank 1 leaves and is started again. Meanwhile rank 0 goes on alone."""
    elastic = ("elastic.enabled=true", SETTLE, "security.allow_no_secret=true")
    config, alone = configured(daemon.addresses, f"cluster.job={unique_job('switchml')}", *elastic), threading.Event()

    def total(context: Context) -> float:
        return float(context.allreduce(np.ones(8, np.float32), timeout_s=WAIT_S)[0])

    def run(rank: int) -> float:
        with Context().start(config, rank=rank, size=2) as context:
            if rank == 0:
                with pytest.raises(AbortedError, match="rank 1"):
                    total(context)
                context.communicator.reform()
                alone.set()
                assert eventually(lambda: total(context) == 1.0 and context.communicator.newcomers > 0)
                context.communicator.reform()
                return total(context)
        assert alone.wait(WAIT_S)
        with Context().start(config, rank=1, size=2) as context:
            return total(context)

    assert Ranks(2, run).results() == [2.0, 2.0]


def test_a_job_that_cannot_begin_has_failed(daemon: Daemon) -> None:
    first, second = pair(daemon)
    second.stop()
    with pytest.raises(AbortedError, match="rank 1"):
        first.allreduce(np.ones(8, np.float32), timeout_s=WAIT_S)
    job = Job(np.ones(8, np.float32))
    error = failure(lambda: first.submit(job))
    assert (job.state, job.error) == (JobState.FAILED, error)
    assert failure(lambda: job.wait(WAIT_S)) is error
    assert (first.stats.jobs_submitted, first.stats.jobs_failed) == (2, 2)
    first.stop()


def test_jobs_of_their_own_memory_run_together(daemon: Daemon) -> None:
    first, second = pair(daemon)
    arrays = [np.full(10 * number, number, np.float32) for number in range(1, 6)]
    jobs = [first.allreduce_async(array) for array in arrays]
    assert {job.state for job in jobs} == {JobState.RUNNING}
    stats = first.stats
    assert (stats.jobs_submitted, stats.jobs_finished, stats.jobs_failed) == (5, 0, 0)
    sizes = stats.sizes
    assert (sizes.sum, sizes.mean, sizes.max, sizes.min, sizes.median) == (150, 30, 50, 10, 30)
    assert sizes.stdev == pytest.approx(200**0.5)
    for number in range(1, 6):
        second.allreduce_async(np.full(10 * number, 1, np.float32))
    first.wait_for_all_jobs(WAIT_S)
    assert [set(array) for array in arrays] == [{float(number + 1)} for number in range(1, 6)]
    first.reset_stats()
    assert str(first.stats).startswith("Jobs submitted: #0#\nJobs finished: #0#\nJobs failed: #0#\nJob sizes: Sum: 0 ")
    for context in (second, first):
        context.stop()


def test_jobs_that_share_memory_give_what_they_give_one_after_the_other(daemon: Daemon) -> None:
    """Also when their memory overlaps in part, and from several threads, which take turns."""
    contexts = pair(daemon)

    def run(rank: int) -> list[int]:
        context, memory = contexts[rank], np.ones(30, np.int32)
        for start in (0, 5, 10, 3, 0):
            part = memory[start : start + 10]
            thread = threading.Thread(target=context.allreduce_async, args=(part,))
            thread.start()
            thread.join(WAIT_S)
        context.wait_for_all_jobs(WAIT_S)
        return memory.tolist()

    expected = np.ones(30, np.int32)
    for start in (0, 5, 10, 3, 0):
        expected[start : start + 10] *= 2
    assert Ranks(2, run).results() == [expected.tolist()] * 2
    for context in contexts:
        context.stop()


def test_stop_wakes_everyone_who_waits(daemon: Daemon) -> None:
    """Whether the job runs or is in the queue, whose thread waits, too. The other rank takes no part: the jobs could
    not end."""
    first, second = pair(daemon)
    x = np.ones(100, np.float32)
    running, queued = first.allreduce_async(x), first.allreduce_async(x)
    waiters = Ranks(2, lambda number: (running, queued)[number].wait())
    engine = first.communicator._engine
    assert eventually(lambda: engine._waiters == 2 and len(queued._changed._waiters) == 1)  # type: ignore[attr-defined]
    first.stop()
    outcomes = waiters.outcomes()
    assert [type(outcome) for outcome in outcomes] == [ClosedError] * 2
    assert str(outcomes[1]) == f"the context was stopped before job {queued.id} was begun"
    assert [job.state for job in (running, queued)] == [JobState.FAILED] * 2
    assert isinstance(running.error, ClosedError)
    assert (first.stats.jobs_failed, first.stats.jobs_finished) == (2, 0)
    second.stop()


def test_a_rank_that_leaves_is_named_and_all_may_start_again(daemon: Daemon) -> None:
    first, second = pair(daemon)
    x = np.ones(100, np.float32)
    jobs = [first.allreduce_async(x), first.allreduce_async(x)]
    second.stop()
    with pytest.raises(AbortedError, match="rank 1"):
        first.wait_for_all_jobs(WAIT_S)
    for job in jobs:
        with pytest.raises(AbortedError, match="rank 1"):
            job.wait(WAIT_S)
        assert job.state is JobState.FAILED
        assert "rank 1" in str(job.error)
    assert eventually(lambda: first.stats.jobs_failed == 2)
    assert "the context is running; stop it" in str(failure(lambda: first.start()))
    first.stop()
    config = configured(daemon.addresses, f"cluster.job={unique_job('switchml')}")

    def again(rank: int) -> float:
        with (first, second)[rank].start(config, rank=rank, size=2) as context:
            return float(context.allreduce(np.ones(10, np.float32))[0])

    assert Ranks(2, again).results() == [2.0, 2.0]


def test_an_error_in_the_program_is_told_to_the_other_ranks(daemon: Daemon) -> None:
    first, second = pair(daemon)
    job = first.allreduce_async(np.ones(10, np.float32))
    with pytest.raises(ZeroDivisionError), second:
        raise ZeroDivisionError("of mine")
    assert second.state is ContextState.STOPPED
    with pytest.raises(AbortedError, match="left because of ZeroDivisionError: of mine"):
        job.wait(WAIT_S)
    first.stop()


def test_a_coroutine_may_await_a_job(alone: Config) -> None:
    async def run(context: Context) -> list[float]:
        jobs = [context.allreduce_async(np.full(4, number, np.float32)) for number in range(3)]
        return [float((await job)[0]) for job in jobs]

    with Context().start(alone) as context:
        assert asyncio.run(run(context)) == [0.0, 1.0, 2.0]


def test_tensors_of_torch_share_their_memory(alone: Config) -> None:
    torch = pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    with Context().start(alone) as context:
        x, out = torch.arange(6, dtype=torch.float32).reshape(2, 3), torch.zeros(2, 3)
        context.allreduce(x.requires_grad_(), out)
        assert torch.equal(x, out)
        weights = torch.ones(4, dtype=torch.int32)
        assert context.allreduce(weights, weights).ctypes.data == weights.data_ptr()
        with pytest.raises(UsageError, match="x is on meta, expected a tensor on the processor"):
            context.allreduce(torch.ones(3, device="meta"))
        with pytest.raises(UsageError, match=r"x: .*BFloat16"):
            context.allreduce(torch.ones(3, dtype=torch.bfloat16))
