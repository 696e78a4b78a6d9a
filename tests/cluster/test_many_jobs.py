"""One daemon, many jobs: one after another, at once, of all sizes; and nothing of them remains."""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import zlib
from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest
from cluster_checks import assert_serves
from local_cluster import (
    MPIRUN,
    ROOT,
    WAIT_S,
    Daemon,
    Ranks,
    configured,
    eventually,
    open_files,
    resident_bytes,
    run_job,
    start_job,
    workers,
)
from transports import TRANSPORTS, over

from omnireduce import AbortedError, Communicator

SERIES = str(ROOT / "tests" / "cluster" / "job_series.py")


def launch(daemon: Daemon, size: int, jobs: range) -> Counter[tuple[int, str]]:
    """Run `jobs` one after another on `size` processes that mpirun starts; how often each job had which outcome."""
    assert MPIRUN is not None
    numbers = ["--jobs", str(jobs.start), str(jobs.stop)]
    command = [MPIRUN, "-n", str(size), sys.executable, SERIES, "--aggregators", ",".join(daemon.addresses), *numbers]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return Counter((report["job"], report["outcome"]) for report in reports)


def outcomes(size: int, number: int) -> dict[tuple[int, str], int]:
    """Counts that `launch` must return for one job: the last rank of every fifth job fails."""
    if number % 5:
        return {(number, "done"): size}
    return {(number, "ZeroDivisionError"): 1} | ({(number, "AbortedError"): size - 1} if size > 1 else {})


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_forty_jobs_in_a_row() -> None:
    """Processes of four launches, of 1 to 4 ranks. A new job can begin where the last one has hardly ended, descriptors
    and memory stay flat."""
    with Daemon(2) as daemon:
        shards = daemon.shard_pids
        before: list[tuple[int, int]] = []
        for number, size in enumerate((1, 4, 2, 3)):
            jobs = range(10 * number, 10 * number + 10)
            expected = [outcomes(size, job) for job in jobs]
            assert launch(daemon, size, jobs) == {key: count for each in expected for key, count in each.items()}
            if number == 1:
                before = [(len(open_files(pid)), resident_bytes(pid)) for pid in shards]
        assert_serves(daemon)
        assert daemon.shard_pids == shards
        for pid, (files, memory) in zip(shards, before, strict=True):
            # the last connections may still be closing
            assert eventually(lambda pid=pid, files=files: len(open_files(pid)) <= files), (files, open_files(pid))
            assert resident_bytes(pid) <= memory + (16 << 20)


def test_many_jobs_at_once(daemon: Daemon) -> None:
    """Twelve threads of jobs on the same shards, by all ways, some failing all the while."""

    def one_after_another(thread: int) -> None:
        config = configured(daemon.addresses, *over(TRANSPORTS[thread % len(TRANSPORTS)]))
        for i in range(4):
            value = zlib.crc32(b"%d %d" % (thread, i)) % 1000

            def run(comm: Communicator, value: int = value) -> float:
                if thread % 4 == 3 and comm.rank == 1:
                    raise ZeroDivisionError
                return sum(float(comm.allreduce(np.full(5000, float(value)))[-1]) for _ in range(5))

            outcomes = start_job(config, 2, run).outcomes()
            if thread % 4 == 3:
                assert [type(outcome) for outcome in outcomes] == [AbortedError, ZeroDivisionError]
            else:
                assert outcomes == [value * 10.0] * 2

    Ranks(12, one_after_another).results()


def test_workers_keep_no_threads_descriptors_or_slots(daemon: Daemon) -> None:
    """After a clean end not even until the cycle collector runs; an exception keeps its frames until then."""
    config = configured(daemon.addresses)
    run_job(config, 2, lambda comm: comm.allreduce_async(np.ones(1000)).wait())
    gc.collect()
    gc.disable()
    try:
        threads, files = threading.active_count(), len(open_files(os.getpid()))
        for _ in range(5):
            run_job(config, 2, lambda comm: comm.allreduce_async(np.ones(1000)).wait())
        assert len(open_files(os.getpid())) == files
    finally:
        gc.enable()
    for _ in range(5):
        outcomes = start_job(config, 2, lambda comm: 1 / comm.rank and comm.barrier()).outcomes()
        assert [type(error) for error in outcomes] == [ZeroDivisionError, AbortedError]
        del outcomes
    gc.collect()
    assert threading.active_count() == threads
    assert len(open_files(os.getpid())) == files


@pytest.mark.parametrize("size", [16])
def test_a_job_of_many_ranks(daemon: Daemon, size: int) -> None:
    config = configured(daemon.addresses, "protocol.slot_bytes=65536", "protocol.slots=2")

    def run(comm: Communicator) -> list[int]:
        x = np.zeros(50_000, np.int64)
        x[comm.rank :: size] = comm.rank
        return np.unique(comm.allreduce(x)).tolist()

    assert run_job(config, size, run) == [list(range(size))] * size


def test_worker_processes_of_several_jobs_at_once(daemon: Daemon) -> None:
    """Real processes, jobs of two, interleaved; one goes each way."""
    quick = ("--rounds", "20", "--elements", "300000")
    with ExitStack() as stack:
        jobs = [stack.enter_context(workers(daemon, 2, *quick, overrides=over(transport))) for transport in TRANSPORTS]
        for worker in itertools.chain.from_iterable(jobs):
            worker.expect("left")
            assert worker.wait() == 0
