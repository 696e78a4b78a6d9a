"""The kernels that a worker compiles before it joins are all that its collectives need."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

import pytest
from local_cluster import ROOT, WAIT_S, Daemon, Ranks
from numba.core import event
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import cpu_target

from omnireduce.kernels import warm
from omnireduce.kernels.compiling.cache import KernelFiles
from omnireduce.kernels.compiling.claims import Kernel
from omnireduce.kernels.compiling.jit import kernel
from omnireduce.runtime.rank import kernels_ready
from omnireduce.support.logs import BoundLog


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_no_collective_needs_a_kernel_that_was_not_made_ready(daemon: Daemon) -> None:
    """A kernel that compiles in a turn of a shard stops all of its jobs, longer than its watchdog waits. In a process
    of its own: in this one other tests have compiled whatever they needed."""
    program = str(ROOT / "tests" / "kernels" / "all_collectives.py")
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, program, *daemon.addresses]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout.strip()) == (0, ""), result.stderr


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_all_processes_name_the_same_kernels_alike() -> None:
    """So that each knows what the others have compiled."""
    program = """
from omnireduce.kernels import warm
kernels = [*warm.worker_kernels(), *warm.aggregator_kernels()]
print([kernel.name for kernel in kernels])
assert len({kernel.name for kernel in kernels}) == len(kernels) - 4  # both list the runs of indices
"""
    environs = [os.environ | {"PYTHONHASHSEED": str(seed)} for seed in range(3)]
    outputs = {
        subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, check=True, timeout=60).stdout
        for environ in environs
    }
    assert len(outputs) == 1


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
    ("are_kept", "calls", "expected"),
    [
        (True, [load, load, load, load], []),  # however long that takes on a busy machine
        (True, [load, load, compile_, load], [(6, 10), (10, 10)]),
        (False, [load, load, load, load], [(1, 10), (3, 10), (6, 10), (10, 10)]),  # another process compiles
    ],
)
def test_compiling_is_said_and_loading_is_not(
    monkeypatch: pytest.MonkeyPatch, are_kept: bool, calls: list[Callable[[], None]], expected: list[tuple[int, int]]
) -> None:
    """And counts by the seconds that a kernel takes."""
    reports = list[tuple[float, float]]()
    monkeypatch.setattr(warm, "Ticker", AtEachCheck)
    monkeypatch.setattr(warm, "are_kept", lambda kernels: are_kept)
    monkeypatch.setattr(warm, "share_out", iter)
    kernels = [Kernel(str(seconds), seconds, call) for seconds, call in enumerate(calls, 1)]
    warm.make_ready(kernels, lambda *progress: reports.append(progress))
    assert reports == expected


def test_it_is_said_while_one_kernel_compiles_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    reports, was_said, spent = list[float](), threading.Event(), [0.0]

    def progress(done_s: float, total_s: float) -> None:
        assert total_s == 3.0
        reports.append(done_s)
        was_said.set()

    def compile_for_long() -> None:
        with event.trigger_event("numba:compile"):
            for spent[0] in (0.5, 9.0):
                for _ in range(2):  # the first may have looked before
                    was_said.clear()
                    assert was_said.wait(WAIT_S)

    monkeypatch.setattr(warm, "MOMENT_S", 0.001)
    monkeypatch.setattr(warm, "share_out", iter)
    monkeypatch.setattr(warm.time, "process_time", lambda: spent[0])
    warm.make_ready([Kernel("short", 1.0, load), Kernel("long", 2.0, compile_for_long)], progress)
    assert reports == sorted(reports)
    assert {1.5, 1.0 + 2.0 * warm.ALMOST} <= set(reports)


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_ctrl_c_is_not_lost_in_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python handles it when LLVM, which has compiled a kernel, calls back with it."""

    def work(number: int) -> int:
        return number + 1

    monkeypatch.setattr(JITCodeLibrary, "_object_compiled_hook", lambda *_: signal.raise_signal(signal.SIGINT))
    engine = JITCPUCodegen("interrupted")
    monkeypatch.setattr(cpu_target.target_context, "_internal_codegen", engine)
    with pytest.raises(KeyboardInterrupt):
        warm.make_ready([Kernel("interrupted", 1.0, partial(kernel(work), 1))], lambda *_: None)


def test_threads_that_compile_at_once_leave_what_python_shows_as_it_is() -> None:
    hook, both = sys.unraisablehook, threading.Barrier(2)

    def compile_beside_the_other(first_to_end: threading.Event, waits: bool) -> None:
        def call() -> None:
            both.wait(WAIT_S)
            assert not waits or first_to_end.wait(WAIT_S)

        warm.make_ready([Kernel(f"waits {waits}", 1.0, call)], lambda *_: None)
        first_to_end.set()

    ended = threading.Event()
    Ranks(2, lambda rank: compile_beside_the_other(ended, rank == 1)).results()
    assert sys.unraisablehook is hook


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_trouble_with_files_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By the first rank of a host."""
    files = KernelFiles("tag", [])
    monkeypatch.setattr(warm, "kernel_files", lambda: files)
    files.save("one", b"")
    log = BoundLog(logging.getLogger("omnireduce"))
    kernels_ready.log_kernel_trouble(log, is_first=False)
    assert not caplog.records
    files.save("one", b"")
    for _ in range(2):
        kernels_ready.log_kernel_trouble(log, is_first=True)
    assert caplog.text.count("every start compiles them again (this user has no home): set OMNIREDUCE_CACHE") == 1


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_ranks_that_exchange_nothing_in_memory_load_no_kernels_for_that() -> None:
    program = (
        "from omnireduce.kernels import exchange_steps, nonzero_blocks, warm\n"
        "warm.make_ready(warm.worker_kernels(in_memory=False))\n"
        "assert nonzero_blocks.pack_blocks.signatures\n"
        "assert not exchange_steps.run.signatures and not exchange_steps.run_with_rows.signatures\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
