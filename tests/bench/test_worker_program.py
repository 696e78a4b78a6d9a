"""`python -m omnireduce.worker` as users run it: real processes, real files, exit statuses."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner, Result
from local_cluster import MPIRUN, ROOT, Daemon, complaints, unique_job

from omnireduce.support.config import Config, load_config
from omnireduce.worker.cli import main

WORKER = (sys.executable, "-m", "omnireduce.worker")
needs_mpi = pytest.mark.skipif(
    not MPIRUN or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and its mpirun"
)
LIMIT_S = 120


def environ(daemon: Daemon) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OMNIREDUCE_")}
    return kept | {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": json.dumps(daemon.addresses),
        "OMNIREDUCE_CLUSTER_JOB": unique_job("program"),
        "OMNIREDUCE_BENCH_ROUNDS": "3",
        "OMNIREDUCE_BENCH_WARMUP": "1",
    }


def finished(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def mpirun(size: int, *arguments: str) -> list[str]:
    assert MPIRUN is not None
    return [MPIRUN, "-n", str(size), *WORKER, *arguments]


def both(daemon: Daemon, *arguments: str, own: tuple[list[str], list[str]] = ([], [])) -> list[tuple[int, str, str]]:
    """Two ranks without a launcher, each with arguments of its own: (status, standard output, standard error)."""
    environment = environ(daemon)
    ranks = [
        subprocess.Popen(
            [*WORKER, "bench", "--rank", str(rank), "--size", "2", *arguments, *own[rank]],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(ranks, outputs, strict=True)]


@needs_mpi
def test_bench_against_mpi_under_mpirun(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sweep = ["--set", "bench.elements=30_000", "--set", 'bench.dtype=["float32", "bfloat16"]']
    ops = ["--set", 'bench.op=["mean", "prod"]', "--set", "bench.density=0.1"]
    command = mpirun(2, "bench", "--against", "mpi", "--json", str(path), *sweep, *ops)
    result = finished(command, environ(daemon))
    assert (result.returncode, complaints(result.stderr)) == (0, [])
    rows = json.loads(path.read_text())
    assert [(row["dtype"], row["op"]) for row in rows] == [
        ("float32", "mean"),
        ("float32", "prod"),
        ("bfloat16", "mean"),
        ("bfloat16", "prod"),
    ]
    assert all((row["wrong"], row["world_size"], row["shards"]) == (0, 2, 3) for row in rows)
    for row in rows:
        if row["dtype"] == "float32":
            assert row["speedup"] == pytest.approx(row["mpi_time_ms"] / row["time_ms"])
        else:  # MPI has no such type
            assert "mpi_time_ms" not in row
            assert "speedup" not in row
    lines = result.stdout.splitlines()
    assert len([line for line in lines if line.split()[1:2] == ["30000"]]) == 4, result.stdout
    assert all(len(line.rstrip()) <= 100 for line in lines)


@needs_mpi
@pytest.mark.parametrize("size", [2, 3])
def test_bench_of_real_tensors_against_mpi(daemon: Daemon, tmp_path: Path, size: int) -> None:
    """Three ranks too, where MPI's order of summation may give another result."""
    rng, path = np.random.default_rng(3), tmp_path / "rows.json"
    for rank in range(size):
        table = rng.standard_normal((500, 64)).astype(np.float32) * (rng.random((500, 1)) < 0.1)
        np.savez(tmp_path / f"model-{rank}.npz", table=table, bias=np.ones(300, ml_dtypes.bfloat16))
    pattern = f"{tmp_path}/model-{{rank}}.npz"
    options = ("--against", "mpi", "--json", str(path), "--set", "bench.block_size=64")
    result = finished(mpirun(size, "bench", "--input", pattern, *options), environ(daemon))
    assert (result.returncode, complaints(result.stderr)) == (0, [])
    assert "blocks of 64, table of model-{rank}.npz\n" in result.stdout
    table, bias = json.loads(path.read_text())
    assert (table["dtype"], table["elements"], table["wrong"]) == ("float32", 32_000, 0)
    assert 0.05 < table["density"] < table["union_density"] < 0.1 * size + 0.1
    assert table["speedup"] == pytest.approx(table["mpi_time_ms"] / table["time_ms"])
    assert (bias["dtype"], bias["elements"], bias["wrong"], bias["density"]) == ("bfloat16", 300, 0, 1)


@needs_mpi
def test_a_rank_that_fails_ends_those_that_wait_in_mpi() -> None:
    code = (
        "from omnireduce.console.bench.mpi import MpiAllreduce; import numpy, os\n"
        "rank = int(os.environ['PMI_RANK'])\n"
        "mpi = MpiAllreduce(rank, 2, command='')\n"
        "mpi.in_place(numpy.ones(10), 'sum')\n"
        "if rank == 1: raise SystemExit('rank 1 gives up')\n"
        "mpi.in_place(numpy.ones(10), 'sum')\n"
    )
    assert MPIRUN is not None
    result = finished([MPIRUN, "-n", "2", sys.executable, "-c", code], dict(os.environ))  # has a bound
    assert result.returncode != 0
    assert "rank 1 gives up" in result.stderr


def test_bench_without_a_launcher_prints_on_rank_0_only(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    results = both(daemon, "--set", "bench.elements=1000", "--set", "bench.density=1.0", "--json", str(path))
    assert [(status, complaints(errors)) for status, _, errors in results] == [(0, []), (0, [])]
    assert "float32" in results[0][1]
    assert results[1][1] == ""
    assert len(json.loads(path.read_text())) == 1


def test_wrong_elements_end_every_rank_with_status_1(daemon: Daemon) -> None:
    """Ranks with different seeds fill tensors that the other's oracle does not expect."""
    seeds = (["--set", "bench.seed=1"], ["--set", "bench.seed=2"])
    results = both(daemon, "--set", "bench.elements=1000", "--set", "bench.density=1.0", own=seeds)
    assert [status for status, _, _ in results] == [1, 1]
    assert results[0][2].endswith("elements were wrong\n")
    assert (results[1][1], complaints(results[1][2])) == ("", [])


def test_a_file_that_cannot_be_written_ends_every_rank_at_once(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "none" / "rows.json"
    results = both(daemon, "--set", "bench.elements=1000", "--json", str(path))
    assert [status for status, _, _ in results] == [2, 1]
    assert complaints(results[0][2]) == [f"Error: {path}: there is no folder {path.parent}"]
    assert "rank 0" in results[1][2]


def run(*arguments: str) -> Result:
    return CliRunner(env={name: None for name in os.environ if name.startswith("OMNIREDUCE_")}).invoke(main, arguments)


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (["bench", "--rank", "0"], 2, "got rank 0 and no size, expected both or neither"),
        (
            ["bench", "--set", "bench.op=mean", "--set", "bench.dtype=int8"],
            2,
            '--set: bench.dtype: got "int8", expected float types because bench.op is mean',
        ),
        (
            ["bench", "--rank", "0", "--size", "2", "--set", "bench.overlap=none"],
            2,
            "2 workers cannot have disjoint blocks at density 1",
        ),
        (["bench", "--input", "x.npy"], 2, "got 'x.npy', expected the file of every rank, such as gradients/"),
        (["bench", "--input", "none-{rank}.npy"], 2, "none-0.npy: No such file or directory"),
        (["bench", "--input", "{rank}.txt"], 2, "0.txt: expected a file name that ends in .npy, .npz, .safetensors"),
        (["bench", "--set", "bench.elemnts=1"], 2, "--set: bench.elemnts: unknown key"),
        (["train", "--config", "none.toml"], 2, "none.toml: no such file"),
        (["train", "--set", "train.max_files=9"], 2, "--set: train.max_files: got 9, "),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], status: int, line: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert result.stderr.startswith(f"Error: {line}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_against_mpi_without_mpirun_names_the_command() -> None:
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    result = finished([*WORKER, "bench", "--against", "mpi"], kept)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("mpirun -n 2 omnireduce bench --against mpi\n")


@needs_mpi
def test_against_mpi_with_ranks_that_mpi_does_not_know() -> None:
    """In a process of its own: importing mpi4py starts MPI."""
    result = finished([*WORKER, "bench", "--rank", "1", "--size", "2", "--against", "mpi"], dict(os.environ))
    assert result.returncode == 2
    assert "this is rank 1 of 2, but to MPI it is rank 0 of 1" in result.stderr
    assert result.stderr.count("\n") == 1


def test_against_mpi_without_mpi4py_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')\n")
    hidden = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = finished([*WORKER, "bench", "--rank", "1", "--size", "2", "--against", "mpi"], hidden)
    assert result.returncode == 2
    what = "Error: the comparison with MPI needs mpi4py (not here): pip install 'mpi4py>="
    assert result.stderr.startswith(what)


def test_config_prints_what_is_in_effect() -> None:
    result = run("config", "--set", "protocol.slots=7")
    assert result.exit_code == 0
    assert tomllib.loads(result.stdout)["protocol"]["slots"] == 7


def test_config_reference_loads_as_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "reference.toml"
    path.write_text(run("config", "--reference").stdout)
    assert load_config(path, environ={}) == Config()


def test_help_is_quick_because_it_imports_no_runtime() -> None:
    code = "import sys; from omnireduce.worker.cli import main; main(['--help'], standalone_mode=False)"
    code += "; print(*sys.modules)"
    result = finished([sys.executable, "-c", code], dict(os.environ))
    text, _, modules = result.stdout.rpartition("\n")[0].rpartition("\n")
    for command in ("bench", "train", "density", "config"):
        assert f"\n  {command} " in text
    assert "..." not in text.partition("Commands:")[2]
    assert "omnireduce.worker.cli" in modules.split()
    parts = {"omnireduce.console.bench.run", "omnireduce.console.density.report", "omnireduce.worker.train"}
    assert not {*parts, "mpi4py", "rich"} & set(modules.split())


def gradient(folder: Path) -> Path:
    """An embedding's gradient: 1 row of 64 elements in 50 is not zero, the others hold -0."""
    path = folder / "gradient.npy"
    values = np.full((5000, 64), -0.0, np.float32)
    values[::50] = 1.5
    np.save(path, values)
    return path


def test_density_of_a_sparse_gradient(tmp_path: Path) -> None:
    path, out = gradient(tmp_path), tmp_path / "density.json"
    options = ("--block-sizes", "64,256", "--world-size", "4", "--link-gbps", "25", "--json", str(out))
    result = run("density", str(path), *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "5000x64" in result.stdout
    assert "The service would help" in result.stdout
    assert "protocol.block_size=64" in result.stdout
    (report,) = json.loads(out.read_text())
    assert (report["file"], report["world_size"], report["link_gbps"]) == (str(path), 4, 25)
    assert (report["best_block_size"], report["helps"], report["errors"]) == (64, True, [])
    (array,) = report["arrays"]
    assert (array["shape"], array["dtype"], array["density"]) == ([5000, 64], "float32", 0.02)
    assert [estimate["block_size"] for estimate in array["estimates"]] == [64, 256]
    assert [estimate["density"] for estimate in report["estimates"]] == [0.02, 0.08]
    assert report["estimates"][0]["union_density"] == pytest.approx(1 - 0.98**4)


def test_density_of_dense_arrays_says_no(tmp_path: Path) -> None:
    path = tmp_path / "dense.npz"
    np.savez(path, a=np.ones(10_000, np.float32), b=np.ones(1000).astype(ml_dtypes.bfloat16))
    result = run("density", str(path))
    assert result.exit_code == 0
    assert "bfloat16" in result.stdout
    assert "would not help: at best" in result.stdout


def test_density_of_a_small_sparse_array_says_that_latency_decides(tmp_path: Path) -> None:
    path = tmp_path / "small.npy"
    np.save(path, np.eye(1, 5000, dtype=np.float32))
    result = run("density", str(path))
    assert "would not help: at best 0.1" in result.stdout
    assert "pay for latency: reduce them together" in " ".join(result.stdout.split())


def test_density_reports_the_other_files_beside_a_broken_one(tmp_path: Path) -> None:
    broken, missing, mixed = tmp_path / "broken.safetensors", tmp_path / "none.npy", tmp_path / "mixed.npz"
    broken.write_bytes(b"\xff" * 20)
    np.savez(mixed, names=np.array(["a", "b"]), ones=np.ones(10))
    good = gradient(tmp_path)
    result = run("density", str(broken), str(missing), str(mixed), str(good), "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"Error: {broken}: is 20 bytes long, which its header does not fit into",
        f"Error: {missing}: No such file or directory",
        f"Error: {mixed}: names: cannot reduce arrays of <U1; supported are "
        "float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8, uint16, uint32, uint64",
    ]
    assert "gradient" in result.stdout
    assert "ones" in result.stdout
    reports = json.loads((tmp_path / "out.json").read_text())
    assert [len(report["arrays"]) for report in reports] == [0, 0, 1, 1]
    assert [len(report["errors"]) for report in reports] == [1, 1, 1, 0]


def test_density_of_a_file_without_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "none.npz")
    result = run("density", str(tmp_path / "none.npz"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: {tmp_path / 'none.npz'}: holds no arrays\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--block-sizes", "12"), "--block-sizes '12': expected multiples of 8 from 8 to 65536, such as 8,32"),
        (("--block-sizes", "64,x"), "--block-sizes '64,x': expected multiples of 8 from"),
        (("--block-sizes", ""), "--block-sizes '': expected multiples of 8 from"),
        (("--world-size", "1"), "Invalid value for '--world-size'"),
        (("--link-gbps", "0"), "Invalid value for '--link-gbps'"),
        (("--link-gbps", "inf"), "Invalid value for '--link-gbps'"),
    ],
)
def test_density_refuses_wrong_options(option: tuple[str, str], message: str) -> None:
    result = run("density", *option, "x.npy")
    assert result.exit_code == 2
    assert f"Error: {message}" in result.stderr
