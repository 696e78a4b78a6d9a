"""Several hosts on one machine: network namespaces joined by a bridge, every link shaped both ways.

    python -m benchmarks.harness.testbed [--rate 1gbit] [--hosts 3] [--seconds 1]        needs root, `ip` and `tc`

Prints the hosts and the goodput between the first two, and removes everything. Only the network is divided: the hosts
share files, memory and processors. The bridge has a namespace of its own and every interface is made inside one, so
that the machine's own network stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from omnireduce.errors import UsageError
from omnireduce.support.cli import reporting_errors

MAX_HOSTS = 250
NAMES = re.compile(r"omni(\d+)(?:sw|h\d+)")
COMMAND_S = 20.0  # ip and tc answer within milliseconds
PEER_S = 10.0  # a Python process starts, and connects to another host
CHUNK_BYTES = 1 << 20
# A GSO packet has up to 64 KiB and must fit into the burst, or tbf cuts it into frames. Four of them let a link catch
# up when its timer fires late; they pass unshaped after a pause, a quarter of a transfer of 1 MB, so that a bound must
# leave them out. A frame waits for up to 50 ms: several senders to one host then share its link without many losses,
# each of which may cost TCP a 200 ms time-out.
BURST_BYTES = 1 << 18
SHAPING = ("burst", str(BURST_BYTES), "latency", "50ms")
# Whatever the machine's own choice, so that results compare: every kernel has Reno and allows it here, it keeps so
# short a path full, and on a busy machine it held the rate better than BBR.
CONGESTION = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"


class TestbedError(Exception):
    """The testbed cannot be made or used: what is missing and what to do, in one line."""

    __test__ = False  # its name looks like that of a test class


class Host(NamedTuple):
    """A namespace, its address in the testbed, and what runs a command there when put in front of it."""

    name: str
    address: str
    prefix: tuple[str, ...]


class Racks(NamedTuple):
    """Hosts that share one link to all others: how many each rack has, and what that link carries each way, as tc
    writes it."""

    sizes: tuple[int, ...]
    rate: str


NO_RACKS = Racks((), "")


def testbed(hosts: int, rate: str) -> AbstractContextManager[list[Host]]:
    """As `racked_testbed`, without racks."""
    return racked_testbed(hosts, rate, NO_RACKS)


@contextmanager
def racked_testbed(hosts: int, rate: str, racks: Racks, *, ipv6: bool = False) -> Iterator[list[Host]]:
    """Make 2 to 250 hosts whose links carry `rate` each way, in the words of tc ("1gbit"; "": as much as they can);
    yield them. The first ones are in `racks`. With `ipv6` they have no IPv4 address at all, not even on loopback.

    At the end, even after an exception, processes that still run on a host are killed and everything is removed. A
    testbed whose process died without that is removed by the next one. A process has one testbed at a time.

    Raises TestbedError when the hosts cannot be made, UsageError for a number of hosts out of range.
    """
    if not 2 <= hosts <= MAX_HOSTS:
        raise UsageError(f"a testbed has 2 to {MAX_HOSTS} hosts, not {hosts}")
    _check_rights()
    _remove_leftovers()
    switch = f"omni{os.getpid()}sw"
    if switch in _namespaces():
        raise TestbedError(f"the namespace {switch} exists: leave this process's testbed before you make another")
    created = [_host(index, ipv6) for index in range(hosts)]
    try:
        _add_switch(switch)
        bridges = [f"rack{number}" for number, size in enumerate(racks.sizes) for _ in range(size)]
        for bridge in dict.fromkeys(bridges):
            _add_rack(switch, bridge, racks.rate)
        for index, host in enumerate(created):
            _add_host(host, switch, f"p{index}", rate, bridges[index] if index < len(bridges) else "br0")
        yield created
    finally:
        _remove([*(host.name for host in created), switch])


def goodput(sender: Host, receiver: Host, seconds: float = 1.0) -> float:
    """Measure the bytes of payload that one TCP connection carries from `sender` to `receiver`, per second.

    The receiver counts for `seconds`. Half as long before that it reads without counting, so that TCP's start and the
    links' first bursts are left out, and half as long afterwards, so that measurements which were started together
    compete during the whole of each. It takes two times `seconds` and the start of two processes.

    Raises TestbedError when the hosts do not reach each other or do not end in time.
    """
    with _role(receiver, "receive", receiver.address, str(seconds)) as sink:
        assert sink.stdout is not None
        port = sink.stdout.readline() if select.select([sink.stdout], [], [], PEER_S)[0] else ""
        if not port:
            _give_up(sink, receiver)
        with _role(sender, "send", receiver.address, port.strip()) as source:
            try:
                out, _ = sink.communicate(timeout=2 * seconds + 3 * PEER_S)
                return float(out)
            except (subprocess.TimeoutExpired, ValueError):
                _give_up(source if source.poll() else sink, receiver)


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise TestbedError("only root may make network namespaces: run this as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise TestbedError(f"there is no program {program!r} on the PATH: install iproute2")


def _run(*command: str, advice: str = "a testbed needs root with the right to administer networks") -> str:
    """Run a command and return what it prints; its error becomes one line that ends with `advice`."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        raise TestbedError(f"`{' '.join(command)}` hung for {COMMAND_S:g} s") from None
    if process.returncode:
        reason = " ".join(process.stderr.split()) or f"status {process.returncode}"
        raise TestbedError(f"`{' '.join(command)}` failed: {reason}; {advice}")
    return process.stdout


def _host(index: int, ipv6: bool) -> Host:
    name, subnet = f"omni{os.getpid()}h{index}", "fd77::" if ipv6 else "10.77.0."
    return Host(name, f"{subnet}{index + 1}", ("ip", "netns", "exec", name))


def _add_switch(switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "br0", "up")


def _add_rack(switch: str, bridge: str, rate: str) -> None:
    """A bridge of its own, with one link to the others."""
    _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
    _run("ip", "-n", switch, "link", "set", bridge, "up")
    up, down = f"{bridge}up", f"{bridge}down"
    _run("ip", "-n", switch, "link", "add", up, "type", "veth", "peer", "name", down)
    for end, bridge_of_end in ((up, bridge), (down, "br0")):
        _shape(switch, end, rate)
        _run("ip", "-n", switch, "link", "set", end, "master", bridge_of_end, "up")


def _shape(namespace: str, interface: str, rate: str) -> None:
    """Limit what leaves by this interface to this rate."""
    advice = "a rate is written like 1gbit, and the kernel needs tbf (modprobe sch_tbf)"
    shape = ("qdisc", "add", "dev", interface, "root", "tbf", "rate", rate, *SHAPING)
    _run("tc", "-n", namespace, *shape, advice=advice)


def _add_host(host: Host, switch: str, port: str, rate: str, bridge: str) -> None:
    _run("ip", "netns", "add", host.name)
    _run(*host.prefix, "sh", "-c", CONGESTION)
    _run("ip", "-n", host.name, "link", "set", "lo", "up")
    _run("ip", "-n", host.name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    if ":" in host.address:
        _run("ip", "-n", host.name, "address", "del", "127.0.0.1/8", "dev", "lo")
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/64", "dev", "eth0", "nodad")
    else:
        _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
    for namespace, interface in ((host.name, "eth0"), (switch, port)) if rate else ():
        _shape(namespace, interface, rate)
    _run("ip", "-n", switch, "link", "set", port, "master", bridge, "up")
    _run("ip", "-n", host.name, "link", "set", "eth0", "up")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _remove_leftovers() -> None:
    owned = [(name, match[1]) for name in _namespaces() if (match := NAMES.fullmatch(name))]
    _remove([name for name, pid in owned if not Path("/proc", pid).exists()])


def _remove(names: list[str]) -> None:
    """Remove the namespaces that exist of `names`, and kill what still runs in them: it would keep them alive."""
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # a second Ctrl-C waits
    try:
        for name in set(names).intersection(_namespaces()):
            with suppress(TestbedError):  # another process may remove the same leftovers
                for pid in map(int, _run("ip", "netns", "pids", name).split()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            with suppress(TestbedError):
                _run("ip", "netns", "delete", name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)


@contextmanager
def _role(host: Host, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run one side of a measurement on a host; it is gone afterwards."""
    command = [*host.prefix, sys.executable, "-P", __file__, "--role", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _give_up(process: subprocess.Popen[str], receiver: Host) -> NoReturn:
    process.kill()
    _, log = process.communicate()
    reason = log.strip().splitlines()[-1] if log.strip() else "no answer in time"
    raise TestbedError(f"no goodput to {receiver.name}: {reason}; are both hosts of one testbed that still exists?")


def _receive(address: str, seconds: float) -> None:
    """Print the port, take one connection, print its bytes per second."""
    buffer = bytearray(CHUNK_BYTES)
    with socket.create_server((address, 0)) as server:
        server.settimeout(PEER_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(PEER_S)
        start = time.monotonic()
        _, first = _count(connection, buffer, start + seconds / 2)
        size, last = _count(connection, buffer, start + seconds * 3 / 2)
        _count(connection, buffer, start + seconds * 2)
    print(size / (last - first))


def _count(connection: socket.socket, buffer: bytearray, until: float) -> tuple[int, float]:
    """Read until `until` or just past it; return the number of bytes and the time of the last ones."""
    total, now = 0, 0.0
    while now < until:
        size = connection.recv_into(buffer)
        if not size:
            raise ConnectionError("the sender closed the connection early")
        total, now = total + size, time.monotonic()
    return total, now


def _send(address: str, port: int) -> None:
    """Send until the receiver has seen enough and closes."""
    data = bytes(CHUNK_BYTES)
    with socket.create_connection((address, port), PEER_S) as connection, suppress(ConnectionError):
        while True:
            connection.sendall(data)


def _show(rate: str, count: int, seconds: float) -> None:
    def print_rate(text: str, value: float) -> None:
        print(f"{text}: {value / 1e6:.2f} MB/s", flush=True)

    with testbed(count, rate) as hosts:
        for host in hosts:
            print(f"{host.name} {host.address}")
        a, b = hosts[:2]
        for sender, receiver in ((a, b), (b, a)):
            print_rate(f"{sender.name} to {receiver.name}, alone", goodput(sender, receiver, seconds))
        with ThreadPoolExecutor() as pool:
            forward, backward = pool.submit(goodput, a, b, seconds), pool.submit(goodput, b, a, seconds)
            print_rate(f"{a.name} to {b.name}, both at once", forward.result())
            print_rate(f"{b.name} to {a.name}, both at once", backward.result())


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure hosts on one machine, with shaped links; needs root.")
    parser.add_argument("--rate", default="1gbit", help="of every link, each way, as tc understands it")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--role", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        role, address, number = options.role
        return _send(address, int(number)) if role == "send" else _receive(address, float(number))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with reporting_errors():
            return _show(options.rate, options.hosts, options.seconds)
    except TestbedError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
