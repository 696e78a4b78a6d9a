"""Launches on hosts that have only IPv6, or whose own name means 127.0.1.1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import lines, python, run
from local_cluster import MPIRUN
from separate_hosts import separate_hosts
from ssh_daemons import Sshd, needs_sshd, ssh_daemons

from benchmarks.harness.testbed import Host
from omnireduce.support.addresses import Address, parse_address

PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
CODE = """
import os, sys
import numpy as np
import omnireduce as omni
with omni.init() as comm:
    total = omni.allreduce(np.full(1000, comm.rank + 1.0))[0]
    words = [f"{total:g}", *comm.config.cluster.aggregators, os.environ.get("MASTER_ADDR", "")]
    os.write(1, (" ".join(words) + "\\n").encode())
"""
TORCH = """
import torch, torch.distributed as dist
import omnireduce.torch
dist.init_process_group("omnireduce")
ranks = [torch.zeros(1) for _ in range(2)]
dist.all_gather(ranks, torch.ones(1) * dist.get_rank())
assert ranks == [0, 1]
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with separate_hosts(2, tmp_path_factory.mktemp("hosts"), only_ipv6=request.param == "ipv6") as two_hosts:
        yield two_hosts


def loopback_of(host: Host) -> str:
    return "::1" if ":" in host.address else "127.0.0.1"


@pytest.fixture(scope="module")
def sshd(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """On each host; "elsewhere" is a name of the second one that ssh alone knows."""
    local, remote = hosts
    names = {local.address: [local.name], remote.address: [remote.name, "elsewhere"]}
    prefixes = {host.address: host.prefix for host in hosts}
    with ssh_daemons(tmp_path_factory.mktemp("sshd"), names, prefixes) as found:
        yield found


def hosts_reported(text: str, ranks: int) -> tuple[str, str]:
    """The hosts at which the ranks found the aggregator, and each other; all have the right sum."""
    results = {tuple(line.rpartition("stdout>:")[2].split(" ")) for line in lines(text)}
    assert len(lines(text)) == ranks
    [(total, aggregator, master)] = results
    assert total == str(ranks * (ranks + 1) // 2)
    return parse_address(aggregator).host, master


@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        ("ipv4", ["--launcher", "torchrun"]),
        ("ipv6", []),
        ("ipv6", ["--aggregators", "1"]),
        ("ipv6", ["--launcher", "torchrun"]),
    ],
    indirect=["hosts"],
)
def test_ranks_of_one_host(hosts: list[Host], options: list[str]) -> None:
    if "torchrun" in options:
        pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    code = TORCH + CODE if "torchrun" in options else CODE
    result = run("-np", "2", *options, *python(code), prefix=hosts[0].prefix, PATH=PATH)
    assert result.returncode == 0, result.stderr
    aggregator = "localhost" if "--aggregators" in options else loopback_of(hosts[0])
    assert hosts_reported(result.stdout, 2) == (aggregator, loopback_of(hosts[0]))


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.parametrize("hosts", ["ipv6"], indirect=True)
def test_ranks_of_mpirun(hosts: list[Host]) -> None:
    result = run("-np", "2", "--mpi", *python(CODE), prefix=hosts[0].prefix, PATH=PATH)
    assert result.returncode == 0, result.stderr
    assert hosts_reported(result.stdout, 2) == (loopback_of(hosts[0]), "")


@needs_sshd
@pytest.mark.parametrize(
    ("hosts", "placement"),
    [
        ("ipv4", "names"),
        ("ipv4", "this one second"),
        ("ipv6", "addresses"),
        ("ipv6", "this one second"),
        ("ipv6", "an alias of ssh first"),
        ("ipv6", "an interface"),
    ],
    indirect=["hosts"],
)
def test_ranks_of_two_hosts(hosts: list[Host], sshd: Sshd, tmp_path: Path, placement: str) -> None:
    """All are told an address that all reach, whatever hosts call themselves."""
    local, remote = hosts
    config, key = tmp_path / "config", f"[{remote.address}]:{sshd.port}"  # as it stands in the file of known hosts
    lines_of_all = f"Host *\n UserKnownHostsFile {sshd.known}\n HostKeyAlias {key}\n"
    config.write_text(f"Host elsewhere\n HostName {remote.address}\n{lines_of_all}")
    first = {
        "names": [local.name, remote.name],
        "addresses": [str(Address(host.address, 1)) for host in hosts],
        "this one second": [remote.name, local.name],
        "an alias of ssh first": ["elsewhere", "localhost"],
        "an interface": ["localhost", remote.name],
    }[placement]
    more = ["--network-interfaces", "eth0"] if placement == "an interface" else []
    how = ["--ssh", f"ssh -F {config}", "-p", str(sshd.port), "-i", str(sshd.key)]
    result = run("-H", ",".join(first), *how, *more, *python(CODE), prefix=local.prefix)
    assert result.returncode == 0, result.stderr
    address = remote.address if placement in ("this one second", "an alias of ssh first") else local.address
    assert hosts_reported(result.stdout, 2) == (address, address)
