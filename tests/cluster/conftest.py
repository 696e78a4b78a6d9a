"""Fixtures for the tests of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, configured, start_job
from transports import over

from omnireduce import Communicator


@pytest.fixture
def busy(daemon: Daemon) -> Iterator[Daemon]:
    """A daemon with a job by shm and one by tcp that run all the while, and whose shards must all outlive the test."""
    shards, finished, under_way = daemon.shard_pids, threading.Event(), threading.Semaphore(0)

    def run(comm: Communicator) -> int:
        rounds = 0
        while comm.allgather(np.array(finished.is_set())).sum() < comm.size:
            assert comm.allreduce(np.ones(5000))[-1] == comm.size
            rounds += 1
            if rounds == 1:
                under_way.release()
        return rounds

    jobs = [start_job(configured(daemon.addresses, *over(kind)), 2, run) for kind in ("shm", "tcp")]
    for _ in range(2 * len(jobs)):
        assert under_way.acquire(timeout=WAIT_S)
    yield daemon
    finished.set()
    for job in jobs:
        assert min(job.results()) > 0
    assert daemon.shard_pids == shards
