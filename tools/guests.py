"""Run a command in one or two small QEMU guests that have Soft-RoCE devices; no root and no KVM needed.

    python tools/guests.py prepare
    python tools/guests.py run [--nodes 1|2] [--share DIR]... [--silent S] [--timeout S] -- COMMAND...

`prepare` fetches the distribution's stock kernel into a cache folder, and compiles omnireduce's kernels for a generic
CPU. `run` boots the guests and runs COMMAND in each, in the present folder.

A guest sees the file system of this machine read-only over 9p, below a tmpfs: everything may be written there, and
nothing of it is kept, except in the shared folders, which are the machine's own. The guests are called node1 and node2,
at 192.168.59.101 and .102, each with the RDMA device rxe0, and can log in to each other. A guest that is alone also
has rxe1 and rxe2, at the two ends of a virtual cable that a test can pull: `ip link set cable1 down`. The
environment of the command has GUEST_NODE, GUEST_NODES and NUMBA_CACHE_DIR, a folder that is kept. Of this machine's
variables it has only PATH, CI and PYTEST_ADDOPTS. The files in tools/guest/ run inside.

A run ends when no guest has written anything for `--silent` seconds: how long it takes all in all depends on the
machine, and says nothing about the command. `--timeout` is for a command that writes for ever.

The exit status is the worst of the nodes', 124 for a node that did not finish, 2 where no guest could be started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from guest.image import CannotRunError, Image, missing_packages, output_of, pack_init, prepare

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "omnireduce"
NUMBA = {"NUMBA_CPU_NAME": "generic", "NUMBA_CACHE_DIR": str(CACHE / "numba")}
DID_NOT_FINISH = 124


def log(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"guests: {message}\n")
    sys.stderr.flush()


def compile_kernels() -> None:
    """Compile omnireduce's kernels ahead, for the CPU that QEMU emulates: inside it takes minutes."""
    command = [sys.executable, "-m", "omnireduce", "warm"]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | NUMBA, capture_output=True, text=True, check=False)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or ["no message"])[-1]
        log(f"kernels not compiled ahead, so the guests will be slow; {sys.executable} said: {reason}")


class Guests:
    """The guests of one run, and `control`, the folder through which they and this process talk."""

    def __init__(
        self, image: Image, nodes: int, shares: Sequence[Path], silent: float, timeout: float, control: Path
    ) -> None:
        self.image, self.nodes, self.shares, self.control = image, nodes, shares, control
        self.start, self.silent, self.timeout = time.monotonic(), silent, timeout
        self.last_output_at = self.start  # when a guest wrote something
        (control / "initramfs").write_bytes(image.modules.read_bytes() + pack_init())
        self.processes: list[subprocess.Popen[bytes]] = []
        self.readers: list[threading.Thread] = []

    def boot(self) -> None:
        for node in range(1, self.nodes + 1):
            process = subprocess.Popen(self.command(node), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            reader = threading.Thread(target=self.print_output, args=(node, process), daemon=True)
            self.processes.append(process)
            self.readers.append(reader)
            reader.start()

    def command(self, node: int) -> list[str]:
        # guests with more processors than this machine has wait for each other's locks, and take twice the time
        cpus = str(max(1, min(2, len(os.sched_getaffinity(0)) // self.nodes)))
        append = f"console=ttyS0 quiet panic=-1 mitigations=off random.trust_cpu=on guest_node={node}"
        command = [
            *("qemu-system-x86_64", "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", cpus, "-m", "3G"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-kernel", str(self.image.kernel), "-initrd", f"{self.control}/initramfs"),
            *("-append", f"{append} guest_limit={int(self.timeout) + 10}"),
            *("-serial", f"file:{self.control}/console.{node}", "-device", "virtio-rng-pci"),
            # a chardev `stdio` would stop the guest at the end of standard input
            *("-device", "virtio-serial-pci", "-chardev", "file,id=out,path=/dev/stdout"),
            *("-device", "virtserialport,chardev=out,name=out"),
            *("-virtfs", "local,path=/,mount_tag=root,security_model=none,multidevs=remap,readonly=on"),
        ]
        folders = {"control": self.control, **{f"share{i}": path for i, path in enumerate(self.shares)}}
        for tag, path in folders.items():
            command += ["-virtfs", f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap"]
        if self.nodes > 1:  # datagrams between sockets: a cable that loses nothing and delays nothing
            own_socket, peer_socket = self.control / f"net{node}", self.control / f"net{3 - node}"
            ends = f"local.type=unix,local.path={own_socket},remote.type=unix,remote.path={peer_socket}"
            card = f"virtio-net-pci,netdev=cable,mac=52:54:00:59:00:{node:02x},host_mtu=9000"
            command += ["-netdev", f"dgram,id=cable,{ends}", "-device", card]
        return command

    def print_output(self, node: int, process: subprocess.Popen[bytes]) -> None:
        prefix = f"[node{node}] ".encode() if self.nodes > 1 else b""
        assert process.stdout is not None
        for line in process.stdout:
            self.last_output_at = time.monotonic()
            sys.stdout.buffer.write(prefix + line)
            sys.stdout.buffer.flush()

    def read_file(self, kind: str, node: int) -> str | None:
        """Return what a node has left in the file `kind`, None if it has not."""
        with contextlib.suppress(OSError):
            return (self.control / f"{kind}.{node}").read_text("utf-8", "replace").strip()
        return None

    def is_over_time(self) -> bool:
        """Whether nothing has been written for too long, or the whole takes too long. Says which."""
        now = time.monotonic()
        if now >= self.last_output_at + self.silent:
            log(f"no output for {self.silent:g} s; --silent S sets another limit")
        elif now >= self.start + self.timeout:
            log(f"the time limit of {self.timeout:g} s is over; --timeout S sets another")
        else:
            return False
        return True

    def wait(self) -> int:
        """Wait until all have ended, one has died or time is over; return the worst status."""
        while not self.is_over_time():
            ended = [node for node, process in enumerate(self.processes, 1) if process.poll() is not None]
            if len(ended) == self.nodes or any(self.read_file("exit", node) is None for node in ended):
                break
            time.sleep(0.05)
        self.stop()
        return max(self.report(node) for node in range(1, self.nodes + 1))

    def report(self, node: int) -> int:
        status, seconds = self.read_file("exit", node), time.monotonic() - self.start
        if status is None:
            console_text = self.read_file("console", node) or ""
            log(f"node{node} did not finish. The end of its console:\n{console_text[-4000:]}")
            return DID_NOT_FINISH
        log(f"node{node}: status {status}, up after {self.read_file('up', node)} s, over after {seconds:.1f} s")
        return int(status)

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for reader in self.readers:
            reader.join(5)


def write_control(control: Path, nodes: int, shares: Sequence[Path], command: Sequence[str]) -> None:
    """Write what the guests read: their environment, their key, the shared folders and the command."""
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    environment = {"PATH": path, "GUEST_NODES": str(nodes), "GUEST_ROOT": str(ROOT), "LANG": "C.UTF-8", **NUMBA}
    environment |= {name: value for name, value in os.environ.items() if name in ("CI", "PYTEST_ADDOPTS")}
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in environment.items()]
    (control / "environment").write_text("".join(lines))
    (control / "shares").write_text("".join(f"share{i} {path}\n" for i, path in enumerate(shares)))
    (control / "command").write_text(f"cd {shlex.quote(os.getcwd())}\nexec {shlex.join(command)}\n")
    output_of("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "omnireduce guests", "-f", control / "key")


def run(command: Sequence[str], nodes: int, shares: Sequence[Path], silent: float, timeout: float) -> int:
    image = prepare(CACHE)
    (CACHE / "numba").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="guests.") as name:
        shares = [CACHE / "numba", *shares]
        write_control(Path(name), nodes, shares, command)
        guests = Guests(image, nodes, shares, silent, timeout, Path(name))
        try:
            guests.boot()
            return guests.wait()
        finally:
            guests.stop()


def folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir() or re.search(r"[\s,]", str(path)):
        raise argparse.ArgumentTypeError(f"expected a folder without spaces and commas in its name, got {text}")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command in QEMU guests that have Soft-RoCE devices.")
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("prepare", help="fetch the kernel, compile omnireduce's kernels")
    actions.add_parser("missing", help="print the Debian packages that this machine or a guest would miss")
    runner = actions.add_parser("run", help="boot, run a command, print its output, return its exit status")
    runner.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    runner.add_argument("--share", type=folder, action="append", default=[], help="a folder to share, writable")
    limits = {"--silent": (240.0, "without a line of output"), "--timeout": (3600.0, "all in all")}
    for option, (seconds, limit_text) in limits.items():
        runner.add_argument(option, type=float, default=seconds, help=f"seconds {limit_text} (default: %(default)g)")
    runner.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs `finally`, which ends the guests
    try:
        if arguments.action == "run":
            return run(arguments.command, arguments.nodes, arguments.share, arguments.silent, arguments.timeout)
        if arguments.action == "missing":
            sys.stdout.write(" ".join(missing_packages()) + "\n")
            return 0
        prepare(CACHE)
        compile_kernels()
        log(f"ready in {CACHE}")
    except CannotRunError as error:
        log(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
