"""A type checker's view of a user's program: results keep their dtype, and only ops are taken for ops."""

from __future__ import annotations

from pathlib import Path

from mypy import api

GOOD = """
from typing import Any, assert_type
import numpy as np
from numpy.typing import NDArray
import omnireduce as omni

x: NDArray[np.float32] = np.ones(3, np.float32)
doubles: NDArray[np.float64] = np.ones(3)
table = np.ones((3, 2), np.float32)
assert_type(omni.allreduce(x), NDArray[np.float32])
assert_type(omni.allreduce_async(x, op="mean").wait(), NDArray[np.float32])
assert_type(omni.allreduce_rows(np.arange(3), table, 3), tuple[NDArray[np.int64], NDArray[np.float32]])
assert_type(omni.connect().broadcast(np.ones(3, np.int8)), NDArray[np.int8])
assert_type(omni.allgather_async(x).wait(), NDArray[np.float32])
assert_type(omni.allreduce([x, x]), list[NDArray[np.float32]])
assert_type(omni.allreduce_async({"w": x, "b": x}).wait(), dict[str, NDArray[np.float32]])
assert_type(omni.allreduce((x, doubles)), tuple[NDArray[np.float32], NDArray[np.float64]])
assert_type(omni.reduce_scatter(x), NDArray[np.float32])
assert_type(omni.reduce(x, 0), NDArray[np.float32] | None)
assert_type(omni.gather(x), NDArray[np.float32] | None)
assert_type(omni.scatter(x), NDArray[np.float32])
assert_type(omni.alltoall(x), NDArray[np.float32])
assert_type(omni.allgather_ragged_async(x).wait(), list[NDArray[np.float32]])
assert_type(omni.allreduce(x > 0, op="any"), NDArray[np.bool_])
assert_type(omni.allreduce_rows(np.arange(3), table, 3), omni.Rows[np.float32])
assert_type(omni.allreduce_rows_async(np.arange(3), table, 3, op="mean").wait(), omni.Rows[np.float32])
tables: list[omni.Table] = [(np.arange(3), table, 3), (np.arange(2), np.ones((2, 5)), 7)]
assert_type(omni.allreduce_tables(tables, op="mean"), list[omni.Rows[Any]])
assert_type(omni.allreduce_tables_async(tables).wait(), list[omni.Rows[Any]])
assert_type(omni.broadcast_object({"step": 3}), Any)
assert_type(omni.allgather_object("x"), list[Any])
assert_type(omni.allgather_object_async("x").wait(), list[Any])
row_op: omni.RowOp = "mean"
op: omni.Op = row_op
omni.barrier_async().wait()

async def later() -> NDArray[np.float32]:
    return await omni.allreduce_async(x)
"""
WRONG = """
import numpy as np
import omnireduce as omni

omni.allreduce(np.ones(3), op="sun")
omni.broadcast(3)
omni.allreduce_rows(np.arange(3), [1.0], 3)
omni.allreduce_rows(np.arange(3), np.ones((3, 2)), 3, op="max")
omni.allreduce_rows_async(np.arange(3), np.ones((3, 2)), 3, op="prod")
omni.allreduce_tables([(np.arange(3), np.ones((3, 2)), 3)], op="min")
omni.allreduce_tables([(np.arange(3), np.ones((3, 2)))])
omni.connect().allreduce_rows(np.arange(3), np.ones((3, 2)), 3, op="any")
"""


def errors(folder: Path, text: str) -> list[str]:
    file = folder / "user.py"
    file.write_text(text)
    out, crashed, _ = api.run(["--strict", "--no-error-summary", str(file)])
    assert not crashed
    return [line for line in out.splitlines() if ": error: " in line]


def test_results_keep_their_dtype(tmp_path: Path) -> None:
    assert errors(tmp_path, GOOD) == []


def test_what_is_wrong_is_an_error(tmp_path: Path) -> None:
    results = errors(tmp_path, WRONG)
    assert [line.split(":")[1] for line in results] == ["5", "6", "7", "8", "9", "10", "11", "12"], results
