"""Whole training runs: ranks as threads on a real daemon, and the program under mpirun."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import MPIRUN, ROOT, Daemon, Ranks, configured, run_job, start_job, unique_job
from transports import BY_SHARDS, MEMORY, over

from omnireduce.console.bench.recorded_tensors import find_arrays
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config
from omnireduce.worker.train import check_plot, named_methods, run_methods, run_train
from omnireduce.worker.train.run import load_shared_corpus

SMALL = {
    "steps": 12,
    "batch": 32,
    "dim": 16,
    "vocabulary": 400,
    "max_files": 40,
    "learning_rate": 0.1,
}
needs_mpi = pytest.mark.skipif(
    not MPIRUN or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and its mpirun"
)
LIMIT_S = 120


def overrides(**values: object) -> list[str]:
    return [f"train.{key}={value}" for key, value in (SMALL | values).items()]


def small(daemon: Daemon, *others: str, **values: object) -> Config:
    return configured(daemon.addresses, *overrides(**values), *others)


def train(config: Config, size: int, json_path: Path | None = None) -> list[int]:
    path = None if json_path is None else str(json_path)
    return run_job(config, size, lambda comm: run_train(comm, config, json_path=path, against_mpi=False))


@pytest.mark.parametrize("transport", ["shm", "tcp", MEMORY])
def test_all_ranks_end_like_one_process(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str
) -> None:
    config = small(daemon, *over(transport), steps=40)
    assert train(config, 2, tmp_path / "result.json") == [0, 0]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["verdict"] == {"ranks_identical": True, "reference_identical": True, "reference_difference": 0}
    assert (result["transport"], result["world_size"], result["shards"]) == (transport, 2, 3)
    assert result["train"]["steps"] == 40
    assert result["words"] == 400
    assert result["mpi"] is None
    assert result["loss_after"] < result["loss_before"] - 0.2
    assert 0 < result["timing"]["exchange_ms"] < result["timing"]["step_ms"]
    output = capsys.readouterr().out
    assert "bit-identical on all workers, equal to a one-process run's" in output
    assert output.count("held-out loss") == 1  # only rank 0 prints


def test_the_bytes_are_those_of_the_non_zero_blocks(daemon: Daemon, tmp_path: Path) -> None:
    assert train(small(daemon, BY_SHARDS, dim=64), 2, tmp_path / "result.json") == [0, 0]
    result = json.loads((tmp_path / "result.json").read_text())["gradients"]
    assert result["block_size"] == 64
    assert result["bytes"] == 2 * 400 * 64 * 4
    assert 0 < result["density"] < result["union_density"] < 2 * result["density"]
    framing = 3 * 1024 + 16 / (64 * 4) * result["bytes"]
    for density, wire in (("density", "wire_up_bytes"), ("union_density", "wire_down_bytes")):
        payload = result[density] * result["bytes"]
        assert payload <= result[wire] <= payload + framing


@pytest.mark.parametrize(("size", "dim"), [(1, 16), (3, 16), (3, 20), (4, 7)])
def test_any_number_of_ranks_and_rows_that_are_no_blocks(daemon: Daemon, size: int, dim: int) -> None:
    assert train(small(daemon, dim=dim, steps=5), size) == [0] * size


def test_each_rank_saves_its_own_gradient(daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = small(daemon), tmp_path / "made" / "gradients"

    def on_rank(comm: Communicator) -> int:
        return run_train(comm, config, against_mpi=False, gradients_folder=str(folder))

    assert run_job(config, 2, on_rank) == [0, 0]
    assert sorted(path.name for path in folder.iterdir()) == ["gradient-0.npy", "gradient-1.npy"]
    saved = [np.load(path) for path in sorted(folder.iterdir())]
    assert [(each.shape, each.dtype) for each in saved] == [((2 * 400, 16), np.float32)] * 2
    assert all(0 < np.count_nonzero(each) < each.size for each in saved)
    assert not np.array_equal(*saved), "own gradients, not their sum"
    (array,) = find_arrays(f"{folder}/gradient-{{rank}}.npy", 2)
    assert array.shape == (800, 16)
    report = capsys.readouterr().out
    assert f"saved each worker's gradient of step 12: {folder}/gradient-{{rank}}.npy\n" in report


def test_a_folder_that_cannot_be_made_is_told_before_the_training(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = small(daemon)
    with pytest.raises(UsageError, match="file: cannot be made a folder: "):
        run_job(config, 1, lambda comm: run_train(comm, config, gradients_folder=str(tmp_path / "file")))


class WrongSum(Communicator):
    """A communicator whose sums are wrong on the ranks in `wrong`."""

    wrong: tuple[int, ...] = ()

    def allreduce(self, x: Array, **options: Any) -> Array:
        result = super().allreduce(x, **options)
        if self.rank in self.wrong:
            result[0, 0] += 1
        return result


@pytest.mark.parametrize(("wrong", "message"), [((1,), "DIFFERENT between workers"), ((0, 1), "NOT those of a one")])
def test_a_wrong_sum_is_noticed(
    daemon: Daemon, capsys: pytest.CaptureFixture[str], wrong: tuple[int, ...], message: str
) -> None:
    config, job = small(daemon), unique_job()

    def run(rank: int) -> int:
        with WrongSum(config, rank=rank, size=2, job=job) as comm:
            comm.wrong = wrong
            return run_train(comm, config, against_mpi=False)

    assert Ranks(2, run).results() == [1, 1]
    assert message in " ".join(capsys.readouterr().out.split())


def test_ranks_with_other_values_are_told_so(daemon: Daemon) -> None:
    configs = [small(daemon), small(daemon, seed=2)]
    outcomes = start_job(configs, 2, lambda comm: run_train(comm, comm.config, against_mpi=False)).outcomes()
    assert all(isinstance(outcome, UsageError) for outcome in outcomes)
    assert all("rank 1 has other values in [train]" in str(outcome) for outcome in outcomes)


def test_ranks_with_other_files_are_told_so(daemon: Daemon, tmp_path: Path) -> None:
    config = small(daemon)
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        for i in range(10):
            size = "short" if rank == 2 and i == 4 else "long"
            (tmp_path / str(rank) / f"m{i}.py").write_text(f"some words of a file that is {size} enough " * 100)

    def run(comm: Communicator) -> int:
        return load_shared_corpus(comm, config, tmp_path / str(comm.rank)).files

    assert run_job(config, 2, run) == [10, 10]
    outcomes = start_job(config, 3, run).outcomes()
    assert all("rank 2 has other source files" in str(outcome) for outcome in outcomes), outcomes


def test_a_result_file_that_cannot_be_written_is_told_before_the_training(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        train(small(daemon), 1, tmp_path / "missing" / "result.json")


def program(daemon: Daemon, *arguments: str) -> list[str]:
    settings = [f"cluster.aggregators={json.dumps(daemon.addresses)}", f"cluster.job={unique_job()}", *overrides()]
    return [
        sys.executable,
        "-m",
        "worker",
        "train",
        *arguments,
        *(word for setting in settings for word in ("--set", setting)),
    ]


def finished(command: list[str]) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@needs_mpi
def test_the_program_under_mpirun_compares_with_mpi(daemon: Daemon, tmp_path: Path) -> None:
    assert MPIRUN is not None
    result = finished([MPIRUN, "-n", "2", *program(daemon, "--json", str(tmp_path / "result.json"))])
    assert result.returncode == 0, result.stderr
    assert "MPI all-reduce" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr  # no progress display without a terminal
    mpi = json.loads((tmp_path / "result.json").read_text())["mpi"]
    assert mpi["weights_difference"] == 0  # two summands: the order does not matter
    assert 0 < mpi["timing"]["exchange_ms"] < mpi["timing"]["step_ms"]


@pytest.mark.slow
def test_without_mpirun_the_program_says_why_there_is_no_comparison(daemon: Daemon, tmp_path: Path) -> None:
    command = program(daemon, "--json", str(tmp_path / "result.json"), "--size", "2", "--rank")
    i = command.index("--rank") + 1
    outputs = Ranks(2, lambda rank: finished([*command[:i], str(rank), *command[i:]])).results(LIMIT_S)
    assert [output.returncode for output in outputs] == [0, 0], [output.stderr for output in outputs]
    assert "no comparison with MPI" in outputs[0].stdout
    assert outputs[1].stdout == ""
    assert json.loads((tmp_path / "result.json").read_text())["mpi"]["missing"]


def methods(config: Config, size: int, *texts: str, **paths: str) -> list[int]:
    named = named_methods(texts)
    return run_job(config, size, lambda comm: run_methods(comm, config, named, **paths))


def test_methods_are_compared_by_what_they_lose_and_send(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(daemon, BY_SHARDS, steps=60, dim=64)
    path = tmp_path / "methods.json"
    assert methods(config, 2, "int8", "topk,0.05", "int8", "powersgd,2", json_path=str(path)) == [0, 0]
    none, int8, topk, powersgd = report = json.loads(path.read_text())
    assert [each["method"] for each in report] == ["none", "int8", "topk,0.05", "powersgd,2"]
    assert all(each["ranks_identical"] for each in report)
    assert all(len(each["curve"]) == 10 for each in report)
    assert all(each["curve"][-1]["loss"] == each["loss"] < each["curve"][0]["loss"] for each in (none, int8, topk))
    assert none["loss_change"] == 0
    assert abs(int8["loss_change"]) < 0.005
    assert int8["wire_up_bytes"] < 0.3 * none["wire_up_bytes"]
    assert topk["wire_up_bytes"] < none["wire_up_bytes"] > powersgd["wire_up_bytes"]
    output = capsys.readouterr().out
    assert output.count("weights: bit-identical on all workers") == 1  # only rank 0 prints
    assert [line.split()[0] for line in output.splitlines() if "%" in line] == [each["method"] for each in report]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_plot_of_the_methods(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "methods.svg"
    check_plot(str(path))
    assert methods(small(daemon, BY_SHARDS, steps=3), 1, "bf16", plot_path=str(path)) == [0]
    assert "<svg" in path.read_text()
    with pytest.raises(UsageError, match=r"--plot .*\.txt: expected a file name that ends with \.svg, \.png, \.pdf"):
        check_plot(str(tmp_path / "methods.txt"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "x.svg"], "--plot without --compression: expected a method, such as topk,0.01, or all"),
        (["--compression", "int8", "--elastic"], "--elastic with --compression: leave one of them out"),
        (["--compression", "int8", "--against", "none"], "--against with --compression: leave one of them out"),
        (["--compression", "nope"], "method 'nope': expected a name with numbers"),
        (["--compression", "int8", "--plot", "/nowhere/x.svg"], "/nowhere/x.svg: there is no folder /nowhere"),
    ],
)
def test_what_does_not_go_together_is_said_before_anybody_trains(arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "omnireduce.worker", "train", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert result.returncode in (1, 2)
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""
