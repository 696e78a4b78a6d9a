"""Collectives in any order over a real aggregator."""

from __future__ import annotations

import random
import sys
import traceback

import numpy as np
import pytest
from local_cluster import Daemon, Process, configured, run_job
from msgspec.structs import replace

from omnireduce import ClosedError, Communicator, Op, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.queue import Queue


def tensors(rank: int, step: int, count: int, size: int) -> list[Array]:
    rng = np.random.default_rng([rank, step])
    return [rng.integers(-9, 10, size + i).astype(np.float32) for i in range(count)]


@pytest.mark.parametrize(("size", "fusion_bytes"), [(5, 1 << 20), (300, 4000), (300, 0)])
@pytest.mark.parametrize("op", ["sum", "min", "mean", "prod"])
def test_ranks_submit_in_any_order(daemon: Daemon, size: int, fusion_bytes: int, op: Op) -> None:
    """Twenty steps, of which the sixteenth has other names; three ranks, each in an order of its own."""
    combine = {"sum": np.sum, "min": np.min, "mean": np.mean, "prod": np.prod}[op]

    def run(comm: Communicator) -> tuple[list[list[Array]], int, int]:
        queue, rng, results, early = Queue(comm), random.Random(comm.rank), [], 0
        for step in range(20):
            arrays = tensors(comm.rank, step, 6, size)
            order = rng.sample(range(6), 6) if step < 2 or step == 15 else range(6)
            stem = "other" if step == 15 else "w"
            tasks = {i: queue.allreduce_async(arrays[i], name=f"{stem}{i}", op=op) for i in order}
            for i in rng.sample(range(6), 6):
                tasks[i].wait(60)
            results.append(arrays)
            early = queue.statistics().rounds if step == 14 else early
            late = queue.statistics().rounds if step == 12 else early
        comm.barrier(name="end")
        queue.close()
        return results, late, early

    outcomes = run_job(configured(daemon.addresses, f"queue.fusion_bytes={fusion_bytes}"), 3, run)
    for step in range(20):
        inputs = [tensors(rank, step, 6, size) for rank in range(3)]
        for found, _, _ in outcomes:
            for i, each in enumerate(found[step]):
                expected = combine([inputs[rank][i] for rank in range(3)], axis=0).astype(np.float32)
                assert (each == expected).all()


def test_steps_that_are_alike_have_no_rounds(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[int]:
        queue, rounds = Queue(comm), []
        for _ in range(12):
            tasks = [queue.allreduce_async(np.ones(100, np.float32), name=f"w{i}") for i in range(9)]
            assert all((task.wait(60) == comm.size).all() for task in tasks)
            rounds.append(queue.statistics().rounds)
        comm.barrier(name="end")
        queue.close()
        return rounds

    for rounds in run_job(configured(daemon.addresses), 2, run):
        assert rounds[-1] == rounds[-6] > 0


def test_ranks_that_differ_get_one_error(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        task = queue.allreduce_async(np.ones(3 + comm.rank, np.float32), name="w")
        with pytest.raises(UsageError, match=r"rank 0 has allreduce sum float32\[3\], rank 1 has .*\[4\]"):
            task.wait(60)
        assert (queue.allreduce_async(np.ones(3, np.float32), name="w").wait(60) == 2).all()
        comm.barrier(name="end")
        queue.close()

    run_job(configured(daemon.addresses), 2, run)


def test_one_that_closes_ends_all(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        if comm.rank:
            with pytest.raises(ClosedError, match="closed its queue"):
                queue.allreduce_async(np.ones(3, np.float32), name="w").wait(60)
        queue.close()
        with pytest.raises(ClosedError, match="closed its queue"):
            queue.allreduce_async(np.ones(3, np.float32), name="w")

    run_job(configured(daemon.addresses), 2, run)


def test_the_limit_of_rank_0_counts_for_what_travels_together(daemon: Daemon) -> None:
    """Otherwise one rank would put two arrays where the other has one."""

    def run(comm: Communicator) -> list[float]:
        limit = 0 if comm.rank else 1 << 20
        comm.config = replace(comm.config, queue=replace(comm.config.queue, fusion_bytes=limit))
        queue, found = Queue(comm), []
        for _ in range(6):
            tasks = [queue.allreduce_async(np.full(3, 1.0 + i + comm.rank), name=f"w{i}") for i in range(3)]
            found += [float(task.wait(60)[0]) for task in tasks]
        comm.barrier(name="end")
        queue.close()
        return found

    assert run_job(configured(daemon.addresses), 2, run) == [[3.0, 5.0, 7.0] * 6] * 2


FORKS = """
import os, numpy as np, omnireduce as omni
comm = omni.init()
queue = omni.Queue(comm)
if not (child := os.fork()):
    try:
        queue.allreduce_async(np.ones(3), name="w")
    except omni.ClosedError as error:
        os._exit("was forked from" in str(error))
    os._exit(2)
_, status = os.waitpid(child, 0)
assert queue.allreduce_async(np.ones(3), name="w").wait()[0] == 1
queue.close()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
def test_a_forked_child_is_told_that_the_queue_is_its_parents() -> None:
    with Process(sys.executable, "-c", FORKS, environ={"WORLD_SIZE": "1", "RANK": "0"}) as process:
        assert process.line() == "1"
        assert process.wait() == 0


def test_a_handler_may_close_on_top_of_a_submission(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        with queue._dispatcher._lock:  # as in `submit`, which the handler has interrupted
            queue.close()
        with pytest.raises(ClosedError):
            queue.allreduce_async(np.ones(3), name="w").wait(60)

    run_job(configured(daemon.addresses), 1, run)


def test_an_error_that_is_raised_often_does_not_grow(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        queue, lengths = Queue(comm), []
        queue.close()
        for _ in range(9):
            with pytest.raises(ClosedError) as caught:
                queue.allreduce_async(np.ones(3), name="w")
            lengths.append(len(traceback.extract_tb(caught.value.__traceback__)))
        assert lengths[1] == lengths[-1]

    run_job(configured(daemon.addresses), 1, run)


def test_only_the_root_has_an_object_to_send(daemon: Daemon) -> None:
    def run(comm: Communicator) -> object:
        queue = Queue(comm)
        mine = {"epoch": 3} if comm.rank == 1 else object()
        result = queue.broadcast_object_async(mine, 1, name="told").wait(60)
        comm.barrier(name="end")
        queue.close()
        return result

    assert run_job(configured(daemon.addresses), 2, run) == [{"epoch": 3}] * 2
