"""Processes that compile at the same time do not spoil each other's cache."""

from __future__ import annotations

import ast
import fcntl
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnireduce.kernels import jit, scatter

PROGRAM = """
import numpy as np
from omnireduce.kernels.jit import {0}

@{0}
def total(numbers):
    found = 0
    for k in range(numbers.size):
        found += numbers[k]
    return found

print(total(np.arange(5)), sum(total.stats.cache_hits.values()))
"""
WAIT_S = 20.0
COMPILE_S = 60.0
BRIEFLY_S = 0.2


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
def test_every_access_to_the_cache_is_locked() -> None:
    cache = scatter.add_rows._cache  # type: ignore[attr-defined]
    for access in (cache.save_overload, cache.load_overload):
        assert access.__name__ == "access_locked"


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
def test_an_edit_to_any_kernel_file_makes_all_compile_anew() -> None:
    folder = Path(jit.__file__).parent
    cache = scatter.add_rows._cache  # type: ignore[attr-defined]
    stamp = {name: size for name, _, size in cache._cache_file._source_stamp}
    assert stamp == {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*.py")}
    assert "codecs/int8.py" in stamp


@pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
def test_an_entry_is_loaded_without_what_compilers_want(tmp_path: Path) -> None:
    for decorator in ("kernel", "entry"):
        folder = tmp_path / decorator
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM.format(decorator))
        for hits in (0, 1):
            done = subprocess.run(
                [sys.executable, "program.py"], cwd=folder, env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
                capture_output=True, text=True, check=True, timeout=COMPILE_S,
            )  # fmt: skip
            assert done.stdout.split() == ["10", str(hits)]
    sizes = [next((tmp_path / each).rglob("*.nbc")).stat().st_size for each in ("entry", "kernel")]
    assert sizes[0] < sizes[1]


def test_no_kernel_calls_an_entry() -> None:
    """It would call an empty function, once both are loaded from their files."""
    trees = [ast.parse(file.read_text()) for file in Path(jit.__file__).parent.glob("*.py")]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    marks = {node: {each.id for each in node.decorator_list if isinstance(each, ast.Name)} for node in functions}
    entries = {node.name for node, names in marks.items() if "entry" in names}
    assert entries == {"run", "run_with_rows"}
    for node, names in marks.items():
        if names & {"kernel", "inlined", "entry"}:
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            assert not entries & {each.id for each in calls if isinstance(each, ast.Name)}, node.name


def test_a_cache_is_written_by_one_process_at_a_time() -> None:
    folder = os.open(Path(jit.__file__).parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_SH)  # a reader holds the writer up
    ours, theirs = multiprocessing.Pipe()
    writer = multiprocessing.get_context("fork").Process(
        target=jit._locked(lambda: theirs.send("written"), fcntl.LOCK_EX)
    )
    writer.start()
    try:
        assert not ours.poll(BRIEFLY_S)
        fcntl.flock(folder, fcntl.LOCK_UN)
        assert ours.poll(WAIT_S)
    finally:
        os.close(folder)
        writer.join(WAIT_S)
    assert writer.exitcode == 0
