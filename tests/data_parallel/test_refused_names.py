"""A refusal of one rank by name reaches the ranks that wait for that name; the queue goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import AbortedError, Communicator, UsageError
from omnireduce.data_parallel.negotiation import MAX_PENDING
from omnireduce.data_parallel.queue import Queue

CALLS: dict[str, Callable[[], dict[str, Any]]] = {  # proper arguments of all methods, for two ranks
    "allreduce": lambda: {"x": np.ones(3)},
    "grouped_allreduce": lambda: {"arrays": [np.ones(3), np.ones(2, np.int8)]},
    "allreduce_rows": lambda: {"indices": np.arange(2), "values": np.ones((2, 2)), "n_rows": 4},
    "allgather": lambda: {"x": np.ones(3)},
    "broadcast": lambda: {"x": np.ones(3)},
    "alltoall": lambda: {"x": np.ones(4)},
    "reducescatter": lambda: {"x": np.ones(4)},
    "broadcast_object": lambda: {"x": {"step": 7}},
    "allgather_object": lambda: {"x": {"step": 7}},
}
LOCK = threading.Lock()
WRONG: dict[str, dict[str, Any]] = {  # arguments that each of them refuses
    "allreduce": {"op": "median"},
    "grouped_allreduce": {"arrays": []},
    "allreduce_rows": {"n_rows": 1},
    "allgather": {"x": np.ones(())},
    "broadcast": {"root": 7},
    "alltoall": {"splits": np.array([1, 1])},
    "reducescatter": {"x": np.ones(())},
    "broadcast_object": {"root": 7},
    "allgather_object": {"trust": 1, "x": LOCK},
}


def run_on_queues(daemon: Daemon, work: Callable[[Queue], object], *overrides: str, size: int = 2) -> list[Any]:
    def run(comm: Communicator) -> object:
        queue = Queue(comm)
        result = work(queue)
        comm.barrier(name="end")
        queue.close()
        return result

    return run_job(configured(daemon.addresses, *overrides), size, run)


def submit(queue: Queue, what: str, name: str, **more: Any) -> Any:
    return getattr(queue, f"{what}_async")(**CALLS[what]() | more, name=name)


def test_no_method_is_forgotten() -> None:
    assert {each.removesuffix("_async") for each in vars(Queue) if each.endswith("_async")} == set(CALLS)


@pytest.mark.parametrize("what", [call for call in CALLS if call != "allgather_object"])
def test_what_one_rank_refuses_is_an_error_on_all(daemon: Daemon, what: str) -> None:
    """Also once steps have no rounds any more. The next of the name is sound, and so are others."""

    def work(queue: Queue) -> list[str]:
        results = []
        for step in range(12):
            good = queue.allreduce_async(np.ones(5, np.float32), name="good")
            if step % 6 < 4:
                submit(queue, what, "w").wait(60)
            elif queue.rank == 1:
                with pytest.raises(UsageError) as caught:
                    submit(queue, what, "w", **WRONG[what])
                results.append(str(caught.value))
            else:
                with pytest.raises(UsageError) as caught:
                    submit(queue, what, "w").wait(60)
                results.append(str(caught.value))
            assert good.wait(60).tolist() == [2.0] * 5
        return results

    theirs, own = run_on_queues(daemon, work)
    assert len(own) == 4
    assert theirs == [f"rank 1 refused 'w': {each}" for each in own]


def test_what_all_ranks_refuse(daemon: Daemon) -> None:
    """Each has an error of its own, and nobody waits."""

    def work(queue: Queue) -> float:
        for _ in range(3):
            with pytest.raises(UsageError, match=f"op 'rank {queue.rank}'"):
                queue.allreduce_async(np.ones(3), name="w", op=f"rank {queue.rank}")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="0 arrays and 0 outs"):
                queue.grouped_allreduce_async([], name="v")
        return float(queue.allreduce_async(np.ones(3), name="w").wait(60)[0])

    assert run_on_queues(daemon, work, size=3) == [3.0] * 3


@pytest.mark.parametrize("limit", ["1_000_000", "2000"])
def test_an_object_that_cannot_be_sent(daemon: Daemon, limit: str) -> None:
    """For what it is, or for its size; of the root, or of one of all."""
    what = LOCK if limit == "1_000_000" else b"x" * 3000

    def work(queue: Queue) -> list[str]:
        results = []
        for step in range(5):
            error = what if queue.rank == 0 and step % 2 == 0 else {"step": 7}
            for task in (
                queue.broadcast_object_async(error, name="b"),
                queue.allgather_object_async(error, name="g"),
            ):
                if step % 2:
                    task.wait(60)
                else:
                    with pytest.raises(UsageError) as caught:
                        task.wait(60)
                    results.append(str(caught.value))
        return results

    error, *others = run_on_queues(daemon, work, f"protocol.max_part_bytes={limit}", size=3)
    assert all(("lock is no plain data" if what is LOCK else "bytes to send; expected") in each for each in error)
    assert others == [[f"rank 0 refused its part: {each}" for each in error]] * 2


def test_a_name_that_is_under_way_is_refused_in_its_turn(daemon: Daemon) -> None:
    """Calls that were submitted before run first; later calls wait for their turn."""
    is_refused = threading.Event()

    def work(queue: Queue) -> list[float]:
        if queue.rank == 0:
            first = queue.allreduce_async(np.ones(3), name="w")
            with pytest.raises(UsageError, match="'w' is under way already"):
                queue.allreduce_async(np.ones(3), name="w")
            is_refused.set()
        else:
            assert is_refused.wait(30)
            first = queue.allreduce_async(np.ones(3), name="w")
        results = [float(first.wait(60)[0])]
        if queue.rank:
            with pytest.raises(UsageError, match="rank 0 refused 'w': 'w' is under way already"):
                queue.allreduce_async(np.ones(3), name="w").wait(60)
        return [*results, float(queue.allreduce_async(np.ones(3), name="w").wait(60)[0])]

    assert run_on_queues(daemon, work) == [[2.0, 2.0]] * 2


def test_who_waits_behind_what_it_has_refused_is_told_who_does_not_come(daemon: Daemon) -> None:
    ended = threading.Event()

    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        if comm.rank == 0:
            with pytest.raises(UsageError, match="median"):
                submit(queue, "allreduce", "w", op="median")
            with pytest.raises(AbortedError, match="rank 1 has not come to 'w', for which rank 0 waits since"):
                submit(queue, "allreduce", "w")
            ended.set()
        assert ended.wait(60)
        queue.close()

    run_job(configured(daemon.addresses, "stall.abort_s=0.5"), 2, run)


@pytest.mark.slow
def test_more_than_there_is_room_for_is_refused_when_there_is(daemon: Daemon) -> None:
    is_refused = threading.Event()

    def work(queue: Queue) -> float:
        x = np.ones(1, np.int8)
        assert queue.rank == 0 or is_refused.wait(30)
        tasks = [queue.allreduce_async(x.copy(), name=f"{number}") for number in range(MAX_PENDING)]
        if queue.rank == 0:
            with pytest.raises(UsageError, match="are under way already"):
                queue.allreduce_async(x, name="one more")
            is_refused.set()
        assert all(task.wait(60)[0] == 2 for task in tasks)
        if queue.rank:
            with pytest.raises(UsageError, match=r"rank 0 refused .one more.: .* are under way"):
                queue.allreduce_async(x, name="one more").wait(60)
        return float(queue.allreduce_async(np.ones(1), name="one more").wait(60)[0])

    assert run_on_queues(daemon, work) == [2.0, 2.0]


def test_names_that_cannot_be_and_ranks_that_have_joined_keep_nobody_waiting(daemon: Daemon) -> None:
    def work(queue: Queue) -> float:
        for wrong in ("", "a\nb", "(join)", 7):
            with pytest.raises(UsageError, match="name"):
                queue.allreduce_async(np.ones(3), name=wrong)  # type: ignore[arg-type]
        if queue.rank == 1:
            with pytest.raises(UsageError, match="expected one of sum"):
                queue.allreduce_async(np.ones(3), name="w", op="median")  # type: ignore[arg-type]
            queue.join()
        else:
            queue.allreduce_async(np.ones(3), name="v").wait(60)
            queue.join()
        return float(queue.allreduce_async(np.ones(3), name="w").wait(60)[0])

    assert run_on_queues(daemon, work) == [2.0, 2.0]
