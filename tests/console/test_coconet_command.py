"""`omnireduce coconet` as users run it: real ranks, every program, and what it says of what cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from local_cluster import READY_S, ROOT, keep_kernels

from omnireduce.__main__ import main
from omnireduce.console.coconet.run import difference
from omnireduce.programs.library import PROGRAMS, schedules


def coconet(*words: str) -> subprocess.CompletedProcess[str]:
    """`omnireduce coconet run` with these words, to its end."""
    return run_coconet("run", *words)


def run_coconet(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`omnireduce coconet` with these words, to its end."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMNIREDUCE_", "HOROVOD_"))}
    return subprocess.run(
        [sys.executable, "-m", "omnireduce", "coconet", *words],
        env=kept | {"PYTHONPATH": str(ROOT)} | environ, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=READY_S, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_schedules_give_what_one_process_gives(program: str) -> None:
    result = coconet(program, "-np", "4", "--elements", "1001", "--steps", "3")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert re.fullmatch(rf"{program} on 4 ranks: 1001 elements, 3 steps, \S+", lines[0])
    assert [line.split()[0] for line in lines[2:-1]] == list(schedules(program))
    if program == "lamb":
        assert lines[-1].startswith("All results are those of one process, ")
    else:
        assert lines[-1] == "All results are those of one process, bit for bit."
    if program == "adam":  # two tensors of state, whole and cut
        assert [line.split()[2] for line in lines[2:-1]] == ["8.008k", "2.008k", "2.008k"]


def test_one_schedule() -> None:
    result = coconet("sgd", "--schedule", "fuse-rs-c-ag", "--elements", "10", "--steps", "1")
    assert result.returncode == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[2:-1]] == ["fuse-rs-c-ag"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sdg",), "program 'sdg': expected one of sgd, adam, lamb, model-parallel, pipeline-parallel"),
        (("sgd", "--schedule", "ring"), "--schedule ring: expected one of ar-c, rs-c-ag, fuse-rs-c-ag for sgd"),
        (("pipeline-parallel", "-np", "3"), "-np 3: expected a multiple of 2, for so many groups of ranks"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["coconet", "run", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"


def test_differences_are_seen() -> None:
    one = np.array([1, -4], np.float32)
    assert difference(one, one.copy()) == 0
    assert difference(one + 1, one) == 0.25
    assert np.isnan(difference(one * np.nan, one))


def test_a_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "adam.py"
    result = run_coconet("generate", "adam", "--schedule", "rs-c-ag", "--target", "mpi4py", "-o", str(path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{path}: adam, rs-c-ag; mpirun -n 2 python {path} 10\n"
    text = path.read_text()
    assert text.startswith('"""adam, rs-c-ag.\n')
    assert "from mpi4py import MPI" in text


def test_the_fastest_is_named_and_remembered(tmp_path: Path) -> None:
    keep_kernels(tmp_path)
    words = ["tune", "adam", "--sizes", "1_000,70", "--turns", "1"]
    result = run_coconet(*words, OMNIREDUCE_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "adam on 2 ranks: median ms of a run"
    assert lines[1].split() == ["schedule", "N=1000", "N=70"]
    rows = {line[:25].strip(): [float(word) for word in line[25:].split()] for line in lines[2:-2]}
    assert list(rows) == ["ar-c", "rs-c-ag", "fuse-rs-c-ag", "fuse-rs-c-ag, on shards"]
    for at, (name, line) in enumerate(zip(("N=1000", "N=70"), lines[-2:], strict=True)):
        best = line.removeprefix(f"{name}: ")
        assert rows[best][at] == min(row[at] for row in rows.values())
    again = run_coconet(*words, OMNIREDUCE_CACHE=str(tmp_path))
    assert again.stdout.splitlines() == [f"{lines[0]}, known from an earlier run", *lines[1:]]
    other = run_coconet(*words, "--no-cache", OMNIREDUCE_CACHE=str(tmp_path))
    assert other.stdout.splitlines()[0] == lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("generate", "sgd", "--schedule", "x", "-o", "x.py"),
            "--schedule x: expected one of ar-c, rs-c-ag, fuse-rs-c-ag for sgd",
        ),
        (("generate", "sgd", "--schedule", "ar-c", "-o", "/no/x.py"), "/no/x.py: there is no folder /no"),
        (("tune", "sdg"), "program 'sdg': expected one of sgd, adam, lamb, model-parallel, pipeline-parallel"),
        (("tune", "sgd", "--sizes", "10,x"), "--sizes '10,x': expected numbers from 1 to 1073741824, such as 1,4"),
        (("tune", "sgd", "--sizes", "1__0"), "--sizes '1__0': expected numbers from 1 to 1073741824, such as 1,4"),
        (("tune", "sgd", "--chunks", "1"), "--chunks '1': expected numbers from 2 to 1024, such as 2,8"),
        (("tune", "pipeline-parallel", "-np", "3"), "-np 3: expected a multiple of 2, for so many groups of ranks"),
    ],
)
def test_what_cannot_be_written_or_tuned_is_one_line(words: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, ["coconet", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {message}\n"
