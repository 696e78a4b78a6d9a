"""Compiled kernels are kept, believed from the right users only, and whatever is wrong with them costs time alone."""

from __future__ import annotations

import ast
import os
import re
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omnireduce.console import doctor
from omnireduce.kernels.compiling import cache, jit
from omnireduce.kernels.compiling.cache import KEPT, UNFINISHED, UNFINISHED_S, KernelFiles
from omnireduce.support.files.cache import cache_folders

PROGRAM = """
import numpy as np
from omnireduce.kernels.compiling.jit import {0}, kernel_files

@{0}
def total(numbers):
    found = 0
    for k in range(numbers.size):
        found += numbers[k]
    return found

print(total(np.arange(5)), sum(total.stats.cache_hits.values()))
print(kernel_files().trouble)
"""
COMPILE_S = 120.0
NAME, CONTENT = "one.kernel", b"machine code"
compiled = pytest.mark.skipif("NUMBA_DISABLE_JIT" in os.environ, reason="nothing is compiled")
FOLDER = Path(jit.__file__).parents[1]


def kernel_sources() -> list[Path]:
    return [file for file in FOLDER.rglob("*.py") if file.parent.name != "compiling" and file.name != "warm.py"]


def run(folder: Path, program: str = "program.py", **options: object) -> list[str]:
    """The lines that the program says, with a cache beside it."""
    result = subprocess.run(
        [sys.executable, program], cwd=folder, env=os.environ | {"OMNIREDUCE_CACHE": str(folder / "cache")},
        capture_output=True, text=True, check=True, timeout=COMPILE_S, **options,  # type: ignore[call-overload]
    )  # fmt: skip
    return result.stdout.splitlines()


@compiled
@pytest.mark.parametrize("decorator", ["kernel", "entry"])
def test_a_kernel_is_compiled_once(tmp_path: Path, decorator: str) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format(decorator))
    assert run(tmp_path) == ["10 0", ""]
    assert run(tmp_path) == ["10 1", ""]
    (tmp_path / "program.py").write_text(PROGRAM.format(decorator).replace("found = 0", "found = 1"))
    assert run(tmp_path) == ["11 0", ""]


@compiled
def test_an_entry_is_kept_without_what_compilers_want(tmp_path: Path) -> None:
    sizes = []
    for decorator in ("entry", "kernel"):
        (tmp_path / decorator).mkdir()
        (tmp_path / decorator / "program.py").write_text(PROGRAM.format(decorator))
        run(tmp_path / decorator)
        [file] = (tmp_path / decorator).rglob("*.kernel")
        sizes.append(file.stat().st_size)
    assert sizes[0] < sizes[1]


@compiled
def test_a_full_disk_costs_time_only(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    (tmp_path / "program.py").write_text(PROGRAM.format("kernel"))
    (tmp_path / "home").mkdir()
    environ = {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=os.environ | environ, preexec_fn=limit,
        capture_output=True, text=True, check=True, timeout=COMPILE_S,
    )  # fmt: skip
    first, trouble = result.stdout.splitlines()
    assert first == "10 0"
    assert re.search("every start compiles them again .*File too large.*: set OMNIREDUCE_CACHE to a folder", trouble)
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith((".kernel", UNFINISHED))]


@compiled
def test_a_file_that_is_damaged_is_compiled_once_more(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.format("kernel"))
    run(tmp_path)
    [file] = tmp_path.rglob("*.kernel")
    whole = file.read_bytes()
    for spoiled in (whole[: len(whole) // 2], b"", whole[:-1] + bytes([whole[-1] ^ 1])):
        file.write_bytes(spoiled)
        first, trouble = run(tmp_path)
        assert first == "10 0"
        assert trouble == f"{file}: cut short or damaged, so this kernel was compiled once more"
        assert run(tmp_path) == ["10 1", ""]


def test_what_constants_and_kernels_come_from_makes_all_compile_anew() -> None:
    """Modules of which a kernel may take a constant, and no others: an edit costs minutes of compiling."""
    sources = [ast.parse(file.read_text()) for file in kernel_sources()]
    taken = {
        node.module.removeprefix("omnireduce.").replace(".", "/")
        for tree in sources
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("omnireduce")
    }
    constants = {name for name in taken if not name.startswith("kernels")}
    assert constants - {"errors", "support/load_by_name", "support/files/cache", "support/version"} == set(
        jit.CONSTANTS
    )


def test_no_kernel_calls_an_entry() -> None:
    """It would call an empty function, once both are loaded from their files."""
    trees = [ast.parse(file.read_text()) for file in kernel_sources()]
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    marks = {node: {each.id for each in node.decorator_list if isinstance(each, ast.Name)} for node in functions}
    entries = {node.name for node, names in marks.items() if "entry" in names}
    assert entries == {"run", "run_with_rows"}
    for node, names in marks.items():
        if names & {"kernel", "inlined", "entry"}:
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            assert not entries & {call.id for call in calls if isinstance(call, ast.Name)}, node.name


# places of files, and owners that are trusted


def folder_of_kernels(folder: Path) -> Path:
    return folder / "kernels" / "tag"


def test_the_first_folder_that_can_be_written_to_keeps_what_is_new(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = KernelFiles("tag", [tmp_path / "file", tmp_path / "own"])
    assert files.load(NAME) is None
    files.save(NAME, CONTENT)
    assert (files.load(NAME), files.trouble, files.folder) == (CONTENT, "", folder_of_kernels(tmp_path / "own"))
    KernelFiles("tag", [tmp_path / "image"]).save("two.kernel", b"2")
    both = KernelFiles("tag", [tmp_path / "image", tmp_path / "own"])
    assert (both.load("two.kernel"), both.load(NAME)) == (b"2", CONTENT)
    assert (both.has(NAME), both.has("three.kernel")) == (True, False)


@compiled
def test_warm_fills_the_folder_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this user's own folder has the kernels: other users of an image do not have that one."""
    named, own_folder = tmp_path / "named", tmp_path / "own"
    KernelFiles("kernels", [own_folder]).save(NAME, CONTENT)
    files = KernelFiles("kernels", [named, own_folder])
    monkeypatch.setattr(doctor, "kernel_files", lambda: files)
    monkeypatch.setattr(doctor, "warm_up_all", lambda _: files.load(NAME) or files.save(NAME, CONTENT))
    doctor.warm()
    assert KernelFiles("kernels", [named]).load(NAME) == CONTENT


def test_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folders, why in (([tmp_path / "file"], "Not a directory"), ([], "this user has no home")):
        files = KernelFiles("tag", folders)
        files.save(NAME, CONTENT)
        assert why in files.trouble
        assert files.trouble.endswith("set OMNIREDUCE_CACHE to a folder that this user can write to")
        assert files.folder is None


def test_nobody_else_can_write_to_what_is_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        KernelFiles("tag", [tmp_path / "a"]).save(NAME, CONTENT)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", *(tmp_path / "a").rglob("*")):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH), path
    assert (
        folder_of_kernels(tmp_path / "a").stat().st_mode & 0o777 == 0o755
    )  # as others need it who share what root has made


@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_others_may_have_written_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    KernelFiles("tag", [tmp_path]).save(NAME, CONTENT)
    spoiled = folder_of_kernels(tmp_path) if what == "folder" else folder_of_kernels(tmp_path) / NAME
    spoiled.chmod(0o777)
    files = KernelFiles("tag", [tmp_path])
    assert files.load(NAME) is None
    if what == "folder":
        files.save(NAME, CONTENT)
        assert "other users may write to it, its mode is 777" in files.trouble
    spoiled.chmod(0o755)
    assert KernelFiles("tag", [tmp_path]).load(NAME) == CONTENT
    monkeypatch.setattr(cache.os, "geteuid", lambda: spoiled.stat().st_uid + 4321)
    monkeypatch.setattr(cache, "ROOT", 1234)
    files = KernelFiles("tag", [tmp_path])
    assert files.load(NAME) is None
    files.save(NAME, CONTENT)
    assert f"it belongs to another user, {spoiled.stat().st_uid}" in files.trouble
    monkeypatch.setattr(cache, "ROOT", spoiled.stat().st_uid)  # root may have filled it when an image was built
    assert KernelFiles("tag", [tmp_path]).load(NAME) == CONTENT


def test_a_link_or_a_pipe_in_place_of_a_file_does_not_count(tmp_path: Path) -> None:
    KernelFiles("tag", [tmp_path]).save("elsewhere", CONTENT)
    (folder_of_kernels(tmp_path) / NAME).symlink_to("elsewhere")
    os.mkfifo(folder_of_kernels(tmp_path) / "pipe")
    for name in (NAME, "pipe"):
        assert KernelFiles("tag", [tmp_path]).load(name) is None


def test_folders_of_other_versions_and_unfinished_files_go(tmp_path: Path) -> None:
    for age in range(KEPT + 3):
        folder = tmp_path / "kernels" / f"0.1-{age:016x}"
        folder.mkdir(parents=True)
        for name in (NAME, f"a{UNFINISHED}", "ready-0123abcd"):
            (folder / name).write_bytes(b"")
        os.utime(folder, (1000 - age, 1000 - age))
    files = KernelFiles("tag", [tmp_path])
    files.save(NAME, CONTENT)
    left = {path.name for path in (tmp_path / "kernels").iterdir()}
    assert left == {"tag", *(f"0.1-{age:016x}" for age in range(KEPT))}
    for name, age_s in (("a", 0.0), ("b", UNFINISHED_S + 60)):
        file = folder_of_kernels(tmp_path) / f"{name}{UNFINISHED}"
        file.write_bytes(b"")
        os.utime(file, (file.stat().st_mtime - age_s,) * 2)
    KernelFiles("tag", [tmp_path]).save(NAME, CONTENT)
    assert [path.name for path in folder_of_kernels(tmp_path).glob(f"*{UNFINISHED}")] == [f"a{UNFINISHED}"]


def test_what_is_no_folder_of_kernels_stays(tmp_path: Path) -> None:
    """The folder may have been somebody's own before, or a link that another user has made."""
    home = tmp_path / "home"
    theirs = [home / f"{name}{number}" for name in ("project", "0.1-000000000000000") for number in range(KEPT)]
    for age, folder in enumerate(theirs):
        folder.mkdir(parents=True)
        (folder / "thesis.tex").write_text("all of it")
        os.utime(folder, (1000 - age, 1000 - age))
    (home / "0.1-00000000000000ff").symlink_to(theirs[0])
    (tmp_path / "kernels").symlink_to(home)
    os.utime(theirs[-1], (1, 1))
    (home / "0.1-0000000000000008").mkdir()
    KernelFiles("tag", [tmp_path]).save(NAME, CONTENT)
    assert [folder for folder in theirs if not (folder / "thesis.tex").exists()] == []
    assert (home / "0.1-00000000000000ff").is_symlink()


def test_a_folder_that_is_used_counts_as_new(tmp_path: Path) -> None:
    KernelFiles("tag", [tmp_path]).save(NAME, CONTENT)
    os.utime(folder_of_kernels(tmp_path), (1000, 1000))
    KernelFiles("tag", [tmp_path]).load(NAME)
    assert folder_of_kernels(tmp_path).stat().st_mtime > 1000


def test_the_folders_of_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own_folder = tmp_path / ".cache" / "omnireduce"
    assert cache_folders({}) == [own_folder]
    assert cache_folders({"XDG_CACHE_HOME": "relative"}) == [own_folder]  # so says its specification
    assert cache_folders({"XDG_CACHE_HOME": "/x"}) == [Path("/x/omnireduce")]
    assert cache_folders({"OMNIREDUCE_CACHE": "/a"}) == [Path("/a"), own_folder]
    assert cache_folders({"OMNIREDUCE_CACHE": "~/a"}) == [tmp_path / "a", own_folder]
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert cache_folders({}) == []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(Path, "stat", lambda path: SimpleNamespace(st_uid=1000))
    assert cache_folders({}) == []  # as sudo may leave it


@compiled
def test_numbas_own_variable_counts_too(tmp_path: Path) -> None:
    program = "from omnireduce.kernels.compiling.jit import kernel_files; print(kernel_files().folder.parents[1])"
    for environ, expected in (
        ({"NUMBA_CACHE_DIR": str(tmp_path / "n")}, tmp_path / "n" / "omnireduce"),
        ({"NUMBA_CACHE_DIR": str(tmp_path / "n"), "OMNIREDUCE_CACHE": str(tmp_path / "o")}, tmp_path / "o"),
    ):
        result = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environ, capture_output=True, text=True, check=True,
            timeout=COMPILE_S,
        )  # fmt: skip
        assert result.stdout.strip() == str(expected)
