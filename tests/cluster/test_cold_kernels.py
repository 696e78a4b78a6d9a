"""Ranks whose kernels must be compiled first: the others wait for them, say so, and nobody is refused for that."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from local_cluster import READY_S, WAIT_S, Daemon, Ranks, configured, eventually, unique_job

from omnireduce.errors import AbortedError, OmniReduceError, RefusedError, TransportError, UsageError
from omnireduce.kernels.compiling.claims import Kernel
from omnireduce.kernels.warm import Progress
from omnireduce.runtime.rank import communicator, kernels_ready
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config

LIMIT = ("cluster.join_timeout_s=1", "aggregator.join_timeout_s=1")


class Compiler:
    """Compilation of the kernels of one rank that lasts until `is_done` is set. The rank's thread calls `begin`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_done, self._this = threading.Event(), threading.local()
        self._make_ready, self._list, self.lists = kernels_ready.make_ready, communicator.needed_at_first, 0
        monkeypatch.setattr(communicator, "needed_at_first", self.list_once)
        monkeypatch.setattr(kernels_ready, "are_kept", lambda kernels: not self.is_needed)
        monkeypatch.setattr(kernels_ready, "make_ready", self.make_ready)

    @property
    def is_needed(self) -> bool:
        return getattr(self._this, "is_cold", False)

    def begin(self) -> None:
        self._this.is_cold = True

    def list_once(self, *args: Any, **options: Any) -> list[Kernel]:
        self.lists += 1
        return self._list(*args, **options)

    def make_ready(self, kernels: Sequence[Kernel], progress: Progress) -> None:
        while self.is_needed and not self.is_done.wait(0.01):
            progress(1, 2)
        self._make_ready(kernels, progress)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(monkeypatch)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Daemon]:
    with Daemon(2, LIMIT[1], "log.level=debug") as daemon:
        yield daemon


def summed(config: Config, rank: int, job: str) -> float:
    with Communicator(config, rank=rank, size=2, job=job) as comm:
        return float(comm.allreduce(np.ones(3, np.float32))[0])


def compiled(compiler: Compiler, config: Config, job: str, when: Callable[[], None]) -> Ranks:
    """Rank 1 compiles, and then rank 0 comes, `when` it may."""

    def run(rank: int) -> float:
        if rank:
            compiler.begin()
        else:
            when()
        return summed(config, rank, job)

    return Ranks(2, run)


def test_nobody_is_refused_while_kernels_compile(
    compiler: Compiler, impatient: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    job = unique_job()

    def both_shards_know() -> None:
        assert eventually(lambda: impatient.log.count(f"job={job} ") == 2), impatient.log

    ranks = compiled(compiler, configured(impatient.addresses, *LIMIT), job, both_shards_know)
    expected = "(the kernels of rank 1 compile) since 4 s"  # four times as long as the limit
    try:
        assert eventually(lambda: expected in caplog.text, READY_S), caplog.text
    finally:
        compiler.is_done.set()
    assert ranks.results(READY_S) == [2.0, 2.0]
    assert compiler.lists == 2  # one for each rank, cold or not


def test_ranks_of_an_aggregator_of_their_own_wait_for_one_that_compiles(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    config = configured([], f"cluster.join_timeout_s={READY_S}", "aggregator.join_timeout_s=3")
    ranks = compiled(compiler, config, unique_job(), lambda: None)
    try:
        assert eventually(lambda: "(the kernels of rank 1 compile) since 4 s" in caplog.text, READY_S), caplog.text
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


def test_what_the_first_collective_of_a_kind_compiles_does_not_count_as_its_time(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 1 compiles for much longer than the time limit, once both are in the job."""
    config, job = configured([], "cluster.timeout_s=1"), unique_job()

    def run(rank: int) -> float:
        with Communicator(config, rank=rank, size=2, job=job) as comm:
            comm.allreduce(np.ones(3, np.float32))
            if rank:
                compiler.begin()
            return float(comm.allreduce(np.ones(3, np.int16))[0])

    ranks = Ranks(2, run)
    try:
        assert eventually(lambda: "since 4" in caplog.text, READY_S), caplog.text
    finally:
        compiler.is_done.set()
    assert ranks.results(READY_S) == [2.0, 2.0]


def test_ranks_that_wait_in_another_group_see_that_a_rank_compiles(
    compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    """Ranks 0 and 1 sum in a group first, where rank 1 compiles for longer than the time limit; rank 2 is ahead."""
    config, job = configured([], "cluster.timeout_s=1"), unique_job()

    def run(rank: int) -> float:
        with Communicator(config, rank=rank, size=3, job=job) as comm:
            comm.allreduce(np.ones(3, np.float32))
            if rank < 2:
                with comm.create_group([0, 1], name="pair") as group:
                    if rank == 1:
                        compiler.begin()
                    group.allreduce(np.ones(3, np.int16))
            return float(comm.allreduce(np.ones(3, np.float32))[0])

    ranks = Ranks(3, run)
    try:
        assert eventually(lambda: "since 4" in caplog.text, READY_S), caplog.text
    finally:
        compiler.is_done.set()
    assert ranks.results(READY_S) == [3.0, 3.0, 3.0]


def test_a_rank_that_refuses_compiles_nothing_before_it_says_so(compiler: Compiler) -> None:
    config, job = configured([]), unique_job()

    def run(rank: int) -> None:
        with Communicator(config, rank=rank, size=2, job=job) as comm:
            comm.allreduce(np.ones(3, np.float32))
            if rank:
                compiler.begin()
                comm.allreduce(np.ones(3, np.complex64))
            comm.allreduce(np.ones(3, np.float32))

    error, refused = Ranks(2, run).outcomes(WAIT_S)
    assert isinstance(refused, UsageError)
    assert isinstance(error, OmniReduceError)
    assert "complex64" in str(error)


def test_a_rank_that_says_no_more_that_it_compiles_is_late(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said so once, as a process that is stopped meanwhile, and the time limit counts from then."""
    config, job, is_over = configured([], "cluster.timeout_s=1"), unique_job(), threading.Event()
    monkeypatch.setattr(kernels_ready, "Ticker", lambda *_: nullcontext())

    def run(rank: int) -> None:
        try:
            with Communicator(config, rank=rank, size=2, job=job) as comm:
                comm.allreduce(np.ones(3, np.float32))
                if rank:
                    compiler.begin()
                comm.allreduce(np.ones(3, np.int16))
        finally:
            is_over.set()

    ranks = Ranks(2, run)
    assert is_over.wait(READY_S)
    compiler.is_done.set()
    error, _ = ranks.outcomes(READY_S)
    assert isinstance(error, AbortedError)
    assert "rank 1" in str(error)
    assert "not complete after 1 s" in str(error)
