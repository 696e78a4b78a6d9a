"""Command lines of mpirun, srun and torchrun, which take the place of the supervisors of other hosts.

They start `set_rank`, which sets the variables that other launchers would set, and becomes the user's command.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress

from omnireduce.errors import ConfigError
from omnireduce.launch.connection import CHUNK
from omnireduce.launch.hosts import Host, is_this_host, names_in
from omnireduce.launch.launched_job import LaunchedJob
from omnireduce.launch.plan import LaunchRequest, Plan
from omnireduce.support.addresses import loopback
from omnireduce.support.child_program_code import TREE, program_of
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.extras import install

SET_RANK_PROGRAM = program_of("omnireduce.launch.set_rank", "1")
_VERSION_S = 30.0  # the longest run of `mpirun --version`
_KILLED_S = 5.0  # the longest wait for its end when it was killed
_PREFIXES = ("OMNIREDUCE_", "HOROVOD_", "OMNIRUN_", "PYTHON")
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", SECRET_VARIABLE)


def wrap_command(words: Sequence[str]) -> list[str]:
    """The user's command behind the command of `set_rank`."""
    return [sys.executable, "-P", "-c", SET_RANK_PROGRAM, TREE, *words]


def launcher_command(request: LaunchRequest, environ: Mapping[str, str], job: LaunchedJob) -> list[str]:
    """The command line of the other launcher. Raises ConfigError if it is missing, or cannot do what is asked;
    InterruptedLaunchError."""
    if shutil.which(request.launcher, path=environ.get("PATH")) is None:
        how_to_get = {
            "mpirun": f"{install('mpi4py', 'mpi')}, or MPI of this system",
            "torchrun": install("torch", "torch"),
        }
        raise ConfigError(
            f"{request.launcher}: command not found: {how_to_get.get(request.launcher, 'it comes with Slurm')}"
        )
    if request.launcher == "mpirun":
        return _mpirun(request, environ, is_open_mpi=_is_open_mpi(environ, job))
    return _srun(request) if request.launcher == "srun" else _torchrun(request)


def _mpirun(request: LaunchRequest, environ: Mapping[str, str], *, is_open_mpi: bool) -> list[str]:
    words = ["mpirun", "-n", str(request.ranks)]
    if is_open_mpi:
        if request.hosts:
            words += ["-H", _hosts_text(request.hosts)]
        passed_names = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _PASSED_VARIABLES)
        words += [word for name in passed_names for word in ("-x", name)]  # the value is not on the command line
    elif request.hosts:
        words += ["-hosts", _hosts_text(request.hosts)]
    return [*words, *request.mpi_args, *wrap_command(request.words)]


def _srun(request: LaunchRequest) -> list[str]:
    words = ["srun", f"--ntasks={request.ranks}", "--export=ALL"]
    if request.hosts:
        words += [f"--nodelist={','.join(host.name for host in request.hosts)}", f"--nodes={len(request.hosts)}"]
    return [*words, *request.mpi_args, *wrap_command(request.words)]


def _torchrun(request: LaunchRequest) -> list[str]:
    if len(request.hosts) > 1:
        raise ConfigError(
            "--launcher torchrun starts ranks on one host only: run torchrun --nnodes on each host, or use "
            "--launcher ssh"
        )
    if request.mpi_args:
        raise ConfigError("--mpi-args with --launcher torchrun: expected --launcher mpirun or srun")
    # The default is the name of this host, which may stand for an address of another host.
    local_address = f"--local-addr={loopback()}"
    return [
        "torchrun",
        "--standalone",
        local_address,
        f"--nproc-per-node={request.ranks}",
        "--no-python",
        *wrap_command(request.words),
    ]


def _is_open_mpi(environ: Mapping[str, str], job: LaunchedJob) -> bool:
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                ["mpirun", "--version"], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL,
                env=dict(environ), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"mpirun --version: {error.strerror}") from None
        end = os.pidfd_open(process.pid)
        job.watch(end, lambda: job.forget(end))
        try:
            has_ended = job.wait_for(lambda: not job.is_watched(end) or bool(job.signal), _VERSION_S)
        finally:
            job.forget(end)
            os.close(end)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
        job.check()
        if not has_ended:
            raise ConfigError(f"mpirun --version: no answer within {_VERSION_S:g} s")
        output.seek(0)
        version_text = output.read(CHUNK)
    return any(name in version_text for name in (b"Open MPI", b"PRTE", b"prterun"))


def _hosts_text(hosts: Sequence[Host]) -> str:
    return ",".join(map(str, hosts))


def hosts_of_ranks(request: LaunchRequest, environ: Mapping[str, str]) -> list[str]:
    """The hosts of the ranks, as far as they are known; this host first, because aggregators would run on it."""
    if request.hosts:
        return ["localhost", *(host.name for host in request.hosts if not is_this_host(host.name))]
    others = names_in(environ.get("SLURM_JOB_NODELIST", "")) if request.launcher == "srun" else []
    return ["localhost", *(name for name in others if not is_this_host(name))]


def start_other(job: LaunchedJob, request: LaunchRequest) -> None:
    """Start the aggregators of the job and the other launcher. Raises OmniReduceError; InterruptedLaunchError."""
    if request.output_folder is not None:
        raise ConfigError(f"--output-filename with --launcher {request.launcher}: use its own option, by --mpi-args")
    [connection] = job.connections
    plan = Plan(request, hosts_of_ranks(request, request.environ))
    words = launcher_command(request, plan.environ, job)
    job.greet(request.start_timeout_s)
    plan.serve(job, connection)
    job.launcher_name = request.launcher
    job.start(0, connection, plan.command(words, connection))
