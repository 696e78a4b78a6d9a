"""Processes that start at the same time, and the kernels that each of them compiles."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from local_cluster import ROOT

from omnireduce.kernels import claims

SHARE = """
import sys
from functools import partial
from types import SimpleNamespace
from omnireduce.kernels.claims import in_turn

def kernel(number): pass
kernel._cache = SimpleNamespace(cache_path=sys.argv[1])
for found in in_turn([partial(kernel, kind(1)) for kind in (int, float, str, bytes)]):
    print(type(found.args[0]).__name__, flush=True)
    sys.stdin.readline()
"""
KINDS = ("int", "float", "str", "bytes")
WAIT_S = 60.0


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SHARE.replace("kind(1)", "kind()"), str(folder)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


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
        rest = []  # whatever the first one held is free again
        for _ in KINDS[1:]:
            go_on(second)
            rest.append(called(second))
        assert len(set(rest)) == 3
        go_on(second)
        assert second.wait(WAIT_S) == 0


def test_a_kernel_that_a_stopped_process_holds_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_S", 0.1)
    with start(tmp_path) as other:
        assert called(other) == "int"

        def kernel(number: object) -> None:
            """Nothing is compiled."""

        kernel._cache = type("Cache", (), {"cache_path": str(tmp_path)})  # type: ignore[attr-defined]
        ours = [partial(kernel, number) for number in (0, 0.0, "")]
        assert [type(found.args[0]).__name__ for found in claims.in_turn(ours)] == ["float", "str", "int"]
        other.kill()


def test_where_there_can_be_no_claims_every_process_does_all(tmp_path: Path) -> None:
    def kernel() -> None:
        """Nothing is compiled."""

    assert len(list(claims.in_turn([partial(kernel)] * 3))) == 3
    kernel._cache = type("Cache", (), {"cache_path": str(tmp_path / "none")})  # type: ignore[attr-defined]
    assert len(list(claims.in_turn([partial(kernel)] * 3))) == 3


def test_a_claim_ends_with_the_next_kernel(tmp_path: Path) -> None:
    def kernel(number: int) -> None:
        """Nothing is compiled."""

    kernel._cache = type("Cache", (), {"cache_path": str(tmp_path)})  # type: ignore[attr-defined]
    list(claims.in_turn([partial(kernel, 1)]))
    child = os.fork()
    if not child:
        with open(tmp_path / claims.FILE, "r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_what_has_been_compiled_as_a_whole_is_not_claimed(tmp_path: Path) -> None:
    """So that many processes load kernels at the same time."""
    with start(tmp_path) as first:
        for kind in KINDS:
            assert called(first) == kind
            go_on(first)
        assert first.wait(WAIT_S) == 0
    with start(tmp_path) as one, start(tmp_path) as another:
        assert called(one) == called(another) == KINDS[0]
        one.kill()
        another.kill()


def test_what_is_built_into_others_is_compiled_but_not_loaded(tmp_path: Path) -> None:
    def kernel(number: int) -> None:
        """Nothing is compiled."""

    kernel._cache = type("Cache", (), {"cache_path": str(tmp_path)})  # type: ignore[attr-defined]
    kernels = [claims.BuiltIn(kernel, 1), partial(kernel, 2)]
    assert list(claims.in_turn(kernels)) == kernels
    assert list(claims.in_turn(kernels)) == kernels[1:]


def test_the_marks_of_many_edits_take_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(number: object) -> None:
        """Nothing is compiled."""

    kernel._cache = type("Cache", (), {"cache_path": str(tmp_path)})  # type: ignore[attr-defined]
    for edit in range(1000):
        monkeypatch.setattr(claims, "source_stamp", lambda edit=edit: edit)
        assert len(list(claims.in_turn([partial(kernel, 1)]))) == 1
    assert (tmp_path / claims.FILE).stat().st_size <= claims.MOST_MARKS
