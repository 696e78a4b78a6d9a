"""Daemons, relays and workers on hosts that have only IPv6, or whose own name means 127.0.1.1."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from certificates import certificates, needs_openssl
from local_cluster import READY_S, ROOT, Daemon, Process, eventually, unique_job
from separate_hosts import separate_hosts
from transports import BY_SHARDS

from benchmarks.harness.testbed import Host
from omnireduce.support.addresses import Address, parse_address

CODE = """
import os, sys
import numpy as np
import omnireduce as omni
rank, size, job, *sets = sys.argv[1:]
from omnireduce.support.config import load_config
config = load_config(overrides=sets)
with omni.init(config, rank=int(rank), size=int(size), job=job) as comm:
    total = omni.allreduce(np.full(50_000, comm.rank + 1.0))[0]
    os.write(1, f"{total:g} by {'+'.join(comm.statistics().carried)}\\n".encode())
"""
OPEN = "security.allow_no_secret=true"


only_ipv6 = pytest.mark.parametrize("hosts", ["ipv6"], indirect=True)


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with separate_hosts(2, tmp_path_factory.mktemp("hosts"), only_ipv6=request.param == "ipv6") as two_hosts:
        yield two_hosts


def sums(ranks: Sequence[tuple[Host, Sequence[str]]], *sets: str) -> list[str]:
    """Sums and transports of ranks, one line each. `ranks` has the host and the aggregators of each rank.

    Hosts of tests are on one machine, so they could share memory.
    """
    job = unique_job("apart")
    with ExitStack() as stack:
        processes = []
        for rank, (host, addresses) in enumerate(ranks):
            words = [str(rank), str(len(ranks)), job, f"cluster.aggregators={','.join(addresses)}", BY_SHARDS, *sets]
            process = Process(*host.prefix, sys.executable, "-c", CODE, *words)
            processes.append(stack.enter_context(process))
        results = [process.line(READY_S) for process in processes]
        assert [process.wait() for process in processes] == [0] * len(ranks)
    return results


def omnireduce(host: Host, *words: str) -> str:
    """Output of a command of the program on a host."""
    command = [*host.prefix, sys.executable, "-m", "omnireduce", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=READY_S)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def at(host: Host, daemon: Daemon) -> list[str]:
    """The addresses of a daemon that listens at all of them, as other hosts see it."""
    return [str(Address(host.address, parse_address(address).port)) for address in daemon.addresses]


@only_ipv6
def test_a_daemon_serves_hosts_without_ipv4(hosts: list[Host]) -> None:
    local, remote = hosts
    with Daemon(2, OPEN, "metrics.listen=:0", listen=":0", prefix=local.prefix) as daemon:
        assert all(address.startswith("[::]:") for address in daemon.addresses)
        addresses = at(local, daemon)
        by_name = [address.replace(f"[{local.address}]", local.name) for address in addresses]
        assert sums([(remote, addresses), (remote, by_name), (local, by_name)]) == ["6 by tcp", "6 by tcp", "6 by shm"]
        assert f"{addresses[0]} " in omnireduce(remote, "status", "--once", *addresses)
        setting = "--set", f"cluster.aggregators={by_name[0]}"
        assert "answers by tcp, from fd77::2" in omnireduce(remote, "doctor", *setting)
        assert "answers by shm" in omnireduce(local, "doctor", *setting)
        with Daemon(2, OPEN, f"aggregator.upstream={','.join(addresses)}", listen=":0", prefix=remote.prefix) as relay:
            assert sums([(remote, at(remote, relay)), (local, addresses)]) == ["3 by shm"] * 2
        port = daemon.log.partition("metrics at http://[::]:")[2].partition("/")[0]
        read = (
            f"import urllib.request as u; print(u.urlopen('http://[{local.address}]:{port}/metrics').read().decode())"
        )
        result = subprocess.run(
            [*remote.prefix, sys.executable, "-c", read], capture_output=True, text=True, check=True
        )
        assert "omnireduce_" in result.stdout


@needs_openssl
@only_ipv6
def test_tls_to_an_ipv6_address(hosts: list[Host]) -> None:
    local, remote = hosts
    files = certificates()
    with Daemon(1, OPEN, *files.holder("aggregator"), listen=f"[{local.address}]:0", prefix=local.prefix) as daemon:
        assert daemon.addresses[0].startswith("[fd77::1]:")
        assert sums([(remote, daemon.addresses)] * 2, files.trust()) == ["3 by tcp"] * 2


@only_ipv6
def test_a_daemon_without_configuration(hosts: list[Host]) -> None:
    """It listens at localhost, where status and workers look."""
    with Daemon(1, listen="localhost:7400", prefix=hosts[1].prefix) as daemon:
        assert daemon.addresses == ["localhost:7400"]
        assert "localhost:7400 " in omnireduce(hosts[1], "status", "--once")
        assert sums([(hosts[1], ["[::1]:7400"])] * 2, "transport.kind=tcp") == ["3 by tcp"] * 2


@pytest.mark.parametrize("hosts", ["ipv4", "ipv6"], indirect=True)
def test_a_host_may_call_itself_127_0_1_1(hosts: list[Host]) -> None:
    """Its daemon listens at the address that others know, and all workers are told the same name. Who lets it listen at
    that name hears that no other host reaches it."""
    local, remote = hosts
    with Daemon(1, OPEN, listen=str(Address(local.address, 0)), prefix=local.prefix) as daemon:
        name = str(Address(local.name, parse_address(daemon.addresses[0]).port))
        assert sums([(local, [name]), (remote, [name])]) == ["3 by shm", "3 by tcp"]
        assert "answers by shm" in omnireduce(local, "doctor", "--set", f"cluster.aggregators={name}")
    with Daemon(1, listen=f"{local.name}:0", prefix=local.prefix) as daemon:
        loopback = "127.0.1.1" if "." in local.address else "::1"
        assert eventually(lambda: f"{local.name} is {loopback} on this host" in daemon.log)
        assert local.address in daemon.log
