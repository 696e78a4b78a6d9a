"""What a worker compiles before it joins is all that its collectives need."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
from numba.core import event

from omnireduce.kernels import warm

PROGRAM = """
import numpy as np
from omnireduce.dtypes import ELEMENT_TYPES
from omnireduce.descriptor import describe
from omnireduce.kernels import exchange, pack, scatter
from omnireduce.kernels.merge import admit_marked
from omnireduce.kernels.warm import warm_up_worker
from omnireduce.layout import Layout
from omnireduce.protocol.collective import Collective
from omnireduce.protocol.exchange import HostExchange, region_bytes
from omnireduce.protocol.operands import DenseTensor
from omnireduce.protocol.rows import RowSet, RowsInto
from omnireduce.runtime.member.pool import Pool
from omnireduce.runtime.member.arguments import combine_duplicates

KERNELS = [
    pack._pack_run, pack.pack_blocks, pack.deal_rows, pack.pack_rows, scatter.scatter_blocks, scatter.add_rows,
    admit_marked,
    exchange.run, exchange.run_with_rows,
]
host = HostExchange(np.zeros((1, region_bytes(2, 4096)), np.uint8), 0, ["rank 0"], 2, 4096)

def exchanged(descriptor, operand):
    host.submit(Collective(0, descriptor, operand, 1), 0.0)
    while host.is_busy:
        list(host.advance(0.0))

def compiled():
    return {kernel.__name__: len(kernel.signatures) for kernel in KERNELS}

warm_up_worker()
before = compiled()
for element in ELEMENT_TYPES.values():
    for is_read_only in (False, True):
        x = np.ones(64, element.dtype)
        values = np.ones((3, 8), element.dtype)
        x.flags.writeable = values.flags.writeable = not is_read_only
        layout = Layout(64, 8, 1, 1)
        size = 8 * element.dtype.itemsize
        for target in [np.ones(64, element.dtype), *([] if is_read_only else [x])]:
            operand = DenseTensor(x, target, layout, element.zero_mask)
            rows = np.zeros((8, size // 8), np.uint64)
            operand.pack(0, 0, 64, rows, np.zeros(8, np.int64))
            operand.put(rows, np.arange(8), np.zeros(8, np.bool_), True)
            exchanged(describe("allreduce", "", element.name, (64,)), operand)
        for numbers in (np.arange(3), np.array([2, 0, 2])):
            own = combine_duplicates(numbers, np.ascontiguousarray(values), element)
            rows = RowSet(*own, layout, Pool().take)
            rows.pack(0, 0, 64, np.zeros((8, size), np.uint8), np.zeros(8, np.int64))
            exchanged(describe("allreduce_rows", "", element.name, (8, 8)), rows)
            into = RowsInto(*own, layout, Pool().take, out=np.ones((8, 8), element.dtype))
            into.start(0)
            into.put(np.zeros((3, size), np.uint8), np.arange(3), np.zeros(3, np.bool_), False)
assert compiled() == before, (before, compiled())
"""


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_no_collective_compiles_anything() -> None:
    """In a process of its own: in this one other tests have compiled whatever they needed."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


def test_all_processes_name_the_same_kernels_alike() -> None:
    """So that each knows what the others have compiled."""
    program = """
from omnireduce.kernels import claims, warm
print([claims._mark_of(list(kernels())) for kernels in (warm._of_worker, warm._of_aggregator)])
"""
    environs = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in range(3)]
    said = {
        subprocess.run([sys.executable, "-c", program], env=each, capture_output=True, check=True, timeout=60).stdout
        for each in environs
    }
    assert len(said) == 1


def test_what_takes_long_is_said_about_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not of kernels that are only loaded, on a machine that is busy."""
    now, said = [0.0], []

    def load(seconds: float) -> None:
        now[0] += seconds

    def compile_(seconds: float) -> None:
        with event.trigger_event("numba:compile"):
            load(seconds)

    monkeypatch.setattr(warm.time, "monotonic", lambda: now[0])
    for short in ([partial(load, 0.4)] * 20, [partial(compile_, 0.01)] * 20):
        warm.make_ready(short, lambda *progress: said.append(progress))
    assert said == []
    warm.make_ready([partial(load, 0.4), *[partial(compile_, 0.4)] * 6], lambda *progress: said.append(progress))
    assert said == [(3, 7), (6, 7)]


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_ranks_that_exchange_nothing_in_memory_load_no_kernels_for_that() -> None:
    program = (
        "from omnireduce.kernels import exchange, pack, warm\n"
        "warm.warm_up_worker(in_memory=False)\n"
        "assert pack.pack_blocks.signatures and not exchange.run.signatures and not exchange.run_with_rows.signatures\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
