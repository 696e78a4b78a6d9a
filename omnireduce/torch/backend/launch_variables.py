"""Launch variables for torch, if a launcher other than torchrun has started this process."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager

import torch.distributed as dist

from omnireduce.errors import UsageError
from omnireduce.launch.hosts import names_in
from omnireduce.runtime.rank.global_communicator import first_of_host
from omnireduce.runtime.rank.launcher_detection import Launch, detect_launch, launch_id
from omnireduce.support.addresses import loopback
from omnireduce.torch.backend.rendezvous import MeetingPoint, drawn_ports


def set_torch_variables(environ: MutableMapping[str, str] = os.environ) -> MeetingPoint | None:
    """Set the variables that `init_process_group` reads, under mpirun, srun and similar launchers. If RANK or
    WORLD_SIZE is set, set none.

    RANK, WORLD_SIZE and LOCAL_RANK come from the launcher. MASTER_ADDR is this host if all ranks are here, or the
    first host of a Slurm step. MASTER_PORT is drawn from the launch's identity. If the identity or the address is not
    known, these two stay unset, and torch asks for them. Raises UsageError if the launcher's variables make no sense.

    Returns the meeting point of the ranks, unless the user has chosen an address.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:  # one alone: the other comes with the call
        return _meeting_point_of_run(environ)
    launch = detect_launch(environ)
    if launch.launcher == "none":
        return None
    identity, address = launch_id(launch.rank, launch.size, environ), _address(launch, environ)
    environ["RANK"], environ["WORLD_SIZE"] = str(launch.rank), str(launch.size)
    if launch.local_rank is not None:
        environ.setdefault("LOCAL_RANK", str(launch.local_rank))
    if not identity or not address:
        return None
    ports, is_drawn = drawn_ports(identity), "MASTER_PORT" not in environ
    address = environ.setdefault("MASTER_ADDR", address)
    environ.setdefault("MASTER_PORT", str(ports[0]))
    return MeetingPoint(identity, address, ports) if is_drawn else None


def _meeting_point_of_run(environ: Mapping[str, str]) -> MeetingPoint | None:
    """The meeting point under `omnireduce run`, which has found a free port. Perhaps it is no longer free."""
    job, address, port = (environ.get(name, "") for name in ("OMNIRUN_JOB", "MASTER_ADDR", "MASTER_PORT"))
    if not job or not address or not port.isdecimal() or "TORCHELASTIC_RUN_ID" in environ:  # of a torchrun in a rank
        return None
    return MeetingPoint(job, address, [int(port), *drawn_ports(job)])


def local_first(group: dist.ProcessGroup | None = None) -> AbstractContextManager[bool]:
    """`with omnireduce.torch.local_first():` lets one rank of each host, the one whose LOCAL_RANK is 0, go through the
    block before the others of `group` (None: all).

    For data that are downloaded or prepared once per host: the others find them. All ranks must call it; it gives
    whether this rank is the first of its host. Raises UsageError where no launcher has set LOCAL_RANK.
    """
    if "LOCAL_RANK" not in os.environ:
        raise UsageError("LOCAL_RANK is not set, so nothing tells which rank is the first of its host")
    return first_of_host(os.environ["LOCAL_RANK"] == "0", lambda: dist.barrier(group))


def _address(launch: Launch, environ: MutableMapping[str, str]) -> str:
    """The address of rank 0; empty if it is not known."""
    if launch.size == launch.local_size:
        return loopback()
    hosts = environ.get("SLURM_STEP_NODELIST", "") if launch.launcher == "Slurm" else ""
    return next(iter(names_in(hosts)), "")
