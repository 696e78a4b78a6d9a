"""Arithmetic of the exchange inside a host: kernels of their own, which a job compiles only if it needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from local_cluster import ROOT

from omnireduce.kernels import exchange_steps, reduce
from omnireduce.kernels.reducers_by_type import REDUCERS, reducer_of
from omnireduce.kernels.regions import STORAGES

compiled = pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
JOB = """
import sys
import numpy as np
from all_collectives import needed
from local_cluster import configured, run_job
asked = needed()
def call(comm):
    rows = np.arange(2), np.ones((2, 8), np.float32)
    for kind, has_rows in (("float32", False), *([("int8", True)] if "more" in sys.argv else [])):
        comm.allreduce(np.ones(100, kind), op="mean" if kind == "float32" else "max")
        if has_rows:
            comm.allreduce_rows(*rows, 8)
run_job(configured([]), 2, call)
print(*sorted({name.split("(")[0].split(".")[-1] for name in asked}))
"""
SMALL = {"anybody_left", "anybody_sleeps", "await_step", "get_counter", "next_step", "set_counter"}


def called(kernel: Any, seen: set[str]) -> Iterator[Any]:
    """The kernels that are compiled together with this one."""
    function = kernel.py_func
    for name in function.__code__.co_names:
        callee = function.__globals__.get(name)
        if hasattr(callee, "py_func") and name not in seen:
            seen.add(name)
            yield callee
            yield from called(callee, seen)


@compiled
@pytest.mark.parametrize("kernel", [exchange_steps.run, exchange_steps.run_with_rows])
def test_no_arithmetic_is_compiled_into_the_exchange(kernel: Any) -> None:
    """Or it takes half a minute: each of eight types, with each operation, would be in it."""
    modules = [callee.py_func.__module__ for callee in called(kernel, set())]
    assert exchange_steps.__name__ in modules
    assert reduce.__name__ not in modules


@compiled
def test_each_storage_has_a_reducer_of_its_own() -> None:
    """With a name of its own: machine code is found by that, also by a process that has not compiled it."""
    addresses = [reducer_of(storage) for storage in range(len(STORAGES))]
    assert len(set(addresses)) == len(STORAGES)
    assert all(addresses)
    functions: list[Any] = list(REDUCERS)
    symbols = [result.fndesc.mangled_name for kernel in functions for result in kernel.overloads.values()]
    assert all(f"reduce_{name}" in symbol for name, symbol in zip(STORAGES, symbols, strict=True))


@compiled
@pytest.mark.parametrize(
    ("arguments", "more"),
    [([], set[str]()), (["more"], {"reduce_int8", "run_with_rows"})],
)
def test_a_job_in_memory_needs_the_kernels_of_its_own_collectives(arguments: list[str], more: set[str]) -> None:
    environ = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}{os.pathsep}{ROOT / 'tests/kernels'}"}
    command = [sys.executable, "-c", JOB, *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300)
    assert (result.returncode, set(result.stdout.split())) == (0, {"run", "reduce_float32"} | SMALL | more), (
        result.stderr
    )
