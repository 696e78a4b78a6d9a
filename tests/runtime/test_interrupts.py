"""Interrupts at the worst places, and forked children: no rank waits for ever, none gets a wrong sum."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, configured, run_job, start_job

from omnireduce.config import Config
from omnireduce.errors import AbortedError, RefusedError
from omnireduce.runtime.communicator import Communicator

BLOCK = 256


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def interrupted(*_: object) -> None:
        raise error

    return interrupted


def test_an_interrupt_while_a_collective_is_submitted_aborts_it_on_all_ranks(local: Config) -> None:
    """The message that was being packed is lost: going on would leave its blocks out of the sum."""

    def work(comm: Communicator) -> str:
        x = np.ones(100 * BLOCK, np.float32)
        if comm.rank == 0:
            comm.barrier()  # all have joined: an abort before that is an error of joining
            comm._links[1].send = raising(KeyboardInterrupt)  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce(x)
        with pytest.raises(AbortedError) as caught:  # rank 1 may learn of the abort while its barrier ends
            comm.barrier() or comm.allreduce(np.ones(100 * BLOCK, np.float32))
        return caught.value.culprit

    culprits = start_job(local, 2, work).results(WAIT_S)
    assert all(culprit.startswith("rank 0") for culprit in culprits)


def test_a_second_interrupt_during_the_abort_leaves_no_handle_waiting(local: Config) -> None:
    over = threading.Event()

    def work(comm: Communicator) -> None:
        with contextlib.suppress(AbortedError):  # rank 1 may learn of the abort while its barrier ends
            comm.barrier()
        if comm.rank == 1:
            assert over.wait(WAIT_S)
            return
        handle = comm.allreduce_async(np.ones(BLOCK, np.float32))
        for link in comm._links:
            link.send_control = raising(KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            comm._engine.abort("interrupted once")
        with pytest.raises(AbortedError, match="interrupted once"):
            handle.wait(WAIT_S)
        over.set()

    start_job(local, 2, work).results(WAIT_S)


def test_a_forked_child_that_ends_does_not_end_the_job_of_its_parent(local: Config) -> None:
    def work(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                refused = False
                try:
                    comm.barrier()
                except AbortedError:
                    refused = True
                comm.shutdown()
                os._exit(0 if refused else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return comm.allreduce(np.ones(3, np.float32)).tolist()

    assert run_job(local, 2, work) == [[2.0] * 3] * 2


def test_ranks_that_deal_blocks_differently_are_refused(local: Config) -> None:
    """Each block would be summed on two shards, by one rank each."""
    other = configured(local.cluster.aggregators, "protocol.stripe_blocks=128", "cluster.join_timeout_s=3")
    mine = configured(local.cluster.aggregators, "cluster.join_timeout_s=3")
    outcomes = start_job([mine, other], 2, lambda comm: comm.barrier()).outcomes(WAIT_S)
    assert any(isinstance(each, RefusedError) and "stripe_blocks" in str(each) for each in outcomes)
    assert all(isinstance(each, Exception) for each in outcomes)
