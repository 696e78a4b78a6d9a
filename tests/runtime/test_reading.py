"""Reads of ranks that never have to wait: messages of ranks of their host are there whenever they look."""

from __future__ import annotations

import threading

import numpy as np
from local_cluster import WAIT_S, Daemon, configured, never_wait, start_job

from omnireduce import AbortedError, Communicator


def test_that_the_aggregator_stops() -> None:
    with Daemon() as daemon:
        begun = threading.Barrier(3)

        def work(comm: Communicator) -> str:
            comm.barrier()
            never_wait(comm)
            begun.wait(WAIT_S)
            try:
                while True:
                    comm.allreduce(np.ones(8, np.float32))
            except AbortedError as error:
                return str(error)

        ranks = start_job(configured(daemon.addresses), 2, work)
        begun.wait(WAIT_S)
    assert all("shutting down" in text for text in ranks.results())
