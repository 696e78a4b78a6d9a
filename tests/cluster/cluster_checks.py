"""Helpers that the tests of failures share."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
from local_cluster import SLOWNESS, Daemon, Worker, configured, run_job, unique_job

DEATH_S = 1.0 * SLOWNESS  # all ranks must learn of the death of a process in this time
FAILURE_S = 5.0 * SLOWNESS  # and of every other failure in this time


def assert_serves(daemon: Daemon, *overrides: str, job: str = "", size: int = 3) -> None:
    """A job joins and works. Waits no longer than a busy machine needs for that."""
    config = configured(daemon.addresses, "cluster.join_timeout_s=20", "cluster.timeout_s=20", *overrides)
    job = job or unique_job("next")
    results = run_job(config, size, lambda comm: comm.allreduce(np.ones(1000, np.float32)).tolist(), job)
    assert results == [[float(size)] * 1000] * size


def name_of(worker: Worker, rank: int) -> str:
    return f"rank {rank} (host {socket.gethostname()}, pid {worker.pid})"


def expect_round(worker: Worker, event: str, number: int) -> None:
    """Wait until round `number` has `started`, or is complete (`round`)."""
    while worker.expect(event)["round"] < number:
        pass


def assert_aborted(
    survivors: Sequence[Worker], since: float, within_s: float, *culprits: str, kind: str = "AbortedError"
) -> list[dict[str, Any]]:
    """Each survivor raises the error, names one of the culprits and ends with status 1, all within the time."""
    errors = [worker.expect("error") for worker in survivors]
    for error in errors:
        assert error["type"] == kind, error
        assert error["culprit"] in culprits, error
    for error in errors:
        assert error["at"] - since < within_s, error
    assert [worker.wait() for worker in survivors] == [1] * len(survivors)
    return errors
