"""The threads of a rank: how many, that they work at the same time, and that sums and ends are the same with them."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, Process, configured, eventually, run_job, unique_job
from tensors import sparse
from transports import KINDS, MEMORY, over

from benchmarks.harness.inproc import pair
from omnireduce.errors import AbortedError, OmniReduceError, ProtocolError
from omnireduce.protocol.collective.stream import ShardStream
from omnireduce.runtime.rank import engine, joining
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.threads import MAX_DEFAULT_THREADS, Threads, threads_for
from omnireduce.support.config import Config
from omnireduce.transport.base import Link
from omnireduce.transport.unix_sockets import Peer

BLOCK = 256
QUOTA = "omnireduce.runtime.rank.threads.quota"


def links(count: int, local: int = 0) -> list[Link]:
    results: list[Link] = [pair("shard", "rank")[0] for _ in range(count)]
    for result in results[:local]:
        result.process = Peer(os.getpid(), os.geteuid())
    return results


def count_of(pool: Threads | None) -> int:
    if pool is None:
        return 1
    pool.close()
    return pool.count


@pytest.mark.parametrize(
    ("configured", "cores", "shards", "local", "neighbours", "threads"),
    [
        (0, 16, 8, 0, 1, MAX_DEFAULT_THREADS),
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
    monkeypatch: pytest.MonkeyPatch, configured: int, cores: int, shards: int, local: int, neighbours: int, threads: int
) -> None:
    monkeypatch.setattr(QUOTA, lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert count_of(threads_for(configured, links(shards, local), neighbours)) == threads


def test_ranks_that_share_no_memory_are_known_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(QUOTA, lambda: None)
    results = []
    for local_size in ("4", "2", "nonsense"):
        for name, value in {"RANK": "0", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": local_size}.items():
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
        results.append(count_of(threads_for(0, links(8), 1)))
    assert results == [2, 4, MAX_DEFAULT_THREADS]


@pytest.mark.parametrize(("quota", "expected"), [(None, MAX_DEFAULT_THREADS), (4.5, 2), (0.5, 1)])
def test_a_quota_is_a_share_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(QUOTA, lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert count_of(threads_for(0, links(8), 1)) == expected


@pytest.fixture
def three() -> Iterator[Threads]:
    pool = Threads(3)
    yield pool
    pool.close()


def test_calls_run_at_the_same_time(three: Threads) -> None:
    together = threading.Barrier(3)
    assert sorted(three.run([lambda: together.wait(WAIT_S)] * 3)) == [0, 1, 2]


def test_results_come_in_the_order_of_the_calls(three: Threads) -> None:
    assert three.run([partial(int, number) for number in range(100)]) == list(range(100))


def test_the_first_error_comes_out_when_all_are_done(three: Threads) -> None:
    done = []

    def call(number: int) -> None:
        if number in (1, 3):
            raise ArithmeticError(number)
        done.append(number)

    with pytest.raises(ArithmeticError, match="1"):
        three.run([partial(call, number) for number in range(5)])
    assert sorted(done) == [0, 2, 4]


class Held:
    """An object to which a call refers, as to slots and the user's arrays."""

    def fail(self) -> None:
        raise ArithmeticError

    def pass_on(self) -> None:
        return


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_keeps_nothing_until_the_cycle_collector_runs(three: Threads, failing: int) -> None:
    held = Held()
    gone = weakref.ref(held)
    calls = [held.pass_on, held.pass_on]
    calls[failing] = held.fail
    gc.disable()
    try:
        with suppress(ArithmeticError):
            three.run(calls)
        del held, calls
        assert eventually(lambda: gone() is None)  # the other thread lets go of it in its own time
    finally:
        gc.enable()


HAMMERED = """
import random, signal, threading, zlib
from omnireduce.runtime.rank.threads import Threads

chance, data, came, went, armed, interrupted = random.Random(1), bytes(1 << 16), [], [], 0, 0

def call():
    if threading.current_thread() is threading.main_thread():
        return zlib.crc32(data)
    came.append(None)
    zlib.crc32(data)  # without the interpreter's lock
    went.append(None)

def handler(*_):
    global armed, interrupted
    if armed:  # once, or once more while that is dealt with
        armed, interrupted = armed - 1, interrupted + 1
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00001, 0.0001))
        raise TimeoutError

signal.signal(signal.SIGALRM, handler)
pool = Threads(3)
while interrupted < 3000:
    try:
        try:
            armed = 2
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.00002, 0.0006))
            pool.run([call] * 5)
            armed = 0
        except TimeoutError:
            armed = 0
    except TimeoutError:
        armed = 0
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(came) == len(went), "a call runs on"
assert len(went) > 1000, "the other threads did nothing"
assert pool.run([lambda at=at: at for at in range(5)]) == [0, 1, 2, 3, 4]
pool.close()
print("done")
"""


@pytest.mark.slow
def test_an_interrupt_between_any_two_lines_leaves_no_lock_and_no_call_behind() -> None:
    with Process(sys.executable, "-c", HAMMERED, from_scratch=True) as process:
        assert process.line() == "done"
        assert process.wait() == 0


def test_after_an_interrupt_no_call_runs_on(three: Threads) -> None:
    """One has begun in another thread, and goes on until the interrupt has come; another one never begins."""
    interrupted, inside, ends = threading.Event(), threading.Barrier(3), []

    def slow() -> None:
        inside.wait(WAIT_S)
        assert interrupted.wait(WAIT_S)
        ends.append("ended")

    def interrupt() -> None:
        inside.wait(WAIT_S)
        interrupted.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        three.run([interrupt, slow, slow])
    assert ends == ["ended"] * 2


def test_no_thread_outlives_its_pool() -> None:
    before = threading.active_count()
    pool = Threads(4)
    assert threading.active_count() == before + 3
    pool.close()
    assert threading.active_count() == before


def test_threads_end_with_a_rank_that_nobody_shuts_down(daemon: Daemon) -> None:
    before = set(threading.enumerate())
    comm = Communicator(configured(daemon.addresses, *over("tcp"), "transport.threads=3"), rank=0, size=1)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # warnings of its open sockets
        del comm
        gc.collect()
    assert eventually(lambda: not any(helper.is_alive() for helper in helpers))


def test_an_interrupt_counts_more_than_an_error(three: Threads) -> None:
    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyboardInterrupt):
        three.run([partial(fail, ArithmeticError()), partial(fail, KeyboardInterrupt())])


@pytest.mark.parametrize(("configured", "ends"), [(3, True), (0, False)])
def test_no_room_for_threads(monkeypatch: pytest.MonkeyPatch, configured: int, ends: bool) -> None:
    """It is an error, before the first collective, where the user wants them. Else one thread does everything."""
    before, start = threading.active_count(), threading.Thread.start

    def full(self: threading.Thread) -> None:
        if threading.active_count() > before:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", full)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(QUOTA, lambda: None)
    if ends:
        with pytest.raises(BlockingIOError, match=r"no room for 3 threads; set transport\.threads = 1"):
            threads_for(configured, links(3), 1)
    else:
        assert threads_for(configured, links(3), 1) is None
    assert threading.active_count() == before


def test_a_rank_without_room_for_its_threads_says_so(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise BlockingIOError(11, "no room for 3 threads; set transport.threads = 1")

    monkeypatch.setattr(joining, "threads_for", full)
    with pytest.raises(OmniReduceError, match=r"could not begin: no room for 3 threads"):
        Communicator(configured(daemon.addresses, "transport.threads=3"), rank=0, size=1, job=unique_job())


def test_threads_end_when_the_rank_cannot_begin(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(24, "Too many open files")

    before = threading.active_count()
    monkeypatch.setattr(engine, "Poller", full)
    with pytest.raises(OmniReduceError, match="could not begin"):
        Communicator(configured(daemon.addresses, *over("tcp"), "transport.threads=3"), rank=0, size=1)
    assert threading.active_count() == before


def test_the_channel_for_urgent_tensors_has_no_threads(daemon: Daemon) -> None:
    before, urgent = threading.active_count(), ("transport.threads=3", "protocol.urgent_bytes=4096")
    with Communicator(configured(daemon.addresses, *over("tcp"), *urgent), rank=0, size=1, job=unique_job()):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before


def test_a_traced_rank_has_one_thread(daemon: Daemon, tmp_path: Path) -> None:
    """Its trace is one line of work: spans of several threads would overlap."""
    before, settings = threading.active_count(), (*over("tcp"), "transport.threads=3", f"trace.folder={tmp_path}")
    with Communicator(configured(daemon.addresses, *settings), rank=0, size=1, job=unique_job()):
        assert threading.active_count() == before


@pytest.fixture
def divided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small tensors are divided, too. The list gets the number of calls, each time that work is."""
    results: list[int] = []
    run = Threads.run

    def counted(pool: Threads, calls: Any) -> Any:
        results.append(len(calls))
        return run(pool, calls)

    monkeypatch.setattr(Threads, "run", counted)
    monkeypatch.setattr(Threads, "worth_bytes", 0)
    return results


@pytest.fixture(params=[*KINDS, MEMORY])
def both(daemon: Daemon, request: pytest.FixtureRequest) -> list[Config]:
    """Three shards, for ranks of three threads and for ranks of one."""
    return [configured(daemon.addresses, *over(request.param), f"transport.threads={n}") for n in (3, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_sums_are_the_same_with_threads(both: list[Config], divided: list[int], dtype: str) -> None:
    shape = (300 * BLOCK + 77,)

    def work(comm: Communicator) -> list[bytes]:
        results = []
        for density in (1.0, 0.3, 0.01, 0.0):
            own = sparse(comm.rank, dtype, shape, density=density)
            separate = np.full(shape, 1, own.dtype)
            comm.allreduce(own, out=separate)
            comm.allreduce(own)
            assert separate.tobytes() == own.tobytes()
            results.append(own.tobytes())
        return results

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
        handles = [comm.allreduce_async(tensor) for tensor in tensors[:2]]
        numbers, values = comm.allreduce_rows(np.arange(50), np.ones((50, 16), np.float32), 64)
        handles += [comm.allreduce_async(tensor) for tensor in tensors[2:]]
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
    original = ShardStream._place

    def broken(stream: ShardStream, slot: int, nbytes: int) -> Any:
        if stream.shard == 2:
            raise ProtocolError("made for this test")
        return original(stream, slot, nbytes)

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

    assert all(result.startswith("rank 0 ") for result in run_job(threaded, 2, work))


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


def test_threads_work_until_the_process_has_ended(threaded: Config) -> None:
    """Also for a thread that goes on when the main thread has ended, and for what the process does at its exit. Nobody
    shuts down."""
    script = """
import atexit, sys, threading
import numpy as np
import omnireduce as omni
from omnireduce.runtime.rank.threads import Threads
Threads.worth_bytes = 0
comm = omni.connect(rank=0, size=1, job=sys.argv[1])

def total(name=""):
    return comm.allreduce(np.ones(100 * 256, np.float32), name=name)[-1]

def later():
    threading.main_thread().join()
    print(total("later"), flush=True)

print(total(), flush=True)
atexit.register(lambda: print(total(), flush=True))
threading.Thread(target=later).start()
"""
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(threaded.cluster.aggregators)}
    environ["OMNIREDUCE_TRANSPORT_THREADS"] = "3"
    environ["OMNIREDUCE_TRANSPORT_HOST_EXCHANGE"] = "off"
    with Process(sys.executable, "-c", script, unique_job(), environ=environ, from_scratch=True) as process:
        assert [process.line() for _ in range(3)] == ["1.0"] * 3
        assert process.wait() == 0
