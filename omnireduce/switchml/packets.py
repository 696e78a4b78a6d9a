"""Jobs in packets, as SwitchML's worker threads exchange them: through a pre- and postprocessor, over the service or
over the dummy backend.

One job follows another. Each is cut into as many parts as there are threads, and each thread goes through the packets
of its part: it sends a batch. When packet p comes back, its memory is used for packet p + batch size.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import ClosedError, OmniReduceError, UsageError, in_a_line
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.switchml.prepostprocessor import JobSlice, PrePostProcessor


class Batch(NamedTuple):
    """The memory of packets that are under way: `entries`, int32 (packets, packet_numel), and `extra_info`, int16
    (packets, 1). Packet `p` has row `p % packets`. `pending`: their numbers."""

    entries: Array
    extra_info: Array
    pending: list[int]

    def rows(self, packets: Sequence[int]) -> list[int]:
        """The rows of these packets."""
        return [packet % len(self.entries) for packet in packets]


class Exchange(Protocol):
    """The exchange that packets go through."""

    def receive(self, name: str, batch: Batch, *, with_extra: bool) -> Sequence[int]:
        """Put the sums of some of the pending packets into their memory and return their numbers. `name` is that of the
        turn. `with_extra`: `extra_info` counts, too."""

    def stop(self, error: BaseException | None = None) -> None:
        """Let `receive` raise ClosedError soon. Other ranks hear of the error."""


class ServiceExchange:
    """Each batch is a sum over all ranks, which are in step."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def receive(self, name: str, batch: Batch, *, with_extra: bool) -> Sequence[int]:
        rows = batch.rows(batch.pending)
        batch.entries[rows] = self._comm.allreduce(batch.entries[rows], name=name)
        if with_extra:
            batch.extra_info[rows] = self._comm.allreduce(batch.extra_info[rows], op="max", name=f"{name}, extra")
        return list(batch.pending)

    def stop(self, error: BaseException | None = None) -> None:
        self._comm.__exit__(None if error is None else type(error), error, None)


def exchange_slice(processor: PrePostProcessor, job_slice: JobSlice, exchange: Exchange, name: str) -> None:
    """Go through the packets of a part of a job."""
    packets = processor.setup_job_slice(job_slice)
    size = min(processor.max_batch, packets)
    with_extra = processor.needs_extra_batch()
    end = packets + (size if with_extra else 0)
    batch = Batch(np.zeros((size, processor.packet_numel), np.int32), np.zeros((size, 1), np.int16), [])

    def send(packet: int) -> None:
        if packet < end:
            row = packet % size
            processor.preprocess_single(packet, batch.entries[row], batch.extra_info[row])
            batch.pending.append(packet)

    for packet in range(size):
        send(packet)
    turns = count()
    while batch.pending:
        for packet in exchange.receive(f"{name}, {next(turns)}", batch, with_extra=with_extra):
            batch.pending.remove(packet)
            row = packet % size
            processor.postprocess_single(packet, batch.entries[row], batch.extra_info[row])
            send(packet + size)
    processor.cleanup_job_slice()


class PacketJob:
    """A job that was handed to `PacketStarter`."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._future.result(timeout_s)


class InstantStarter:
    """Starts jobs that are over at once: their arrays stay as they are."""

    def allreduce_async(self, x: Array, *, out: Array | None = None, name: str = "") -> PacketJob:
        future = Future[None]()
        future.set_result(None)
        return PacketJob(future)


class PacketStarter:
    """Exchanges jobs in packets; there is one processor for each thread."""

    def __init__(self, exchange: Exchange, processors: Sequence[PrePostProcessor]) -> None:
        self._exchange, self._processors = exchange, processors
        self._stopped = threading.Event()
        self._jobs = ThreadPoolExecutor(1, "omnireduce-switchml-jobs")
        self._parts = ThreadPoolExecutor(len(processors), "omnireduce-switchml-part")

    def allreduce_async(self, x: Array, *, out: Array | None = None, name: str = "") -> PacketJob:
        """Begin, after the jobs before. It ends with ClosedError after `stop`, with UsageError where the processor
        raises, and else with what ends a collective."""
        return PacketJob(self._jobs.submit(self._run, x.reshape(-1), (x if out is None else out).reshape(-1), name))

    def stop(self) -> None:
        """End the job that is under way, and those behind it."""
        self._stopped.set()
        self._exchange.stop()
        self._jobs.shutdown()
        self._parts.shutdown()

    def _run(self, x: Array, out: Array, name: str) -> None:
        if self._stopped.is_set():
            raise ClosedError(f"the context was stopped before {name} was begun")
        threads = len(self._processors)
        parts = zip(self._processors, np.array_split(x, threads), np.array_split(out, threads), strict=True)
        futures = [
            self._parts.submit(exchange_slice, processor, JobSlice(*part), self._exchange, name)
            for processor, *part in parts
            if part[0].size
        ]
        try:
            for future in futures:
                future.result()
        except OmniReduceError:
            raise
        except BaseException as error:  # it is a user's own, and may raise anything, also SystemExit
            self._exchange.stop(error)
            kind = type(self._processors[0])
            raise UsageError(f"the prepostprocessor {kind.__name__} failed: {in_a_line(error)}") from error
