"""Many arrays, or tables, in one call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, run_job, start_job
from oracle import assert_results, bits, reduce_in_rank_order
from tensors import Array, sparse
from test_rows import expected_rows, some_rows

from omnireduce import AbortedError, Communicator, Config, Op, UsageError
from omnireduce.runtime.rank.calls.batched import FUSED_BYTES, _leaves

LARGE = FUSED_BYTES // 4 + 1  # elements of float32
SHAPES = [(3, 5), (), (0,), (LARGE,), (257,), (2, LARGE)]


def model(rank: int) -> dict[str, Any]:
    """Parameters as a model has them: nested, of several types, small and large."""
    floats = [sparse(rank, "float32", shape, seed=at) for at, shape in enumerate(SHAPES)]
    return {
        "layers": [{"weight": each, "bias": sparse(rank, "float64", (7,))} for each in floats],
        "steps": (sparse(rank, "int64", (3,)), sparse(rank, "bfloat16", (300,))),
        3: sparse(rank, "float32", (9,), seed=99),
    }  # fmt: skip


class Alike:
    def __repr__(self) -> str:
        return "alike"


def leaves(x: Any) -> list[Array]:
    return [leaf.array for leaf in _leaves(x, "")]


@pytest.mark.parametrize("op", ["sum", "max"])
def test_every_array_of_a_group_is_combined_in_place(config: Config, op: Op) -> None:
    def run(comm: Communicator) -> list[Array]:
        for start in (comm.allreduce, lambda x, op: comm.allreduce_async(x, op=op).wait(30)):
            x = model(comm.rank)
            before = leaves(x)
            assert start(x, op=op) is x  # type: ignore[operator]
            assert all(one is other for one, other in zip(before, leaves(x), strict=True))
        return before

    results = run_job(config, 3, run)
    for at, tensors in enumerate(zip(*(leaves(model(rank)) for rank in range(3)), strict=True)):
        assert_results([result[at] for result in results], reduce_in_rank_order(tensors, op))


def test_small_arrays_of_a_dtype_take_one_exchange(daemon: Daemon) -> None:
    def run(comm: Communicator) -> list[int]:
        taken = []
        for x in (
            [np.ones(100, np.float32) for _ in range(200)],
            [np.ones(100, dtype) for dtype in (np.float32, np.int8, np.float32, np.int8)],
            [np.ones(LARGE, np.float32), np.ones(3, np.float32), np.ones(LARGE, np.float32)],
            {"one": np.ones(3)},
            [],
        ):
            before = comm.statistics().collectives
            comm.allreduce(x)
            taken.append(comm.statistics().collectives - before)
        return taken

    assert run_job(configured(daemon.addresses), 2, run) == [[1, 2, 3, 1, 1]] * 2


def test_dicts_may_have_been_filled_in_another_order(daemon: Daemon) -> None:
    def run(comm: Communicator) -> dict[str, Array]:
        items = [("a", np.full(3, 1.0)), ("b", np.full(3, 10.0))]
        return comm.allreduce(OrderedDict(items if comm.rank else items[::-1]))

    for result in run_job(configured(daemon.addresses), 2, run):
        assert (result["a"].tolist(), result["b"].tolist()) == ([2.0] * 3, [20.0] * 3)


@pytest.mark.parametrize(
    "pair",
    [
        ([np.ones(2), np.ones(3)], [np.ones(3), np.ones(2)]),
        ([np.ones((2, 3)), np.ones(1)], [np.ones((3, 2)), np.ones(1)]),
        ({"a": np.ones(3), "b": np.ones(3)}, {"a": np.ones(3), "c": np.ones(3)}),
        ([np.ones(3), np.ones(3)], [np.ones(6)]),
        ({"a": np.ones(3)}, {"b": np.ones(3)}),
        ([np.ones(3)], np.ones(3)),
        ([np.ones(3)], []),
        ([np.ones(3), np.ones(LARGE)], [np.ones(3)]),
        ([np.ones(3), np.ones(3, np.int8)], [np.ones(3)]),
    ],
)
def test_ranks_whose_groups_differ_are_told(daemon: Daemon, pair: tuple[Any, Any]) -> None:
    for outcome in start_job(configured(daemon.addresses), 2, lambda comm: comm.allreduce(pair[comm.rank])).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "submitted different collectives" in outcome.reason
        assert "of a group, " in outcome.reason


def test_what_cannot_be_in_a_group(daemon: Daemon) -> None:
    def run(comm: Communicator) -> None:
        x = np.ones(10)
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        for wrong, message in (
            ([x, x], r"x\[0\] and x\[1\] share memory; expected each array once"),
            ({"a": x[:6], "b": [x[5:]]}, r"x\['a'\] and x\['b'\]\[0\] share memory"),
            ({"lr": 0.1}, r"x\['lr'\] is a float: make one of it first|x\['lr'\] is a float; expected a numpy.ndarray"),
            ([x[::2]], r"x\[0\] is not C-contiguous"),
            ([np.ones(3, "c8"), np.ones(3, "c8")], "cannot reduce arrays of complex64"),
            ({Alike(): x, Alike(): np.ones(3)}, "x has two keys alike: the ranks could not tell which is which"),
            (cyclic, "x is nested more than 50 deep"),
        ):
            with pytest.raises(UsageError, match=message):
                comm.allreduce(wrong)
        for more in ({"out": [x]}, {"block_size": 8}):
            with pytest.raises(UsageError, match="out and block_size go with a single array"):
                comm.allreduce([x], **more)  # type: ignore[call-overload]
        assert comm.statistics().collectives == 0
        assert comm.allreduce([x, np.ones(3)])[0] is x

    run_job(configured(daemon.addresses), 1, run)


def test_a_handle_of_a_group_is_done_when_all_is(daemon: Daemon) -> None:
    go = threading.Event()

    def run(comm: Communicator) -> None:
        x = [np.ones(LARGE), np.ones(3), np.ones(3, np.int8)]
        if comm.rank == 1:
            assert go.wait(WAIT_S)
            comm.allreduce(x)
            return
        handle = comm.allreduce_async(x)
        with pytest.raises(TimeoutError):
            handle.wait(0.01)
        assert not handle.done()
        go.set()
        assert handle.wait(WAIT_S) is handle.wait() is x
        assert handle.done()
        assert x[1].tolist() == [2.0] * 3

    run_job(configured(daemon.addresses), 2, run)


def test_the_result_is_put_back_once(daemon: Daemon) -> None:
    """A second wait does not overwrite changes since the first."""

    def run(comm: Communicator) -> None:
        x = [np.ones(3), np.ones(4)]
        handle = comm.allreduce_async(x)
        comm.barrier()
        assert handle.done()
        assert x[0].tolist() == [2.0] * 3  # nobody has waited: once it is done the arrays are the caller's again
        x[0][:] = 7
        handle.wait()
        assert x[0].tolist() == [7.0] * 3

    run_job(configured(daemon.addresses), 2, run)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_tables(config: Config, op: Op) -> None:
    def some(rank: int) -> list[tuple[Array, Array, int]]:
        kinds = [("float32", 30, 4, 100), ("float32", 0, 4, 50), ("float64", 5, 4, 9), ("float32", 8, 3, 40),
                 ("float32", 40_000, 4, 90_000), ("float32", 60, 4, 70)]  # fmt: skip
        return [
            (*some_rows(rank, dtype, 0 if n == 40_000 and rank == 1 else n, length, n_rows), n_rows)
            for dtype, n, length, n_rows in kinds
        ]

    def run(comm: Communicator) -> tuple[int, list[tuple[Array, Array]]]:
        result = comm.allreduce_tables(some(comm.rank), op=op)
        return comm.statistics().collectives, result

    results = run_job(config, 3, run)
    assert {collectives for collectives, _ in results} == {3}
    for at in range(6):
        tables = [some(rank)[at] for rank in range(3)]
        union, sums = expected_rows([table[:2] for table in tables], tables[0][2], op)
        for _, found in results:
            assert found[at][0].tolist() == union.tolist()
        assert_results([found[at][1] for _, found in results], sums)


def test_no_tables_and_tables_that_differ(daemon: Daemon) -> None:
    config = configured(daemon.addresses)
    assert run_job(config, 2, lambda comm: comm.allreduce_tables([])) == [[], []]

    def run(comm: Communicator) -> None:
        sizes = (10, 20) if comm.rank else (20, 10)
        comm.allreduce_tables([(np.arange(2), np.ones((2, 3)), n_rows) for n_rows in sizes])

    for outcome in start_job(config, 2, run).outcomes():
        assert isinstance(outcome, AbortedError)
        assert "of a group, 2 tables " in outcome.reason


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((table for table in ()), "tables is a generator; expected a list of"),
        (
            [(np.arange(2), np.ones((2, 3)), 4), (np.arange(2), np.ones((2, 3)))],
            r"tables\[1\] is a tuple; expected \(ind",
        ),
        ([np.ones((2, 3))], r"tables\[0\] is an ndarray; expected \(indices, values, n_rows\)"),
        ([(np.arange(2), np.ones((2, 3)), 4), (np.arange(2), np.ones((2, 3)), 1)], r"tables\[1\]: indices from 0 to 1"),
        ([(np.arange(2), [1.0, 2.0], 4)], r"tables\[0\]: values is a list"),
    ],
)
def test_what_is_no_list_of_tables(daemon: Daemon, tables: Any, message: str) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(UsageError, match=message):
            comm.allreduce_tables(tables)

    run_job(configured(daemon.addresses), 1, run)


def test_bits_of_a_group_are_those_of_its_arrays_alone(config: Config) -> None:
    def run(comm: Communicator) -> bool:
        together, alone = model(comm.rank), leaves(model(comm.rank))
        comm.allreduce(together)
        return [bits(leaf) for leaf in leaves(together)] == [bits(comm.allreduce(each)) for each in alone]

    assert all(run_job(config, 3, run))
