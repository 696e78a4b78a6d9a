"""Refused calls: their errors; and the job and the arrays stay as they were."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from local_cluster import configured, run_job, start_job, unique_job

from omnireduce import Communicator, Config, ConfigError, UsageError

X = np.ones(64, np.float32)
READ_ONLY = np.ones(64, np.float32)
READ_ONLY.flags.writeable = False
SQUARE = np.ones((64, 64), np.float32)
ROWS = np.ones((2, 8), np.float32)
INDICES = np.array([1, 3])

REFUSED: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "a list": (lambda c: c.allreduce([1.0, 2.0]), "x[0] is a float; expected a numpy.ndarray"),
    "a scalar": (
        lambda c: c.allreduce(np.float32(1)),
        "x is a float32; expected a numpy.ndarray: make one of it first, x = numpy.array([x])",
    ),
    "a number": (
        lambda c: c.allreduce(1.0),
        "x is a float; expected a numpy.ndarray: make one of it first, x = numpy.array([x])",
    ),
    "a masked array": (lambda c: c.allreduce(np.ma.masked_less(X, 1)), "x is a masked array, and masks are not sent"),
    "Fortran order": (lambda c: c.allreduce(np.asfortranarray(SQUARE)), "ascontiguousarray"),
    "a strided view": (lambda c: c.allreduce(np.ones(64, np.float32)[::2]), "not C-contiguous"),
    "a column": (lambda c: c.allreduce(SQUARE[:, :32]), "not C-contiguous"),
    "a broadcast view": (lambda c: c.allreduce(np.broadcast_to(np.float32(1), 64)), "not C-contiguous"),
    "read-only": (lambda c: c.allreduce(READ_ONLY), "x is read-only and cannot take the result; pass out="),
    "complex": (lambda c: c.allreduce(np.ones(9, np.complex64)), "cannot reduce arrays of complex64; supported are"),
    "bool": (lambda c: c.allreduce(np.ones(9, bool)), "allreduce of bool has no op sum; expected any or all"),
    "complex64": (lambda c: c.allreduce(np.ones(9, np.complex64)), "cannot reduce arrays of complex64"),
    "other byte order": (lambda c: c.allreduce(np.ones(9, np.dtype(">f4"))), "cannot reduce arrays of >f4"),
    "objects": (lambda c: c.broadcast(np.array([None])), "Python objects"),
    "an unknown op": (lambda c: c.allreduce(X, op="avg"), "op 'avg': expected one of sum, mean, min, max, prod"),
    "the mean of integers": (lambda c: c.allreduce(np.ones(9, int), op="mean"), "convert to a float type first"),
    "block size 0": (lambda c: c.allreduce(X, block_size=0), "block_size 0: expected a multiple of 8"),
    "block size -8": (lambda c: c.allreduce(X, block_size=-8), "block_size -8: expected a multiple of 8"),
    "block size 12": (lambda c: c.allreduce(X, block_size=12), "block_size 12: expected a multiple of 8"),
    "block size 2**31": (
        lambda c: c.allreduce(X, block_size=2**31),
        "block_size 2147483648: expected a multiple of 8 from 8 to 2147483640",
    ),
    "block size 2**63": (
        lambda c: c.allreduce(X, block_size=2**63),
        f"block_size {2**63}: expected a multiple of 8 from 8 to 2147483640",
    ),
    "a block size of thousands of digits": (
        lambda c: c.allreduce(X, block_size=1 << 20_000),
        "block_size is an integer of 20001 bits, which is out of any range",
    ),
    "block size of float": (lambda c: c.allreduce(X, block_size=8.0), "block_size is 8.0, a float; expected an int"),
    "a block that fits no slot": (
        lambda c: c.allreduce(X, block_size=1 << 20),
        "a block of 4194304 bytes does not fit a slot, which holds blocks of up to 1571760 bytes; choose a smaller "
        "block_size (or shorter rows), or raise protocol.slot_bytes",
    ),
    "a long name": (lambda c: c.allreduce(X, name="n" * 201), "a name of 201 characters; expected at most 200"),
    "no name": (lambda c: c.allreduce(X, name=None), "name is None; leave it out"),
    "a name that is no text": (lambda c: c.barrier(name=[1]), "name is a list; expected a str"),
    "a name that spoils a log": (lambda c: c.allreduce(X, name="a\nb"), "a name with characters that cannot be shown"),
    "an op that is no text": (lambda c: c.allreduce(X, op=["sum"]), "op ['sum']: expected one of sum"),
    "elements of no bytes": (lambda c: c.allgather(np.zeros(3, [])), "elements of 0 bytes"),
    "a result of 65 dimensions": (
        lambda c: c.allgather(np.zeros((1,) * 64)),
        "the result of an allgather of (1, 1, 1,",
    ),
    "out is x": (lambda c: c.allreduce(X, out=X), "out overlaps x"),
    "out overlaps": (
        lambda c: c.allreduce(X[:32], out=X[31:63]),
        "overlaps x; to work in place, call without out=",
    ),
    "out is a list": (lambda c: c.allreduce(X, out=[0.0] * 64), "out is a list; expected a numpy.ndarray"),
    "out of another dtype": (lambda c: c.allreduce(X, out=np.ones(64)), "out is float64[64], x is float32[64]"),
    "out of another shape": (
        lambda c: c.allreduce(X, out=np.ones((8, 8), np.float32)),
        "out is float32[8, 8], x is float32[64]: expected the same",
    ),
    "read-only out": (lambda c: c.allreduce(X, out=READ_ONLY), "out is read-only"),
    "strided out": (lambda c: c.allreduce(X, out=np.ones(128, np.float32)[::2]), "out is not C-contiguous"),
    "async": (lambda c: c.allreduce_async(READ_ONLY), "read-only"),
    "root -1": (lambda c: c.broadcast(X, root=-1), "root -1: expected 0 to 1"),
    "root 2**64": (lambda c: c.broadcast(X, root=2**64), f"root {2**64}: expected 0 to 1"),
    "root 2": (lambda c: c.broadcast(X, root=2), "root 2: expected 0 to 1"),
    "root of float": (lambda c: c.broadcast(X, root=0.5), "root is 0.5, a float; expected an int"),
    "root of bool": (lambda c: c.broadcast(X, root=True), "root is True, a bool; expected an int"),
    "broadcast of a list": (lambda c: c.broadcast([1]), "x is a list"),
    "broadcast into read-only": (
        lambda c: c.broadcast(READ_ONLY),
        "x is read-only and cannot take the result; pass a copy",
    ),
    "allgather of a list": (lambda c: c.allgather([1]), "x is a list"),
    "allgather of a strided view": (lambda c: c.allgather(X[::2]), "not C-contiguous"),
    "reduce_scatter of a list": (lambda c: c.reduce_scatter([1]), "x is a list"),
    "reduce_scatter of 0-d": (lambda c: c.reduce_scatter(np.array(1.0)), "at least one dimension"),
    "rows as a list": (lambda c: c.allreduce_rows(INDICES, [[1.0]], 9), "values is a list"),
    "indices as a list": (lambda c: c.allreduce_rows([1, 3], ROWS, 9), "indices is a list"),
    "indices of float": (lambda c: c.allreduce_rows(INDICES * 1.0, ROWS, 9), "expected integer indices, got float64"),
    "an index too high": (lambda c: c.allreduce_rows(INDICES, ROWS, 3), "indices from 1 to 3: expected 0 to 2"),
    "a negative index": (lambda c: c.allreduce_rows(-INDICES, ROWS, 9), "indices from -3 to -1: expected 0 to 8"),
    "an index where there are no rows": (
        lambda c: c.allreduce_rows(INDICES, ROWS, 0),
        "2 indices, but n_rows is 0; expected none",
    ),
    "rows of no elements": (
        lambda c: c.allreduce_rows(INDICES, ROWS[:, :0], 9),
        "values (n, row length) with a row length of at least 1, got (2,) and (2, 0)",
    ),
    "a negative n_rows": (lambda c: c.allreduce_rows(INDICES[:0], ROWS[:0], -1), "n_rows -1: expected 0 to "),
    "more rows than there are block numbers": (
        lambda c: c.allreduce_rows(INDICES, ROWS[:, :1].copy(), 1 << 48),
        f"n_rows {1 << 48}: expected 0 to {(1 << 48) - 1} for rows of 1 elements",
    ),
    "more elements than a tensor may have": (
        lambda c: c.allreduce_rows(INDICES, np.ones((2, 1 << 16), np.int8), 1 << 46),
        f"n_rows {1 << 46}: expected 0 to {(1 << 46) - 1} for rows of 65536 elements",
    ),
    "n_rows 2**64": (lambda c: c.allreduce_rows(INDICES, ROWS, 1 << 64), f"n_rows {1 << 64}: expected 0 to "),
    "a huge n_rows": (lambda c: c.allreduce_rows(INDICES, ROWS, 1 << 99_999), "n_rows is an integer of 100000 bits"),
    "n_rows of float": (lambda c: c.allreduce_rows(INDICES, ROWS, 9.0), "n_rows is 9.0, a float; expected an int"),
    "more indices than rows": (lambda c: c.allreduce_rows(np.arange(3), ROWS, 9), "expected indices (n,) and values"),
    "flat values": (lambda c: c.allreduce_rows(INDICES, ROWS[0], 9), "expected indices (n,) and values"),
    "rows of length 0": (lambda c: c.allreduce_rows(INDICES, ROWS[:, :0], 9), "expected indices (n,) and values"),
    "complex rows": (lambda c: c.allreduce_rows(INDICES, ROWS * 1j, 9), "cannot reduce arrays of complex64"),
    "a row that fits no slot": (
        lambda c: c.allreduce_rows(INDICES[:1], np.ones((1, 1 << 19), np.float32), 9),
        "raise protocol.slot_bytes",
    ),
}


def test_unsuitable_arguments_are_refused_with_the_reason(local: Config) -> None:
    """Two ranks make every mistake; then the job still works."""

    def run(comm: Communicator) -> tuple[dict[str, str], Any]:
        results = {}
        for what, (call, _) in REFUSED.items():
            with pytest.raises(UsageError) as caught:
                call(comm)
            results[what] = str(caught.value)
        return results, comm.allreduce(np.full(5, comm.rank + 1)).tolist()

    for result, after in run_job(local, 2, run):
        wrong = {what: text for what, text in result.items() if REFUSED[what][1] not in text}
        assert not wrong
        assert after == [3] * 5
    assert X.tolist() == [1] * 64
    assert READ_ONLY.tolist() == [1] * 64


@pytest.mark.parametrize(("min_ranks", "max_ranks"), [(0, 1), (2, 1), (1, 2**32), (2**70, 2**71)])
def test_sizes_of_a_job_that_is_formed_anew(local: Config, min_ranks: int, max_ranks: int) -> None:
    with (
        Communicator(local, rank=0, size=1, job=unique_job()) as comm,
        pytest.raises(UsageError, match=f"from {min_ranks} to {max_ranks} workers: expected 1 <= min_ranks <= "),
    ):
        comm.reform(min_ranks=min_ranks, max_ranks=max_ranks)


def test_every_refusal_is_a_value_error(local: Config) -> None:
    def run(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="expected one of sum"):
            comm.allreduce(X, op="median")

    run_job(local, 1, run)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1), (0, 2**32), (2**64, 2**65)])
def test_rank_and_size(local: Config, rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=re.escape(f"rank {rank} of {size}: expected 0 <= rank < size")):
        Communicator(local, rank=rank, size=size)


@pytest.mark.parametrize(("rank", "size"), [(0.0, 1), (False, 1), (0, True), (0, "1"), (None, 1)])
def test_rank_and_size_are_integers(local: Config, rank: Any, size: Any) -> None:
    with pytest.raises(UsageError, match=r"(rank|size|local_rank) is .*; expected an int"):
        Communicator(local, rank=rank, size=size)


def test_integers_of_numpy_are_integers(local: Config) -> None:
    one = np.int64(1)
    with Communicator(local, rank=one - 1, size=one, job=unique_job()) as comm:  # type: ignore[arg-type]
        assert comm.broadcast(np.ones(3), root=np.uint8(0)).tolist() == [1.0] * 3
        assert comm.allreduce(np.ones(8), block_size=np.int32(8)).tolist() == [1.0] * 8
        assert comm.allreduce_rows(INDICES, ROWS, np.int16(9))[0].tolist() == [1, 3]


@pytest.mark.parametrize("job", ["two words", "line\n", "j" * 129])
def test_job_names(local: Config, job: str) -> None:
    with pytest.raises(UsageError, match=r"expected a string of 1 to 128 characters out of A-Z"):
        Communicator(local, rank=0, size=1, job=job)


def test_a_configuration_made_in_python_is_checked() -> None:
    config = configured(["127.0.0.1:1"])
    wrong = msgspec.structs.replace(config, protocol=msgspec.structs.replace(config.protocol, slots=1))
    with pytest.raises(ConfigError, match=r"protocol\.slots: got 1"):
        Communicator(wrong, rank=0, size=1)


def test_an_array_in_flight_cannot_be_used_again(local: Config) -> None:
    """Neither read nor written, whole or in part, until its handle was waited for. Reading it twice is fine."""
    calls: list[Callable[[Communicator, Any, Any], object]] = [
        lambda comm, x, out: comm.allreduce(x),
        lambda comm, x, out: comm.allreduce_async(x[10:20]),
        lambda comm, x, out: comm.allreduce(out),
        lambda comm, x, out: comm.allreduce(out[:10], out=np.zeros(10, np.float32)),
        lambda comm, x, out: comm.allreduce(np.ones(1000, np.float32), out=out),
        lambda comm, x, out: comm.allgather(out),
        lambda comm, x, out: comm.allreduce_rows(np.array([1]), out[:8].reshape(1, 8), 4),
        lambda comm, x, out: comm.broadcast(x, root=1),
        lambda comm, x, out: comm.broadcast(out, root=1),
    ]

    def run(comm: Communicator) -> tuple[int, list[float], list[float]]:
        x, out, total, refused = np.ones(1000, np.float32), np.zeros(1000, np.float32), np.zeros(1000, np.float32), 0
        last = comm.size - 1  # the last rank comes late
        if comm.rank == last:
            assert go_on.wait(30)
        handles = [comm.allreduce_async(x, out=out), comm.allreduce_async(x, out=total)]
        for call in calls if comm.rank == 0 else ():
            with pytest.raises(UsageError, match="in use by a collective that is under way; wait for its handle"):
                call(comm, x, out)
            refused += 1
        go_on.set()
        for handle in handles:
            handle.wait()
        return refused, out.tolist() + total.tolist(), x.tolist()

    go_on = threading.Event()
    [(refused, sums, after), _] = start_job(local, 2, run).results()
    assert (refused, sums, after) == (len(calls), [2.0] * 2000, [1.0] * 1000)
