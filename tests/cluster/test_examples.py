"""The examples of the library do what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from forked_ranks import run_ranks
from local_cluster import ROOT, WAIT_S, Daemon
from nursery import TORCH
from separate_hosts import separate_hosts


def outputs(daemon: Daemon, script: str, host_exchange: str = "auto", arguments: Sequence[str] = ()) -> list[str]:
    """Output of two ranks of an example."""
    ranks = run_ranks(
        [str(ROOT / "examples" / script), *arguments], 2,
        OMNIREDUCE_CLUSTER_AGGREGATORS=json.dumps(daemon.addresses), OMNIREDUCE_TRANSPORT_HOST_EXCHANGE=host_exchange,
    )  # fmt: skip
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    return [rank.out for rank in ranks]


def test_allreduce(daemon: Daemon) -> None:
    """Each of two ranks in memory sends its rows of the other's half, and the sum of its own half."""
    for rank, line in enumerate(outputs(daemon, "allreduce.py")):
        assert line.startswith(f"rank {rank} of 2 by memory: sum 122880, sent ")
        sent, received, dense = (int(match) for match in re.findall(r"(\d+) kB", line))
        assert 100 < received < sent < 350 < dense


def test_allreduce_by_shards(daemon: Daemon) -> None:
    for rank, line in enumerate(outputs(daemon, "allreduce.py", host_exchange="off")):
        assert line.startswith(f"rank {rank} of 2 by shm: sum 122880, sent ")
        sent, received, dense = (int(match) for match in re.findall(r"(\d+) kB", line))
        assert 160 < sent < received < 350 < dense


def test_embedding_rows(daemon: Daemon) -> None:
    lines = outputs(daemon, "embedding_rows.py")
    rows_and_norms = {tuple(re.findall(r"(\d+ rows out|norm [\d.]+)", line)) for line in lines}
    assert len(rows_and_norms) == 1
    assert all("for a matrix of 2.56 GB" in line for line in lines)


def check_recommended(outs: Sequence[str], sent_kb: int) -> None:
    """The numbers of the tutorial. A rank also sends a report once a second, which counts."""
    assert outs[1] == ""
    match = re.fullmatch(
        r"mean squared error 0.533, without a model 1.962\n"
        r"2 ranks; each sent (\d+) kB in a step, for tables of 7040 kB\n",
        outs[0],
    )
    assert match is not None, outs[0]
    assert abs(int(match[1]) - sent_kb) <= 2


def test_recommender(daemon: Daemon) -> None:
    """The numbers of the tutorial."""
    check_recommended(outputs(daemon, "recommender.py"), 222)


def test_recommender_on_two_hosts(tmp_path: Path) -> None:
    """Each rank is on a host of its own, as in the tutorial, and one of them is that of the aggregator."""
    with separate_hosts(2, tmp_path) as (first, second):
        listen = f"{first.address}:0"
        with Daemon(1, "security.allow_no_secret=true", listen=listen, prefix=first.prefix) as daemon:
            environ = os.environ | {
                "OMNIREDUCE_CLUSTER_AGGREGATORS": daemon.addresses[0],
                "OMNIREDUCE_CLUSTER_JOB": "tutorial",
                "OMNIREDUCE_TRANSPORT_HOST_EXCHANGE": "off",  # hosts of tests could share memory
                "WORLD_SIZE": "2",
            }
            command = [sys.executable, str(ROOT / "examples/recommender.py")]
            ranks = [
                subprocess.Popen(
                    [*host.prefix, *command], env=environ | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True
                )
                for rank, host in enumerate((first, second))
            ]
            try:
                outs = [process.communicate(timeout=4 * WAIT_S)[0] for process in ranks]
            finally:
                for process in ranks:
                    process.kill()
    check_recommended(outs, 236)


def test_sharded_optimizer(daemon: Daemon) -> None:
    """A batch looks up few rows. Of a row four weights are kept, and one number; such small tables lie on one shard."""
    small = ["--users", "300", "--items", "200", "--width", "4", "--steps", "400", "--batch", "64"]
    output, nothing = outputs(daemon, "sharded_optimizer.py", arguments=small)
    form = (
        r"2 ranks: mean squared error ([\d.]+) at first, ([\d.]+) after 400 steps; "
        r"a rank sent (\d+) rows in the last one, of 500; a shard keeps (\d+) bytes\n"
    )
    first, last, rows, kept = map(float, re.fullmatch(form, output).groups())  # type: ignore[union-attr]
    assert nothing == ""
    assert last < first / 2
    assert rows < 128
    assert kept == 500 * 5 * 4


def test_switchml_hello(daemon: Daemon) -> None:
    for rank, text in enumerate(outputs(daemon, "switchml_hello.py")):
        first, second, last = text.splitlines()
        assert first == f"rank {rank} of 2: submitting 8 tensors of 32768 floats"
        assert second.startswith(
            f"rank {rank}: 8 jobs finished, the last is <omnireduce.switchml.Job 7: float32[32768]"
        )
        assert last == "Data verified successfully exiting main program"


def test_switchml_job(daemon: Daemon) -> None:
    first, second = outputs(daemon, "switchml_job.py", arguments=["10000"])
    steps = ("the synchronous all-reduce", "submitting the asynchronous one", "waiting for it")
    *times, last = first.splitlines()
    assert [re.sub(r"\d+", "N", line) for line in times] == [f"{step} took N ns" for step in steps]
    assert re.fullmatch(r"world size 2, <omnireduce.switchml.Job 1: float32\[10000\], finished>, context stopped", last)
    assert second == ""


@pytest.mark.parametrize("script", ["switchml_hello.py", "switchml_job.py"])
def test_switchml_alone(script: str) -> None:
    """Without a launcher, and on an aggregator of its own."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)],
        env={name: value for name, value in environ.items() if name not in names},
        capture_output=True, text=True, timeout=2 * WAIT_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] in (
        "Data verified successfully exiting main program",
        "world size 1, <omnireduce.switchml.Job 1: float32[16777216], finished>, context stopped",
    )


@pytest.mark.parametrize(
    "script",
    [
        "allreduce.py",
        "embedding_rows.py",
        "recommender.py",
        "sharded_optimizer.py",
        "switchml_hello.py",
        "switchml_job.py",
    ],
)
def test_the_commands_in_an_example_exist(script: str) -> None:
    text = (ROOT / "examples" / script).read_text()
    assert f"python examples/{script}" in text
    assert all((ROOT / path).exists() for path in re.findall(r"configs/[\w.-]+", text))


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here; `make torch` installs it")
@pytest.mark.parametrize("more", [[], ["--fp16-allreduce"], ["--use-adasum"]])
def test_the_synthetic_benchmark_prints_the_lines_that_users_know(more: list[str]) -> None:
    small = ["--batch-size", "2", "--num-classes", "10", "--num-iters", "2", "--num-batches-per-iter", "2", *more]
    first, second = run_ranks([str(ROOT / "examples/torch_synthetic_benchmark.py"), *small], 2, preloaded=TORCH)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert second.out == ""
    lines = first.out.splitlines()
    assert lines[:4] == ["Batch size: 2", "Number of CPUs: 2", "Running warmup...", "Running benchmark..."]
    number = r"[\d.]+"
    assert [bool(re.fullmatch(f"Iter #{i}: {number} img/sec per CPU", lines[4 + i])) for i in range(2)] == [True] * 2
    assert re.fullmatch(rf"Img/sec per CPU: {number} \+-{number}", lines[6])
    assert re.fullmatch(rf"Total img/sec on 2 CPU\(s\): {number} \+-{number}", lines[7])


def test_scaling_makes_a_table(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import omnireduce as omni\nwith omni.init() as comm:\n"
        "    if comm.rank == 0:\n        print(f'Hvd Procs {comm.size} Total time: {2 / comm.size} second')\n"
    )
    command = [sys.executable, str(ROOT / "examples/scaling.py"), "--np", "1,2", sys.executable, str(program)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=4 * WAIT_S, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.split() for line in result.stdout.splitlines()[-2:]] == [
        ["1", "2.00", "1.00", "100%"],
        ["2", "1.00", "2.00", "100%"],
    ]
    for wrong, message in ((["--np", "one", "x"], "--np one: expected numbers"), (["--np", "1"], "expected a program")):
        result = subprocess.run([*command[:2], *wrong], capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert result.returncode == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    ("script", "small", "expected"),
    [
        ("torch_ddp.py", ["--steps", "60", "--width", "64"], "of digits read right"),
        ("torch_embedding.py", ["--steps", "3", "--rows", "2000", "--files", "20"], "loss "),
        ("torch_embedding.py", ["--steps", "3", "--rows", "2000", "--files", "20", "--dense"], "loss "),
    ],
)
def test_pytorch(script: str, small: list[str], expected: str) -> None:
    """They need no aggregator. What is said of speed differs."""
    for package in ("torch", "sklearn"):
        if find_spec(package) is None:
            pytest.skip(f"no {package} here; `make torch` installs it")
    ranks = run_ranks([str(ROOT / "examples" / script), *small], 2, preloaded=TORCH)
    assert [rank.status for rank in ranks] == [0, 0], ranks[0].err + ranks[1].err
    assert re.match(rf"omnireduce\b.*, 2 ranks: [\d.]+ steps/s; .*{expected}", ranks[0].out), ranks[0].out
