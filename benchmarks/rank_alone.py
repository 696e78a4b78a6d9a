"""The speed at which a rank packs and places, with shards that cost nothing: each result is the message itself.

So the threads of the rank have all processors, as on a host with a processor for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.cases import BLOCK
from omnireduce.core.descriptor import describe
from omnireduce.core.dtypes import Array, element_type
from omnireduce.core.wire.blocks import read_header, room_for
from omnireduce.protocol.collective.operands import DenseTensor
from omnireduce.protocol.rank import WorkerMachine
from omnireduce.runtime.rank.threads import ParallelDriver, Threads
from omnireduce.transport.base import Credited, Received
from omnireduce.transport.inproc import InprocLink

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
            slots = np.zeros((SLOTS, room_for(MESSAGE_BYTES)), np.uint8)
            link.attach(slots, slots)
        self._shards, self._done = shards, False
        self._machine = WorkerMachine(
            [(link.send_slots, link.receive_slots) for link in links], [link.peer for link in links], "the rank",
            rank=0, scan_span=SPAN, timeout_s=60.0, threads=pool,
        )  # fmt: skip
        self._driver = ParallelDriver(self._machine, links, time.monotonic, on_finish=self._finished)

    def _finished(self, number: int) -> None:
        self._done = True

    def all_reduce(self, x: Array) -> None:
        """In place. With one rank the sum is `x` itself."""
        descriptor = describe("allreduce", "", str(x.dtype), x.shape, "sum", BLOCK)
        layout = descriptor.layout._replace(shards=self._shards)
        self._done = False
        self._machine.submit(descriptor, DenseTensor(x, x, layout, element_type(x.dtype).zero_mask), time.monotonic())
        while not self._done:
            self._driver.turn()


@contextmanager
def rank_alone(threads: int, shards: int) -> Iterator[RankAlone]:
    pool = Threads(threads) if threads > 1 else None
    try:
        yield RankAlone(pool, shards)
    finally:
        if pool is not None:
            pool.close()
