"""`omnireduce coconet run` as users run it: real ranks, every program, and what it says of what cannot be."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from local_cluster import READY_S, ROOT

from omnireduce.console.programs.trial import difference
from omnireduce.programs.ready import PROGRAMS, schedules


def coconet(*words: str) -> subprocess.CompletedProcess[str]:
    """`omnireduce coconet run` with these words, to its end."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMNIREDUCE_", "HOROVOD_"))}
    return subprocess.run(
        [sys.executable, "-m", "omnireduce", "coconet", "run", *words],
        env=kept | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, capture_output=True, text=True, check=False, timeout=READY_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_schedules_give_what_one_process_gives(program: str) -> None:
    done = coconet(program, "-np", "4", "--elements", "1001", "--steps", "3")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert re.fullmatch(rf"{program} on 4 ranks: 1001 elements, 3 steps, \S+", said[0])
    assert [line.split()[0] for line in said[2:-1]] == list(schedules(program))
    if program == "lamb":
        assert said[-1].startswith("All results are those of one process, ")
    else:
        assert said[-1] == "All results are those of one process, bit for bit."
    if program == "adam":  # two tensors of state, whole and cut
        assert [line.split()[2] for line in said[2:-1]] == ["8.008k", "2.008k", "2.008k"]


def test_one_schedule() -> None:
    done = coconet("sgd", "--schedule", "fuse-rs-c-ag", "--elements", "10", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[2:-1]] == ["fuse-rs-c-ag"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("sdg",), "program 'sdg': expected one of sgd, adam, lamb, model-parallel, pipeline-parallel"),
        (("sgd", "--schedule", "ring"), "--schedule ring: expected one of ar-c, rs-c-ag, fuse-rs-c-ag for sgd"),
        (("pipeline-parallel", "-np", "3"), "-np 3: expected a multiple of 2, for so many groups of ranks"),
    ],
)
def test_what_cannot_be_is_one_line(words: tuple[str, ...], message: str) -> None:
    done = coconet(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"Error: {message}\n"


def test_differences_are_seen() -> None:
    one = np.array([1, -4], np.float32)
    assert difference(one, one.copy()) == 0
    assert difference(one + 1, one) == 0.25
    assert np.isnan(difference(one * np.nan, one))
