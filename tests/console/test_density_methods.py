"""`omnireduce density --methods`: what it predicts is what travels, and what it says to be lost is lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job
from transports import BY_SHARDS

from omnireduce import Communicator
from omnireduce.compression.methods import method_of
from omnireduce.console.density.estimate import MethodEstimate, advise, measure
from omnireduce.console.density.report import report_files
from omnireduce.core.dtypes import Array

SIZES, RANKS = (32, 256), 2
SHAPE = (4000, 64)


def gradient(rank: int) -> Array:
    """Like that of an embedding: one row in twenty."""
    rng = np.random.default_rng(rank)
    x = np.zeros(SHAPE, np.float32)
    rows = rng.choice(SHAPE[0], SHAPE[0] // 20, replace=False)
    x[rows] = rng.standard_normal((rows.size, SHAPE[1]))
    return x


def advice(x: Array) -> dict[str, MethodEstimate]:
    results = advise(x.reshape(-1), x.shape, measure(x.reshape(-1), SIZES), world_size=RANKS, link_gbps=1)
    assert len({result.method for result in results}) == len(results)
    return {result.method: result for result in results}


@pytest.mark.parametrize(
    "method",
    ["int8", "bf16", "sign", "topk,0.01", "topk,0.01+bf16", "block_topk,0.01", "block_topk,0.01+int8", "randomk,0.01"],
)
def test_so_much_travels(daemon: Daemon, method: str) -> None:
    def run(comm: Communicator) -> tuple[int, int]:
        before = comm.statistics()
        method_of(method).allreduce(comm, gradient(comm.rank), name="w")
        after = comm.statistics()
        return after.sent_bytes - before.sent_bytes, after.received_bytes - before.received_bytes

    expected = advice(gradient(0))[method]
    for up, down in run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run):
        assert up == pytest.approx(expected.wire_up_bytes, rel=0.1, abs=2000)
        assert down == pytest.approx(expected.wire_down_bytes, rel=0.1, abs=2000)


def test_rows_are_as_many_bytes_as_they_say(daemon: Daemon) -> None:
    def run(comm: Communicator) -> int:
        x = gradient(comm.rank)
        numbers = np.flatnonzero(x.any(axis=1))
        before = comm.statistics().sent_bytes
        comm.allreduce_rows(numbers, x[numbers], SHAPE[0])
        return comm.statistics().sent_bytes - before

    [up, _] = run_job(configured(daemon.addresses, BY_SHARDS), RANKS, run)
    assert up == pytest.approx(advice(gradient(0))["rows"].wire_up_bytes, rel=0.05, abs=1000)


def test_what_is_lost() -> None:
    x = np.zeros((100, 256), np.float32)
    x[0, 0], x[7, :2] = 3, 4
    result = advice(x)
    assert [name for name, each in result.items() if each.exact] == ["blocks of 32", "rows"]
    assert result["bf16"].lost == result["int8"].lost == result["topk,0.01"].lost == 0
    assert result["block_topk,0.01"].lost == pytest.approx(3 / 41**0.5)
    assert result["sign"].lost > 1
    assert result["randomk,0.01"].lost > 0.9


@pytest.mark.parametrize(
    "x", [np.zeros(0, np.float32), np.zeros(7, np.float64), np.arange(9), np.ones((3, 0), np.float16)]
)
def test_arrays_that_are_odd(x: Array) -> None:
    for each in advice(x).values():
        assert each.lost == 0
        assert np.isfinite(each.speedup)
        assert each.time_ms > 0


def test_the_program_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "g.npy", tmp_path / "g.json"
    dense = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
    np.save(path, dense)
    options = {"block_sizes": SIZES, "world_size": RANKS, "link_gbps": 1.0, "json_path": str(out)}
    assert report_files([str(path)], **options, methods=True)  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "g: what each method would take, and what one step of it would lose" in text
    assert "Exact: blocks of 256, 0.97x as fast as a dense ring; int8 would lose 0.93% in a step, 3.41x as fast" in text
    [report] = json.loads(out.read_text())
    assert {"method", "exact", "wire_up_bytes", "time_ms", "lost"} <= report["arrays"][0]["methods"][0].keys()
    assert report_files([str(path)], **options)  # type: ignore[arg-type]
    assert "what each method" not in capsys.readouterr().out
