"""Ranks that do not come are named, and the job ends."""

from __future__ import annotations

import logging
import re
import threading

import numpy as np
import pytest
from local_cluster import Daemon, configured, run_job

from omnireduce import AbortedError, Communicator
from omnireduce.data_parallel.overdue_names import OverdueName, describe_overdue, find_overdue
from omnireduce.data_parallel.queue import Queue


def test_who_is_missing_where() -> None:
    reports = [[("a", 9.0), ("b", 1.0)], [("b", 2.0)], [("a", 3.0), ("b", 1.0)], []]
    assert find_overdue(reports, [3], 2) == [OverdueName("a", 9.0, (0, 2), (1,))]
    assert find_overdue(reports, [], 2) == [
        OverdueName("a", 9.0, (0, 2), (1, 3)),
        OverdueName("b", 2.0, (0, 1, 2), (3,)),
    ]
    assert find_overdue(reports, [1, 3], 0) == []


def test_many_names_are_cut() -> None:
    result = [OverdueName(f"w{i}", 70.0, (0, 1), (2,)) for i in range(9)]
    [(who, what)] = describe_overdue(result)
    assert who == "rank 2"
    assert what == (
        "has not come to 'w0', 'w1', 'w2', 'w3', 'w4', 'w5' and 3 more, for which ranks 0, 1 wait since 70 s"
    )


@pytest.mark.parametrize("steps", [0, 9])
def test_a_rank_that_skips_a_tensor_is_named(daemon: Daemon, caplog: pytest.LogCaptureFixture, steps: int) -> None:
    """Also after steps that were alike, where ranks did not meet."""

    def run(comm: Communicator) -> None:
        queue, x = Queue(comm), np.ones(3, np.float32)
        for _ in range(steps):
            tasks = [queue.allreduce_async(np.ones(3, np.float32), name=f"w{i}") for i in range(2)]
            assert all(each.wait(60)[0] == 2 for each in tasks)
        task = queue.allreduce_async(np.ones(3, np.float32), name="w0")
        if comm.rank == 0:
            with pytest.raises(AbortedError, match=r"rank 1 has not come to 'w1', for which rank 0 waits since \d+ s"):
                queue.allreduce_async(x, name="w1").wait(60)
        else:
            task.wait(60)
            assert ended.wait(60)
            with pytest.raises(AbortedError, match=r"longer than stall\.abort_s, 1 s"):
                queue.allreduce_async(x, name="w1").wait(60)
        ended.set()
        queue.close()

    ended = threading.Event()
    with caplog.at_level(logging.WARNING, "omnireduce"):
        run_job(configured(daemon.addresses, "stall.warn_s=0.2", "stall.abort_s=1.0"), 2, run)
    warning = r"stalled: rank 1 has not come to 'w1', for which rank 0 waits since \d+ s"
    assert any(re.fullmatch(warning, message) for message in caplog.messages), caplog.messages
