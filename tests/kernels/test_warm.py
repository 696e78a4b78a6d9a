"""What a worker compiles before it joins is all that its collectives need."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
from local_cluster import ROOT, WAIT_S, configured
from numba.core import event

from omnireduce.config import Config
from omnireduce.kernels import warm
from omnireduce.kernels.cache import KernelFiles
from omnireduce.logs import BoundLog
from omnireduce.runtime.member import compiling

PROGRAM = """
import numpy as np
from omnireduce.dtypes import ELEMENT_TYPES
from omnireduce.descriptor import describe
from omnireduce.kernels import checksum, exchange, pack, scatter
from omnireduce.kernels.merge import admit_marked
from omnireduce.kernels.warm import warm_up_worker
from omnireduce.layout import Layout
from omnireduce.protocol.collective import Collective
from omnireduce.protocol.exchange import HostExchange, region_bytes
from omnireduce.protocol.operands import DenseTensor, as_writable
from omnireduce.protocol.rows import RowSet, RowsInto
from omnireduce.runtime.member.pool import Pool
from omnireduce.runtime.member.arguments import combine_duplicates

KERNELS = [
    pack._pack_run, pack.pack_blocks, pack.deal_rows, pack.pack_rows, scatter.scatter_blocks, scatter.add_rows,
    admit_marked, checksum.mix_words,
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
        checksum.checksum(as_writable(x))
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


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_simulated_clusters_compile_nothing_once_all_is_warm() -> None:
    """A kernel that compiles in a turn of a shard stops all of its jobs, longer than its watchdog waits."""
    program = (
        "import importlib, pkgutil\n"
        "import omnireduce.kernels\n"
        "from omnireduce.kernels.warm import warm_up_all\n"
        "from tests.simulator import draw\n"
        "from tests.simulator.campaign import Task, run_task\n"
        "names = [each.name for each in pkgutil.walk_packages(omnireduce.kernels.__path__, 'omnireduce.kernels.')]\n"
        "modules = [importlib.import_module(name) for name in names]\n"
        "def compiled():\n"
        "    kernels = [each for module in modules for each in vars(module).values() if hasattr(each, 'signatures')]\n"
        "    return {f'{each.__name__}{types}' for each in kernels for types in each.signatures}\n"
        "warm_up_all()\n"
        "before = compiled()\n"
        "for first in (0, draw.FIRST_OF_HOSTS, draw.FIRST_OF_PROGRAMS, draw.FIRST_OF_RELAYS, draw.FIRST_OF_SEVERAL):\n"
        "    for seed in range(first, first + 4):\n"
        "        assert not run_task(Task(seed)).found\n"
        "print(*sorted(compiled() - before), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


class AtEachCheck:
    """A Ticker whose time passes when a kernel is ready."""

    def __init__(self, tell: Callable[[], None], every_s: float) -> None:
        self.check = tell

    def __enter__(self) -> AtEachCheck:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing runs."""


def load() -> None:
    """Nothing is compiled."""


def compile_() -> None:
    with event.trigger_event("numba:compile"):
        load()


@pytest.mark.parametrize(
    ("are_kept", "kernels", "expected"),
    [
        (True, [load, load, load], []),  # however long that takes on a busy machine
        (True, [load, compile_, load], [(3, 4), (4, 4)]),
        (False, [load, load, load], [(1, 4), (2, 4), (3, 4), (4, 4)]),  # another process compiles
    ],
)
def test_compiling_is_said_and_loading_is_not(
    monkeypatch: pytest.MonkeyPatch, are_kept: bool, kernels: list[Callable[[], None]], expected: list[tuple[int, int]]
) -> None:
    said = list[tuple[int, int]]()
    monkeypatch.setattr(warm, "Ticker", AtEachCheck)
    monkeypatch.setattr(warm, "are_kept", lambda kernels: are_kept)
    monkeypatch.setattr(warm, "in_turn", iter)
    warm.make_ready([[partial(load)], list(map(partial, kernels))], lambda *progress: said.append(progress))
    assert said == expected


def test_it_is_said_while_one_kernel_compiles_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    said, was_said = list[tuple[int, int]](), threading.Event()

    def progress(ready: int, total: int) -> None:
        said.append((ready, total))
        was_said.set()

    def compile_for_long() -> None:
        with event.trigger_event("numba:compile"):
            was_said.clear()
            assert was_said.wait(WAIT_S)

    monkeypatch.setattr(warm, "MOMENT_S", 0.001)
    monkeypatch.setattr(warm, "in_turn", iter)
    warm.make_ready([[partial(load), partial(compile_for_long)]], progress)
    assert (1, 2) in said


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_trouble_with_files_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank of a host."""
    files = KernelFiles("tag", [])
    monkeypatch.setattr(warm, "kernel_files", lambda: files)
    monkeypatch.setattr(compiling, "warm_up_worker", lambda progress, in_memory: files.save("one", b""))
    log = BoundLog(logging.getLogger("omnireduce"))
    for is_first, count in ((False, 0), (True, 1)):
        compiling.make_kernels_ready(Config(), lambda ready, total: None, log, is_first=is_first)
        assert (
            caplog.text.count("every start compiles them again (this user has no home): set OMNIREDUCE_CACHE") == count
        )
    files.trouble = ""
    compiling.make_kernels_ready(
        configured([], "transport.host_exchange=off"), lambda ready, total: None, log, is_first=False
    )
    assert warm.take_trouble() == ""


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_ranks_that_exchange_nothing_in_memory_load_no_kernels_for_that() -> None:
    program = (
        "from omnireduce.kernels import exchange, pack, warm\n"
        "warm.warm_up_worker(in_memory=False)\n"
        "assert pack.pack_blocks.signatures and not exchange.run.signatures and not exchange.run_with_rows.signatures\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
