"""Processes that compile at the same time do not spoil each other's cache."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

import pytest

from omnireduce.kernels import jit, scatter

WAIT_S = 20.0
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
    assert stamp == {file.name: file.stat().st_size for file in folder.glob("*.py")}


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
