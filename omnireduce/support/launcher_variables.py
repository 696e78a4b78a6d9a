"""Known launchers, by the variables that they set. docs/launching.md has the same as a table for users.

A row of LAUNCHERS gives the rank and size of this process. A row of HINTS says only that there are several processes.

Sources: Open MPI documentation, "Environment variables set for MPI applications"; PyTorch documentation, "torchrun,
environment variables"; srun(1), "Output environment variables"; for MPICH, `mpirun env`; MVAPICH2 user guide; Horovod
documentation, "Environment variables"; flux-environment(7); Slurm's plugin mpi/cray_shasta for PALS; Lightning's
environment for jsrun; LeaderWorkerSet documentation, "Environment variables"; AWS Batch user guide, "Multi-node
parallel jobs"; SkyPilot documentation, "Distributed jobs".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from omnireduce.errors import OmniReduceError
from omnireduce.support.files.paths import read_text

Environ = Mapping[str, str]
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # "2(x3),1": two tasks on each of three nodes, one on the next
MASTER_VARIABLES = "MASTER_ADDR", "MASTER_PORT"  # the address where PyTorch's ranks meet


@dataclass(frozen=True, slots=True)
class Variables:
    """The names of a launcher's variables. If there are several names, the first that is set counts.

    `job` lists alternatives. Each has the names of the variables whose values together make the id of the launch.
    `meets`: host and port where the ranks of a launch meet, and ranks of no other launch at the same time. If one of
    the `guards` is not set, none of the variables counts. `one_per_host`: each host has a single process.
    """

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    job: tuple[tuple[str, ...], ...] = ()
    meets: tuple[str, str] | None = None
    guards: tuple[str, ...] = ()
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()
    one_per_host: bool = False


OMNIREDUCE_RUN = Variables(  # omnireduce/launch/rank_variables.py sets them
    launcher="omnireduce run",
    rank="OMNIRUN_RANK",
    size=("OMNIRUN_SIZE",),
    local_rank=("OMNIRUN_LOCAL_RANK",),
    local_size=("OMNIRUN_LOCAL_SIZE",),
    job=(("OMNIRUN_JOB",),),
    cross_rank=("OMNIRUN_CROSS_RANK",),
    cross_size=("OMNIRUN_CROSS_SIZE",),
)
TORCHRUN = Variables(
    launcher="torchrun",
    rank="RANK",
    size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    job=(("TORCHELASTIC_RUN_ID",),),
    meets=MASTER_VARIABLES,
)
LAUNCHERS = (  # the innermost first
    Variables(
        launcher="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    Variables(  # MPICH's mpirun, and other launchers with PMI: srun --mpi=pmi2, Flux, PALS
        launcher="MPICH",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=(("PMI_JOBID",),),
    ),
    Variables(
        launcher="MVAPICH2",
        rank="MV2_COMM_WORLD_RANK",
        size=("MV2_COMM_WORLD_SIZE",),
        local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
        local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables(
        launcher="jsrun",
        rank="JSM_NAMESPACE_RANK",
        size=("JSM_NAMESPACE_SIZE",),
        local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
        local_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job=(("LSB_JOBID", "PMIX_NAMESPACE"),),
    ),
    OMNIREDUCE_RUN,
    TORCHRUN,
    Variables(
        launcher="horovodrun",
        rank="HOROVOD_RANK",
        size=("HOROVOD_SIZE",),
        local_rank=("HOROVOD_LOCAL_RANK",),
        local_size=("HOROVOD_LOCAL_SIZE",),
        meets=("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        cross_rank=("HOROVOD_CROSS_RANK",),
        cross_size=("HOROVOD_CROSS_SIZE",),
    ),
    Variables(
        launcher="Flux",
        rank="FLUX_TASK_RANK",
        size=("FLUX_JOB_SIZE",),
        local_rank=("FLUX_TASK_LOCAL_ID",),
        job=(("FLUX_JOB_ID",),),
    ),
    Variables(
        launcher="PALS",
        rank="PALS_RANKID",
        size=("PMI_SIZE",),
        local_rank=("PALS_LOCAL_RANKID",),
        local_size=("PALS_LOCAL_SIZE",),
        job=(("PALS_APID",),),
        guards=("PALS_RANKID", "PMI_SIZE"),
    ),
    Variables(
        launcher="Slurm",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),  # NTASKS may count the allocation, not the step
        local_rank=("SLURM_LOCALID",),
        local_size=(TASKS_PER_NODE,),
        job=(("SLURM_JOB_ID", "SLURM_STEP_ID"),),
        guards=("SLURM_STEP_ID",),
    ),
    Variables(
        launcher="LeaderWorkerSet",
        rank="LWS_WORKER_INDEX",
        size=("LWS_GROUP_SIZE",),
        job=(("LWS_LEADER_ADDRESS",),),
    ),
    Variables(
        launcher="AWS Batch",
        rank="AWS_BATCH_JOB_NODE_INDEX",
        size=("AWS_BATCH_JOB_NUM_NODES",),
        job=(("AWS_BATCH_JOB_ID",),),
        one_per_host=True,
    ),
    Variables(
        launcher="SkyPilot",
        rank="SKYPILOT_NODE_RANK",
        size=("SKYPILOT_NUM_NODES",),
        job=(("SKYPILOT_TASK_ID",),),
        one_per_host=True,
    ),
)
ID_SEPARATORS = {"AWS_BATCH_JOB_ID": "#"}  # the number of the node follows this character
_ALLOCATION_VARIABLES = {"SLURM_JOB_ID", "LSB_JOBID"}  # they name the allocation; srun and jsrun in a rank need them


def variables_of_launchers() -> frozenset[str]:
    """The names of all variables in which launchers of processes give rank, size and launch."""
    all_names: set[str] = set()
    for launcher in LAUNCHERS:
        if not launcher.one_per_host:
            names = (
                launcher.rank,
                *launcher.guards,
                *launcher.size,
                *launcher.local_rank,
                *launcher.local_size,
                *launcher.cross_rank,
            )
            all_names |= {*names, *launcher.cross_size, *(name for job in launcher.job for name in job)}
    return frozenset(all_names - _ALLOCATION_VARIABLES)


@dataclass(frozen=True, slots=True)
class Hint:
    """Variables of `source` that say that there are several processes.

    `least_processes`: the least number of processes; 1 for the first of any number, and 0 if they say nothing.
    `is_certain`: if there are two or more, they are ranks; otherwise a program may run once for all of them. `instead`:
    how to start ranks there.

    """

    source: str
    least_processes: Callable[[Environ], int]
    is_certain: bool
    instead: str


def _count(name: str) -> Callable[[Environ], int]:
    """A function that reads a number of processes from a variable: 4, or 2:4, which is two to four."""

    def read(environ: Environ) -> int:
        match = re.fullmatch(r"(?:[0-9]{1,9}:)?([0-9]{1,9})", environ.get(name, "").strip())
        return 0 if match is None or int(match[1]) < 2 else int(match[1])

    return read


def _index(name: str) -> Callable[[Environ], int]:
    """A function that reads the least number of processes from a variable with the index of a process, from 0."""
    return lambda environ: int(environ[name]) + 1 if re.fullmatch("[0-9]{1,9}", environ.get(name, "")) else 0


def _if_several(count: int) -> int:
    return count if count > 1 else 0


def _hosts_of_lsf(environ: Environ) -> int:
    """The hosts in a variable such as `host1 4 host2 4`."""
    return _if_several(len(environ.get("LSB_MCPU_HOSTS", "").split()) // 2)


def _lines_of_pbs(environ: Environ) -> int:
    """The lines of a file with a line for each process that the user has asked for."""
    with suppress(OmniReduceError):
        return _if_several(len(read_text(environ["PBS_NODEFILE"]).split())) if environ.get("PBS_NODEFILE") else 0
    return 0


def _processes_of_torchrun(environ: Environ) -> int:
    """The processes by torchrun's options, given as variables."""
    nodes, per_node = _count("PET_NNODES")(environ), environ.get("PET_NPROC_PER_NODE", "1").strip()
    return _if_several(max(1, nodes) * (int(per_node) if re.fullmatch("[0-9]{1,6}", per_node) else 2))  # such as "gpu"


def _tasks_of_tensorflow(environ: Environ) -> int:
    with suppress(ValueError, LookupError, AttributeError, TypeError, RecursionError):
        cluster = json.loads(environ.get("TF_CONFIG", "{}"))["cluster"]
        return _if_several(sum(len(cluster.get(kind, ())) for kind in ("chief", "master", "worker")))
    return 0


def _hosts_of_sagemaker(environ: Environ) -> int:
    with suppress(ValueError, TypeError, RecursionError):
        return _if_several(len(json.loads(environ.get("SM_HOSTS", "[]"))))
    return 0


_BY_HAND = "set RANK and WORLD_SIZE for each process"
HINTS = (
    Hint("torchrun (PET_NNODES, PET_NPROC_PER_NODE)", _processes_of_torchrun, True, "start the program by torchrun"),
    Hint("PMIx (PMIX_RANK)", _index("PMIX_RANK"), True, _BY_HAND),
    Hint("PALS (PALS_RANKID)", _index("PALS_RANKID"), True, _BY_HAND),
    Hint("ALPS (ALPS_APP_PE)", _index("ALPS_APP_PE"), True, _BY_HAND),
    Hint("TensorFlow (TF_CONFIG)", _tasks_of_tensorflow, True, _BY_HAND),
    Hint("SageMaker (SM_HOSTS)", _hosts_of_sagemaker, True, f"start the program by torchrun or mpirun, or {_BY_HAND}"),
    Hint("Slurm (SLURM_NTASKS)", _count("SLURM_NTASKS"), False, "start the program by srun"),
    Hint("PBS (PBS_NODEFILE)", _lines_of_pbs, False, "start the program by mpirun"),
    Hint("PBS (PBS_NP)", _count("PBS_NP"), False, "start the program by mpirun"),
    Hint("LSF (LSB_MCPU_HOSTS)", _hosts_of_lsf, False, "start the program by jsrun or mpirun"),
    Hint("Grid Engine (NHOSTS)", _count("NHOSTS"), False, "start the program by mpirun"),
    Hint("Cobalt (COBALT_JOBSIZE)", _count("COBALT_JOBSIZE"), False, "start the program by mpirun"),
    Hint("Kubernetes (JOB_COMPLETION_INDEX)", _index("JOB_COMPLETION_INDEX"), False, _BY_HAND),
    Hint("the environment (NNODES)", _count("NNODES"), False, "start the program by torchrun"),
)
