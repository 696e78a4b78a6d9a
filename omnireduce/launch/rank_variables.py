"""The environment variables of ranks.

`OMNIRUN_…` is for the library (omnireduce/runtime/rank/launcher_detection.py), `RANK` and others for torch,
`HOROVOD_RANK` and others for scripts that read them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from omnireduce.launch.hosts import Slot
from omnireduce.support.config.schema import SECRET_VARIABLE
from omnireduce.support.launcher_variables import variables_of_launchers

_MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "HYDI_", "TORCHELASTIC_")
_LOGIN_VARIABLES = {  # variables about this login; another host has its own
    *(
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PWD",
        "OLDPWD",
        "HOSTNAME",
        "TMPDIR",
        "DISPLAY",
        "TERM",
        "MAIL",
        "SHLVL",
        "_",
    ),
    *("SSH_CLIENT", "SSH_CONNECTION", "SSH_TTY", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "DBUS_SESSION_BUS_ADDRESS"),
}
_LOGIN_PREFIXES = ("XDG_", "SLURM_", "BASH_FUNC_", "LC_", "SUDO_")


def new_job_name() -> str:
    """A name for a launch that no other launch has."""
    return f"run-{secrets.token_hex(8)}"


def new_secret() -> str:
    """A secret for the ranks and aggregators of one job."""
    return secrets.token_hex(32)


def environ_of_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables of other launchers. Python's output is not buffered, unless `environ` says
    otherwise."""
    launcher_variables = variables_of_launchers()
    remaining = {
        name: text
        for name, text in environ.items()
        if name not in launcher_variables and not name.startswith(_MPI_PREFIXES)
    }
    return {"PYTHONUNBUFFERED": "1"} | remaining


def environ_of_other_host(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of `environ` that applies to other hosts, too."""
    return {
        name: text
        for name, text in environ.items()
        if name not in _LOGIN_VARIABLES and not name.startswith(_LOGIN_PREFIXES)
    }


def variables_of_rank(slot: Slot, size: int, job: str, master: tuple[str, int]) -> dict[str, str]:
    """The variables of one rank. `master`: host and port where torch's ranks meet."""
    numbers = {
        "RANK": slot.rank,
        "SIZE": size,
        "LOCAL_RANK": slot.local_rank,
        "LOCAL_SIZE": slot.local_size,
        "CROSS_RANK": slot.cross_rank,
        "CROSS_SIZE": slot.cross_size,
    }
    variables = {
        f"{prefix}_{name}": str(number) for prefix in ("OMNIRUN", "HOROVOD") for name, number in numbers.items()
    }
    torch = {"RANK": slot.rank, "WORLD_SIZE": size, "LOCAL_RANK": slot.local_rank, "LOCAL_WORLD_SIZE": slot.local_size}
    variables |= {name: str(number) for name, number in torch.items()}
    return variables | {
        "OMNIRUN_JOB": job,
        "OMNIRUN_TOLD": "1",
        "HOROVOD_HOSTNAME": slot.host,
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
    }


def variables_of_aggregators(addresses: tuple[str, ...], secret: str) -> dict[str, str]:
    """The variables for the aggregators of a job, and for its secret, if it has one."""
    variables = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(addresses)}
    return variables | ({SECRET_VARIABLE: secret} if secret else {})


def environ_as_bytes(environ: Mapping[str, str]) -> dict[bytes, bytes]:
    """The environment as bytes: names and values need not be UTF-8."""
    return {os.fsencode(name): os.fsencode(text) for name, text in environ.items()}
