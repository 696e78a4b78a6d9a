"""Ranks of several hosts, as threads that believe so: each host sends one sum, and all ranks get the same bits."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from local_cluster import Daemon, Ranks, configured, unique_job
from oracle import bits, reduce_by_host

from omnireduce import AbortedError, Communicator
from omnireduce.runtime.rank import joining
from omnireduce.runtime.tracing.aligned_traces import read_lanes
from omnireduce.runtime.tracing.trace import SpanKind

HOSTS = ((0, 2), (1, 3), (4,))
RANKS = 5
HOST_OF = {rank: host for host, ranks in enumerate(HOSTS) for rank in ranks}
BLOCKS, BLOCK = 300, 256


@pytest.fixture
def rank_of_thread(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Let each thread have the memory key of the host of its rank."""
    this_thread = threading.local()

    def key() -> str:
        return hashlib.sha256(b"%d" % HOST_OF[this_thread.rank]).hexdigest()[:32]

    monkeypatch.setattr(joining, "memory_key", key)
    return this_thread


def run(
    this_thread: threading.local,
    addresses: Sequence[str],
    kind: str,
    work: Callable[[Communicator], object],
    *more: str,
) -> list[object]:
    """Call `work` on each rank of a job; return the results."""
    config, job = configured(addresses, f"transport.kind={kind}", *more), unique_job("hosts")

    def rank(number: int) -> object:
        this_thread.rank = number
        with Communicator(config, rank=number, size=RANKS, job=job) as comm:
            return work(comm)

    return list(Ranks(RANKS, rank).results())


def tensor(rank: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    rng = np.random.default_rng(rank)
    blocks, values = rng.random(BLOCKS) < 0.3, rng.standard_normal(BLOCKS * BLOCK).astype(np.float32)
    return np.where(np.repeat(blocks, BLOCK), values, np.float32(0))


@pytest.mark.parametrize("kind", ["shm", "tcp"])
@pytest.mark.parametrize("shards", [1, 2])
def test_every_collective(rank_of_thread: threading.local, kind: str, shards: int) -> None:
    def work(comm: Communicator) -> tuple[bytes, list[int]]:
        me = comm.rank
        result = bits(comm.allreduce(tensor(me)))
        comm.barrier()
        everybody = comm.allgather(np.arange(me, me + 3))
        assert everybody.tolist() == [[rank, rank + 1, rank + 2] for rank in range(RANKS)]
        numbers, rows = comm.allreduce_rows(np.array([me, 7]), np.ones((2, 4), np.float32), 100)
        assert numbers.tolist() == [*range(RANKS), 7]
        assert rows[-1].tolist() == [RANKS] * 4
        assert comm.allreduce(np.full(5, me, np.float32), op="mean").tolist() == [2.0] * 5
        assert comm.broadcast(np.full(9, me), root=3).tolist() == [3] * 9
        return result, list(comm.statistics().shard_bytes)

    with Daemon(shards) as daemon:
        results = run(rank_of_thread, daemon.addresses, kind, work)
    result = [each[0] for each in results if isinstance(each, tuple)]
    assert set(result) == {bits(reduce_by_host(HOSTS, [tensor(rank) for rank in range(RANKS)], "sum"))}
    moved = [each[1] for each in results if isinstance(each, tuple)]
    for shard in range(shards):
        delegates = {ranks[shard % len(ranks)] for ranks in HOSTS}
        smallest = min(moved[rank][shard] for rank in delegates)
        largest = max(moved[rank][shard] for rank in set(range(RANKS)) - delegates)
        assert largest < smallest / 10, "a rank that is no delegate sent tensors"


def test_a_rank_that_fails_is_named_on_all_hosts(rank_of_thread: threading.local) -> None:
    def work(comm: Communicator) -> tuple[str, str]:
        if comm.rank == 2:
            comm.allreduce(tensor(comm.rank))
            comm._engine.abort("its work failed")
            return "", ""
        try:
            for _ in range(3):
                comm.allreduce(tensor(comm.rank))
        except AbortedError as error:
            return error.culprit[:6], error.reason
        return "nobody", ""

    with Daemon(2) as daemon:
        ends = run(rank_of_thread, daemon.addresses, "shm", work)
    assert set(ends) == {("", ""), ("rank 2", "its work failed")}


def test_a_trace_tells_what_was_shown(rank_of_thread: threading.local, tmp_path: Path) -> None:
    """All ranks of a host stage, combine, show and collect every chunk; only delegates pack and scatter."""
    rounds = 3

    def work(comm: Communicator) -> None:
        for _ in range(rounds):
            comm.allreduce(tensor(comm.rank))

    with Daemon(1) as daemon:
        run(rank_of_thread, daemon.addresses, "shm", work, f"trace.folder={tmp_path}")
    for lane in read_lanes(tmp_path):
        shares, is_delegate = lane.origin.number != 4, lane.origin.number in (0, 1, 4)
        chunks = {lane.of(what).size for what in (SpanKind.STAGE, SpanKind.COMBINE, SpanKind.SHOW, SpanKind.COLLECT)}
        assert len(chunks) == 1
        assert (chunks.pop() >= rounds) == shares
        assert (lane.of(SpanKind.PACK)["detail"].sum() > 0) == is_delegate
        assert (lane.of(SpanKind.SCATTER)["detail"].sum() > 0) == is_delegate


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_trace_tells_what_each_rank_brought(rank_of_thread: threading.local, tmp_path: Path, dtype: str) -> None:
    """Its own blocks, not those of its host. float16 is not summed by host."""
    rounds, shards = 2, 2
    masks = np.array([np.asarray(tensor(rank)).reshape(BLOCKS, BLOCK).any(axis=1) for rank in range(RANKS)])

    def work(comm: Communicator) -> None:
        for number in range(rounds):
            x = tensor(comm.rank).astype(dtype)
            comm.allreduce(x, out=np.empty_like(x) if number else None)

    with Daemon(shards) as daemon:
        run(rank_of_thread, daemon.addresses, "tcp", work, f"trace.folder={tmp_path}")
    for lane in read_lanes(tmp_path):
        assert lane.of(SpanKind.TENSOR)["detail"].tolist() == [BLOCKS] * rounds
        assert lane.of(SpanKind.OWN)["detail"].tolist() == [int(masks[lane.origin.number].sum())] * rounds
        assert lane.of(SpanKind.UNION)["detail"].tolist() == [int(masks.any(axis=0).sum())] * rounds
