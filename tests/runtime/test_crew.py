"""The threads of a rank: how many, that they work at the same time, and that sums and ends are the same with them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, Process, configured, run_job, unique_job
from tensors import sparse
from transports import KINDS, MEMORY, over

from omnireduce import processors
from omnireduce.config import Config
from omnireduce.errors import AbortedError, OmniReduceError, ProtocolError
from omnireduce.protocol.shard_stream import ShardStream
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.runtime.member.crew import MOST_BY_ITSELF, Threads, crew_for
from omnireduce.runtime.tracing.trace import What, read_trace
from omnireduce.transport.base import Link
from omnireduce.transport.inproc import InprocLink, pair

BLOCK = 256


def links(count: int, local: int = 0) -> list[Link]:
    found: list[Link] = [pair("shard", "rank")[0] for _ in range(count)]
    for each in found[:local]:
        cast(InprocLink, each).kind = "shm"
    return found


@pytest.mark.parametrize(
    ("wanted", "processors", "shards", "local", "ranks", "threads"),
    [
        (0, 16, 8, 0, 1, MOST_BY_ITSELF),
        (0, 16, 8, 0, 3, 2),
        (0, 16, 8, 0, 8, 1),
        (0, 16, 3, 0, 1, 3),  # no more than shards
        (0, 8, 8, 0, 1, 4),
        (0, 8, 8, 4, 1, 2),  # four shards need processors, too
        (0, 2, 4, 0, 1, 1),
        (0, 2, 4, 4, 1, 1),
        (0, 1, 4, 0, 4, 1),
        (8, 1, 16, 0, 4, 8),  # the user's word counts
        (8, 1, 3, 0, 4, 3),
        (1, 16, 8, 0, 1, 1),
    ],
)
def test_a_rank_has_its_share_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, wanted: int, processors: int, shards: int, local: int, ranks: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    assert threads_of(crew_for(wanted, links(shards, local), ranks)) == threads


def test_a_quota_is_a_share_of_the_processors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(processors, "LIMIT", limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    found = []
    for text in ("max 100000", "450000 100000", "50000 100000", "nonsense"):
        limit.write_text(text)
        found.append(threads_of(crew_for(0, links(8), 1)))
    assert found == [MOST_BY_ITSELF, 2, 1, MOST_BY_ITSELF]


def threads_of(crew: Threads | None) -> int:
    if crew is None:
        return 1
    crew.close()
    return crew.threads


def test_the_channel_for_urgent_tensors_has_no_threads(daemon: Daemon) -> None:
    before, urgent = threading.active_count(), ("transport.threads=3", "protocol.urgent_bytes=4096")
    with Communicator(configured(daemon.addresses, *over("tcp"), *urgent), rank=0, size=1, job=unique_job()):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


@pytest.fixture
def crew() -> Any:
    with_three = Threads(3)
    yield with_three
    with_three.close()


def test_calls_run_at_the_same_time(crew: Threads) -> None:
    together = threading.Barrier(3)
    assert sorted(crew.run([lambda: together.wait(WAIT_S)] * 3)) == [0, 1, 2]


def test_there_may_be_more_calls_than_threads(crew: Threads) -> None:
    calls: list[Callable[[], int]] = [lambda number=number: number for number in range(100)]  # type: ignore[misc]
    assert sorted(crew.run(calls)) == list(range(100))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_an_error_comes_out_when_the_others_are_done(crew: Threads, wrong: int) -> None:
    done = []

    def call(number: int) -> None:
        if number == wrong:
            raise ArithmeticError("wrong")
        done.append(number)

    with pytest.raises(ArithmeticError, match="wrong"):
        list(crew.run([lambda number=number: call(number) for number in range(3)]))  # type: ignore[misc]
    ends = len(done)
    crew.close()  # what had not begun never does
    assert len(done) == ends


def test_who_stops_half_way_waits_for_those_that_have_begun(crew: Threads) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        ended.set()

    results = crew.run([lambda: None, other])
    next(results)
    assert begun.wait(WAIT_S)
    threading.Timer(0.05, may_end.set).start()
    cast(Any, results).close()
    assert ended.is_set()


def test_no_thread_outlives_its_crew() -> None:
    before = threading.active_count()
    crew = Threads(4)
    assert threading.active_count() == before + 3
    crew.close()
    assert threading.active_count() == before


def test_no_room_for_threads_is_said_before_the_first_collective(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.active_count()
    submit = ThreadPoolExecutor.submit

    def full(self: ThreadPoolExecutor, *arguments: Any) -> Any:
        if threading.active_count() > before:
            raise RuntimeError("can't start new thread")
        return submit(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", full)
    with pytest.raises(OmniReduceError, match=r"no room for 2 more threads; set transport\.threads = 1"):
        Communicator(configured(daemon.addresses, "transport.threads=3"), rank=0, size=1, job=unique_job())
    assert threading.active_count() == before


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small tensors are divided, too. The list gets the number of calls, each time that work is."""
    found: list[int] = []
    run = Threads.run

    def counted(crew: Threads, calls: Any) -> Any:
        found.append(len(calls))
        return run(crew, calls)

    monkeypatch.setattr(Threads, "run", counted)
    monkeypatch.setattr(Threads, "worth_bytes", 0)
    return found


@pytest.fixture(params=[*KINDS, MEMORY])
def both(daemon: Daemon, request: pytest.FixtureRequest) -> list[Config]:
    """Three shards, for ranks of three threads and for ranks of one."""
    return [configured(daemon.addresses, *over(request.param), f"transport.threads={n}") for n in (3, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_sums_are_the_same_with_threads(both: list[Config], divided: list[int], dtype: str) -> None:
    shape = (300 * BLOCK + 77,)

    def work(comm: Communicator) -> list[bytes]:
        found = []
        for density in (1.0, 0.3, 0.01, 0.0):
            own = sparse(comm.rank, dtype, shape, density=density)
            separate = np.full(shape, 1, own.dtype)
            comm.allreduce(own, out=separate)
            comm.allreduce(own)
            assert separate.tobytes() == own.tobytes()
            found.append(own.tobytes())
        return found

    with_threads, alone = (run_job(config, 2, work) for config in both)
    assert with_threads == alone
    by_shards = both[0].transport.host_exchange == "off"  # else the ranks have no work for shards
    assert bool(divided) == by_shards


@pytest.fixture
def threaded(daemon: Daemon) -> Config:
    return configured(daemon.addresses, *over("tcp"), "transport.threads=3")


def test_many_at_once_with_rows_between_them(threaded: Config, divided: list[int]) -> None:
    def work(comm: Communicator) -> bool:
        tensors = [np.full(40 * BLOCK, comm.rank + 1 + at, np.int32) for at in range(4)]
        handles = [comm.allreduce_async(each) for each in tensors[:2]]
        numbers, values = comm.allreduce_rows(np.arange(50), np.ones((50, 16), np.float32), 64)
        handles += [comm.allreduce_async(each) for each in tensors[2:]]
        known = comm.broadcast(np.full(60 * BLOCK, comm.rank + 5, np.int64), root=1)
        for handle in handles:
            handle.wait(WAIT_S)
        expected = [np.full(40 * BLOCK, 3 + 2 * at, np.int32) for at in range(4)]
        same = all(np.array_equal(*each) for each in zip(tensors, expected, strict=True))
        return same and numbers.size == 50 and bool(np.all(values == 2)) and bool(np.all(known == 6))

    assert run_job(threaded, 2, work) == [True, True]
    assert divided


def test_one_thread_collects_rows(threaded: Config, divided: list[int]) -> None:
    """They come to lie one behind the other, those of all shards."""
    with Communicator(threaded, rank=0, size=1, job=unique_job()) as comm:
        comm.allreduce_rows(np.arange(3000), np.ones((3000, 256), np.float32), 3000)
        assert not divided
        comm.allreduce(np.ones(3000 * BLOCK, np.float32))
        assert divided


def test_a_shard_that_breaks_the_protocol_is_blamed(
    threaded: Config, divided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ShardStream._place

    def broken(stream: ShardStream, slot: int, nbytes: int) -> Any:
        if stream.shard == 2:
            raise ProtocolError("made for this test")
        return place(stream, slot, nbytes)

    monkeypatch.setattr(ShardStream, "_place", broken)

    def work(comm: Communicator) -> str:
        with pytest.raises(AbortedError) as caught:
            comm.allreduce(np.ones(300 * BLOCK, np.float32))
        return f"{caught.value.culprit}: {caught.value.reason}"

    expected = f"aggregator {threaded.cluster.aggregators[2]}: protocol error: made for this test"
    assert run_job(threaded, 1, work) == [expected]


def test_an_interrupt_in_a_thread_ends_the_job_on_all_ranks(
    threaded: Config, divided: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = ShardStream.pack

    def interrupted(stream: ShardStream) -> Any:
        if stream.shard == 1 and hurt and stream is hurt[0]:
            raise KeyboardInterrupt
        return pack(stream)

    hurt: list[ShardStream] = []
    monkeypatch.setattr(ShardStream, "pack", interrupted)

    def work(comm: Communicator) -> str:
        comm.barrier()
        if comm.rank == 0:
            hurt.append(comm._machine._streams[1])
            with pytest.raises(KeyboardInterrupt):
                comm.allreduce(np.ones(300 * BLOCK, np.float32))
        with pytest.raises(AbortedError) as caught:
            comm.allreduce(np.ones(300 * BLOCK, np.float32))
        return caught.value.culprit

    assert all(each.startswith("rank 0 ") for each in run_job(threaded, 2, work))


def test_a_forked_child_ends_though_its_parent_has_threads(threaded: Config, divided: list[int]) -> None:
    def work(comm: Communicator) -> float:
        comm.allreduce(np.ones(100 * BLOCK, np.float32))
        child = os.fork()
        if not child:
            try:
                comm.allreduce(np.ones(BLOCK, np.float32))
            except AbortedError:
                comm.shutdown()
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return float(comm.allreduce(np.ones(100 * BLOCK, np.float32))[0])

    with Communicator(threaded, rank=0, size=1, job=unique_job()) as comm:
        assert work(comm) == 1.0


def test_a_process_ends_by_itself_though_it_never_shuts_down(threaded: Config) -> None:
    script = """
import sys
import numpy as np
import omnireduce as omni
from omnireduce.runtime.member.crew import Threads
Threads.worth_bytes = 0
comm = omni.connect(rank=0, size=1, job=sys.argv[1])
print(comm.allreduce(np.ones(100 * 256, np.float32))[-1])
"""
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(threaded.cluster.aggregators)}
    environ["OMNIREDUCE_TRANSPORT_THREADS"] = "3"
    environ["OMNIREDUCE_TRANSPORT_HOST_EXCHANGE"] = "off"
    with Process(sys.executable, "-c", script, unique_job(), environ=environ, from_scratch=True) as process:
        assert process.line() == "1.0"
        assert process.wait() == 0


def test_a_trace_has_what_all_threads_did(daemon: Daemon, divided: list[int], tmp_path: Path) -> None:
    job, settings = unique_job(), (*over("tcp"), "transport.threads=3", f"trace.folder={tmp_path}")

    def work(comm: Communicator) -> None:
        comm.allreduce(np.ones(600 * BLOCK, np.float32))

    run_job(configured(daemon.addresses, *settings), 1, work, job)
    _, spans = read_trace(tmp_path / f"{job}-rank0.npz")
    packed = spans[spans["what"] == What.PACK]
    assert packed["detail"].sum() == 600
    assert set(packed["peer"]) == {0, 1, 2}
    assert [spans["detail"][spans["what"] == what].tolist() for what in (What.OWN, What.UNION)] == [[600], [600]]
    assert np.all(spans["start"] <= spans["end"])
    assert divided
