"""One daemon, many jobs: one after another, at once, of all sizes; and nothing of them remains."""

from __future__ import annotations

import gc
import os
import random
import threading
import zlib

import numpy as np
import pytest
from cluster_checks import assert_serves
from local_cluster import Daemon, Ranks, configured, eventually, open_files, resident_bytes, run_job, start_job, workers

from omnireduce import AbortedError, Communicator, Config
from omnireduce.dtypes import ELEMENT_TYPES


def mixed_job(config: Config, seed: int) -> None:
    """A job of 1 to 4 ranks, some collectives of random types and sizes, each checked."""
    size = random.Random(seed).randint(1, 4)

    def run(comm: Communicator) -> None:
        same = random.Random(seed)
        for _ in range(same.randint(1, 4)):
            dtype = same.choice(list(ELEMENT_TYPES))
            elements = same.choice([0, 1, 17, 300, 5000, 200_003])
            x = np.zeros(elements, ELEMENT_TYPES[dtype].dtype)
            x[:: same.choice([1, 7, 1000])] = 1
            expected = (x.astype(np.int64) * size).tolist()
            assert comm.allreduce(x).astype(np.int64).tolist() == expected
        assert comm.allgather(np.array(comm.rank)).tolist() == list(range(size))

    run_job(config, size, run, job="one-name-for-all")


def failing_job(config: Config, seed: int) -> None:
    """One rank leaves by an exception, the others see it."""
    size = random.Random(seed).randint(2, 4)

    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            raise ZeroDivisionError
        comm.allreduce(np.ones(200_003))

    outcomes = start_job(config, size, run, job="one-name-for-all").outcomes()
    assert isinstance(outcomes.pop(1), ZeroDivisionError)
    assert all(isinstance(error, AbortedError) for error in outcomes)


def test_a_hundred_jobs_in_a_row() -> None:
    """Every fifth fails. A new rank can join where the last job has hardly ended, descriptors and memory stay flat."""
    with Daemon(2) as daemon:
        shards = daemon.shard_pids
        configs = [configured(daemon.addresses, f"transport.kind={kind}") for kind in ("shm", "tcp")]
        for number in range(20):
            mixed_job(configs[number % 2], number)
        assert_serves(daemon)
        before = [(len(open_files(pid)), resident_bytes(pid)) for pid in shards]
        for number in range(20, 100):
            (failing_job if number % 5 == 0 else mixed_job)(configs[number // 5 % 2], number)
        assert_serves(daemon)
        assert daemon.shard_pids == shards
        for pid, (files, memory) in zip(shards, before, strict=True):
            # the last connections may still be closing
            assert eventually(lambda pid=pid, files=files: len(open_files(pid)) <= files), (files, open_files(pid))
            assert resident_bytes(pid) <= memory + (16 << 20)


def test_many_jobs_at_once(daemon: Daemon) -> None:
    """Twelve threads of jobs on the same shards, by both transports, some failing all the while."""

    def one_after_another(thread: int) -> None:
        config = configured(daemon.addresses, f"transport.kind={('shm', 'tcp')[thread % 2]}")
        for i in range(4):
            value = zlib.crc32(b"%d %d" % (thread, i)) % 1000

            def run(comm: Communicator, value: int = value) -> float:
                if thread % 4 == 3 and comm.rank == 1:
                    raise ZeroDivisionError
                return sum(float(comm.allreduce(np.full(5000, float(value)))[-1]) for _ in range(5))

            outcomes = start_job(config, 2, run).outcomes()
            if thread % 4 == 3:
                assert [type(each) for each in outcomes] == [AbortedError, ZeroDivisionError]
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
    """Real processes, two jobs of two, interleaved."""
    quick = ("--rounds", "20", "--elements", "300000")
    with workers(daemon, 2, *quick) as first, workers(daemon, 2, *quick, overrides=["transport.kind=tcp"]) as second:
        for worker in (*first, *second):
            worker.expect("left")
            assert worker.wait() == 0
