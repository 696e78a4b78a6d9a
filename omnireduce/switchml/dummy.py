"""SwitchML's dummy backend: it exchanges nothing, and sleeps for as long as a network would take.

It serves to try a program, or a pre- and postprocessor, in one process. Packets come back in a random order, with their
entries multiplied by the number of ranks, as if all ranks had sent the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import ClosedError
from omnireduce.runtime.rank.channels import Statistics
from omnireduce.support.config import Config
from omnireduce.switchml.packets import Batch
from omnireduce.switchml.settings import Dummy

BITS = 32  # of an entry
DUMMY_THREADS = 4  # if the configuration gives no number


class DummyExchange:
    """Exchange that sends packets nowhere. So many `threads` share its bandwidth."""

    def __init__(self, num_workers: int, settings: Dummy, threads: int) -> None:
        self._factor = num_workers if settings.process_packets else 1
        self._bits_per_s = settings.bandwidth_mbps * 1e6 / threads
        self._stopped = threading.Event()
        self._random = np.random.default_rng()

    def receive(self, name: str, batch: Batch, *, with_extra: bool) -> Sequence[int]:
        packets = self._random.permutation(batch.pending)[: self._random.integers(1, len(batch.pending), endpoint=True)]
        numbers: list[int] = packets.tolist()
        rows = batch.rows(numbers)
        batch.entries[rows] *= self._factor
        seconds = batch.entries[rows].size * BITS / self._bits_per_s if self._bits_per_s else 0.0
        if self._stopped.wait(seconds):
            raise ClosedError(f"the context was stopped during {name}")
        return numbers

    def stop(self, error: BaseException | None = None) -> None:
        self._stopped.set()


class DummyCommunicator:
    """Communicator of a context of the dummy backend: its rank is alone."""

    transport, shards, generation = "dummy", 0, 0

    def __init__(self, config: Config, rank: int, size: int) -> None:
        self.config, self.rank, self.size = config, rank, size

    def allreduce(self, x: Array, *, name: str = "") -> Array:
        """Multiply `x` by the number of ranks, as if all of them had the same `x`."""
        x *= self.size
        return x

    def refuse(self, error: Exception) -> None:
        """Do nothing: no other rank waits for this one."""

    def barrier(self, *, name: str = "") -> None:
        """Do nothing: there is no other rank to wait for."""

    def statistics(self) -> Statistics:
        """Statistics of zeros: no bytes were moved."""
        return Statistics(0, 0, 0, (), {})

    def shutdown(self) -> None:
        """Do nothing: there is no connection to close."""

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no other rank to tell of an error."""
