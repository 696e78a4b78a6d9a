"""`allreduce-benchmark` as users of SwitchML run it: its lines, its groups, its check, its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from local_cluster import MPIRUN, ROOT, WAIT_S, Daemon, Process, complaints, configured, unique_job

from omnireduce.switchml import Context, Distribution
from omnireduce.worker.cli import main
from omnireduce.worker.switchml.benchmark import DTYPES, LENGTH, Cell, Summands, trend

NUMBER = r"#[\d.e+-]+#"
FLAGS = {
    "--help": "", "--tensor-numel": "268435456", "--tensor-type": "float", "--device": "cpu", "--num-jobs": "10",
    "--num-warmup-jobs": "5", "--inplace": "1", "--verify": "0", "--sync-every": "1", "--err": "1.0", "--random": "0",
    "--seed": "0", "--dump-stats": "0",
}  # fmt: skip


def run(*arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """On aggregators of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    launcher = [] if ranks == 1 else [str(MPIRUN), "-n", str(ranks)]
    return subprocess.run(
        [*launcher, sys.executable, "-m", "omnireduce.worker", "allreduce-benchmark", *arguments],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=4 * WAIT_S, check=False,
    )  # fmt: skip


def lines_of(groups: list[str]) -> list[str]:
    """Patterns of the printed lines."""
    return [
        r"Signal handler thread started\. Waiting for any signals\.", r"Submitting \d+ warmup jobs\.",
        r"Warmup finished\.", r"Submitting \d+ jobs\.",
        *(rf"Job\(s\) #{group}# finished\. Duration: {NUMBER} ns Goodput: {NUMBER} Gbps\." for group in groups),
        r"All jobs finished\.", "Verifying final results", r"Data verified successfully\.", "",
        *(rf"{name} \d+ ns [\d.e+-]+ Gbps" for name in ("Min", "Max", "Median", "Mean")), r"Std dev \d+ ns",
        r"Cleaning up\.", "Signal handler thread is exiting",
    ]  # fmt: skip


def assert_lines(found: str, patterns: list[str]) -> None:
    lines = found.splitlines()
    assert len(lines) == len(patterns), found
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(pattern, line), f"{line!r}, expected {pattern!r}"


def test_all_flags_and_their_defaults() -> None:
    text = " ".join(CliRunner().invoke(main, ["allreduce-benchmark", "--help"]).output.split())
    for flag, default in FLAGS.items():
        described = text.partition(f" {flag} ")[2].partition(" --")[0]
        assert described, flag
        assert re.search(rf"\[default: {re.escape(default)}[;\]]", described) or not default, described


@pytest.mark.parametrize("command", ["allreduce-benchmark", "replay"])
def test_h_is_help(command: str) -> None:
    short, long = (CliRunner().invoke(main, [command, flag]) for flag in ("-h", "--help"))
    assert (short.exit_code, short.output) == (0, long.output)


def test_help_says_what_each_command_does() -> None:
    lines = [
        " ".join(CliRunner().invoke(main, [name, "-h"]).output.split()) for name in ("allreduce-benchmark", "replay")
    ]
    assert "Check every element of every sum, int32 exactly, from above and from below." in lines[0]
    assert "Check every element of the sums of the last iteration, from above and from below." in lines[1]
    assert "int32" not in lines[1]
    assert "One rank, this one, makes its forward and backward pass --num-iters times" in lines[1]


def test_one_rank_prints_what_switchml_prints() -> None:
    result = run("--tensor-numel", "10000", "--num-jobs", "3", "--verify", "1")
    assert (result.returncode, complaints(result.stderr)) == (0, [])
    assert_lines(result.stdout, lines_of(["0", "1", "2"]))


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        (["--sync-every", "3", "--num-jobs", "10", "--tensor-type", "int32"], ["0-2", "3-5", "6-8", "9"]),
        (["--sync-every", "0", "--inplace", "0", "--random", "1", "--seed", "3"], ["0-9"]),
        (["--sync-every", "4", "--num-tensors", "3", "--num-jobs", "8", "--random"], ["0-3", "4-7"]),
    ],
)
def test_two_ranks_in_groups(tmp_path: Path, options: list[str], groups: list[str]) -> None:
    path = tmp_path / "found.json"
    result = run("--tensor-numel", "20000", "--verify", "--json", str(path), *options, ranks=2)
    assert (result.returncode, complaints(result.stderr)) == (0, [])
    assert_lines(result.stdout, lines_of(groups))
    report = json.loads(path.read_text())
    assert (report["world_size"], report["wrong"], len(report["groups"])) == (2, 0, len(groups))
    for group in report["groups"]:
        jobs = group["last"] - group["first"] + 1
        assert group["goodput_gbps"] == pytest.approx(20000 * 32 * jobs / group["ns"])
    each = [group["ns"] / (group["last"] - group["first"] + 1) for group in report["groups"]]
    assert msgspec.convert(report["job_ns"], Distribution) == Distribution.of(each)


@pytest.mark.parametrize("kind", ["int32", "float"])
@pytest.mark.parametrize("seed", [None, 3])
def test_the_check_sees_a_summand_too_many_and_one_too_few(kind: str, seed: int | None) -> None:
    """In a tensor of more than one window, in the first round and in a later one."""
    summands, numel = Summands(DTYPES[kind], 3, seed), LENGTH + 100
    parts = [np.empty(numel, DTYPES[kind]) for _ in range(3)]
    for rank, part in enumerate(parts):
        summands.fill(rank, part, 2)
    right = parts[0] + parts[1] + parts[2]
    assert summands.wrong(right, number=2).count == 0
    assert summands.wrong(right * 9, number=2, rounds=3).count == 0
    assert summands.wrong(right, number=1).count > LENGTH / 2
    for change in (parts[1], -parts[1]):
        for index in (5, LENGTH + 50):
            wrong = right.copy()
            wrong[index] += change[index] or 1
            result = summands.wrong(wrong, number=2, err=0.01)
            assert (result.count, result.first[0][0]) == (1, index)
            assert str(result).startswith(f"1 wrong elements, the first: [{index}] is ")


def test_floats_may_be_wrong_by_err_per_cent_on_both_sides() -> None:
    summands, result = Summands(DTYPES["float"], 2), np.empty(4, np.float32)
    summands.fill(0, result)
    sums = 2 * result + 1
    changed = sums * np.array([0.991, 1.009, 0.989, 1.011], np.float32)
    assert [index for index, _, _ in summands.wrong(changed, err=1).first] == [2, 3]
    changed[:] = np.nan, np.inf, -sums[2], 0
    assert summands.wrong(changed, err=1).count == 4


def test_a_wrong_sum_ends_every_rank_with_status_1(daemon: Daemon) -> None:
    """Ranks with different seeds sum what the other one does not expect."""
    environ = {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
        "OMNIREDUCE_CLUSTER_JOB": unique_job("benchmark"),
    }
    arguments = ["allreduce-benchmark", "--tensor-numel", "1000", "--num-jobs", "2", "--random", "--verify"]
    ranks = [
        Process(
            *(
                sys.executable,
                "-m",
                "omnireduce.worker",
                *arguments,
                "--seed",
                str(rank),
                "--rank",
                str(rank),
                "--size",
                "2",
            ),
            environ=environ,
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait() for process in ranks] == [1, 1]
        assert re.search(r"rank 0: \d+ wrong elements, the first: \[\d+\] is .*, expected ", ranks[0].log)
        assert re.search(r"Error: \d+ elements were wrong\n$", ranks[0].log)
        assert "rank 1: " in ranks[1].log
        assert "Error" not in ranks[1].log
    finally:
        for process in ranks:
            process.close()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_stops_the_context(daemon: Daemon, number: int, status: int) -> None:
    """The other rank is there, and takes no part: without the signal this would not end."""
    job = unique_job("signalled")
    environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses), "OMNIREDUCE_CLUSTER_JOB": job}
    command = [sys.executable, "-m", "omnireduce.worker", "allreduce-benchmark", "--rank", "0", "--size", "2"]
    with Process(*command, "--tensor-numel", "1000", environ=environ) as process:
        other = Context().start(configured(daemon.addresses, f"cluster.job={job}"), rank=1, size=2)
        assert process.line().startswith("Signal handler thread started.")
        assert process.line() == "Submitting 5 warmup jobs."
        process.signal(number)
        assert process.line() == f"Received {signal.Signals(number).name}. Stopping."
        assert process.line() == "Signal handler thread is exiting"
        assert process.wait() == status
        assert "Traceback" not in process.log
        other.stop()


def test_the_table_has_a_cell_for_all_threads_and_sizes(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    few = ["--num-jobs", "2", "--num-warmup-jobs", "0", "--verify", "--json", str(path)]
    result = run("--table", "--threads", "1,2", "--sizes", "100,2000,30000", *few)
    assert (result.returncode, complaints(result.stderr)) == (0, [])
    rows = [re.findall(r"[\d.k]+", line) for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["100", "2k", "30k"]
    assert {len(row) for row in rows} == {3}
    cells = json.loads(path.read_text())
    assert {(cell["threads"], cell["tensor_numel"]) for cell in cells} == {
        (threads, size) for threads in (1, 2) for size in (100, 2000, 30000)
    }
    assert all(cell["goodput_gbps"] > 0 and cell["wrong"] == 0 for cell in cells)
    assert result.stdout.splitlines()[-1].startswith("trend: from 1 to 2 threads ")


def test_the_trend_is_that_of_the_cells() -> None:
    rates = {(1, 10): 1.0, (1, 20): 4.0, (8, 10): 2.0, (8, 20): 2.0}
    cells = [Cell(threads, size, rate, Distribution.of([]), 0) for (threads, size), rate in rates.items()]
    assert trend(cells) == (
        "trend: from 1 to 8 threads 0.50x to 2.00x the goodput; from 10 to 20 elements 1.00x to 4.00x"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--device", "gpu"], 2, "--device gpu: these tensors are in the memory of the host"),
        (["--tensor-type", "double"], 2, "'double' is not one of 'int32', 'float'"),
        (["--table", "--threads", "1,x"], 2, "--threads '1,x': expected numbers from 1 to 1099511627776"),
        (["--table", "--sizes", "9" * 23], 2, "expected numbers from 1 to 1099511627776, such as 1,4"),
        (["--num-jobs", "9" * 23], 2, "is not in the range 1<=x<="),
        (["--table", "--threads", "65"], 2, "--threads: transport.threads: got 65, expected an int between 0 and 64"),
        (["--set", "transport.thread=1"], 2, "--set: transport.thread: unknown key"),
    ],
)
def test_wrong_options_are_one_line(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(main, ["allreduce-benchmark", *arguments])
    assert result.exit_code == status
    assert message in result.stderr


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
def test_jobs_in_place_that_the_type_cannot_hold_are_refused() -> None:
    """Two ranks double the sum with each job; without a limit int32 would end in zeros, which do not travel."""
    result = run("--tensor-numel", "10", "--tensor-type", "int32", "--sync-every", "0", "--num-jobs", "40", ranks=2)
    assert result.returncode == 2
    assert "40 jobs one after the other in place: with 2 workers int32 holds the sums of 21; set --inplace 0" in (
        result.stderr
    )
