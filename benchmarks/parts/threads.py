"""The gain from a second thread of a rank: one rank, with shards that cost nothing, and with shards on one processor.

Shards that cost nothing return each message as the result. So the threads of the rank have all processors, as on a host
with a processor for each.

`python -m benchmarks.parts.threads SOCKET OPTIONS` is the rank.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import BLOCK, SIZES
from benchmarks.harness.carriers import NOTHING
from benchmarks.harness.group import Group, PeerError, Servers, daemon, service_group
from benchmarks.harness.inproc import InprocLink
from benchmarks.harness.orders import connect, serve_turns
from benchmarks.harness.verdicts import at_least, show_verdicts
from omnireduce.core.descriptor import describe
from omnireduce.core.dtypes import Array, element_type
from omnireduce.core.wire.blocks import read_header, slot_bytes_for
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.rank import RankMachine
from omnireduce.runtime.rank.threads import ParallelDriver, Threads
from omnireduce.transport.base import Credited, Received

SLOTS, MESSAGE_BYTES, SPAN = 4, 1 << 20, 1 << 14
EXTRA_AT = slice(24, 28)  # in a header: how many bytes of `extra` there are


class Echo(InprocLink):
    """A link to a shard that returns each message at once, as the result."""

    def _send(self, slot: int, nbytes: int) -> None:
        memory = self.send_slots[slot]
        header = read_header(memory, nbytes)
        if header.extra_bytes:  # results have none
            memory[EXTRA_AT].view(np.uint32)[:] = 0
            nbytes -= header.extra_bytes
        self.deliver(Received(slot, nbytes))
        self.deliver(Credited(slot))

    def _return_credit(self, slot: int) -> None:
        """The slot was the rank's own all the time."""


class RankAlone:
    """A rank with so many threads and shards."""

    def __init__(self, pool: Threads | None, shards: int) -> None:
        links = [Echo(f"shard {shard}") for shard in range(shards)]
        for link in links:
            slots = np.zeros((SLOTS, slot_bytes_for(MESSAGE_BYTES)), np.uint8)
            link.attach(slots, slots)
        self._shards, self._is_done = shards, False
        self._machine = RankMachine(
            [(link.send_slots, link.receive_slots) for link in links], [link.peer for link in links], "the rank",
            rank=0, scan_span=SPAN, timeout_s=60.0, threads=pool,
        )  # fmt: skip
        self._driver = ParallelDriver(self._machine, links, time.monotonic, on_finish=self._note_end)

    def _note_end(self, number: int) -> None:
        self._is_done = True

    def all_reduce(self, x: Array) -> None:
        """In place. With one rank the sum is `x` itself."""
        descriptor = describe("allreduce", "", str(x.dtype), x.shape, "sum", BLOCK)
        layout = descriptor.layout._replace(shards=self._shards)
        self._is_done = False
        self._machine.submit(descriptor, DenseTensor(x, x, layout, element_type(x.dtype).zero_mask), time.monotonic())
        while not self._is_done:
            self._driver.turn()


@contextmanager
def rank_alone(threads: int, shards: int) -> Iterator[RankAlone]:
    pool = Threads(threads) if threads > 1 else None
    try:
        yield RankAlone(pool, shards)
    finally:
        if pool is not None:
            pool.close()


ALONE, TRANSPORTS, DENSITIES, SHARDS = "the rank alone", ("shm", "tcp"), (1.0, 0.1, 0.01), 4
THREADS = (1, 2)
MIN_SPEEDUP = 1.0  # times as fast
# of each number of threads and each density, ms: every turn, the rank's work in it, and that of the shards
Times = dict[tuple[int, float], list[tuple[float, float, float]]]


class Rank:
    """The rank. All values are whole numbers, so that sums are exact."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._comm = connect(options)
        self._tensor = np.empty(SIZES["100 MiB"], np.float32)

    def turn(self, density: float) -> dict[str, float]:
        """Milliseconds of one all-reduce, and those of the processor in this process."""
        return time_all_reduce(self._comm.allreduce, self._tensor, density)


def time_all_reduce(all_reduce: Callable[[Array], object], tensor: Array, density: float) -> dict[str, float]:
    """Milliseconds of an all-reduce of one rank, and those of the processor in this process."""
    blocks = tensor.reshape(-1, BLOCK)
    blocks[:] = 0
    blocks[np.random.default_rng(1).random(len(blocks)) < density] = 3
    expected = float(tensor.sum(dtype=np.float64))
    begin, used_before = time.perf_counter(), time.process_time()
    all_reduce(tensor)
    ms, used_ms = (time.perf_counter() - begin) * 1e3, (time.process_time() - used_before) * 1e3
    return {"ms": ms, "used_ms": used_ms, "wrong": int(tensor.sum(dtype=np.float64) != expected)}


def measure(console: Console, turns: int) -> bool:
    """Let a rank of one thread and one of two take turns; return whether two are faster when the tensor is dense.
    Raises PeerError where one fails, or finds a wrong sum."""
    verdicts = []
    table = Table(box=None)
    works = "rank works", "shards work"
    for title in ("1 rank, 100 MiB", "1 thread ms", "2 threads ms", "ratio", "at most", *works, "carried by"):
        table.add_column(title, justify="right")
    for transport in (ALONE, *TRANSPORTS):
        times, carrier = (_times_alone(turns), NOTHING) if transport == ALONE else _times(transport, turns)
        for density in DENSITIES:
            (one_ms, works, shards_work), (two_ms, _, _) = (
                np.median(times[threads, density], 0) for threads in THREADS
            )
            name, bound = f"{transport}, density {density:g}", one_ms / ((works + shards_work) / 2)
            numbers = (one_ms, two_ms, one_ms / two_ms, bound, works, shards_work)
            table.add_row(name, *(f"{number:.2f}" for number in numbers), carrier)
            if density == 1:
                verdicts.append(at_least(f"{name}: 2 threads", two_ms, "1 thread", one_ms, MIN_SPEEDUP))
    console.print(table, "at most: two processors share the work of the rank and of the shards\n")
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _times_alone(turns: int) -> Times:
    times: Times = {}
    tensor = np.empty(SIZES["100 MiB"], np.float32)
    with contextlib.ExitStack() as stack:
        ranks = {threads: stack.enter_context(rank_alone(threads, SHARDS)) for threads in THREADS}
        for _, density, (threads, rank) in itertools.product(range(turns), DENSITIES, ranks.items()):
            row = time_all_reduce(rank.all_reduce, tensor, density)
            if row["wrong"]:
                raise PeerError(ALONE, "gave wrong sums")
            times.setdefault((threads, density), []).append((row["ms"], row["used_ms"], 0.0))
    return times


def _times(transport: str, turns: int) -> tuple[Times, str]:
    """Also what has carried the tensors."""
    times: Times = {}
    with contextlib.ExitStack() as stack:
        entrants = {threads: _entrant(stack, transport, threads) for threads in THREADS}
        for _, density, (threads, (shards, rank)) in itertools.product(range(turns), DENSITIES, entrants.items()):
            before = shards.cpu_seconds()
            (row,) = rank.tell(do="turn", density=density)
            if row["wrong"]:
                raise PeerError(transport, "gave wrong sums")
            shards_ms = (shards.cpu_seconds() - before) * 1e3
            times.setdefault((threads, density), []).append((row["ms"], row["used_ms"], shards_ms))
    [carrier] = {rank.carrier for _, rank in entrants.values()}
    return times, carrier


def _entrant(stack: contextlib.ExitStack, transport: str, threads: int) -> tuple[Servers, Group]:
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-"))
    processor = str(max(os.sched_getaffinity(0)))
    shards = stack.enter_context(daemon(SHARDS, prefix=["taskset", "-c", processor]))
    sets = ("transport.host_exchange=off", f"transport.kind={transport}", f"transport.threads={threads}")
    group = service_group(1, folder, shards.addresses, *sets, program=("benchmarks.parts.threads",), carrier=transport)
    return shards, stack.enter_context(group)


if __name__ == "__main__":
    serve_turns(Rank)
