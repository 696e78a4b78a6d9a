"""Open MPI between the hosts of a testbed: what its launcher takes for ssh starts a command on one of them.

A host of the testbed divides the network only. Open MPI tells hosts apart by their names, so each gets one of its own.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.environments import python_of
from benchmarks.group import Group, socket_path
from benchmarks.testbed import Host

NAME = "openmpi"
WITH_NAME = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"')  # then the name, and a command
AGENT = """#!/bin/sh
case $1 in
{cases}
*) echo "$1 is no host of this testbed" >&2; exit 1 ;;
esac
shift
exec {with_name} "$host" ip netns exec "$host" sh -c "$*"
"""


def write_agent(hosts: Iterable[Host], folder: str) -> Path:
    """Write a program that is called as ssh is, with the address of a host and a command; return its path."""
    agent = Path(folder) / "agent"
    cases = "\n".join(f"{host.address}) host={host.name} ;;" for host in hosts)
    agent.write_text(AGENT.format(cases=cases, with_name=shlex.join(WITH_NAME)))
    agent.chmod(0o755)
    return agent


def openmpi_between(of_ranks: Sequence[Host], folder: str, interface: str) -> Group:
    """Ranks of Open MPI on these hosts, those of one host in a row. They talk over `interface`, and on one host through
    memory."""
    counts, python = Counter(of_ranks), python_of(NAME)
    agent, first = write_agent(counts, folder), of_ranks[0]
    settings = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": interface, "mpi_yield_when_idle": "1"}
    options = ["--allow-run-as-root", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)]
    options += [word for name, value in settings.items() for word in ("--mca", name, value)]
    options += [
        "--host",
        ",".join(f"{host.address}:{count}" for host, count in counts.items()),
        "-n",
        str(len(of_ranks)),
    ]
    program = [str(python), "-m", "benchmarks.rank", "mpi", socket_path(folder, NAME), "{}"]
    mpirun = [str(python.parent / "mpirun"), *options, *program]
    return Group(NAME, len(of_ranks), [[*first.prefix, *WITH_NAME, first.name, *mpirun]], folder, carrier="tcp")
