"""Detection of this process's rank and world size, from environment variables of its launcher.

Launchers nest, so their order matters: `mpirun` and `torchrun` run inside a Slurm step, never around it. The innermost
launcher counts. Slurm counts only inside a step: a batch script has the variables of the whole allocation, though it
runs once. `omnireduce run` removes the variables of all other launchers from the environment of its ranks, and then
sets torchrun's for torch. So if another launcher's variables are there beside its own, this launcher was started in a
rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from omnireduce.errors import ConfigError, UsageError
from omnireduce.runtime.rank.calls.arguments import whole_number
from omnireduce.support.addresses import is_loopback, is_wildcard
from omnireduce.support.config import Config
from omnireduce.support.launcher_variables import (
    HINTS,
    ID_SEPARATORS,
    LAUNCHERS,
    MASTER_VARIABLES,
    OMNIREDUCE_RUN,
    TASKS_PER_NODE,
    TORCHRUN,
    Variables,
)
from omnireduce.support.logs import tagged

MAX_CHARACTERS = 128  # the most characters of a job's name, and of a launch's id
PROC = Path("/proc")
log = logging.getLogger("omnireduce")
_logged_signs = set[str]()  # signs of other processes that were logged


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a launch: `0 <= rank < size`; `local_rank` counts the launch's processes on this host.

    `job` is the launcher's id of the launch, or None. `launcher` is the source of these numbers: "arguments", a name of
    the table in `launchers`, such as "Open MPI", or "none" for a process on its own. `local_size` is the number of
    processes of the launch on this host. Both local numbers are None if they are not known.
    """

    rank: int
    size: int
    local_rank: int | None
    job: str | None
    launcher: str
    local_size: int | None = None


def detect_launch(
    environ: Mapping[str, str] = os.environ, *, rank: int | None = None, size: int | None = None
) -> Launch:
    """This process's rank and size: from the arguments, else from its launcher, else rank 0 of 1. If the launcher
    agrees with the arguments, its local numbers count, too.

    Raises UsageError if only one of `rank` and `size` is given, or unless both are integers and 0 <= rank < size. The
    same holds for the variables of a launcher.
    """
    if rank is not None or size is not None:
        if rank is None or size is None:
            present, missing = (f"rank {rank}", "size") if size is None else (f"size {size}", "rank")
            raise UsageError(f"got {present} and no {missing}, expected both or neither")
        rank, size = whole_number(rank, "rank"), whole_number(size, "size")
        if not 0 <= rank < size:
            raise UsageError(f"got rank {rank} and size {size}, expected 0 <= rank < size")
        launcher = _innermost(environ)
        if launcher is None or not _agrees(launcher, environ, rank, size):
            return Launch(rank, size, None, None, "arguments")
        return Launch(rank, size, launcher="arguments", job=None, **_local_numbers(launcher, environ, rank, size))
    launcher = _innermost(environ)
    return Launch(0, 1, 0, None, "none", 1) if launcher is None else _launch_by(launcher, environ)


def own_launch(environ: Mapping[str, str] = os.environ, *, rank: int | None = None, size: int | None = None) -> Launch:
    """`detect_launch`, for a process that is going to train.

    Raises UsageError if it would train alone, though variables say that there are several ranks. If they only may be
    ranks, as in a batch script that runs once, this logs a warning, once.
    """
    launch = detect_launch(environ, rank=rank, size=size)
    sign = None if launch.launcher != "none" else find_launcher_sign(environ)
    if sign is not None:
        if sign.is_certain:
            raise UsageError(f"{sign.text}, but does not give this process a rank and a size: {sign.instead}")
        if sign.text not in _logged_signs:
            _logged_signs.add(sign.text)
            text = f"this process is rank 0 of 1 though {sign.text}: if it should be one of them, {sign.instead}"
            log.warning("%s", text, extra=tagged("alone"))
    return launch


class LauncherSign(NamedTuple):
    """The sign in the environment that a process without a launcher is one of several, and what to do `instead`.
    `is_certain`: it should certainly be one of several ranks."""

    text: str
    instead: str
    is_certain: bool


def find_launcher_sign(environ: Mapping[str, str] = os.environ) -> LauncherSign | None:
    """The sign that there are several processes; None if there is none."""
    for hint in HINTS:
        count = hint.least_processes(environ)
        if count:
            text = f"{hint.source} speaks of {f'{count} processes or more' if count > 1 else 'several processes'}"
            instead = f"{hint.instead}; or, for a process on its own, set RANK=0 and WORLD_SIZE=1"
            return LauncherSign(text, instead, hint.is_certain and count > 1)
    return None


def job_name(config: Config, launcher_job: str | None) -> str:
    """The job's name: `cluster.job` of the configuration. For "auto" it is the launcher's id or, without one,
    "default"; the name of the team, if there is one, stands before that.

    Characters that a job name cannot have become "_".
    """
    if config.cluster.job != "auto":
        return config.cluster.job
    team = f"{config.security.team}." if config.security.team else ""
    return (team + _clean_name(launcher_job or "default"))[:MAX_CHARACTERS]


def launch_id(rank: int, size: int, environ: Mapping[str, str] = os.environ) -> str:
    """An id that only the processes of this launch share; empty if nothing is known.

    The innermost launcher counts, if it gives the same rank and size. Otherwise these were given by hand, and the
    launcher started something else. The id of the launcher is taken. MPICH's mpirun may give no id. Then the address
    counts at which it waits for its proxies, one of which is an ancestor of this process. With torchrun, and for rank
    and size given by hand, it is the address where PyTorch's ranks meet (MASTER_ADDR, MASTER_PORT). With torchrun its
    id stands before the address, but all launches may have the same id. A loopback address is the same on all hosts,
    so the identity of the host follows it.
    """
    launcher = _innermost(environ)
    if launcher is not None and not _agrees(launcher, environ, rank, size):
        launcher = None
    variables = MASTER_VARIABLES if launcher is None else launcher.meets
    parts = [] if launcher is None else [_id(launcher, environ)]
    if variables is not None:
        address, port = (environ.get(name, "") for name in variables)
        parts.append(_rendezvous_address(f"{address}:{port}") if address and port else None)
    return _bounded_id("@".join(part for part in parts if part))


def identity_of(config: Config, rank: int, size: int) -> str:
    """The identity of this launch: `cluster.launch`, or what the launcher gives; empty if neither gives one."""
    return launch_id(rank, size) if config.cluster.launch == "auto" else config.cluster.launch


def check_told_apart(config: Config, rank: int, size: int, *, is_named: bool) -> None:
    """Raise ConfigError if ranks of another launch could be mistaken for ranks of this launch: the job has no name, and
    nothing tells the launches apart. cluster.launch = "" says that this cannot happen."""
    if size > 1 and not is_named and config.cluster.launch == "auto" and not identity_of(config, rank, size):
        raise ConfigError(
            f"nothing tells this launch of {size} workers from another one: set another "
            "cluster.job for each launch (OMNIREDUCE_CLUSTER_JOB=NAME), the same for all its workers, or start them by "
            "omnireduce run, mpirun, srun or torchrun"
        )


def _id(variables: Variables, environ: Mapping[str, str]) -> str | None:
    """The id of the launch: the launcher's id. If MPICH's mpirun gives none: the address where it waits for its
    proxies. Else the id of another launcher that agrees on this process's rank and size."""
    job_id = _launcher_job(variables, environ)
    if job_id is None and variables.launcher == "MPICH":
        job_id = _rendezvous_address(_process_manager() or "") or None
    if job_id is None and variables is not TORCHRUN:
        rank, size = environ[variables.rank], environ[_size_of(variables, environ)]
        job_ids = (_launcher_job(launcher, environ) for launcher in _agreeing_launchers(variables, environ, rank, size))
        job_id = next((other_id for other_id in job_ids if other_id is not None), None)
    return job_id


def _agreeing_launchers(
    first: Variables, environ: Mapping[str, str], rank: int | str, size: int | str
) -> list[Variables]:
    """The other launchers that agree with `first` on rank and size: a launcher may start its ranks by another one."""
    others = [launcher for launcher in LAUNCHERS if launcher is not first and _has_started(launcher, environ)]
    return [launcher for launcher in others if _agrees(launcher, environ, rank, size)]


def _rendezvous_address(address: str) -> str:
    """HOST:PORT where the ranks of a launch meet. For an address that every host has, the identity of this host follows
    it."""
    host = address.rpartition(":")[0].strip("[]")
    return f"{address}@{this_host()}" if is_loopback(host) or is_wildcard(host) else address


def this_host(proc: Path = PROC) -> str:
    """A name that only the processes of this host, or of this container, share: the boot id of the kernel (else the
    name of the host), and the inode of the network namespace, because each has its own loopback address."""
    try:
        parts = [(proc / "sys/kernel/random/boot_id").read_text().strip()]
    except OSError:
        parts = [socket.gethostname()]
    with suppress(OSError):  # not readable everywhere
        parts.append(str((proc / "self/ns/net").stat().st_ino))
    return ".".join(parts)


def _agrees(variables: Variables, environ: Mapping[str, str], rank: int | str, size: int | str) -> bool:
    """Whether the launcher gives this process this rank and size."""
    sizes = [environ[name] for name in variables.size if name in environ]
    return environ.get(variables.rank) == str(rank) and sizes[:1] == [str(size)]


def _clean_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._:@+-]", "_", text)


def _bounded_id(text: str) -> str:
    """The text as an id of a limited length. Two different texts give different ids, however long they are."""
    if len(text) <= MAX_CHARACTERS and text == _clean_name(text):
        return text
    return _clean_name(text)[:64] + hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _innermost(environ: Mapping[str, str]) -> Variables | None:
    """The launcher that started this process. Variables of torchrun without torchrun, beside Slurm, only repeat the
    numbers of Slurm: then it is Slurm."""
    launchers = [launcher for launcher in LAUNCHERS if _has_started(launcher, environ)]
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if launchers[:1] == [OMNIREDUCE_RUN]:  # it sets torchrun's variables, too, except torchrun's id
        return launchers[1] if "TORCHELASTIC_RUN_ID" in environ and len(launchers) > 1 else OMNIREDUCE_RUN
    if [launcher.launcher for launcher in launchers] == ["torchrun", "Slurm"] and "TORCHELASTIC_RUN_ID" not in environ:
        return launchers[1] if _agrees(launchers[1], environ, rank, size) else launchers[0]
    return launchers[0] if launchers else None


def _has_started(variables: Variables, environ: Mapping[str, str]) -> bool:
    """Whether this process was started by this launcher, perhaps through others."""
    is_guarded = all(name in environ for name in variables.guards)
    return is_guarded and any(name in environ for name in (variables.rank, *variables.size))


def _launch_by(variables: Variables, environ: Mapping[str, str]) -> Launch:
    rank_name, size_name = variables.rank, _size_of(variables, environ)
    if rank_name not in environ or size_name not in environ:
        present, missing = (rank_name, size_name) if rank_name in environ else (size_name, rank_name)
        is_outer = LAUNCHERS.index(variables) > LAUNCHERS.index(TORCHRUN)
        hint = "; or set RANK and WORLD_SIZE" if is_outer else ""
        raise UsageError(f"{variables.launcher}: got {present} but not {missing}, expected both or neither{hint}")
    rank, size = number_in(rank_name, environ), number_in(size_name, environ)
    if rank >= size:
        raise UsageError(
            f"{variables.launcher}: got {rank_name}={rank} and {size_name}={size}, expected 0 <= rank < size"
        )
    numbers = _local_numbers(variables, environ, rank, size)
    local_rank, local_size = numbers["local_rank"] or 0, numbers["local_size"]
    if local_size is not None and not local_rank < local_size <= size:
        raise UsageError(
            f"{variables.launcher}: got local rank {local_rank} of {local_size} on this host and {size} in all, "
            "expected local rank < local size <= size"
        )
    job = _launcher_job(variables, environ)
    if job is None and variables.launcher == "MPICH":
        job = _process_manager()
    return Launch(rank, size, launcher=variables.launcher, job=job or _id(variables, environ), **numbers)


def _size_of(variables: Variables, environ: Mapping[str, str]) -> str:
    """The name of the variable with the size."""
    return next((name for name in variables.size if name in environ), variables.size[-1])


def _local_numbers(variables: Variables, environ: Mapping[str, str], rank: int, size: int) -> dict[str, int | None]:
    """The numbers of a `Launch` on its host. If the launcher leaves some out, another launcher that agrees with it may
    give them."""
    numbers: dict[str, int | None] = dict.fromkeys(("local_rank", "local_size"))
    for launcher in (variables, *_agreeing_launchers(variables, environ, rank, size)):
        for name in numbers:
            if numbers[name] is None:
                numbers[name] = _local_number(getattr(launcher, name), environ)
        if launcher.one_per_host and numbers["local_rank"] is None:
            numbers["local_rank"], numbers["local_size"] = 0, 1
    return numbers


def _local_number(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """The number in the first of these variables that is set, which counts on this host only; None if none is set."""
    name = next((name for name in names if name in environ), None)
    if name == TASKS_PER_NODE:
        return _tasks_of_node(environ[name], number_in("SLURM_NODEID", environ)) if "SLURM_NODEID" in environ else None
    return number_in(name, environ) if name else None


def _tasks_of_node(text: str, node: int) -> int:
    """The number of tasks of a Slurm step on its node number `node`. Raises UsageError."""
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise UsageError(f"{TASKS_PER_NODE}: got {text[:80]!r}, expected a number of tasks for each node, such as 2(x3),1")


def number_in(name: str, environ: Mapping[str, str]) -> int:
    """The number in this variable of a launcher. Raises UsageError."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}: got {text[:80]!r}, expected an int that is not negative")
    return int(text)


def _launcher_job(variables: Variables, environ: Mapping[str, str]) -> str | None:
    for names in variables.job:
        texts = {name: environ.get(name, "") for name in names}
        parts = [
            text.partition(ID_SEPARATORS[name])[0] if name in ID_SEPARATORS else text for name, text in texts.items()
        ]
        if all(parts) and parts != ["none"]:  # torchrun's id is "none" unless it was given one
            return ".".join(parts)
    return None


def _process_manager() -> str | None:
    """HOST:PORT where MPICH's mpirun waits for its proxies on all hosts. No other launch has the same at the same
    time."""
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
