"""The batch script: run here, with a stand-in for srun, so that real workers join real aggregators."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from deployment import DEPLOY
from free_ports import free_ports
from local_cluster import READY_S, ROOT, WAIT_S

SCRIPT = DEPLOY / "slurm" / "train.sbatch"
STAND_IN = ROOT / "tests" / "deploy" / "slurm_here.py"


def test_the_script_is_clean() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True, timeout=WAIT_S)
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("bash takes it; no shellcheck here")
    result = subprocess.run([checker, SCRIPT], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert result.returncode == 0, result.stdout


def test_its_ports_are_none_that_the_system_gives_to_clients() -> None:
    [(first, count)] = re.findall(r"\(\((\d+) \+ SLURM_JOB_ID % (\d+)\)\)", SCRIPT.read_text())
    assert 1024 <= int(first) < int(first) + int(count) <= 32768  # ip(7), ip_local_port_range


def run(folder: Path, *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the script as a batch of two tasks on one node: status, standard output, standard error."""
    programs = {
        "srun": f'exec {sys.executable} {STAND_IN} "$@"',
        "scontrol": '[ "$1 $2 $3" = "show hostnames here" ] && echo 127.0.0.1',
        "python": f'exec {sys.executable} "$@"',
        "omnireduce": f'exec {sys.executable} -m omnireduce "$@"',
    }
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_NTASKS": "2"}
    ours = {
        "AGGREGATOR_PORT": str(free_ports()),
        "STEPS": str(folder / "steps"),
        "PATH": f"{folder}:{os.environ['PATH']}",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMNIREDUCE_", "SLURM_"))}
    variables = kept | slurm | ours | (environ or {})
    command, limit_s = ["bash", SCRIPT, *arguments], 2 * READY_S
    result = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit_s, check=False
    )
    return result.returncode, result.stdout, result.stderr


def test_workers_join_the_aggregators_beside_them(tmp_path: Path) -> None:
    """Rank, size and job come from the step; the aggregators stop when the workers are done."""
    code = """
import omnireduce as omni, numpy as np, os
comm = omni.init()
line = f"rank {comm.rank} of {comm.size} {omni.allreduce(np.ones(1000))[0]} {comm.config.cluster.aggregators[0]}\\n"
os.write(1, line.encode())  # at once: both ranks write to one pipe
omni.shutdown()
"""
    status, out, log = run(tmp_path, "python", "-c", code)
    assert status == 0, log
    [address] = re.findall(r"ready (\S+)", out)
    port = address.rpartition(":")[2]
    lines = sorted(line for line in out.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 2 2.0 127.0.0.1:{port}" for rank in range(2)]
    assert "event=job_started" in log
    assert re.search(r"job=4711\.[01] ", log)  # the two steps begin at the same time
    assert "event=stopped" in log
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


def test_the_training_that_comes_with_the_project(tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text("[train]\nsteps = 3\ndim = 16\nmax_files = 20\n")
    status, out, log = run(tmp_path, environ={"OMNIREDUCE_CONFIG": str(tmp_path / "few.toml")})
    assert status == 0, log
    assert "bit-identical on all workers" in out


def test_a_failure_of_the_workers_is_the_status_of_the_batch(tmp_path: Path) -> None:
    status, out, log = run(tmp_path, "python", "-c", "import omnireduce; omnireduce.init(); raise SystemExit(3)")
    assert status == 3, log
    assert "shard " in out  # the log of the aggregators is kept
    assert "event=stopped" in log


SHOW = "import os; os.write(1, b'secret %d\\n' % len(os.environ.get('OMNIREDUCE_SECURITY_SECRET', '')))"


def test_an_allocation_has_a_secret_of_its_own_or_that_of_the_configuration(tmp_path: Path) -> None:
    """In the environment or in a file, and in no command line: the stand-in takes no `--export=NAME=VALUE`."""
    status, out, log = run(tmp_path, "python", "-c", f"import omnireduce; omnireduce.init(); {SHOW}")
    assert (status, out.count("secret 64\n")) == (0, 2), out + log
    (tmp_path / "secret").write_text("whatever the operator has chosen")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "ours.toml").write_text(f"[security]\nsecret_file = '{tmp_path / 'secret'}'\n")
    ours = {"OMNIREDUCE_CONFIG": str(tmp_path / "ours.toml")}
    status, out, log = run(tmp_path, "python", "-c", f"import omnireduce; omnireduce.init(); {SHOW}", environ=ours)
    assert (status, out.count("secret 0\n")) == (0, 2), out + log
