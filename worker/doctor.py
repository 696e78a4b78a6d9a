"""What this host offers: RDMA devices, limits, and which addresses answer."""

from __future__ import annotations

import os
import platform
import resource
import socket
from importlib.metadata import version
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from omnireduce.bench.report import make_console
from omnireduce.config import Config, parse_address
from omnireduce.errors import TransportError

if TYPE_CHECKING:  # importing it needs pyverbs
    from omnireduce.transport.verbs.devices import Port

PATIENCE_S = 2.0  # for an aggregator to take a connection


def report_host(config: Config) -> bool:
    """Print what the transports find on this host; return whether everything that `config` asks for is there."""
    console = make_console()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if memlock == resource.RLIM_INFINITY else f"{memlock} bytes"
    console.print(f"{socket.gethostname()}: {os.cpu_count()} cores, locked memory {limit}")
    versions = (f"{name} {version(name)}" for name in ("omnireduce", "numpy", "numba"))
    console.print(", ".join((f"Python {platform.python_version()}", *versions)))
    return all([_report_rdma(console, config), _report_aggregators(console, config)])


def _report_rdma(console: Console, config: Config) -> bool:
    try:
        from omnireduce.transport.verbs.devices import choose, list_ports

        ports = list_ports()
        _print_ports(console, ports)
        choice = choose(config.verbs, near="")
    except TransportError as error:
        console.print(f"RDMA: {error}", soft_wrap=True)
        return config.transport.kind != "verbs"
    console.print(f"RDMA: by default {choice.port.device} port {choice.port.number}, GID {choice.gid.index}")
    return True


def _print_ports(console: Console, ports: list[Port]) -> None:
    table = Table("device", "port", "state", "MTU", "GID", "kind", "address")
    for port in ports:
        start = (port.device, str(port.number), port.state, str(port.mtu))
        for gid in port.gids or (None,):
            table.add_row(*start, *((str(gid.index), gid.kind, gid.ipv4 or gid.text) if gid else ("", "", "no GID")))
            start = ("", "", "", "")
    if ports:
        console.print(table)


def _report_aggregators(console: Console, config: Config) -> bool:
    answered = []
    for address in config.cluster.aggregators:
        try:
            with socket.create_connection(parse_address(address), timeout=PATIENCE_S) as sock:
                answer = f"answers, reached from {sock.getsockname()[0]}"
            answered.append(True)
        except OSError as error:
            answer = f"does not answer: {error.strerror or error}; is `python -m aggregator` running there?"
            answered.append(False)
        console.print(f"aggregator {address}: {answer}", soft_wrap=True)
    return all(answered)
