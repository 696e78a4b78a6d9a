"""Ranks whose kernels must be compiled first: the others wait for them, say so, and nobody is refused for that."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from local_cluster import READY_S, WAIT_S, Daemon, Ranks, configured, eventually, unique_job

from omnireduce.errors import RefusedError, TransportError
from omnireduce.runtime.member import compiling
from omnireduce.runtime.member.communicator import Communicator

LIMIT = ("cluster.join_timeout_s=1", "aggregator.join_timeout_s=1")


class Compiler:
    """What compiles the kernels of one rank for as long as a test wants: of this thread, if it says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_done, self._this = threading.Event(), threading.local()
        self._warm_up = compiling.warm_up_worker
        monkeypatch.setattr(compiling, "is_worker_warm", lambda in_memory: not self.is_needed)
        monkeypatch.setattr(compiling, "warm_up_worker", self.warm_up)

    @property
    def is_needed(self) -> bool:
        return getattr(self._this, "is_cold", False)

    def begin(self) -> None:
        self._this.is_cold = True

    def warm_up(self, progress: compiling.Progress, *, in_memory: bool) -> None:
        while self.is_needed and not self.is_done.wait(0.01):
            progress(1, 2)
        self._warm_up(progress, in_memory=in_memory)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture(scope="module")
def impatient() -> Daemon:
    with Daemon(2, LIMIT[1]) as found:
        yield found  # type: ignore[misc]


@pytest.mark.parametrize(("embedded", "cold"), [(False, 0), (True, 0), (True, 1)])
def test_nobody_is_refused_while_kernels_compile(
    compiler: Compiler, impatient: Daemon, caplog: pytest.LogCaptureFixture, embedded: bool, cold: int
) -> None:
    job, config = unique_job(), configured(impatient.addresses, *LIMIT)
    if embedded:  # the rest of the time is for its start
        config = configured([], f"cluster.join_timeout_s={READY_S}", LIMIT[1])

    def run(rank: int) -> float:
        if rank == cold:
            compiler.begin()
        with Communicator(config, rank=rank, size=2, job=job) as comm:
            return float(comm.allreduce(np.ones(3, np.float32))[0])

    ranks = Ranks(2, run)
    said = f"(the kernels of rank {cold} compile) since 4 s"  # four times as long as the limit
    try:
        assert eventually(lambda: said in caplog.text, READY_S), caplog.text
    finally:
        compiler.is_done.set()
    assert ranks.results(READY_S) == [2.0, 2.0]


def test_a_rank_that_does_not_come_is_refused_all_the_same(compiler: Compiler, impatient: Daemon) -> None:
    """The time to join begins anew once the kernels of a rank are ready, and not for ever."""
    config, job = configured(impatient.addresses, *LIMIT), unique_job()

    def run(rank: int) -> None:
        if rank:
            compiler.begin()
        Communicator(config, rank=rank, size=3, job=job)

    ranks = Ranks(2, run)
    compiler.is_done.set()
    for error in ranks.outcomes(WAIT_S):
        assert isinstance(error, RefusedError)
        assert "waiting for rank" in str(error)


def test_what_ends_the_meeting_ends_the_compiling(compiler: Compiler) -> None:
    """Rank 0 does not come: nobody has to wait for the last kernel to learn that."""
    config, job = configured([], *LIMIT), unique_job()

    def run(rank: int) -> None:
        compiler.begin()
        Communicator(config, rank=1, size=2, job=job)

    [error] = Ranks(1, run).outcomes(WAIT_S)
    assert isinstance(error, TransportError)
    assert "rank 0 of job" in str(error)
    assert not compiler.is_done.is_set()
