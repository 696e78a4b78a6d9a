"""Processes that start at the same time, and the kernels that each of them compiles."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from local_cluster import ROOT

from omnireduce.kernels.compiling import claims
from omnireduce.kernels.compiling.cache import KernelFiles
from omnireduce.kernels.compiling.claims import Kernel
from omnireduce.kernels.compiling.jit import kernel_files

pytestmark = pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
SHARE = """
import sys
from omnireduce.kernels.compiling.claims import Kernel, share_out

for kernel in share_out([Kernel(name, 1.0, print) for name in ("one", "two", "three", "four")]):
    print(kernel.name, flush=True)
    sys.stdin.readline()
"""
NAMES = ("one", "two", "three", "four")
WAIT_S = 60.0


def start(folder: Path) -> subprocess.Popen[str]:
    environ = os.environ | {"OMNIREDUCE_CACHE": str(folder), "TMPDIR": str(folder)}
    command = [sys.executable, "-c", SHARE]
    return subprocess.Popen(command, cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.fixture
def files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelFiles:
    """Kernel files for this process, as `start` makes them for other processes."""
    files = KernelFiles(kernel_files().tag, [tmp_path])
    monkeypatch.setattr(claims, "kernel_files", lambda: files)
    monkeypatch.setattr(claims, "_compiled", set())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return files


def named(*names: str) -> list[Kernel]:
    """Kernels for which nothing is compiled."""
    return [Kernel(name, 1.0, lambda: None) for name in names]


def called(process: subprocess.Popen[str]) -> str:
    """The kernel that the process holds."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_two_processes_do_not_compile_the_same_kernel(tmp_path: Path) -> None:
    with start(tmp_path) as first, start(tmp_path) as second:
        held = {called(first), called(second)}
        assert len(held) == 2
        go_on(first)
        held.add(called(first))
        assert len(held) == 3
        first.kill()
        first.wait(WAIT_S)
        rest = []  # the kernel that the killed process held can be claimed again
        for _ in NAMES[1:]:
            go_on(second)
            rest.append(called(second))
        assert len(set(rest)) == 3
        go_on(second)
        assert second.wait(WAIT_S) == 0


def test_processes_that_are_stopped_are_waited_for_once(
    files_here: KernelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(claims.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(claims, "LOOK_S", 0.5)
    now[0] = 100.0
    with start(tmp_path) as one, start(tmp_path) as another:
        held = {called(one), called(another)}
        ours = named(*NAMES[:3])
        claimed = monkeypatch.setattr(claims.time, "monotonic", lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
        assert claimed is None
        names = [kernel.name for kernel in claims.share_out(ours)]
        assert sorted(names) == sorted(NAMES[:3])
        assert set(names[:1]).isdisjoint(held)
        assert now[0] < 100.0 + 2 * claims.PATIENCE_S + 10
        one.kill()
        another.kill()


def test_where_there_can_be_no_claims_every_process_does_all(
    files_here: KernelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    assert len(list(claims.share_out(named(*NAMES)))) == 4
    nowhere = KernelFiles("tag", [])
    monkeypatch.setattr(claims, "kernel_files", lambda: nowhere)
    assert len(list(claims.share_out(named(*NAMES)))) == 4


def test_a_file_of_claims_that_others_can_open_does_not_count(files_here: KernelFiles, tmp_path: Path) -> None:
    """They could hold each of them."""
    file = tmp_path / f"omnireduce-kernels-{os.geteuid()}"
    assert claims._opened(files_here) != claims.NOWHERE
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    assert claims._opened(files_here) == claims.NOWHERE
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert claims._opened(files_here) == claims.NOWHERE


def test_a_claim_ends_with_the_next_kernel(files_here: KernelFiles, tmp_path: Path) -> None:
    list(claims.share_out(named("one")))
    child = os.fork()
    if not child:
        with open(tmp_path / f"omnireduce-kernels-{os.geteuid()}", "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_has_been_compiled_is_not_claimed(tmp_path: Path) -> None:
    """So that many processes load kernels at the same time."""
    with start(tmp_path) as first:
        for name in NAMES:
            assert called(first) == name
            go_on(first)
        assert first.wait(WAIT_S) == 0
    with start(tmp_path) as one, start(tmp_path) as another:
        assert called(one) == called(another) == NAMES[0]
        one.kill()
        another.kill()


def test_lists_share_their_kernels(files_here: KernelFiles) -> None:
    """A kernel that was compiled for one list is not compiled again for another list."""
    assert not claims.are_kept(named("one"))
    assert [kernel.name for kernel in claims.share_out(named("one", "two"))] == ["one", "two"]
    assert claims.are_kept(named("two"))
    assert not claims.are_kept(named("two", "three"))
    assert [kernel.name for kernel in claims.share_out(named("three", "two"))] == [
        "two",
        "three",
    ]  # the ready one first


def test_a_kernel_that_is_not_kept_is_ready_in_this_process_only(
    files_here: KernelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_here.note("the disk is full")
    assert len(list(claims.share_out(named("one")))) == 1
    assert claims.are_kept(named("one"))
    monkeypatch.setattr(claims, "_compiled", set())  # as another process has it
    assert not claims.are_kept(named("one"))
