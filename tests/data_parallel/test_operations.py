"""Operations of a queue over a real aggregator, with rounds, and without them in steps that are alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import Communicator, Op, UsageError
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.fusion_buffer import Buffer
from omnireduce.data_parallel.negotiation import ALIKE_STEPS
from omnireduce.data_parallel.operations import Reduction, adasum
from omnireduce.data_parallel.queue import Queue

RANKS, STEPS = 2, ALIKE_STEPS + 4


def array_of(rank: int, shape: tuple[int, ...] = (6, 2), dtype: str = "float32") -> Array:
    return (np.arange(np.prod(shape)).reshape(shape) * (rank + 1) % 7).astype(dtype)


def everyone(**named: Any) -> list[Array]:
    return [array_of(rank, **named) for rank in range(RANKS)]


def in_steps(daemon: Daemon, do: Callable[[Queue], None]) -> None:
    """Let each rank `do` it some times."""

    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        rounds = []
        for _ in range(STEPS):
            do(queue)
            rounds.append(queue.statistics().rounds)
        assert rounds[-1] == rounds[-2]
        queue.close()

    run_job(configured(daemon.addresses), RANKS, run)


def test_arrays_of_a_group_are_done_together(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        arrays = [array_of(queue.rank, dtype=name) for name in ("float32", "float64", "int32")]
        result = queue.grouped_allreduce_async(arrays, name="g", op="max").wait(60)
        expected = [np.max(everyone(dtype=name), axis=0) for name in ("float32", "float64", "int32")]
        assert all((a == b).all() for a, b in zip(result, expected, strict=True))

    in_steps(daemon, do)


def test_a_mean_of_floats_beside_integers_does_not_overflow(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        floats, integers = np.full(3, 40_000, np.float16), np.array([1 + queue.rank])
        queue.grouped_allreduce_async([integers, floats], name="g", op="mean").wait(60)
        assert floats.tolist() == [40_000] * 3
        assert integers.tolist() == [1]

    in_steps(daemon, do)


@pytest.mark.parametrize(("dtype", "ranks"), [("int8", 128), ("int8", 200), ("uint8", 256), ("uint64", 300)])
def test_a_mean_of_short_integers_over_many_ranks(dtype: str, ranks: int) -> None:
    ends = np.array([np.iinfo(dtype).min, 0, np.iinfo(dtype).max], dtype)
    result = Reduction("w", [ends], [ends.copy()], "mean", 1, 1).take([ends], ranks)
    assert result.tolist() == [int(end) // ranks if end >= 0 else -(-int(end) // ranks) for end in ends]


def test_a_mean_of_integers_is_rounded_towards_zero_after_it_is_scaled(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        x = np.array([3 + queue.rank, -3 - queue.rank])
        assert queue.allreduce_async(x.copy(), name="v", op="mean").wait(60).tolist() == [3, -3]
        assert queue.allreduce_async(x, name="w", op="mean", postscale=2).wait(60).tolist() == [7, -7]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32])
def test_products_are_rounded_and_not_factors(daemon: Daemon, dtype: type) -> None:
    """By themselves, with others, and where the result goes elsewhere."""

    def do(queue: Queue) -> None:
        x, scale = np.array([118.5, -118.5]).astype(dtype), 0.19151945
        product = (x.astype(np.float32) * np.float32(scale)).astype(dtype)
        scales = {"prescale": scale, "postscale": 2.0}
        alone = queue.allreduce_async(x.copy(), name="alone", **scales)
        group = queue.grouped_allreduce_async([x.copy(), x.copy()], name="group", **scales)
        beside = queue.allreduce_async(x, name="beside", out=np.empty_like(x), postscale=scale / 2)
        assert all((each == 4 * product).all() for each in (alone.wait(60), *group.wait(60)))
        assert (beside.wait(60) == product).all()

    in_steps(daemon, do)

    in_steps(daemon, do)


@pytest.mark.parametrize("elements", [20, 300_000])
def test_sums_are_scaled(daemon: Daemon, elements: int) -> None:
    def do(queue: Queue) -> None:
        x, out = array_of(queue.rank, shape=(elements,)), np.empty(elements, np.float32)
        result = queue.allreduce_async(x, name="w", out=out, prescale=0.5, postscale=4).wait(60)
        assert result is out
        assert (result == 2 * np.sum(everyone(shape=(elements,)), axis=0)).all()
        assert (x == array_of(queue.rank, shape=(elements,))).all()

    in_steps(daemon, do)


@pytest.mark.parametrize("elements", [20, 300_000])
def test_means_of_integers_are_rounded_towards_zero(daemon: Daemon, elements: int) -> None:
    def do(queue: Queue) -> None:
        x = array_of(queue.rank, shape=(elements,), dtype="int64") - 3
        queue.allreduce_async(x, name="w", op="mean").wait(60)
        total = np.sum(everyone(shape=(elements,), dtype="int64"), axis=0) - 3 * RANKS
        assert (total < 0).any()
        assert (x == np.trunc(total / RANKS)).all()

    in_steps(daemon, do)


def test_rows_are_added_by_number(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        rank = queue.rank
        tasks = [
            queue.allreduce_rows_async(np.array([rank, 5 + i]), np.ones((2, 3), np.float32), 9, name=f"t{i}")
            for i in range(3)
        ]
        for i, task in enumerate(tasks):
            numbers, sums = task.wait(60)
            assert numbers.tolist() == [0, 1, 5 + i]
            assert sums[:, 0].tolist() == [1, 1, 2]

    in_steps(daemon, do)


def test_arrays_of_other_lengths_are_gathered(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        mine = array_of(queue.rank)[: 2 + queue.rank]
        result = queue.allgather_async(mine, name="g").wait(60)
        assert (result == np.concatenate([each[: 2 + rank] for rank, each in enumerate(everyone())])).all()

    in_steps(daemon, do)


def test_the_root_gives_all(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        assert (queue.broadcast_async(array_of(queue.rank), 1, name="b").wait(60) == array_of(1)).all()

    in_steps(daemon, do)


def test_parts_are_exchanged(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        rank = queue.rank
        rows, counts = queue.alltoall_async(array_of(rank), np.array([[1, 5], [4, 2]][rank]), name="x").wait(60)
        assert counts.tolist() == [[1, 4], [5, 2]][rank]
        sent = [array_of(0)[:1], array_of(1)[:4]] if rank == 0 else [array_of(0)[1:], array_of(1)[4:]]
        assert (rows == np.concatenate(sent)).all()
        rows, counts = queue.alltoall_async(array_of(rank), name="even").wait(60)
        assert (rows == np.concatenate([each[3 * rank :][:3] for each in everyone()])).all()

    in_steps(daemon, do)


def test_sums_are_scattered(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        result = queue.reducescatter_async(array_of(queue.rank, shape=(5, 2)), name="r", op="sum").wait(60)
        assert (result == np.array_split(np.sum(everyone(shape=(5, 2)), axis=0), RANKS)[queue.rank]).all()

    in_steps(daemon, do)


def test_adasum_keeps_one_of_two_that_are_alike(daemon: Daemon) -> None:
    def do(queue: Queue) -> None:
        same, apart = np.ones(4, np.float32), np.zeros(4, np.float32)
        apart[queue.rank] = 3
        queue.grouped_allreduce_async([same, apart], name="a", op="adasum").wait(60)
        assert same.tolist() == [1, 1, 1, 1]
        assert apart.tolist() == [3, 3, 0, 0]

    in_steps(daemon, do)


def test_adasum_of_four_combines_pairs_first() -> None:
    a, b = np.array([1.0, 0]), np.array([0, 2.0])
    assert adasum([a, a, b, b]).tolist() == [1, 2]
    assert adasum([a, b, a, b]).tolist() == [1, 2]
    assert adasum([a, 0 * a]).tolist() == [1, 0]
    assert adasum([a, -a]).tolist() == [0, 0]


def test_all_meet_at_a_barrier(daemon: Daemon) -> None:
    in_steps(daemon, lambda queue: queue.barrier())


def test_ranks_with_less_data_join(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        for epoch in range(3):
            for step in range(4 + 3 * comm.rank):
                x = np.ones(9, np.float32)
                queue.allreduce_async(x, name="w").wait(60)
                rows = queue.allreduce_rows_async(np.array([comm.rank]), np.ones((1, 2), np.float32), 4, name="e")
                assert (x == (comm.size if step < 4 else 1)).all(), (epoch, step)
                assert rows.wait(60)[0].tolist() == ([0, 1] if step < 4 else [1])
            assert queue.join() == 1
        queue.close()

    run_job(configured(daemon.addresses), RANKS, run)


def test_what_cannot_be_is_refused(daemon: Daemon) -> None:
    x = np.ones((4, 2), np.float32)

    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        for wrong, message in [
            (
                lambda: queue.allreduce_async(x, name="w", op="median"),
                "op 'median' of 'w', which is float32: expected one of",
            ),  # type: ignore[arg-type]
            (lambda: queue.allreduce_async(x[:, 0], name="w"), "'w' is not C-contiguous"),
            (lambda: queue.allreduce_async(x, name="w", out=x[:2]), r"out of 'w' is float32\[2, 2\]"),
            (lambda: queue.grouped_allreduce_async([], name="w"), "0 arrays"),
            (lambda: queue.grouped_allreduce_async([x, x], name="w"), "arrays of 'w' share memory"),
            (lambda: queue.grouped_allreduce_async([x[1:], x[:3]], name="w"), "arrays of 'w' share memory"),
            (lambda: queue.grouped_allreduce_async([x, x[0, 0]], name="w"), "array 1 of 'w' is a float32"),
            (lambda: queue.allreduce_async(x, name="w", op="adasum", prescale=2), "is not scaled"),
            (lambda: queue.allreduce_async(x.astype(int), name="w", op="adasum"), "adasum of 'w': expected float16"),
            (lambda: queue.allgather_async(np.float32(1) + np.zeros(()), name="w"), "'w' is a float64"),
            (lambda: queue.broadcast_async(x, 2, name="w"), "root 2: expected 0 to 1"),
            (lambda: queue.alltoall_async(x[:3], name="w"), "expected a multiple of 2 rows, or splits"),
            (lambda: queue.alltoall_async(x, np.array([1, 2]), name="w"), "expected 2 numbers that add up to 4"),
            (lambda: queue.allreduce_rows_async(np.array([4]), x[:1], 4, name="w"), "indices from 4 to 4"),
        ]:
            with pytest.raises(UsageError, match=message):
                wrong()
        comm.barrier(name="end")
        queue.close()

    run_job(configured(daemon.addresses), RANKS, run)


@pytest.mark.parametrize("elements", [20, 300_000])
def test_means_of_floats_in_a_group_with_integers_are_not_rounded(daemon: Daemon, elements: int) -> None:
    def do(queue: Queue) -> None:
        floats, ints = np.full(elements, 1.25, np.float32), np.full(elements, queue.rank)
        queue.grouped_allreduce_async([floats, ints], name="g", op="mean").wait(60)
        assert (floats == 1.25).all()
        assert (ints == 0).all()

    in_steps(daemon, do)


@pytest.mark.parametrize("elements", [20, 300_000])
@pytest.mark.parametrize("op", ["min", "max", "prod"])
def test_one_that_has_joined_changes_nothing(daemon: Daemon, op: Op, elements: int) -> None:
    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        for _ in range(4 * comm.rank):
            x = np.full(elements, -5.0, np.float32)
            queue.allreduce_async(x, name="w", op=op).wait(60)
            assert (x == -5).all()
        assert queue.join() == 1
        queue.close()

    run_job(configured(daemon.addresses), RANKS, run)


def test_a_name_is_under_way_until_its_result_is_there(daemon: Daemon) -> None:
    """A second one may not take the place of the first while that is exchanged. When it is done it may."""

    def run(comm: Communicator) -> None:
        queue = Queue(comm)
        for step in range(50):
            task = queue.allreduce_async(np.ones(9, np.float32), name="w")
            while not task.done():
                with contextlib.suppress(UsageError):
                    other = queue.allreduce_async(np.full(9, 100, np.float32), name="w")
                    assert task.done(), step
                    assert (other.wait(60) == 200).all()
                    break
            else:
                assert (queue.allreduce_async(np.full(9, 100, np.float32), name="w").wait(60) == 200).all()
            assert (task.wait(60) == 2).all()
        queue.close()

    run_job(configured(daemon.addresses), RANKS, run)


def test_marks_of_many_ranks_do_not_add_up_to_nothing() -> None:
    brought = []
    for rank in range(512):
        buffer = Buffer(np.empty(64, np.int8), [[3]], "sum", 32)
        buffer.spoil(rank)
        brought.append(buffer.whole.copy())
    buffer.whole[:] = np.sum(brought, axis=0, dtype=np.int8)
    assert buffer.is_spoiled
