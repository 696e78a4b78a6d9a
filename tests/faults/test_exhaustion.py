"""A daemon that runs out of descriptors or memory: it refuses what it cannot serve, and serves the others."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from cluster_checks import assert_serves
from local_cluster import Daemon, configured, eventually, run_job, start_job, unique_job
from raw_peer import RawPeer
from transports import over

from omnireduce import Communicator, RefusedError
from omnireduce.core.wire.control import ControlMessage, Pending, Refused

from .crew import WorkerProcess
from .site import SMALL_SLOTS, held
from .worker import Order

FEW = 100
LIMITS = ("cluster.join_timeout_s=20", "cluster.timeout_s=20")


@contextmanager
def neighbours(daemon: Daemon) -> Iterator[list[WorkerProcess]]:
    """A job of two that goes on all the while, one rank by shm and one by tcp."""
    with WorkerProcess() as first, WorkerProcess() as second:
        for rank, (member, kind) in enumerate(((first, "shm"), (second, "tcp"))):
            overrides = (*over(kind), *SMALL_SLOTS, *LIMITS)
            member.tell(Order("neighbour", rank, 2, tuple(daemon.addresses), overrides, idle_s=0.01))
        for member in (first, second):
            member.hear("joined")
        yield [first, second]
        for member in (first, second):
            member.expect_progress()


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_jobs_beyond_the_descriptors_of_a_daemon(kind: str) -> None:
    """Each is refused at once, and there is room again when others have left."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))

    with Daemon(1, preexec_fn=few) as daemon, neighbours(daemon), ExitStack() as stack:
        [shard] = daemon.shard_pids
        files = held(shard).files
        config = configured(daemon.addresses, *over(kind), *SMALL_SLOTS, *LIMITS)
        admitted, refused, peers = [], [], []
        for _ in range(FEW):
            try:
                admitted.append(stack.enter_context(Communicator(config, rank=0, size=1, job=unique_job())))
            except RefusedError as error:
                refused.append(str(error))
            if len(refused) == 5:
                break
        assert len(refused) == 5
        assert all("raise ulimit -n" in text for text in refused), refused
        assert all(comm.allreduce(np.ones(1000))[-1] == 1 for comm in admitted)
        answer: ControlMessage = Pending([], 0)
        while isinstance(answer, Pending):  # ranks that wait for others take the last descriptors
            peer = stack.enter_context(RawPeer(daemon.addresses[0], local=kind == "shm"))
            peer.hello("gathers", len(peers), FEW)
            answer = peer.control()
            peers.append(peer)
        assert answer == Refused("too many connections; raise ulimit -n of the aggregator, or wait", temporary=True)
        assert "cannot accept" in daemon.log
        for comm in admitted:
            comm.shutdown()
        for peer in peers:
            peer.close()
        assert eventually(lambda: held(shard).files <= files)
        assert_serves(daemon, *over(kind))


def memory_limit(pid: int, more_bytes: int) -> None:
    """Let a process have so much more address space than it has now."""
    now = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (now + more_bytes, resource.RLIM_INFINITY))


def test_a_job_whose_slots_do_not_fit_into_memory() -> None:
    """It is refused with the reason; smaller ones are served, and it, too, once there is memory."""
    large = ("protocol.slot_bytes=16777216", "protocol.slots=4")
    with Daemon(1) as daemon, neighbours(daemon):
        [shard] = daemon.shard_pids
        files = held(shard).files
        config = configured(daemon.addresses, *large, *LIMITS)
        memory_limit(shard, 64 << 20)
        for _ in range(3):
            outcomes = start_job(config, 2, lambda comm: None).outcomes()
            assert [type(outcome) for outcome in outcomes] == [RefusedError] * 2
            assert all("the aggregator has no memory for this job: " in str(outcome) for outcome in outcomes)
        assert_serves(daemon)
        assert eventually(lambda: held(shard).files <= files)
        resource.prlimit(shard, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert run_job(config, 2, lambda comm: float(comm.allreduce(np.ones(9))[0])) == [2.0] * 2
        assert daemon.shard_pids == [shard]
        assert "internal error" not in daemon.log


def test_collectives_of_a_job_that_has_begun_want_no_more_memory() -> None:
    """All that they need is there from the start: a daemon that gets no more memory serves them, and its neighbours."""
    large = ("protocol.slot_bytes=16777216", "protocol.slots=2")
    with Daemon(1) as daemon, neighbours(daemon):
        [shard] = daemon.shard_pids
        config = configured(daemon.addresses, *large, *LIMITS)

        def run(comm: Communicator) -> list[float]:
            if comm.rank == 0:
                memory_limit(shard, 1 << 20)
            comm.barrier()
            kinds = ((kind, size) for kind in (np.float16, np.float32) for size in (8, 2048))
            return [
                float(comm.allreduce(np.ones(1 << 22, kind), block_size=size).sum(dtype=float)) for kind, size in kinds
            ]

        assert start_job(config, 2, run).outcomes() == [[2.0 * (1 << 22)] * 4] * 2
        resource.prlimit(shard, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert daemon.shard_pids == [shard]
        assert "internal error" not in daemon.log
