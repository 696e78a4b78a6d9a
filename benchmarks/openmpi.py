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
NAMED = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"')  # then the name, and a command
AGENT = """#!/bin/sh
case $1 in
{cases}
esac
shift
exec {named} "$host" ip netns exec "$host" sh -c "$*"
"""


def write_agent(hosts: Iterable[Host], folder: str) -> Path:
    """Write a program that is called as ssh is, with the address of a host and a command; return its path."""
    agent = Path(folder) / "agent"
    cases = "\n".join(f"{host.address}) host={host.name} ;;" for host in hosts)
    agent.write_text(AGENT.format(cases=cases, named=shlex.join(NAMED)))
    agent.chmod(0o755)
    return agent


def openmpi_between(ranks: Sequence[Host], folder: str, interface: str) -> Group:
    """Ranks of Open MPI, each on its host, those of one host in a row; they talk over `interface`, and on one host
    through memory."""
    counts, python = Counter(ranks), python_of(NAME)
    agent, first = write_agent(counts, folder), ranks[0]
    settings = {"pml": "ob1", "btl": "tcp,sm,self", "btl_tcp_if_include": interface, "mpi_yield_when_idle": "1"}
    options = ["--allow-run-as-root", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)]
    options += [word for name, value in settings.items() for word in ("--mca", name, value)]
    options += ["--host", ",".join(f"{host.address}:{count}" for host, count in counts.items()), "-n", str(len(ranks))]
    rank = [str(python), "-m", "benchmarks.rank", "mpi", socket_path(folder, NAME), "{}"]
    mpirun = [str(python.parent / "mpirun"), *options, *rank]
    return Group(NAME, len(ranks), [[*first.prefix, *NAMED, first.name, *mpirun]], folder)
