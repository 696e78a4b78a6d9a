"""Which rank of how many this process is: its launcher says so in environment variables.

Launchers nest, so their order matters: `mpirun` and `torchrun` run inside a Slurm step, never around one, and the inner
launcher is the one to believe. Slurm counts only inside a step: a batch script has the variables of the whole
allocation, though it runs once. `omnireduce run` takes the variables of all other launchers out of its ranks'
environment, and then says torchrun's, for torch: so one that is there beside it was started in a rank.

Sources: Open MPI documentation, "Environment variables set for MPI applications"; PyTorch documentation, "torchrun,
environment variables"; srun(1), "Output environment variables"; for MPICH, `mpirun env`.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omnireduce.addresses import is_loopback, is_wildcard
from omnireduce.config import Config
from omnireduce.errors import UsageError
from omnireduce.runtime.member.numbers import whole

LONGEST = 128  # characters of a job's name and of a launch's id
PROC = Path("/proc")
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"  # "2(x3),1": two on each of three nodes, one on the next


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a launch: `0 <= rank < size`; `local_rank` counts the launch's processes on this host.

    `job` is the launcher's own id of the launch, None where it has none. `launcher` is who said so:
    "arguments", "Open MPI", "MPICH", "omnireduce run", "torchrun", "Slurm", or "none" for a process on its own.
    `local_size` is how many processes of the launch this host has. Of all processes that have the same local rank, one
    on each of `cross_size` hosts, this one is number `cross_rank`. All these are None where nobody said them.
    """

    rank: int
    size: int
    local_rank: int | None
    job: str | None
    launcher: str
    local_size: int | None = None
    cross_rank: int | None = None
    cross_size: int | None = None


@dataclass(frozen=True, slots=True)
class _Variables:
    """The names of a launcher's variables. Of several names the first that is set counts.

    `job` lists alternatives. Each has the names of the variables whose values together make the id. Where the variable
    `guard` is named but not set, none of the others counts.
    """

    launcher: str
    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[tuple[str, ...], ...]
    guard: str = ""
    cross_rank: tuple[str, ...] = ()
    cross_size: tuple[str, ...] = ()


OWN = _Variables(  # omnireduce/launching/environment.py sets them
    launcher="omnireduce run",
    rank="OMNIRUN_RANK",
    size=("OMNIRUN_SIZE",),
    local_rank=("OMNIRUN_LOCAL_RANK",),
    local_size=("OMNIRUN_LOCAL_SIZE",),
    job=(("OMNIRUN_JOB",),),
    cross_rank=("OMNIRUN_CROSS_RANK",),
    cross_size=("OMNIRUN_CROSS_SIZE",),
)
_LAUNCHERS = (
    _Variables(
        launcher="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    _Variables(  # MPICH's mpirun, and srun --mpi=pmi2, which has a job id but no local rank of its own
        launcher="MPICH",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID", "SLURM_LOCALID"),
        local_size=("MPI_LOCALNRANKS", TASKS_PER_NODE),
        job=(("PMI_JOBID",),),
    ),
    OWN,
    _Variables(
        launcher="torchrun",
        rank="RANK",
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        job=(("TORCHELASTIC_RUN_ID",),),
    ),
    _Variables(
        launcher="Slurm",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),  # NTASKS may count the allocation, not the step
        local_rank=("SLURM_LOCALID",),
        local_size=(TASKS_PER_NODE,),
        job=(("SLURM_JOB_ID", "SLURM_STEP_ID"),),
        guard="SLURM_STEP_ID",
    ),
)


def detect_launch(
    environ: Mapping[str, str] = os.environ, *, rank: int | None = None, size: int | None = None
) -> Launch:
    """This process's rank and size: from the arguments, else from its launcher, else rank 0 of 1. Where the launcher
    says what the arguments say, its local numbers count, too.

    Raises UsageError if only one of `rank` and `size` is given, or unless both are integers and 0 <= rank < size; also
    if a launcher's variables have one of these faults.
    """
    if rank is not None or size is not None:
        if rank is None or size is None:
            raise UsageError(f"got rank {rank} and size {size}, expected both or neither")
        rank, size = whole(rank, "rank"), whole(size, "size")
        if not 0 <= rank < size:
            raise UsageError(f"got rank {rank} and size {size}, expected 0 <= rank < size")
        said = _innermost(environ)
        if said is None or not _says(said, environ, rank, size):
            return Launch(rank, size, None, None, "arguments")
        local_rank, local_size = _local(said.local_rank, environ), _local(said.local_size, environ)
        return Launch(rank, size, local_rank, None, "arguments", local_size, **_cross(said, environ))
    found = _innermost(environ)
    return Launch(0, 1, 0, None, "none", 1) if found is None else _launch(found, environ)


def job_name(config: Config, launcher_job: str | None) -> str:
    """The job's name: `cluster.job` of the configuration. For "auto" it is the launcher's id or, without one,
    "default"; the name of the team, if there is one, stands before that.

    Characters that a job name cannot have become "_".
    """
    if config.cluster.job != "auto":
        return config.cluster.job
    team = f"{config.security.team}." if config.security.team else ""
    return (team + _clean(launcher_job or "default"))[:LONGEST]


def launch_id(rank: int, size: int, environ: Mapping[str, str] = os.environ) -> str:
    """An id that only the processes of this launch share; empty where nothing is known.

    The innermost launcher counts, if it says the same rank and size. Otherwise these were given by hand, and the
    launcher started something else. Its id of the launch is taken. MPICH's mpirun may give no id; then the address
    counts at which it waits for its proxies, one of which is an ancestor of this process. With torchrun, and for rank
    and size given by hand, it is the address where PyTorch's ranks meet (MASTER_ADDR, MASTER_PORT). With torchrun its
    id stands before that, but this may be the same for all launches. Every host has a loopback address of its own, so
    something that tells hosts apart stands behind such a one.
    """
    inside = _innermost(environ)
    if inside is not None and not _says(inside, environ, rank, size):
        inside = None
    parts = [] if inside is None else [_id(inside, environ)]
    if inside is None or inside.launcher == "torchrun":
        address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
        parts.append(_met_at(f"{address}:{port}") if address and port else None)
    return _short("@".join(part for part in parts if part))


def _id(variables: _Variables, environ: Mapping[str, str]) -> str | None:
    """The launcher's id of the launch; of MPICH's mpirun, which may give none, where it waits for its proxies."""
    found = _job(variables, environ)
    if found is None and variables.launcher == "MPICH":
        found = _met_at(_process_manager() or "")
    return found


def _met_at(address: str) -> str:
    """HOST:PORT where the ranks of a launch meet, in words that no launch of another host shares."""
    host = address.rpartition(":")[0].strip("[]")
    return f"{address}@{this_host()}" if is_loopback(host) or is_wildcard(host) else address


def this_host(proc: Path = PROC) -> str:
    """What the processes of this host, or of this container, share with no others: the id that the kernel drew when it
    started, and the inode of the network namespace, each with a loopback address of its own. Without the first, the
    name of the host."""
    try:
        parts = [(proc / "sys/kernel/random/boot_id").read_text().strip()]
    except OSError:
        parts = [socket.gethostname()]
    with suppress(OSError):  # not readable everywhere
        parts.append(str((proc / "self/ns/net").stat().st_ino))
    return ".".join(parts)


def _says(variables: _Variables, environ: Mapping[str, str], rank: int | str, size: int | str) -> bool:
    """Whether the launcher started this process as that rank."""
    sizes = [environ[name] for name in variables.size if name in environ]
    return environ.get(variables.rank) == str(rank) and sizes[:1] == [str(size)]


def _clean(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:@+-]", "_", text)


def _short(text: str) -> str:
    """The text as an id of a limited length. Two different texts give different ids, however long they are."""
    if len(text) <= LONGEST and text == _clean(text):
        return text
    return _clean(text)[:64] + hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _innermost(environ: Mapping[str, str]) -> _Variables | None:
    """Who started this process. Where Slurm says what the variables of a torchrun that is not there say, they only
    repeat it."""
    found = [each for each in _LAUNCHERS if _is_inside(each, environ)]
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if found[:1] == [OWN]:  # it says torchrun's variables, too, but for the id that torchrun gives
        return found[1] if "TORCHELASTIC_RUN_ID" in environ and len(found) > 1 else OWN
    if [each.launcher for each in found] == ["torchrun", "Slurm"] and "TORCHELASTIC_RUN_ID" not in environ:
        return found[1] if _says(found[1], environ, rank, size) else found[0]
    return found[0] if found else None


def variables_of_launchers() -> frozenset[str]:
    """The names by which launchers say rank, size and the launch."""
    found: set[str] = set()
    for each in _LAUNCHERS:
        names = (each.rank, each.guard, *each.size, *each.local_rank, *each.local_size, *each.cross_rank)
        found |= {*names, *each.cross_size, *(name for job in each.job for name in job)}
    return frozenset(found - {"", "SLURM_JOB_ID"})  # the allocation, which srun in a rank needs


def _is_inside(variables: _Variables, environ: Mapping[str, str]) -> bool:
    """Whether this process was started by that launcher."""
    is_inside = not variables.guard or variables.guard in environ
    return is_inside and any(name in environ for name in (variables.rank, *variables.size))


def _launch(variables: _Variables, environ: Mapping[str, str]) -> Launch:
    rank_name = variables.rank
    size_name = next((name for name in variables.size if name in environ), variables.size[-1])
    if rank_name not in environ or size_name not in environ:
        given, missing = (rank_name, size_name) if rank_name in environ else (size_name, rank_name)
        raise UsageError(f"{variables.launcher}: got {given} but not {missing}, expected both or neither")
    rank, size = number_in(rank_name, environ), number_in(size_name, environ)
    if rank >= size:
        raise UsageError(
            f"{variables.launcher}: got {rank_name}={rank} and {size_name}={size}, expected 0 <= rank < size"
        )
    local_rank, local_size = _local(variables.local_rank, environ), _local(variables.local_size, environ)
    if local_size is not None and not (local_rank or 0) < local_size <= size:
        raise UsageError(
            f"{variables.launcher}: got local rank {local_rank or 0} of {local_size} on this host and {size} in all, "
            "expected local rank < local size <= size"
        )
    job = _job(variables, environ)
    if job is None and variables.launcher == "MPICH":
        job = _process_manager()
    return Launch(rank, size, local_rank, job, variables.launcher, local_size, **_cross(variables, environ))


def _cross(variables: _Variables, environ: Mapping[str, str]) -> dict[str, int | None]:
    """The numbers of a `Launch` across hosts."""
    names = {"cross_rank": variables.cross_rank, "cross_size": variables.cross_size}
    return {name: _local(each, environ) for name, each in names.items()}


def _local(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """The number in the first of these variables that is set, which counts on this host only; None if none is set."""
    name = next((name for name in names if name in environ), None)
    if name == TASKS_PER_NODE:
        return _tasks_of_node(environ[name], number_in("SLURM_NODEID", environ)) if "SLURM_NODEID" in environ else None
    return number_in(name, environ) if name else None


def _tasks_of_node(text: str, node: int) -> int:
    """How many tasks of a Slurm step its node number `node` has."""
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if found is None:
            break
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1])
    raise UsageError(f"{TASKS_PER_NODE}: got {text!r}, expected a number of tasks for each node, such as 2(x3),1")


def number_in(name: str, environ: Mapping[str, str]) -> int:
    """The number that a launcher says in this variable. Raises UsageError."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}: got {text[:80]!r}, expected an int that is not negative")
    return int(text)


def _job(variables: _Variables, environ: Mapping[str, str]) -> str | None:
    for names in variables.job:
        parts = [environ.get(name, "") for name in names]
        if all(parts) and parts != ["none"]:  # torchrun's id is "none" unless it was given one
            return ".".join(parts)
    return None


def _process_manager() -> str | None:
    """HOST:PORT where MPICH's mpirun waits for its proxies on all hosts. No other launch has that at the same time."""
    pid = os.getpid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        if words[0].rpartition(b"/")[2] == b"hydra_pmi_proxy" and b"--control-port" in words[:-1]:
            return words[words.index(b"--control-port") + 1].decode(errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])
    return None
