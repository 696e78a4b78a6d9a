"""mpirun, srun and torchrun in place of the supervisors of other hosts: their command lines.

The command that they start is `inside`: it sets what launchers of other kinds would set, and becomes the user's.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from omnireduce.addresses import loopback
from omnireduce.config.security import SECRET_VARIABLE
from omnireduce.errors import ConfigError
from omnireduce.interpreters import TREE, program_of
from omnireduce.launching.host_lists import Host, names_in
from omnireduce.launching.hosts import is_here
from omnireduce.launching.job import Job
from omnireduce.launching.plan import Asked, Plan

INSIDE = program_of("omnireduce.launching.inside", "1")
OTHERS = ("mpirun", "srun", "torchrun")
_LOOK_S = 30.0  # for `mpirun --version`
_PREFIXES = ("OMNIREDUCE_", "HOROVOD_", "OMNIRUN_", "PYTHON")
_ALSO = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", SECRET_VARIABLE)


def wrapped(words: Sequence[str]) -> list[str]:
    """The user's command behind `inside`."""
    return [sys.executable, "-P", "-c", INSIDE, TREE, *words]


def words_of(asked: Asked, environ: Mapping[str, str]) -> list[str]:
    """The command line of the other launcher. Raises ConfigError where it is missing, or cannot do what is asked."""
    if shutil.which(asked.launcher, path=environ.get("PATH")) is None:
        how = {"mpirun": "pip install 'omnireduce[mpi]', or MPI of this system", "torchrun": "pip install torch"}
        raise ConfigError(f"{asked.launcher}: command not found: {how.get(asked.launcher, 'it comes with Slurm')}")
    make = {"mpirun": _mpirun, "srun": _srun, "torchrun": _torchrun}[asked.launcher]
    return make(asked, environ)


def _mpirun(asked: Asked, environ: Mapping[str, str]) -> list[str]:
    words = ["mpirun", "-n", str(asked.ranks)]
    if _is_open_mpi(environ):
        if asked.hosts:
            words += ["-H", _listed(asked.hosts)]
        named = sorted(name for name in environ if name.startswith(_PREFIXES) or name in _ALSO)
        words += [word for name in named for word in ("-x", name)]  # the value is not on the command line
    elif asked.hosts:
        words += ["-hosts", _listed(asked.hosts)]
    return [*words, *asked.mpi_args, *wrapped(asked.words)]


def _srun(asked: Asked, _: Mapping[str, str]) -> list[str]:
    words = ["srun", f"--ntasks={asked.ranks}", "--export=ALL"]
    if asked.hosts:
        words += [f"--nodelist={','.join(host.name for host in asked.hosts)}", f"--nodes={len(asked.hosts)}"]
    return [*words, *asked.mpi_args, *wrapped(asked.words)]


def _torchrun(asked: Asked, _: Mapping[str, str]) -> list[str]:
    if len(asked.hosts) > 1:
        raise ConfigError(
            "--launcher torchrun starts ranks on one host only: run torchrun --nnodes on each host, or use "
            "--launcher ssh"
        )
    if asked.mpi_args:
        raise ConfigError("--mpi-args with --launcher torchrun: expected --launcher mpirun or srun")
    here = f"--local-addr={loopback()}"  # else the name of this host, which may mean an address that it has not
    return ["torchrun", "--standalone", here, f"--nproc-per-node={asked.ranks}", "--no-python", *wrapped(asked.words)]


def _is_open_mpi(environ: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=_LOOK_S, check=False, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"mpirun --version: {error}") from None
    return "Open MPI" in done.stdout or "PRTE" in done.stdout or "prterun" in done.stdout


def _listed(hosts: Sequence[Host]) -> str:
    return ",".join(map(str, hosts))


def hosts_of(asked: Asked, environ: Mapping[str, str]) -> list[str]:
    """The hosts on which ranks will be, as far as anybody says it; this one first, where aggregators would be."""
    if asked.hosts:
        return ["localhost", *(host.name for host in asked.hosts if not is_here(host.name))]
    others = names_in(environ.get("SLURM_JOB_NODELIST", "")) if asked.launcher == "srun" else []
    return ["localhost", *(name for name in others if not is_here(name))]


def start_other(job: Job, asked: Asked) -> None:
    """Start the aggregators of the job and the other launcher. Raises OmniReduceError; InterruptedLaunchError."""
    if asked.output_folder is not None:
        raise ConfigError(f"--output-filename with --launcher {asked.launcher}: use its own option, by --mpi-args")
    [here] = job.connections
    plan = Plan(asked, hosts_of(asked, asked.environ))
    words = words_of(asked, plan.environ)
    job.greet(asked.start_timeout_s)
    plan.serve(job, here)
    job.called = asked.launcher
    job.start(0, here, plan.command(words, here))
