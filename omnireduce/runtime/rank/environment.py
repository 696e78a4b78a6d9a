"""Detection of this process's rank and world size, from environment variables of its launcher.

Launchers nest, so their order matters: `mpirun` and `torchrun` run inside a Slurm step, never around one, and the inner
launcher is the one to believe. Slurm counts only inside a step: a batch script has the variables of the whole
allocation, though it runs once. `omnireduce run` takes the variables of all other launchers out of its ranks'
environment, and then says torchrun's, for torch: so one that is there beside it was started in a rank.
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
from omnireduce.runtime.rank.arguments import whole
from omnireduce.support.addresses import is_loopback, is_wildcard
from omnireduce.support.config import Config
from omnireduce.support.launchers import (
    BEHIND_ID,
    HINTS,
    LAUNCHERS,
    MEETS,
    OWN,
    TASKS_PER_NODE,
    TORCHRUN,
    Variables,
)
from omnireduce.support.logs import tagged

LONGEST = 128  # characters of a job's name and of a launch's id
PROC = Path("/proc")
log = logging.getLogger("omnireduce")
_said = set[str]()  # which launchers were told of


@dataclass(frozen=True, slots=True)
class Launch:
    """One process of a launch: `0 <= rank < size`; `local_rank` counts the launch's processes on this host.

    `job` is the launcher's own id of the launch, None where it has none. `launcher` is who said so: "arguments", one of
    the table in `launchers`, such as "Open MPI", or "none" for a process on its own.
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
            given, missing = (f"rank {rank}", "size") if size is None else (f"size {size}", "rank")
            raise UsageError(f"got {given} and no {missing}, expected both or neither")
        rank, size = whole(rank, "rank"), whole(size, "size")
        if not 0 <= rank < size:
            raise UsageError(f"got rank {rank} and size {size}, expected 0 <= rank < size")
        said = _innermost(environ)
        if said is None or not _says(said, environ, rank, size):
            return Launch(rank, size, None, None, "arguments")
        return Launch(rank, size, launcher="arguments", job=None, **_places(said, environ, rank, size))
    launcher = _innermost(environ)
    return Launch(0, 1, 0, None, "none", 1) if launcher is None else _launch(launcher, environ)


def own_launch(environ: Mapping[str, str] = os.environ, *, rank: int | None = None, size: int | None = None) -> Launch:
    """`detect_launch`, for a process that is going to train.

    Where it would train alone, though variables speak of several ranks, this raises UsageError. Where these only may
    be ranks, as in a batch script that runs once, this says so, once.
    """
    launch = detect_launch(environ, rank=rank, size=size)
    alone = None if launch.launcher != "none" else alone_though(environ)
    if alone is not None:
        if alone.is_certain:
            raise UsageError(f"{alone.said}, but does not say which rank of how many this one is: {alone.instead}")
        if alone.said not in _said:
            _said.add(alone.said)
            what = f"this process is rank 0 of 1 though {alone.said}: if it should be one of them, {alone.instead}"
            log.warning("%s", what, extra=tagged("alone"))
    return launch


class Alone(NamedTuple):
    """The signs in the environment that a process without a launcher is one of several, and what to do `instead`.
    `is_certain`: it should be one of several ranks."""

    said: str
    instead: str
    is_certain: bool


def alone_though(environ: Mapping[str, str] = os.environ) -> Alone | None:
    """The sign that there are several processes; None if there is none."""
    for hint in HINTS:
        many = hint.many(environ)
        if many:
            said = f"{hint.who} speaks of {f'{many} processes or more' if many > 1 else 'several processes'}"
            instead = f"{hint.instead}; or, for a process on its own, set RANK=0 and WORLD_SIZE=1"
            return Alone(said, instead, hint.is_certain and many > 1)
    return None


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
    meets = MEETS if inside is None else inside.meets
    parts = [] if inside is None else [_id(inside, environ)]
    if meets is not None:
        address, port = (environ.get(name, "") for name in meets)
        parts.append(_met_at(f"{address}:{port}") if address and port else None)
    return _short("@".join(part for part in parts if part))


def identity_of(config: Config, rank: int, size: int) -> str:
    """The identity of this launch: `cluster.launch`, or what the launcher gives; empty if neither gives one."""
    return launch_id(rank, size) if config.cluster.launch == "auto" else config.cluster.launch


def check_told_apart(config: Config, rank: int, size: int, *, is_named: bool) -> None:
    """Raise ConfigError where ranks of another launch could be taken for those of this one: both have the same job,
    which nobody has named, and nothing tells them apart. cluster.launch = "" says that this cannot be."""
    if size > 1 and not is_named and config.cluster.launch == "auto" and not identity_of(config, rank, size):
        raise ConfigError(
            f"nothing tells this launch of {size} workers from another one: set another "
            "cluster.job for each launch (OMNIREDUCE_CLUSTER_JOB=NAME), the same for all its workers, or start them by "
            "omnireduce run, mpirun, srun or torchrun"
        )


def _id(variables: Variables, environ: Mapping[str, str]) -> str | None:
    """The id of the launch: the launcher's own. If MPICH's mpirun gives none: the address where it waits for its
    proxies. Else the id of another launcher that agrees on this process's rank and size."""
    job_id = _job(variables, environ)
    if job_id is None and variables.launcher == "MPICH":
        job_id = _met_at(_process_manager() or "") or None
    if job_id is None and variables is not TORCHRUN:
        rank, size = environ[variables.rank], environ[_size_of(variables, environ)]
        others = (_job(launcher, environ) for launcher in _same(variables, environ, rank, size))
        job_id = next((other for other in others if other is not None), None)
    return job_id


def _same(said: Variables, environ: Mapping[str, str], rank: int | str, size: int | str) -> list[Variables]:
    """The other launchers that agree with `said` on rank and size. One carries out what another one wants."""
    inside = [launcher for launcher in LAUNCHERS if launcher is not said and _is_inside(launcher, environ)]
    return [launcher for launcher in inside if _says(launcher, environ, rank, size)]


def _met_at(address: str) -> str:
    """HOST:PORT where the ranks of a launch meet, in words that no launch of another host shares."""
    host = address.rpartition(":")[0].strip("[]")
    return f"{address}@{this_host()}" if is_loopback(host) or is_wildcard(host) else address


def this_host(proc: Path = PROC) -> str:
    """A name that only the processes of this host, or of this container, share: the id that the kernel drew when it
    started (else the name of the host), and the inode of the network namespace, as each has a loopback address of its
    own."""
    try:
        parts = [(proc / "sys/kernel/random/boot_id").read_text().strip()]
    except OSError:
        parts = [socket.gethostname()]
    with suppress(OSError):  # not readable everywhere
        parts.append(str((proc / "self/ns/net").stat().st_ino))
    return ".".join(parts)


def _says(variables: Variables, environ: Mapping[str, str], rank: int | str, size: int | str) -> bool:
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


def _innermost(environ: Mapping[str, str]) -> Variables | None:
    """The launcher that started this process. If Slurm agrees with variables of torchrun, but there is no torchrun,
    they only repeat what Slurm says."""
    inside = [launcher for launcher in LAUNCHERS if _is_inside(launcher, environ)]
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if inside[:1] == [OWN]:  # it says torchrun's variables, too, but for the id that torchrun gives
        return inside[1] if "TORCHELASTIC_RUN_ID" in environ and len(inside) > 1 else OWN
    if [launcher.launcher for launcher in inside] == ["torchrun", "Slurm"] and "TORCHELASTIC_RUN_ID" not in environ:
        return inside[1] if _says(inside[1], environ, rank, size) else inside[0]
    return inside[0] if inside else None


def _is_inside(variables: Variables, environ: Mapping[str, str]) -> bool:
    """Whether this process was started by that launcher."""
    is_guarded = all(name in environ for name in variables.guards)
    return is_guarded and any(name in environ for name in (variables.rank, *variables.size))


def _launch(variables: Variables, environ: Mapping[str, str]) -> Launch:
    rank_name, size_name = variables.rank, _size_of(variables, environ)
    if rank_name not in environ or size_name not in environ:
        given, missing = (rank_name, size_name) if rank_name in environ else (size_name, rank_name)
        is_outer = LAUNCHERS.index(variables) > LAUNCHERS.index(TORCHRUN)
        or_else = "; or set RANK and WORLD_SIZE" if is_outer else ""
        raise UsageError(f"{variables.launcher}: got {given} but not {missing}, expected both or neither{or_else}")
    rank, size = number_in(rank_name, environ), number_in(size_name, environ)
    if rank >= size:
        raise UsageError(
            f"{variables.launcher}: got {rank_name}={rank} and {size_name}={size}, expected 0 <= rank < size"
        )
    places = _places(variables, environ, rank, size)
    local_rank, local_size = places["local_rank"] or 0, places["local_size"]
    if local_size is not None and not local_rank < local_size <= size:
        raise UsageError(
            f"{variables.launcher}: got local rank {local_rank} of {local_size} on this host and {size} in all, "
            "expected local rank < local size <= size"
        )
    job = _job(variables, environ)
    if job is None and variables.launcher == "MPICH":
        job = _process_manager()
    return Launch(rank, size, launcher=variables.launcher, job=job or _id(variables, environ), **places)


def _size_of(variables: Variables, environ: Mapping[str, str]) -> str:
    """The name of the variable that counts."""
    return next((name for name in variables.size if name in environ), variables.size[-1])


def _places(variables: Variables, environ: Mapping[str, str], rank: int, size: int) -> dict[str, int | None]:
    """The numbers of a `Launch` on its host and across hosts. What the launcher leaves out, another one may say that
    says the same of this process."""
    places: dict[str, int | None] = dict.fromkeys(("local_rank", "local_size", "cross_rank", "cross_size"))
    for launcher in (variables, *_same(variables, environ, rank, size)):
        for name in places:
            if places[name] is None:
                places[name] = _local(getattr(launcher, name), environ)
        if launcher.one_per_host and places["local_rank"] is None:
            places["local_rank"], places["local_size"] = 0, 1
    return places


def _local(names: tuple[str, ...], environ: Mapping[str, str]) -> int | None:
    """The number in the first of these variables that is set, which counts on this host only; None if none is set."""
    name = next((name for name in names if name in environ), None)
    if name == TASKS_PER_NODE:
        return _tasks_of_node(environ[name], number_in("SLURM_NODEID", environ)) if "SLURM_NODEID" in environ else None
    return number_in(name, environ) if name else None


def _tasks_of_node(text: str, node: int) -> int:
    """How many tasks of a Slurm step its node number `node` has."""
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None:
            break
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1])
    raise UsageError(f"{TASKS_PER_NODE}: got {text[:80]!r}, expected a number of tasks for each node, such as 2(x3),1")


def number_in(name: str, environ: Mapping[str, str]) -> int:
    """The number that a launcher says in this variable. Raises UsageError."""
    text = environ[name]
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UsageError(f"{name}: got {text[:80]!r}, expected an int that is not negative")
    return int(text)


def _job(variables: Variables, environ: Mapping[str, str]) -> str | None:
    for names in variables.job:
        texts = {name: environ.get(name, "") for name in names}
        parts = [text.partition(BEHIND_ID[name])[0] if name in BEHIND_ID else text for name, text in texts.items()]
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
