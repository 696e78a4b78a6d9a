"""One rank of the honest job as a process: it sums small tensors, checks every sum, and measures each."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
from faults.worker import FINISH, report
from local_cluster import configured
from transports import check_carried

from omnireduce import Communicator, OmniReduceError

SAMPLES = "samples"  # a request for the measurements since the last request
ELEMENTS = 20_000
IDLE_S = 0.002  # between two collectives
CYCLE = 7  # data of a collective comes again after so many collectives


@dataclass(frozen=True)
class Samples:
    """Seconds of each collective."""

    seconds: list[float]
    event: str = SAMPLES


def serve(pipe: Connection, address: str, job: str, rank: int, size: int, overrides: tuple[str, ...]) -> None:
    """Be rank `rank` of a job until all ranks were told to finish. Reports `joined`, samples, and the end: `left`,
    `wrong` or `error`."""
    logging.getLogger("omnireduce").setLevel(logging.CRITICAL)
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            with Communicator(configured([address], *overrides), rank=rank, size=size, job=job) as comm:
                pipe.send(report("joined", text=comm.transport))
                _run(pipe, comm)
                check_carried(comm, overrides)
            pipe.send(report("left"))
        except AssertionError as error:
            pipe.send(report("wrong", text=str(error)))
        except OmniReduceError as error:
            pipe.send(report("error", kind=type(error).__name__, text=str(error)))


def _run(pipe: Connection, comm: Communicator) -> None:
    """Sum until all ranks were told to finish. The last element counts those, so that all stop together."""
    parts = [_contribution(rank) for rank in range(comm.size)]
    contribution, total, out = parts[comm.rank], np.sum(parts, axis=0, dtype=np.float32), np.empty(ELEMENTS, np.float32)
    seconds: list[float] = []
    finishing, number = 0.0, 0
    while not number or out[-1] < comm.size:
        factor = 1 + number % CYCLE
        x = contribution * factor
        x[-1] = finishing
        began = time.monotonic()
        comm.allreduce(x, out=out, name="gradient")
        seconds.append(time.monotonic() - began)
        wrong = np.count_nonzero(out[:-1] != total[:-1] * factor)
        assert not wrong, f"collective {number}: {wrong} elements are wrong"
        number += 1
        if pipe.poll(IDLE_S):
            if pipe.recv() == FINISH:
                finishing = 1.0
            else:
                pipe.send(Samples(seconds))
                seconds = []


def _contribution(rank: int) -> np.ndarray:
    """Small integers, whose sums are exact; some blocks are zero."""
    numbers = np.arange(ELEMENTS)
    used = np.random.default_rng(rank).random(-(-ELEMENTS // 256)).repeat(256)[:ELEMENTS] < 0.6
    return np.where(used, 1 + (rank + numbers) % 5, 0).astype(np.float32)
