"""mpirun, torchrun and srun, asked for by `--launcher`; and launchers inside each other."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import FAMILY, are_gone, launched, lines, python, run
from local_cluster import MPIRUN, READY_S, WAIT_S

from omnireduce.errors import ConfigError
from omnireduce.launch import launcher_commands
from omnireduce.launch.hosts import Host
from omnireduce.launch.launched_job import InterruptedLaunchError, LaunchedJob
from omnireduce.launch.launcher_commands import _is_open_mpi, launcher_command, wrap_command
from omnireduce.launch.output import UnchangedOutput
from omnireduce.launch.plan import LaunchRequest
from omnireduce.runtime.rank.launcher_detection import detect_launch, launch_id
from omnireduce.support.config import Config

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
CODE = """
import os
import numpy as np
import omnireduce as omni
with omni.init() as comm:
    told = [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE")]
    os.write(1, f"{omni.allreduce(np.ones(9))[0]:g} {' '.join(told)}\\n".encode())
"""
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")


@needs_mpirun
@pytest.mark.parametrize("options", [["--launcher", "mpirun"], ["--mpi", "--aggregators", "1"]], ids=" ".join)
def test_mpirun(options: list[str]) -> None:
    result = run("-np", "2", *options, *python(CODE), PATH=PATH)
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == ["2 0 2 0 2 1", "2 1 2 1 2 1"]


@needs_mpirun
def test_the_status_of_mpirun_is_that_of_the_launch() -> None:
    result = run("-np", "2", "--mpi", "sh", "-c", "exit 3", PATH=PATH)
    assert result.returncode == 3
    assert "mpirun on localhost ended with status 3" in result.stderr


@needs_mpirun
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_of_mpirun_is_left(number: signal.Signals) -> None:
    with launched("-np", "2", "--mpi", "--grace-period", "1", *python(FAMILY), PATH=PATH) as launcher:
        pids = [int(word) for _ in range(2) for word in launcher.line(READY_S).split()]
        launcher.signal(number)
        launcher.wait()
        assert are_gone(pids)


def test_torchrun() -> None:
    pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    result = run("-np", "2", "--launcher", "torchrun", *python(CODE), PATH=PATH)
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == ["2 0 2 0 2 1", "2 1 2 1 2 1"]


def test_srun() -> None:
    if not shutil.which("srun", path=PATH):
        result = run("-np", "2", "--launcher", "srun", "true", PATH=PATH)
        assert (result.returncode, result.stderr) == (2, "Error: srun: command not found: it comes with Slurm\n")
        pytest.skip("no Slurm here")
    if subprocess.run(["srun", "-n", "2", "true"], capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("no Slurm that starts two tasks here")
    result = run("-np", "2", "--launcher", "srun", *python(CODE), PATH=PATH)
    assert result.returncode == 0, result.stderr


def fake(folder: Path, name: str, says: str) -> dict[str, str]:
    """An environment with a program of that name, which says this."""
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o700)
    return {
        "PATH": f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin",
        "OMNIREDUCE_SECURITY_SECRET": "s" * 32,
        "HOME": "/",
    }


@pytest.fixture
def idle() -> Iterator[LaunchedJob]:
    """A job without hosts, in which something can be waited for."""
    with LaunchedJob([], UnchangedOutput({}), grace_s=0) as job:
        yield job


def request_for(launcher: str, *hosts: Host) -> LaunchRequest:
    return LaunchRequest(words=["train"], ranks=4, config=Config(), launcher=launcher, hosts=hosts, mpi_args=["--more"])


def test_open_mpi_passes_names_of_variables_only(tmp_path: Path, idle: LaunchedJob) -> None:
    environ = fake(tmp_path, "mpirun", "mpirun (Open MPI) 4.1.4")
    assert _is_open_mpi(environ, idle)
    words = launcher_command(request_for("mpirun", Host("a", 2), Host("b", 2)), environ, idle)
    assert words[:5] == ["mpirun", "-n", "4", "-H", "a:2,b:2"]
    assert words[5:10] == ["-x", "OMNIREDUCE_SECURITY_SECRET", "-x", "PATH", "--more"]
    assert "s" * 32 not in " ".join(words)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_an_mpirun_that_does_not_end_is_waited_for_no_longer(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: LaunchedJob
) -> None:
    """Also where a child of it keeps its output."""
    (tmp_path / "mpirun").write_text("#!/bin/sh\nsleep 1000 &\nwait\n")
    (tmp_path / "mpirun").chmod(0o700)
    monkeypatch.setattr(launcher_commands, "_VERSION_S", 1000.0 if is_interrupted else 0.1)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if is_interrupted:
        os.write(idle._wake_writer.fileno(), bytes([signal.SIGINT]))
    with pytest.raises(InterruptedLaunchError if is_interrupted else ConfigError):
        _is_open_mpi(environ, idle)


def test_mpich_and_srun_have_words_of_their_own(tmp_path: Path, idle: LaunchedJob) -> None:
    environ = fake(tmp_path, "mpirun", "HYDRA build details:")
    words = launcher_command(request_for("mpirun", Host("a", 2), Host("b", 2)), environ, idle)
    assert words[:6] == ["mpirun", "-n", "4", "-hosts", "a:2,b:2", "--more"]
    environ = fake(tmp_path, "srun", "")
    words = launcher_command(request_for("srun", Host("a", 2), Host("b", 2)), environ, idle)
    assert words[:6] == ["srun", "--ntasks=4", "--export=ALL", "--nodelist=a,b", "--nodes=2", "--more"]
    environ = fake(tmp_path, "torchrun", "")
    with pytest.raises(ConfigError, match="--launcher torchrun starts ranks on one host only"):
        launcher_command(request_for("torchrun", Host("a", 2), Host("b", 2)), environ, idle)


@pytest.mark.parametrize("more", [{"SLURM_NODEID": "9" * 5000, "SLURM_STEP_NUM_NODES": "2"}, {"PMI_SIZE": "x"}])
def test_what_a_launcher_says_wrongly_is_named_in_a_line(more: dict[str, str]) -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2"} | more
    result = subprocess.run(
        wrap_command(["true"]), env=environ, capture_output=True, text=True, check=False, timeout=READY_S
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(("Error: SLURM_NODEID: got", "Error: PMI_SIZE: got"))
    assert len(line) < 200


def test_ranks_of_a_launcher_that_nobody_knows_are_not_told_that_each_is_alone() -> None:
    environ = {"PMIX_RANK": "1"}
    result = subprocess.run(
        wrap_command(["true"]), env=environ, capture_output=True, text=True, check=False, timeout=READY_S
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        "Error: PMIx (PMIX_RANK) speaks of 2 processes or more, but does not give this process a rank"
    )


OWN = {
    "OMNIRUN_RANK": "1", "OMNIRUN_SIZE": "4", "OMNIRUN_LOCAL_RANK": "1", "OMNIRUN_LOCAL_SIZE": "2",
    "OMNIRUN_CROSS_RANK": "0", "OMNIRUN_CROSS_SIZE": "2", "OMNIRUN_JOB": "run-1", "RANK": "1", "WORLD_SIZE": "4",
    "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1",
}  # fmt: skip


def test_this_launcher_is_one_that_the_library_knows() -> None:
    result = detect_launch(OWN)
    assert (result.launcher, result.job, result.rank, result.size) == ("omnireduce run", "run-1", 1, 4)
    assert (result.local_rank, result.local_size) == (1, 2)
    assert launch_id(1, 4, OWN) == "run-1"
    given = detect_launch(OWN, rank=1, size=4)
    assert (given.launcher, given.local_rank, given.local_size) == ("arguments", 1, 2)


@pytest.mark.parametrize(
    ("inner", "launcher"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "Open MPI"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "MPICH"),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"},
            "torchrun",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "omnireduce run"),
    ],
)
def test_what_is_started_in_a_rank_is_the_inner_launcher(inner: dict[str, str], launcher: str) -> None:
    assert detect_launch(OWN | inner).launcher == launcher
