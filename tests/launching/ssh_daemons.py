"""A real sshd on some addresses, for tests: who has its key comes in without a password."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from free_ports import free_ports
from local_cluster import READY_S, eventually

SSHD = shutil.which("sshd", path=f"/usr/sbin{os.pathsep}{os.environ.get('PATH', '')}")
needs_sshd = pytest.mark.skipif(
    not (SSHD and shutil.which("ssh") and shutil.which("ssh-keygen")),
    reason="no sshd here; openssh-server brings one",
)


class Sshd(NamedTuple):
    """Port and keys with which the hosts are reached by ssh."""

    port: int
    key: Path
    known: Path

    def options(self) -> list[str]:
        """Options for `omnireduce run`."""
        command = f"ssh -o UserKnownHostsFile={self.known} -o GlobalKnownHostsFile=/dev/null -F /dev/null"
        return ["--ssh", command, "-p", str(self.port), "-i", str(self.key)]

    def words(self) -> list[str]:
        """The command of ssh with these options."""
        command = self.options()[1].split()
        return [*command, "-o", "BatchMode=yes", "-p", str(self.port), "-i", str(self.key)]


@contextmanager
def ssh_daemons(
    folder: Path, hosts: Mapping[str, Sequence[str]], prefixes: Mapping[str, Sequence[str]] | None = None
) -> Iterator[Sshd]:
    """Each of the addresses `hosts` has an sshd, which its other names lead to as well. It runs behind that one of
    `prefixes`. Skips the test where sshd does not start, or lets nobody in."""
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_ports()
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    names = [name for host, others in hosts.items() for name in (host, *others)]
    (folder / "known").write_text("".join(f"[{name}]:{port} {public}\n" for name in names))
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # the service's unit would make it
    sshd = Sshd(port, folder / "key", folder / "known")
    with ExitStack() as stack:
        for at, host in enumerate(hosts):
            prefix = (prefixes or {}).get(host, ())
            stack.enter_context(_sshd(folder / f"sshd{at}", folder, host, port, prefix))
            _try(sshd, host, prefix)
        yield sshd


@contextmanager
def _sshd(path: Path, folder: Path, host: str, port: int, prefix: Sequence[str]) -> Iterator[None]:
    assert SSHD is not None
    address = f"[{host}]" if ":" in host else host
    path.write_text(
        f"ListenAddress {address}:{port}\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/key.pub\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nUseDNS no\n"
    )
    log = path.with_suffix(".log")
    with open(log, "wb") as errors:
        process = subprocess.Popen([*prefix, SSHD, "-D", "-e", "-f", path], stderr=errors, stdin=subprocess.DEVNULL)
    try:
        if not eventually(lambda: b"Server listening" in log.read_bytes() or process.poll() is not None):
            pytest.skip("sshd does not start here: it says nothing")
        if process.poll() is not None:
            pytest.skip(f"sshd does not start here: {log.read_text()[-200:]}")
        yield
    finally:
        process.terminate()
        process.wait(READY_S)


def _try(found: Sshd, host: str, prefix: Sequence[str]) -> None:
    probe = subprocess.run(
        [*prefix, *found.words(), host, "true"], capture_output=True, text=True, check=False, timeout=READY_S
    )
    if probe.returncode:
        pytest.skip(f"sshd lets nobody in here: {probe.stderr.strip()[-200:]}")
