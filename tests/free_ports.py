"""Ports for servers that a test starts later, or starts again."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

UNPRIVILEGED, PORTS = 1024, 65536
TRIES = 1000
_reserved = ExitStack()  # until this process ends


def free_ports(count: int = 1) -> int:
    """The first of `count` ports in a row at which nobody listens, and which no other test takes.

    The kernel gives none of them to a client either: a port that `bind` has chosen and that is free again may be
    anybody's by the time the server starts.
    """
    first_of_clients, last_of_clients = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    below, above = range(UNPRIVILEGED, first_of_clients), range(last_of_clients + 1, PORTS)
    ports = max(below, above, key=len)
    for _ in range(TRIES):
        first = random.SystemRandom().randrange(ports.start, ports.stop - count + 1)
        if _reserve(range(first, first + count)):
            return first
    raise AssertionError(f"no {count} free ports in a row within {ports}")


def free_address(count: int = 1) -> str:
    """The same at the loopback address, as HOST:PORT."""
    return f"127.0.0.1:{free_ports(count)}"


def _reserve(ports: range) -> bool:
    """Whether all are free. Then a name that belongs to one process at a time keeps other tests from each."""
    with ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.socket(socket.AF_UNIX)).bind(f"\0omnireduce-tests-port-{port}")
                socket.create_server(("", port)).close()
        except OSError:
            return False
        _reserved.enter_context(held.pop_all())
        return True
