"""broadcast, allgather, reduce_scatter and barrier: data arrives bit by bit."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, run_job, start_job
from oracle import assert_results, bits, reduce_in_rank_order
from tensors import Array, sparse
from transports import by_transports

from omnireduce import AbortedError, Communicator, Config

MANY_FIELDS = np.dtype([(f"field_with_a_long_name_{i}", "f4") for i in range(100)])
DTYPES: list[Any] = [
    "float32", "float16", ml_dtypes.bfloat16, "complex128", "bool", "uint32", ">f8", "M8[ns]", "S5", "U3",
    [("id", "u1"), ("value", "f8")], MANY_FIELDS,
]  # fmt: skip
SHAPES = [(), (0,), (1,), (5, 7), (3000,)]


def raw(rank: int, dtype: Any, shape: tuple[int, ...]) -> Array:
    """An array whose bytes are random, and so NaNs, -0.0 and the like; bool has only its two."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng((rank, kind.itemsize, len(shape)))
    if kind == np.dtype(bool):
        return rng.integers(0, 2, shape).astype(bool)
    elements = int(np.prod(shape, dtype=np.int64))
    return rng.integers(0, 256, elements * kind.itemsize, np.uint8).view(kind).reshape(shape)


@pytest.mark.parametrize(("dtype", "config"), by_transports(DTYPES), indirect=["config"], ids=str)
def test_broadcast_from_any_root_of_any_dtype(config: Config, dtype: Any) -> None:
    def run(comm: Communicator) -> list[bytes]:
        results = []
        for shape in SHAPES:
            for root in range(3):
                x = raw(comm.rank, dtype, shape)
                assert comm.broadcast(x, root) is x
                results.append(bits(x))
        return results

    expected = [bits(raw(root, dtype, shape)) for shape in SHAPES for root in range(3)]
    assert run_job(config, 3, run) == [expected] * 3


def test_broadcast_keeps_minus_zero_and_the_payload_of_a_nan(config: Config) -> None:
    source = np.zeros(1000, np.uint32)
    source[[0, 300, 999]] = 0x8000_0000, 0x7FC0_1234, 0x7FA0_0001  # -0.0, a quiet and a signalling NaN

    def run(comm: Communicator) -> list[int]:
        x = source.copy().view(np.float32) if comm.rank == 1 else np.ones(1000, np.float32)
        return comm.broadcast(x, root=1).view(np.uint32).tolist()

    assert run_job(config, 3, run) == [source.tolist()] * 3


def test_broadcast_of_large_tensors(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "protocol.slot_bytes=65536", "protocol.slots=2")

    def run(comm: Communicator) -> bool:
        x = comm.broadcast(raw(comm.rank, "float64", (300_001,)), root=2)
        return bits(x) == bits(raw(2, "float64", (300_001,)))

    assert run_job(config, 3, run) == [True] * 3


@pytest.mark.parametrize(("dtype", "config"), by_transports(DTYPES), indirect=["config"], ids=str)
def test_allgather(config: Config, dtype: Any) -> None:
    def run(comm: Communicator) -> list[tuple[tuple[int, ...], bytes]]:
        results = []
        for shape in SHAPES:
            x = raw(comm.rank, dtype, shape)
            x.flags.writeable = False
            result = comm.allgather(x)
            assert result.dtype == np.dtype(dtype)
            results.append((result.shape, bits(result)))
        return results

    expected = [((3, *shape), b"".join(bits(raw(rank, dtype, shape)) for rank in range(3))) for shape in SHAPES]
    assert run_job(config, 3, run) == [expected] * 3


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("shape", [(12,), (10, 3), (2,), (0, 4), (1001,)])
def test_reduce_scatter(local: Config, op: str, shape: tuple[int, ...]) -> None:
    """Rows that do not divide, and fewer rows than ranks, are split as numpy.array_split does."""

    def run(comm: Communicator) -> Array:
        x = sparse(comm.rank, "float32", shape)
        part = comm.reduce_scatter(x, op=op)
        assert bits(x) == bits(sparse(comm.rank, "float32", shape))
        return part

    total = reduce_in_rank_order([sparse(rank, "float32", shape) for rank in range(3)], op)
    for result, expected in zip(run_job(local, 3, run), np.array_split(total, 3), strict=True):
        assert_results([result], expected)


def test_barrier_waits_for_all(config: Config) -> None:
    """Nobody comes through before the last rank has arrived."""
    arrived: list[int] = []
    through: list[int] = []

    def run(comm: Communicator) -> None:
        if comm.rank == 2:
            assert two_are_there.wait(WAIT_S)
            assert not through
        arrived.append(comm.rank)
        if len(arrived) == 2:
            two_are_there.set()
        comm.barrier()
        through.append(comm.rank)
        assert len(arrived) == 3

    two_are_there = threading.Event()
    run_job(config, 3, run)
    assert sorted(through) == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            lambda c: c.broadcast(np.zeros(4), root=0),
            lambda c: c.broadcast(np.zeros(4), root=1),
            ("broadcast of float64 (4,), root 0", "broadcast of float64 (4,), root 1"),
        ),
        (
            lambda c: c.broadcast(np.zeros(4, "i8")),
            lambda c: c.broadcast(np.zeros(4, "f8")),
            ("of int64 (4,), root 0", "of float64 (4,), root 0"),
        ),
        (
            lambda c: c.allgather(np.zeros(4, "f4")),
            lambda c: c.allgather(np.zeros(2, "f8")),
            ("allgather of float32 (4,)", "allgather of float64 (2,)"),
        ),
        (
            lambda c: c.barrier(),
            lambda c: c.allgather(np.zeros(0)),
            ("called barrier;", "allgather of float64 (0,)"),
        ),
        (
            lambda c: c.broadcast(np.zeros(4, MANY_FIELDS)),
            lambda c: c.broadcast(np.zeros(4, [(name + "2", kind) for name, kind in MANY_FIELDS.descr])),
            ("of a structure of 400 bytes", "of a structure of 400 bytes"),
        ),
    ],
    ids=["root", "dtype", "dtype of equal bytes", "kind", "names of many fields"],
)
def test_disagreement_is_seen(local: Config, first: Any, second: Any, expected: tuple[str, str]) -> None:
    outcomes = start_job(local, 2, lambda comm: (second if comm.rank else first)(comm)).outcomes()
    for error in outcomes:
        assert isinstance(error, AbortedError)
        assert error.culprit == "ranks 0 and 1"
        assert all(part in error.reason for part in expected)
