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
from omnireduce.launch.hosts import Host, is_here, names_in
from omnireduce.launch.job import Job
from omnireduce.launch.plan import LaunchRequest, Plan
from omnireduce.support.addresses import loopback
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.extras import install
from omnireduce.support.interpreters import TREE, program_of

INSIDE = program_of("omnireduce.launch.set_rank", "1")
OTHERS = ("mpirun", "srun", "torchrun")
_LOOK_S = 30.0  # the longest run of `mpirun --version`
_KILLED_S = 5.0  # the longest wait for its end when it was killed
_PREFIXES = ("OMNIREDUCE_", "HOROVOD_", "OMNIRUN_", "PYTHON")
_ALSO = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", SECRET_VARIABLE)


def wrapped(words: Sequence[str]) -> list[str]:
    """The user's command behind the command of `set_rank`."""
    return [sys.executable, "-P", "-c", INSIDE, TREE, *words]


def words_of(asked: LaunchRequest, environ: Mapping[str, str], job: Job) -> list[str]:
    """The command line of the other launcher. Raises ConfigError if it is missing, or cannot do what is asked;
    InterruptedLaunchError."""
    if shutil.which(asked.launcher, path=environ.get("PATH")) is None:
        how = {"mpirun": f"{install('mpi4py', 'mpi')}, or MPI of this system", "torchrun": install("torch", "torch")}
        raise ConfigError(f"{asked.launcher}: command not found: {how.get(asked.launcher, 'it comes with Slurm')}")
    if asked.launcher == "mpirun":
        return _mpirun(asked, environ, is_open_mpi=_is_open_mpi(environ, job))
    return _srun(asked) if asked.launcher == "srun" else _torchrun(asked)


def _mpirun(asked: LaunchRequest, environ: Mapping[str, str], *, is_open_mpi: bool) -> list[str]:
    words = ["mpirun", "-n", str(asked.ranks)]
    if is_open_mpi:
        if asked.hosts:
            words += ["-H", _listed(asked.hosts)]
        named = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _ALSO)
        words += [word for name in named for word in ("-x", name)]  # the value is not on the command line
    elif asked.hosts:
        words += ["-hosts", _listed(asked.hosts)]
    return [*words, *asked.mpi_args, *wrapped(asked.words)]


def _srun(asked: LaunchRequest) -> list[str]:
    words = ["srun", f"--ntasks={asked.ranks}", "--export=ALL"]
    if asked.hosts:
        words += [f"--nodelist={','.join(host.name for host in asked.hosts)}", f"--nodes={len(asked.hosts)}"]
    return [*words, *asked.mpi_args, *wrapped(asked.words)]


def _torchrun(asked: LaunchRequest) -> list[str]:
    if len(asked.hosts) > 1:
        raise ConfigError(
            "--launcher torchrun starts ranks on one host only: run torchrun --nnodes on each host, or use "
            "--launcher ssh"
        )
    if asked.mpi_args:
        raise ConfigError("--mpi-args with --launcher torchrun: expected --launcher mpirun or srun")
    here = f"--local-addr={loopback()}"  # the default, the name of this host, may stand for an address of another host
    return ["torchrun", "--standalone", here, f"--nproc-per-node={asked.ranks}", "--no-python", *wrapped(asked.words)]


def _is_open_mpi(environ: Mapping[str, str], job: Job) -> bool:
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
            has_ended = job.wait_for(lambda: not job.is_watched(end) or bool(job.signal), _LOOK_S)
        finally:
            job.forget(end)
            os.close(end)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED_S)
        job.check()
        if not has_ended:
            raise ConfigError(f"mpirun --version: no answer within {_LOOK_S:g} s")
        output.seek(0)
        said = output.read(CHUNK)
    return any(name in said for name in (b"Open MPI", b"PRTE", b"prterun"))


def _listed(hosts: Sequence[Host]) -> str:
    return ",".join(map(str, hosts))


def hosts_of(asked: LaunchRequest, environ: Mapping[str, str]) -> list[str]:
    """The hosts of the ranks, as far as they are known; this host first, because aggregators would run on it."""
    if asked.hosts:
        return ["localhost", *(host.name for host in asked.hosts if not is_here(host.name))]
    others = names_in(environ.get("SLURM_JOB_NODELIST", "")) if asked.launcher == "srun" else []
    return ["localhost", *(name for name in others if not is_here(name))]


def start_other(job: Job, asked: LaunchRequest) -> None:
    """Start the aggregators of the job and the other launcher. Raises OmniReduceError; InterruptedLaunchError."""
    if asked.output_folder is not None:
        raise ConfigError(f"--output-filename with --launcher {asked.launcher}: use its own option, by --mpi-args")
    [here] = job.connections
    plan = Plan(asked, hosts_of(asked, asked.environ))
    words = words_of(asked, plan.environ, job)
    job.greet(asked.start_timeout_s)
    plan.serve(job, here)
    job.called = asked.launcher
    job.start(0, here, plan.command(words, here))
