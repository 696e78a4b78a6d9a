"""`python -m omnireduce.worker lab`: reductions made of messages are right, and the tables have what was asked for."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from local_cluster import MPIRUN, ROOT, WAIT_S, Ranks

from omnireduce.worker.lab.exercises import Messages, allreduce_by_messages, reduce_by_messages


def by_queues(rank: int, ways: dict[tuple[int, int], Any]) -> Messages:
    """Messages as a library without a buffer has them: who sends waits until the other one receives."""

    def send(x: np.ndarray[Any, Any], peer: int) -> None:
        there, taken = ways[rank, peer]
        there.put(x.copy(), timeout=WAIT_S)
        taken.get(timeout=WAIT_S)

    def receive(x: np.ndarray[Any, Any], peer: int) -> None:
        there, taken = ways[peer, rank]
        x[:] = there.get(timeout=WAIT_S)
        taken.put(None)

    return Messages(send, receive)


@pytest.mark.parametrize("elements", [1, 3, 100])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_messages_make_reductions(size: int, elements: int) -> None:
    ways = {(a, b): (queue.Queue[Any](), queue.Queue[Any]()) for a in range(size) for b in range(size)}

    def run(rank: int) -> tuple[list[float], list[float]]:
        messages = by_queues(rank, ways)
        first, second = (np.full(elements, 2.0**rank, np.float32) for _ in range(2))
        reduce_by_messages(messages, rank, size, first)
        allreduce_by_messages(messages, rank, size, second)
        return first.tolist(), second.tolist()

    results = Ranks(size, run).results()
    total = [2.0**size - 1] * elements
    assert results[0][0] == total
    assert all(second == total for _, second in results)


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_the_tables() -> None:
    command = [
        str(MPIRUN),
        "-n",
        "2",
        sys.executable,
        "-m",
        "omnireduce.worker",
        "lab",
        "--elements",
        "1,1000",
        "--rounds",
        "2",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=4 * WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    tables = re.split(r"(?m)^(.*), 2 ranks, milliseconds$", result.stdout)
    assert tables[1::2] == ["a message and its echo", "reduce", "all-reduce"]
    for table in tables[2::2]:
        assert [row.split()[1] for row in table.splitlines() if re.match(r"│ +\d", row)] == ["4", "4k"]
        assert ("gloo" in table) == (find_spec("torch") is not None)
        assert ("mpi4py" in table) == (find_spec("mpi4py") is not None)
    assert "omnireduce" in tables[4]


@pytest.mark.parametrize("wrong", ["", "1,x", "0"])
def test_sizes_that_are_none_are_refused(wrong: str) -> None:
    command = [sys.executable, "-m", "omnireduce.worker", "lab", "--elements", wrong]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 2
    assert f"--elements {wrong!r}: expected numbers from 1 to" in result.stderr
