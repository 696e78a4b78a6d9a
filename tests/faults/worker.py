"""A rank as a process: it is told by a pipe which job to run, and reports what happens with the time (monotonic, the
same clock in all processes). Everything that it needs is imported, and every kernel loaded, before it is forked."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from local_cluster import configured
from transports import check_carried

from omnireduce import Communicator, OmniReduceError
from omnireduce.core.dtypes import Array
from omnireduce.kernels.warm import make_ready, worker_kernels

BLOCK = 256
ROW = 64
CLONE_NEWNET = 0x40000000
ARE_YOU_THERE, FINISH = "are you there", "finish"  # commands to a worker during a job

make_ready(worker_kernels())


@dataclass(frozen=True)
class Order:
    """A job to run as one of its ranks: so many rounds, or until all ranks were told to finish. Between two rounds a
    rank idles for `idle_s`, or until there is word for it."""

    job: str
    rank: int
    size: int
    aggregators: tuple[str, ...]
    overrides: tuple[str, ...]
    workload: str = "in place"
    elements: int = 1000
    density: float = 1.0
    rounds: int | None = None
    idle_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """`begins` to join, `joined`, `there` (an answer: a round was completed since), `left`, `error`, or `wrong`: a
    wrong sum."""

    event: str
    at: float
    kind: str = ""  # type of the error
    culprit: str = ""
    text: str = ""


def serve(pipe: Connection, namespace: str = "") -> None:
    """Run jobs until the other end of the pipe is closed; in the network namespace, if one is named."""
    logging.getLogger("omnireduce").setLevel(logging.CRITICAL)
    if namespace:
        enter_network(namespace)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            order = pipe.recv()
            if isinstance(order, Order):  # else it was meant for a job that has ended meanwhile
                pipe.send(_outcome(order, pipe))


def enter_network(namespace: str) -> None:
    """Move this thread into a network namespace; needs root."""
    descriptor = os.open(Path("/run/netns", namespace), os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    finally:
        os.close(descriptor)


def report(event: str, **details: str) -> Report:
    return Report(event, time.monotonic(), **details)


def _outcome(order: Order, pipe: Connection) -> Report:
    try:
        config, collectives = configured(order.aggregators, *order.overrides), PREPARE[order.workload](order)
        pipe.send(report("begins"))
        with Communicator(config, rank=order.rank, size=order.size, job=order.job) as comm:
            pipe.send(report("joined", text=comm.transport))
            _run(comm, collectives, order, pipe)
    except OmniReduceError as error:
        culprit = getattr(error, "culprit", "")
        return report("error", kind=type(error).__name__, culprit=culprit, text=str(error))
    except AssertionError as error:
        return report("wrong", text=str(error))
    return report("left")


def _run(comm: Communicator, collectives: Round, order: Order, pipe: Connection) -> None:
    done, finishing = 0, False
    while order.rounds is None or done < order.rounds:
        collectives(comm)
        if not done:
            check_carried(comm, order.overrides)
        done += 1
        pipe.poll(order.idle_s)
        while pipe.poll():
            if pipe.recv() == FINISH:
                finishing = True
            else:
                pipe.send(report("there"))
        if order.rounds is None and comm.allgather(np.array(finishing)).all():
            return


# workloads: each prepares its data and returns a function that runs one round and checks it; the sums of these small
# integers are exact

Round = Callable[[Communicator], None]


def _contributions(order: Order, length: int) -> list[Array]:
    """Arrays of all ranks: some blocks of `length` elements, and the last element, are not zero."""
    numbers = np.arange(-(-order.elements // length))
    parts = []
    for rank in range(order.size):
        used = np.random.default_rng((rank, order.elements)).random(numbers.size) < order.density
        part = np.repeat(np.where(used, 1 + (rank + numbers) % 7, 0).astype(np.float32), length)[: order.elements]
        part[-1] = rank + 1
        parts.append(part)
    return parts


def _check(found: Array, expected: Array) -> None:
    assert np.array_equal(found, expected), f"{np.count_nonzero(found != expected)} elements are wrong"


def _dense(order: Order) -> tuple[Array, Array]:
    """Array of this rank, and the sum of all."""
    parts = _contributions(order, BLOCK)
    return parts[order.rank], np.sum(parts, axis=0, dtype=np.float32)


def _in_place(order: Order) -> Round:
    contribution, total = _dense(order)
    x = np.empty_like(contribution)

    def run(comm: Communicator) -> None:
        x[:] = contribution
        _check(comm.allreduce(x, name="gradient"), total)

    return run


def _out_of_place(order: Order) -> Round:
    contribution, total = _dense(order)
    out = np.empty_like(contribution)
    return lambda comm: _check(comm.allreduce(contribution, out=out, name="gradient"), total)


def _asynchronous(order: Order) -> Round:
    contribution, total = _dense(order)
    first, second = np.empty_like(contribution), np.empty_like(contribution)

    def run(comm: Communicator) -> None:
        handles = [comm.allreduce_async(contribution, out=out, name="gradient") for out in (first, second)]
        for handle in handles:
            _check(handle.wait(), total)

    return run


def _rows(order: Order) -> Round:
    count = -(-order.elements // ROW)
    parts = [np.resize(part, (count, ROW)) for part in _contributions(order, ROW)]
    used = [np.flatnonzero(part.any(axis=1)) for part in parts]
    numbers, values = used[order.rank], parts[order.rank][used[order.rank]]
    union = np.unique(np.concatenate(used))
    total = np.sum(parts, axis=0, dtype=np.float32)[union]

    def run(comm: Communicator) -> None:
        indices, sums = comm.allreduce_rows(numbers, values, count, name="embedding")
        _check(indices, union)
        _check(sums, total)

    return run


PREPARE = {"in place": _in_place, "out of place": _out_of_place, "asynchronous": _asynchronous, "rows": _rows}
