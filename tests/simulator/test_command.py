"""`python -m tests.simulator` as people and CI call it."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUG = "worker finishes out of order"


def simulator(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulator", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_good_seeds_and_new_ones() -> None:
    result = simulator("--seeds", "0:20", "--new", "4", "--jobs", "2", "--verbose")
    assert result.returncode == 0, result.stdout
    assert "24 seeds, 0 failed" in result.stdout
    assert "runs/s" in result.stdout
    assert "new seeds: " in result.stdout
    assert result.stdout.count("options: ") == 24


def test_who_stops_it_hears_how_far_it_came() -> None:
    command = [sys.executable, "-m", "tests.simulator", "--seeds", "7:100000", "--jobs", "1", "--verbose"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("seed 7: ")
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
    assert process.returncode == 130
    seeds = 1 + output.count("options: ")
    assert f"stopped after seed {6 + seeds}\n" in output
    assert f"{seeds} seeds, 0 failed" in output


def test_a_failure_prints_the_command_that_replays_it() -> None:
    result = simulator("--seeds", "0:50", "--failures", "1", "--jobs", "1", "--mutation", BUG)
    assert result.returncode == 1, result.stdout
    [command] = [line.partition("replay: ")[2] for line in result.stdout.splitlines() if "replay: " in line]
    assert "options: " in result.stdout
    assert result.stdout.endswith(f"failed: {command.partition(' --mutation')[0]}\n")
    words = shlex.split(command)
    again = simulator(*words[3:])
    assert again.returncode == 1, again.stdout
    assert "wrong: " in again.stdout or "reason: " in again.stdout
    assert simulator("--replay", words[words.index("--replay") + 1]).returncode == 0


def test_one_fault_at_every_event() -> None:
    result = simulator("--seeds", "25:26", "--fault", "link loss", "--jobs", "1")
    assert result.returncode == 0, result.stdout
    assert "link loss" in result.stdout
    assert " runs)" in result.stdout
    assert simulator("--replay", "25", "--fault", "link loss", "--event", "30").returncode == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--seeds", "5"), "expected FIRST:STOP"),
        (("--fault", "late"), "expected one of crash"),
        (("--mutation", "nobody knows it"), "expected one of worker loses a credit"),
    ],
)
def test_wrong_options_say_what_is_expected(options: tuple[str, ...], message: str) -> None:
    result = simulator(*options)
    assert result.returncode == 2
    assert message in result.stderr
