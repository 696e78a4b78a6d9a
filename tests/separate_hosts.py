"""Hosts for tests, as namespaces of this machine: each has a network, a name and an /etc/hosts of its own.

Each host calls itself 127.0.1.1, as Debian writes it into /etc/hosts, and the others by their addresses. Those of
`only_ipv6` have no IPv4 address at all, not even 127.0.0.1. What is put behind `prefix` runs on a host:
`Daemon(prefix=host.prefix)`, `Process(*host.prefix, sys.executable, ...)`. Files and processes are shared.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.testbed import NO_RACKS, Host, racked_testbed

AS_HOST = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
OWN_LINES = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {name}\n"


@contextmanager
def separate_hosts(count: int, folder: Path, *, only_ipv6: bool = False) -> Iterator[list[Host]]:
    """So many hosts, joined by a network; a process has one such network at a time. `folder` gets their /etc/hosts.
    Skips the test where there can be none."""
    if missing := [name for name in ("ip", "tc", "unshare", "mount") if shutil.which(name) is None]:
        pytest.skip(f"no programs {missing}")
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no namespaces: {tried.stderr.strip()}")
    with racked_testbed(count, "", NO_RACKS, ipv6=only_ipv6) as found:
        yield [_named(host, found, folder) for host in found]


def _named(host: Host, hosts: list[Host], folder: Path) -> Host:
    others = "".join(f"{other.address} {other.name}\n" for other in hosts if other != host)
    path = folder / host.name
    path.write_text(OWN_LINES.format(name=host.name) + others)
    return host._replace(prefix=(*host.prefix, "unshare", "--uts", "sh", "-c", AS_HOST, host.name, str(path)))
