"""Cases run on a real aggregator, ranks as threads; the row is what was measured."""

from __future__ import annotations

import math

import pytest
from local_cluster import Daemon, configured, run_job, start_job
from transports import MEMORY, over

from omnireduce.console.bench.cases import Case, Row, SyntheticCase
from omnireduce.console.bench.run import run_case
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator


def make_case(elements: int = 100_003, dtype: str = "float32", op: str = "sum", density: float = 0.1) -> SyntheticCase:
    return SyntheticCase(elements, dtype, op, block_size=64, overlap="random", density=density, seed=3)


def run(daemon: Daemon, case: Case, size: int, *overrides: str, rounds: int = 3, warmup: int = 1) -> Row:
    def on_rank(comm: Communicator) -> Row:
        return run_case(comm, case, rounds, warmup)

    rows = run_job(configured(daemon.addresses, *overrides), size, on_rank)
    assert rows == [rows[0]] * size, "every rank has the same row"
    return rows[0]


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("size", [1, 3])
def test_row(daemon: Daemon, density: float, size: int) -> None:
    case = make_case(density=density)
    data = case.tensors(size)
    row = run(daemon, case, size, *over("shm"))
    assert row.wrong == 0
    assert (row.transport, row.world_size, row.shards) == ("shm", size, 3)
    assert (row.op, row.dtype, row.elements, row.bytes) == ("sum", "float32", 100_003, 400_012)
    assert (row.block_size, row.density, row.union_density) == (64, data.density, data.union_density)
    assert 0 < row.time_ms_min <= row.time_ms <= row.time_ms_p90
    assert math.isclose(row.algbw_gbps, 400_012 / row.time_ms / 1e6)
    assert (row.mpi_time_ms, row.speedup) == (None, None)
    blocks, block_bytes = Layout(100_003, 64).blocks, 64 * 4 + (0 if density == 1 else 8)  # a dense tensor lists runs
    framing = 3 * 2000
    for moved, expected in [(row.wire_up_bytes, data.density), (row.wire_down_bytes, data.union_density)]:
        assert 0 <= moved - round(expected * blocks) * block_bytes < framing


@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_row_of_ranks_that_share_memory(daemon: Daemon, density: float) -> None:
    """A rank writes its blocks of two thirds of the tensor and the sum of its own third; it takes two thirds."""
    case = make_case(99_840, density=density)  # the parts of three ranks are equal, but for one block in each chunk
    data = case.tensors(3)
    row = run(daemon, case, 3, *over(MEMORY))
    assert (row.wrong, row.transport) == (0, "memory" if density else "nothing")
    assert (row.density, row.union_density) == (data.density, data.union_density)
    assert 0 <= row.wire_down_bytes <= data.union_density * row.bytes
    assert 0 <= row.wire_up_bytes <= (data.density + data.union_density) * row.bytes
    assert (row.wire_up_bytes > row.bytes / 2) == (density == 1)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float16", "mean"),
        ("bfloat16", "prod"),
        ("float64", "min"),
        ("int8", "sum"),
        ("uint8", "max"),
        ("int64", "prod"),
    ],
)
def test_types_and_ops(daemon: Daemon, dtype: str, op: str) -> None:
    assert run(daemon, make_case(5003, dtype, op, 0.4), 3).wrong == 0


@pytest.mark.parametrize("elements", [0, 1, 17, 300])
def test_small_tensors(daemon: Daemon, elements: int) -> None:
    row = run(daemon, make_case(elements, density=1.0), 2)
    assert (row.wrong, row.bytes, row.elements) == (0, elements * 4, elements)


def test_wrong_elements_are_counted_over_ranks_and_rounds(daemon: Daemon) -> None:
    """Ranks that disagree about the seed expect other sums than they get."""

    def on_rank(comm: Communicator) -> Row:
        case = SyntheticCase(1000, "float32", "sum", 64, "full", 1.0, seed=comm.rank)
        return run_case(comm, case, rounds=2, warmup=1)

    rows = run_job(configured(daemon.addresses), 2, on_rank)
    assert rows[0].wrong == rows[1].wrong
    assert 4000 < rows[0].wrong <= 2 * 3 * 1000


def test_impossible_data_fails_on_every_rank(daemon: Daemon) -> None:
    case = SyntheticCase(1000, "float32", "sum", 64, "none", 0.9, seed=1)
    ranks = start_job(configured(daemon.addresses), 2, lambda comm: run_case(comm, case, 1, 0))
    assert all(isinstance(outcome, Exception) for outcome in ranks.outcomes())
    with pytest.raises(UsageError, match="disjoint"):
        case.check(2)
    case.check(1)
