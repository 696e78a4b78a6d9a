"""Traces of real jobs: off, they cost nothing and leave nothing; on, every rank and shard tells what it did."""

from __future__ import annotations

import itertools
import logging
import os
import selectors
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from local_cluster import ROOT, WAIT_S, Daemon, configured, run_job, start_job, unique_job
from tensors import sparse
from transports import BY_SHARDS, KINDS, MEMORY, over

from omnireduce import AbortedError, Communicator, Config, ConfigError
from omnireduce.aggregator.shard import open_listeners
from omnireduce.protocol.collective.reduction import Reduction
from omnireduce.protocol.joining.limits import Limits
from omnireduce.runtime.rank.engine import Engine
from omnireduce.runtime.rank.traced_parts import TracedEngine
from omnireduce.runtime.shard.listening import Listener
from omnireduce.runtime.shard.server import ShardServer
from omnireduce.runtime.shard.traced import ShardTraces, TracedReduction, TracedSelector
from omnireduce.runtime.tracing.aligned_traces import Lane, missing, read_lanes
from omnireduce.runtime.tracing.links import TracedLink
from omnireduce.runtime.tracing.trace import SpanKind
from omnireduce.transport.shm import ShmLink

ELEMENTS, BLOCK, ROUNDS = 1_000_000, 256, 3
IN_MEMORY = (SpanKind.STAGE, SpanKind.COMBINE, SpanKind.COLLECT)
WORK = (SpanKind.PACK, SpanKind.SCATTER, SpanKind.MERGE, *IN_MEMORY, SpanKind.SEND, SpanKind.RECEIVE)


@contextmanager
def traced_daemon(folder: Path, *overrides: str) -> Iterator[Daemon]:
    """Two shards that write traces; they are all written when the block ends."""
    with Daemon(2, f"trace.folder={folder}", *overrides) as daemon:
        yield daemon


def exchange(comm: Communicator) -> None:
    for number in range(ROUNDS):
        comm.allreduce(tensor(comm.rank, number))


def tensor(rank: int, number: int) -> np.ndarray:
    return sparse(10 * number + rank, "float32", (ELEMENTS,), density=0.5)


def blocks(rank: int, number: int) -> np.ndarray:
    """Flags of a tensor's blocks that are not zero."""
    padded = np.zeros(-(-ELEMENTS // BLOCK) * BLOCK, np.float32)
    padded[:ELEMENTS] = tensor(rank, number)
    return padded.reshape(-1, BLOCK).any(axis=1)


def assert_told(ranks: list[Lane]) -> None:
    """Each rank tells of each collective which tensor it was, and how many blocks it and all ranks had."""
    for rank, lane in enumerate(ranks):
        masks = [[blocks(each, number) for each in range(len(ranks))] for number in range(ROUNDS)]
        assert lane.of(SpanKind.TENSOR)["detail"].tolist() == [-(-ELEMENTS // BLOCK)] * ROUNDS
        assert lane.of(SpanKind.BLOCK)["detail"].tolist() == [BLOCK * 4] * ROUNDS
        assert lane.of(SpanKind.OWN)["detail"].tolist() == [int(mask[rank].sum()) for mask in masks]
        assert lane.of(SpanKind.UNION)["detail"].tolist() == [int(np.any(mask, axis=0).sum()) for mask in masks]


def assert_in_order(spans: np.ndarray) -> None:
    """No span begins before the one before it has ended."""
    assert (spans["start"] <= spans["end"]).all()
    assert (spans["start"][1:] >= spans["end"][:-1]).all()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_memory_tell_what_they_staged_combined_and_collected(tmp_path: Path, size: int) -> None:
    """A rank stages its blocks of the others' parts, combines its own part, and collects the others'."""
    with traced_daemon(tmp_path) as daemon:
        run_job(configured(daemon.addresses, f"trace.folder={tmp_path}", *over(MEMORY)), size, exchange)
    ranks = read_lanes(tmp_path)[:size]
    masks = np.array([[blocks(rank, number) for number in range(ROUNDS)] for rank in range(size)])
    union = int(masks.any(axis=0).sum())
    combined = [int(lane.of(SpanKind.COMBINE)["detail"].sum()) for lane in ranks]
    assert sum(combined) == union
    for rank, lane in enumerate(ranks):
        assert lane.origin.missed == 0
        assert 0 < lane.of(SpanKind.STAGE)["detail"].sum() < masks[rank].sum()
        assert lane.of(SpanKind.COLLECT)["detail"].sum() == union - combined[rank]
        chunks = {lane.of(what).size for what in IN_MEMORY}
        assert len(chunks) == 1
        assert chunks.pop() >= ROUNDS
        assert lane.of(SpanKind.COLLECTIVE)["detail"].tolist() == [ELEMENTS * 4] * ROUNDS
        assert lane.of(SpanKind.PACK).size == 0
        assert_in_order(lane.spans[np.isin(lane.spans["what"], [*WORK, SpanKind.WAIT])])
    assert_told(ranks)
    assert_collectives_hold_their_work(ranks, {*IN_MEMORY})


def test_ranks_that_share_memory_tell_which_rows_they_staged_and_combined(tmp_path: Path) -> None:
    """Each rank stages its own rows, and combines all rows of the result; before that, the numbers of rows."""
    numbers = [np.arange(0, 3000, 2), np.arange(0, 3000, 3)]
    union = np.union1d(*numbers).size

    def run(comm: Communicator) -> None:
        mine = numbers[comm.rank]
        comm.allreduce_rows(mine, np.ones((mine.size, 64), np.float32), 3000)

    with traced_daemon(tmp_path) as daemon:
        run_job(configured(daemon.addresses, f"trace.folder={tmp_path}", *over(MEMORY)), 2, run)
    ranks = read_lanes(tmp_path)[:2]
    for mine, lane in zip(numbers, ranks, strict=True):
        staged, combined = lane.of(SpanKind.STAGE)["detail"], lane.of(SpanKind.COMBINE)["detail"]
        assert (staged[0], combined[0]) == (0, 0)
        assert (staged.sum(), combined.sum()) == (mine.size, union)
        assert staged.size == combined.size > 2
        assert lane.of(SpanKind.COLLECT).size == lane.of(SpanKind.TENSOR).size == 0
        assert_in_order(lane.spans[np.isin(lane.spans["what"], [*WORK, SpanKind.WAIT])])
    assert_collectives_hold_their_work(ranks, {SpanKind.STAGE, SpanKind.COMBINE})


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_and_shard_tells_what_it_did(tmp_path: Path, kind: str) -> None:
    with traced_daemon(tmp_path) as daemon:
        run_job(configured(daemon.addresses, f"trace.folder={tmp_path}", *over(kind)), 2, exchange)
    lanes = read_lanes(tmp_path)
    assert [str(lane.origin) for lane in lanes] == ["rank 0", "rank 1", "shard 0", "shard 1"]
    assert missing(lanes) == []
    masks = [[blocks(rank, number) for number in range(ROUNDS)] for rank in range(2)]
    union = sum(int((one | other).sum()) for one, other in zip(*masks, strict=True))
    for rank, lane in enumerate(lanes[:2]):
        assert lane.of(SpanKind.PACK)["detail"].sum() == sum(int(mask.sum()) for mask in masks[rank])
        assert lane.of(SpanKind.SCATTER)["detail"].sum() == union
        assert lane.of(SpanKind.COLLECTIVE)["detail"].tolist() == [ELEMENTS * 4] * ROUNDS
        assert lane.of(SpanKind.MERGE).size == 0
    assert sum(int(lane.of(SpanKind.MERGE)["detail"].sum()) for lane in lanes[2:]) == union
    for lane in lanes:
        assert lane.origin.missed == 0
        assert lane.of(SpanKind.WAIT).size > 0
        assert_in_order(lane.spans[np.isin(lane.spans["what"], [*WORK, SpanKind.WAIT])])
    assert_told(lanes[:2])
    assert_collectives_hold_their_work(lanes[:2], {SpanKind.PACK, SpanKind.SCATTER, SpanKind.SEND, SpanKind.RECEIVE})
    assert_messages_meet(lanes)


def assert_collectives_hold_their_work(ranks: list[Lane], expected: set[SpanKind]) -> None:
    for lane in ranks:
        collectives = lane.of(SpanKind.COLLECTIVE)
        assert_in_order(collectives)
        for start, end in zip(collectives["start"], collectives["end"], strict=True):
            inside = lane.spans[(lane.spans["start"] >= start) & (lane.spans["end"] <= end)]
            kinds = {SpanKind(what) for what in inside["what"]}
            assert expected <= kinds  # the last rank need not wait
            inside = inside[inside["what"] != SpanKind.COLLECTIVE]
            assert 0 < (inside["end"] - inside["start"]).sum() <= end - start


def assert_messages_meet(lanes: list[Lane]) -> None:
    """Check that all messages arrive later, in order; credits may be under way when a link closes."""
    for one, other in itertools.permutations(lanes, 2):
        if one.origin.kind == other.origin.kind:
            continue
        left, came = one.of(SpanKind.MESSAGE_OUT, other.origin.number), other.of(SpanKind.MESSAGE_IN, one.origin.number)
        assert left["detail"].tolist() == came["detail"].tolist()
        assert left.size >= ROUNDS
        assert (left["start"] <= came["end"]).all()
        given, taken = one.of(SpanKind.CREDIT_OUT, other.origin.number), other.of(SpanKind.CREDIT_IN, one.origin.number)
        assert given["detail"].tolist()[: taken.size] == taken["detail"].tolist()
        assert (given["start"][: taken.size] <= taken["end"]).all()


@contextmanager
def server_here(traces: ShardTraces | None) -> Iterator[tuple[ShardServer, Config]]:
    """A shard in a thread of this process, and the configuration of its workers."""
    listeners = open_listeners("127.0.0.1", 0, "shm")
    sock = next(sock for transport, sock in listeners.sockets if transport.name == "shm")
    reader, writer = os.pipe()
    made = [Listener(sock, lambda sock: ShmLink(sock, "a local process"))]
    server = ShardServer("here", made, Limits(4, 4, 1 << 30, 60.0), finish_s=10.0, traces=traces)

    def stop() -> None:
        server.ignore_when_readable(reader)
        server.stop()

    server.call_when_readable(reader, stop)
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server, configured([listeners.address], *over("shm"))
    finally:
        os.close(writer)
        thread.join(WAIT_S)
        os.close(reader)
        for _, taken in listeners.sockets:
            taken.close()
    assert not thread.is_alive()


def parts(server: ShardServer, comm: Communicator) -> list[type]:
    """The types of everything that could be a wrapper."""
    comm.allreduce(np.ones(8, np.float32))
    (job,) = server._jobs.values()
    engine, links = comm._engine, comm._channels[0].links
    results: list[object] = [engine, *links, server._selector, *job.links, job.machine._senders.reduction]
    return [type(result) for result in results]


def test_off_there_is_no_wrapper_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with server_here(None) as (server, config):
        results = run_job(config, 1, lambda comm: parts(server, comm))
    assert results == [[Engine, ShmLink, selectors.DefaultSelector, ShmLink, Reduction]]
    assert list(tmp_path.iterdir()) == []


def test_on_the_wrappers_are_those(tmp_path: Path) -> None:
    """The check above sees them."""
    config = configured(["127.0.0.1:1"], f"trace.folder={tmp_path}")
    with server_here(ShardTraces(config.trace)) as (server, own):
        own = configured(own.cluster.aggregators, f"trace.folder={tmp_path}")
        results = run_job(own, 1, lambda comm: parts(server, comm))
    assert results == [[TracedEngine, TracedLink, TracedSelector, TracedLink, TracedReduction]]
    assert {path.suffix for path in tmp_path.iterdir()} == {".npz"}


def test_a_full_trace_stops_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with traced_daemon(tmp_path, "trace.events=20") as daemon:
        config = configured(daemon.addresses, f"trace.folder={tmp_path}", "trace.events=30", BY_SHARDS)
        with caplog.at_level(logging.WARNING, "omnireduce"):
            run_job(config, 2, exchange, job="small")
        assert daemon.popen.poll() is None
    lanes = read_lanes(tmp_path)
    assert [lane.spans.size for lane in lanes] == [30, 30, 20, 20]
    for lane in lanes[:2]:
        warning = f"the trace of {lane.origin}, job 'small', is full: it has the first 30 spans and misses"
        assert sum(f"{warning} {lane.origin.missed};" in message for message in caplog.messages) == 1
        assert lane.origin.missed > 0


def test_a_shard_says_that_its_trace_is_full(tmp_path: Path) -> None:
    with traced_daemon(tmp_path, "trace.events=20") as daemon:
        run_job(configured(daemon.addresses, BY_SHARDS), 2, exchange, job="small")
        daemon.signal(15)
        assert daemon.wait() == 0
        assert daemon.log.count("job 'small', is full: it has the first 20 spans and misses") == 2
    assert [str(lane.origin) for lane in read_lanes(tmp_path)] == ["shard 0", "shard 1"]


def test_an_aborted_job_leaves_its_traces(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def run(comm: Communicator) -> None:
        exchange(comm)
        both.wait(WAIT_S)
        if comm.rank == 0:
            raise KeyError("mine")
        exchange(comm)

    with traced_daemon(tmp_path) as daemon:
        config = configured(daemon.addresses, f"trace.folder={tmp_path}")
        outcomes = start_job(config, 2, run).outcomes()
    assert [type(outcome) for outcome in outcomes] == [KeyError, AbortedError]
    lanes = read_lanes(tmp_path)
    assert missing(lanes) == []
    assert [lane.of(SpanKind.COLLECTIVE).size for lane in lanes] == [ROUNDS, ROUNDS, 0, 0]


def test_a_folder_that_cannot_be_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "traces"
    nobody = configured(["127.0.0.1:1"], f"trace.folder={folder}")
    with pytest.raises(ConfigError, match=r"trace\.folder: got .*, expected a folder for traces.*: Not a directory"):
        Communicator(nobody, rank=0, size=1)
    command = [
        sys.executable,
        "-m",
        "omnireduce.aggregator",
        "--listen",
        "127.0.0.1:0",
        "--set",
        f"trace.folder={folder}",
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: trace.folder: got '{folder}', expected a folder")


def test_a_folder_that_vanishes_costs_the_trace_only(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    with Communicator(configured(daemon.addresses, f"trace.folder={folder}"), rank=0, size=1, job=unique_job()) as comm:
        comm.allreduce(np.ones(8))
        shutil.rmtree(folder)
    assert "the trace cannot be written: No such file or directory" in caplog.text
