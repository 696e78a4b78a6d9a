"""Jobs on one daemon share no memory, and what one does to its slots is no other's business."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster_checks import expect_round
from local_cluster import WAIT_S, Daemon, Ranks, configured, unique_job, workers
from raw_peer import RawPeer
from test_rule_breakers import data, message
from transports import MEMORY, over

from omnireduce import AbortedError, Communicator
from omnireduce.core.wire.control import Welcome


def shared_files(pid: int) -> set[int]:
    """The slot memory that a process has mapped or open, by inode."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {int(line.split()[4]) for line in lines if "memfd:omnireduce" in line}
    files = [path.stat() for path in Path(f"/proc/{pid}/fd").iterdir() if "memfd:omnireduce" in str(path.readlink())]
    return mapped | {path.st_ino for path in files}


@pytest.mark.parametrize(("transport", "regions"), [("shm", 0), (MEMORY, 2)])
def test_no_memory_is_shared_between_jobs(daemon: Daemon, transport: str, regions: int) -> None:
    """The ranks of a job share, on each shard, the memory of that job alone, and among themselves a region each."""
    with workers(daemon, 2, overrides=over(transport)) as one, workers(daemon, 2, overrides=over(transport)) as two:
        for worker in (*one, *two):
            expect_round(worker, "round", 1)
        first, second, third, fourth = (shared_files(worker.pid) for worker in (*one, *two))
        assert first == second
        assert third == fourth
        assert not first & third
        assert len(first) == len(third) == 2 * len(daemon.addresses) + regions
        for shard in daemon.shard_pids:
            assert len(shared_files(shard) & first) == len(shared_files(shard) & third) == 2


@pytest.mark.parametrize("slot", [3, 6, 2**16 - 1])
def test_slots_beyond_its_own_end_the_job_of_who_names_them(daemon: Daemon, slot: int) -> None:
    """Rank 1 of one job names the slots that lie behind its own; a job beside it goes on, and is right."""
    mine, config = unique_job(), configured(daemon.addresses[:1])

    def honest(_: int) -> None:
        with Communicator(config, rank=0, size=2, job=mine) as comm:
            comm.allreduce(np.ones(10_000, np.float32))

    with workers(daemon, 2) as others, RawPeer(daemon.addresses[0]) as peer:
        ranks = Ranks(1, honest)
        peer.hello(mine, 1, 2)
        while not isinstance(peer.control(), Welcome):
            pass
        before = max(worker.expect("round", WAIT_S)["round"] for worker in others)
        data(message([3]), slots=(slot,))(peer)
        [error] = ranks.outcomes()
        assert isinstance(error, AbortedError)
        assert error.culprit == "rank 1 (host test, pid 1)"
        assert f"message for slot {slot} without a credit" in error.reason
        for worker in others:
            expect_round(worker, "round", before + 3)
