"""Thousands of jobs on one daemon, in parallel and one after another under the same names; nothing of them remains."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
from local_cluster import WAIT_S, Daemon, Ranks, configured, eventually, open_files
from transports import MEMORY, check_carried, over

from omnireduce import AbortedError, Communicator

from .crew import WorkerProcess
from .plan import SHARDS
from .site import REST_S, Held, held
from .worker import report

RANKS = 2  # ranks of each job: threads of different processes
LANES = 4  # jobs at once
FAILING = 10  # one of so many jobs fails
MOST_BATCHES = 20  # after each of which everything is at rest
LIMITS = ("cluster.join_timeout_s=20", "cluster.timeout_s=20")
GROWTH_BYTES = 4 << 20  # from the second quarter of the batches to the last
WORKER_GROWTH_BYTES = 16 << 20  # the allocator has an arena for each of a worker's many threads, and they ebb and flow


@dataclass(frozen=True)
class Batch:
    """Jobs by number: lane l runs those with number mod LANES == l, one after another."""

    jobs: range
    aggregators: tuple[str, ...]


def serve(pipe: Connection, rank: int) -> None:
    """Run this rank of all jobs of one batch after another."""
    logging.getLogger("omnireduce").setLevel(logging.CRITICAL)
    with suppress(EOFError, ConnectionError):
        while True:
            batch: Batch = pipe.recv()
            try:
                _run_batch(batch, rank)
            except Exception as error:
                pipe.send(report("wrong", text=repr(error)))
            else:
                gc.collect()  # an exception keeps its frames until then
                pipe.send(report("batch"))


def _run_batch(batch: Batch, rank: int) -> None:
    def run(lane: int) -> None:
        for number in batch.jobs:
            if number % LANES == lane:
                _run_job(batch.aggregators, number, rank)

    Ranks(LANES, run).results(WAIT_S + len(batch.jobs))


def _run_job(aggregators: Sequence[str], number: int, rank: int) -> None:
    """One job, which follows from its number. One that fails is left by its last rank."""
    draw = random.Random(number)
    kind, shards = draw.choice(("shm", "tcp", MEMORY)), draw.randint(1, SHARDS)
    config = configured(aggregators[:shards], *over(kind), *LIMITS)
    fails = number % FAILING == FAILING - 1
    expected: type[Exception] = ZeroDivisionError if rank == RANKS - 1 else AbortedError
    try:
        with Communicator(config, rank=rank, size=RANKS, job=f"lane-{number % LANES}") as comm:
            for _ in range(draw.randint(1, 4)):
                x = np.full(draw.choice((1, 1000, 200_000)), rank + 1, np.float32)
                total = (comm.allreduce_async(x).wait if draw.random() < 0.3 else lambda x=x: comm.allreduce(x))()
                assert (total == sum(range(RANKS + 1))).all(), f"job {number}: wrong sum"
            check_carried(comm, over(kind))
            if fails and rank == RANKS - 1:
                raise ZeroDivisionError
            comm.barrier()
    except expected:
        assert fails, f"job {number} failed"
    else:
        assert not fails, f"job {number} did not fail"


def soak(jobs: int, say: Callable[[str], None]) -> bool:
    """Run so many jobs; `say` gets a line for each batch. Returns whether descriptors and memory of all processes
    stayed flat. Raises AssertionError when a job goes wrong."""
    started = time.monotonic()
    with Daemon(SHARDS) as daemon, ExitStack() as stack:
        members = [stack.enter_context(WorkerProcess(rank, target=serve)) for rank in range(RANKS)]
        watched = _Watched(daemon, members)
        for batch in _batches(jobs):
            for member in members:
                member.tell(Batch(batch, tuple(daemon.addresses)))
            for member in members:
                result = member.hear("batch", "wrong", within_s=2 * WAIT_S + len(batch))
                assert result.event == "batch", f"jobs {batch.start} to {batch.stop - 1}: {result.text}\n{daemon.log}"
            say(f"{batch.stop} jobs: {watched.look()}")
        assert "internal error" not in daemon.log, daemon.log
    verdicts = watched.verdicts()
    for _, text in verdicts:
        say(text)
    flat = all(good for good, _ in verdicts)
    say(f"{jobs} jobs, {LANES} at once, {time.monotonic() - started:.1f} s: {'flat' if flat else 'NOT FLAT'}")
    return flat


def _batches(jobs: int) -> list[range]:
    count = max(4, min(MOST_BATCHES, jobs // (4 * LANES)))
    return [range(jobs * i // count, jobs * (i + 1) // count) for i in range(count)]


def _links(pid: int) -> int:
    """Number of open sockets and slot files of a process."""
    return sum(name.startswith(("socket:", "/memfd:")) for name in open_files(pid))


class _Watched:
    """All processes, and what each held at rest after each batch."""

    def __init__(self, daemon: Daemon, members: Sequence[WorkerProcess]) -> None:
        self._pids = {"supervisor": daemon.pid}
        self._pids |= {f"shard {number}": pid for number, pid in enumerate(daemon.shard_pids)}
        self._links = {pid: _links(pid) for pid in self._pids.values()}
        self._pids |= {f"worker {rank}": member.pid for rank, member in enumerate(members)}
        self._history: dict[str, list[Held]] = {who: [] for who in self._pids}

    def look(self) -> str:
        """Wait until the daemon has no more connections and slots than at first; note what all processes hold."""
        for pid, count in self._links.items():
            back = eventually(lambda pid=pid, count=count: _links(pid) <= count, REST_S)
            assert back, f"sockets and slots: at first {count}, now {open_files(pid)}"
        for who, pid in self._pids.items():
            self._history[who].append(held(pid))
        return ", ".join(f"{who} {history[-1]}" for who, history in self._history.items())

    def verdicts(self) -> list[tuple[bool, str]]:
        return [flatness(who, history) for who, history in self._history.items()]


def flatness(who: str, history: Sequence[Held]) -> tuple[bool, str]:
    """Whether a process held no more in the last quarter than in the second, in the first caches fill; and the
    figures."""
    quarter = len(history) // 4
    parts = history[quarter : 2 * quarter], history[-quarter:]
    memory = [median(each.memory for each in part) for part in parts]
    files = [max(each.files for each in part) for part in parts]
    limit = WORKER_GROWTH_BYTES if who.startswith("worker") else GROWTH_BYTES
    flat = memory[1] - memory[0] <= limit and files[1] <= files[0]
    text = f"{memory[0] / 2**20:.2f} to {memory[1] / 2**20:.2f} MiB, {files[0]} to {files[1]} descriptors"
    return flat, f"{who}: {text}{'' if flat else ' NOT FLAT'}"
