"""Collectives of every kind in one process, once its kernels are ready. Prints the kernels, with the types of their
arguments, that are then loaded or compiled all the same. Arguments: the addresses of an aggregator.

What a shard does is done by its machines here: simulated clusters, and clusters in one thread. What a worker does goes
through the public calls as well, over each transport.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product

import numpy as np
from harness import InprocCluster
from local_cluster import configured, run_job
from transports import TRANSPORTS, over

from omnireduce import Communicator
from omnireduce.core.block_program import BlockProgram, Operation
from omnireduce.core.dtypes import ELEMENT_TYPES, Array, ElementType
from omnireduce.kernels.array_checksum import checksum
from omnireduce.kernels.codecs.table import BUILT_IN, codec_named
from omnireduce.kernels.compiling import jit
from omnireduce.kernels.warm import make_ready, warm_up_aggregator, worker_kernels
from omnireduce.protocol.collective.dense_operands import as_writable
from omnireduce.runtime.rank.calls.arguments import combine_duplicates
from tests.simulator import draw
from tests.simulator.campaign import Task, run_task

HOSTS: list[list[list[int]]] = [[], [[0, 1]], [[0], [1, 2]]]  # none share memory; all do; some do
RANKS, ELEMENTS, ROWS = 3, 64, 8
SEEDS_OF = (
    0, draw.FIRST_OF_HOSTS, draw.FIRST_OF_SEVERAL, draw.FIRST_OF_RELAYS, draw.FIRST_OF_PROGRAMS, draw.FIRST_OF_REFUSALS,
)  # fmt: skip
SEEDS = 3
COPY = bytes([Operation.COPY, 8, 0, 0])
OF_TENSORS, OF_ROWS = (BlockProgram(state, 1, 0, COPY, every_block=True) for state in (1, 2))


def needed() -> set[str]:
    """Names of kernels that are loaded from now on, each once for each combination of types."""
    names, load = set[str](), jit._OnDisk.load_overload

    def noted(kept: jit._OnDisk, types: object, context: object) -> object:
        names.add(f"{kept._function.__module__}.{kept._function.__qualname__}{types}")
        return load(kept, types, context)

    jit._OnDisk.load_overload = noted  # type: ignore[method-assign]
    return names


def simulate() -> None:
    for first in SEEDS_OF:
        for seed in range(first, first + SEEDS):
            assert not run_task(Task(seed)).found


def tensors(element: ElementType) -> Iterator[tuple[Array, Array]]:
    """Tensors that a rank may contribute, each with the array for its result."""
    for is_read_only in (False, True):
        x = np.ones(ELEMENTS, element.dtype)
        x.flags.writeable = not is_read_only
        yield x, np.ones(ELEMENTS, element.dtype)
        if not is_read_only:
            yield x.copy(), x


def ops(element: ElementType) -> list[str]:
    return ["sum", "min", "max", "prod", *(["mean"] if element.is_float else [])]


def own_rows(element: ElementType) -> Iterator[tuple[Array, Array]]:
    for listed, is_read_only in product(([0, 1, 2], [2, 0, 2]), (False, True)):
        numbers, values = np.array(listed), np.ones((3, 8), element.dtype)
        numbers.flags.writeable = values.flags.writeable = not is_read_only
        yield combine_duplicates(numbers, values, element)


def in_one_thread() -> None:
    for hosts in HOSTS:
        for element in ELEMENT_TYPES.values():
            cluster = InprocCluster(max(2, sum(map(len, hosts))), hosts=hosts)
            codecs = ["", *BUILT_IN] if element.dtype == np.float32 and not hosts else [""]
            for rank in range(cluster.world_size):
                for (x, out), codec in product(tensors(element), codecs):
                    for op in ["sum"] if codec else ops(element):
                        cluster.allreduce(rank, x, out, op=op, codec=codec)
                for numbers, values in own_rows(element):
                    cluster.rows(rank, numbers, values, ROWS)
                cluster.move_bytes(rank, "barrier", None, np.zeros(0, np.uint8))
            cluster.run()


def call(comm: Communicator) -> None:
    for element in ELEMENT_TYPES.values():
        for x, out in tensors(element):
            comm.allreduce(x, out=out)
            comm.allreduce([x.copy(), x.copy()])
            comm.reduce_scatter(x)
            checksum(as_writable(x))  # inputs that each rank must give alike to a program
        for numbers, values in own_rows(element):
            comm.allreduce_rows(numbers, values, ROWS)
            comm.allreduce_rows_into(np.ones((ROWS, 8), element.dtype), numbers, values)
    for codec, (x, out) in product(BUILT_IN, tensors(ELEMENT_TYPES["float32"])):
        comm.allreduce(x, out=out, codec=codec)
    whole = np.ones((ELEMENTS, 3))
    comm.allreduce(whole > 0, op="any")
    comm.broadcast(whole)
    comm.allgather(whole)
    comm.allgather_ragged(whole[comm.rank :])
    comm.alltoall(whole[:RANKS])
    comm.broadcast_object(["some", 1])
    comm.barrier()


def run_program(comm: Communicator) -> None:
    with comm.create_group(name="programs", state_bytes=1 << 20) as group:
        for x, out in tensors(ELEMENT_TYPES["float32"]):
            group.fused_allreduce(x, OF_TENSORS, out=out)
        table, rows = np.ones((ROWS, 8), np.float32), np.ones((2, 8), np.float32)
        group.fused_allreduce_rows(np.arange(2), rows, OF_ROWS, n_rows=ROWS, out=table)


def main(addresses: list[str]) -> None:
    make_ready(worker_kernels())
    for codec in BUILT_IN:  # as the first call with it does, before it begins
        codec_named(codec)
    names = needed()
    for transport in TRANSPORTS:
        config = configured(addresses, *over(transport))
        run_job(config, RANKS, call)
        run_job(config, RANKS, run_program)
    by_workers = set(names)
    warm_up_aggregator()
    names.clear()
    simulate()
    in_one_thread()
    sys.stdout.writelines(f"{name}\n" for name in sorted(names | by_workers))


if __name__ == "__main__":
    main(sys.argv[1:])
