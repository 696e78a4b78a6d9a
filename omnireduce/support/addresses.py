"""Network addresses: their text form, name look-up, listening and connecting.

HOST is a name, an IPv4 address or an IPv6 address. With a port behind it, an IPv6 address stands in brackets. A name
may have several addresses: a client tries one after the other. "localhost" is never looked up, so it needs no entry in
a hosts file. It stands for 127.0.0.1 and ::1. A host may have only one of these.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from omnireduce.errors import ConfigError, show
from omnireduce.support.os_error_origin import raised_by_signal_handler

ANYWHERE = "::"  # to listen at every address of this host, of both families
BACKLOG = 4096  # connections that may wait to be accepted; the system cuts it to net.core.somaxconn
LOOPBACKS = ("127.0.0.1", "::1")
LOCAL_NAMES = ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
MAX_TRIED_ADDRESSES = 16  # the most addresses of a name that are tried
MAX_REMEMBERED_NAMES = 1024  # the most names that are remembered
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation (RFC 5737, RFC 3849): they stand for any host
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,254}}\Z){_LABEL}(\.{_LABEL})*\.?\Z")  # RFC 1123, and underscores
_PORT = re.compile(r"[0-9]{1,5}\Z")
_SCOPE = re.compile(r"[A-Za-z0-9_.~-]{1,15}\Z")  # the name of an interface, which has no more characters, or its number
_SIOCGIFADDR = 0x8915
_FIRST_FREE_PORT = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_last_answers: dict[str, str] = {}  # by name, the address that answered when another address had not
_INET6 = Path("/proc/net/if_inet6")  # address, interface number, length of the prefix, scope, flags, name


class Address(NamedTuple):
    """A host and a port. `parse_address` reads its text."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Target(NamedTuple):
    """One address of a host, in the form of the system."""

    family: socket.AddressFamily
    address: tuple[Any, ...]

    @property
    def host(self) -> str:
        return host_of(self.address)


# text of users


def parse_address(text: str) -> Address:
    """Split `HOST:PORT` into host and port. An IPv6 address stands in brackets; the returned host has none.

    Port 0 is allowed: a program that listens there gets a port from the system. Raises ConfigError for any other text.
    """
    host, _, port = text.rpartition(":")
    has_brackets = host.startswith("[") and host.endswith("]")
    if has_brackets:
        host = host[1:-1]
    if not _is_port(port) or not (is_ipv6(host) if has_brackets else is_host(host)):
        raise ConfigError(
            f'got {show(text)}, expected "HOST:PORT" with a port up to 65535, such as "10.0.0.1:7400", '
            '"node1:7400" or "[fe80::1]:7400"'
        )
    return Address(host, int(port))


def parse_listen(text: str) -> Address:
    """As `parse_address`, for a program that listens. `:PORT` is every address of this host. Raises ConfigError."""
    return parse_address(f"[{ANYWHERE}]{text}" if text.startswith(":") and _is_port(text[1:]) else text)


def address_from_this_host(address: Address) -> Address:
    """The address at which this host itself reaches a program that listens at `address`."""
    if not is_wildcard(address.host):
        return address
    return Address("localhost" if ":" in address.host else LOOPBACKS[0], address.port)


def is_numeric(host: str) -> bool:
    """Whether this is an address, not a name. An IPv6 address may have a scope behind `%`."""
    return _ip(host) is not None


def is_ipv6(host: str) -> bool:
    """Whether this is an IPv6 address."""
    return isinstance(_ip(host), ipaddress.IPv6Address)


def is_host(host: str) -> bool:
    """Whether this is a valid name of a host, or an IPv4 address."""
    if re.fullmatch(r"[0-9.]+", host):  # digits and dots alone can only be an IPv4 address
        return _ip(host) is not None
    return _HOST_NAME.match(host) is not None


def normalize_address(address: Address) -> Address:
    """The normal form of an address, the same for all ways to write it."""
    ip = _ip(address.host)
    return Address(address.host.lower() if ip is None else str(ip), address.port)


def is_loopback(host: str) -> bool:
    """Whether `host` is an address of loopback, or a name that always means it. Names are not looked up, because
    processes could get different answers."""
    name = host.rstrip(".").lower()
    ip = _unmapped(name)
    return name in LOCAL_NAMES or name.endswith(".localhost") if ip is None else ip.is_loopback


def is_wildcard(host: str) -> bool:
    """Whether `host` stands for all addresses of a host, of one family or both."""
    ip = _unmapped(host)
    return ip is not None and ip.is_unspecified


def _is_port(text: str) -> bool:
    return _PORT.match(text) is not None and int(text) <= 65535


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    _, percent, scope = host.partition("%")
    if percent and not _SCOPE.match(scope):
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _unmapped(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address in `host`, or None. An IPv4 address that is written as IPv6 (::ffff:10.0.0.1) becomes IPv4."""
    ip = _ip(host)
    return (isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped) or ip


# addresses of the system


def host_of(address: Sequence[Any]) -> str:
    """The host of a socket address, such as `getpeername` returns. An IPv4 address that is written as IPv6 becomes
    IPv4. A link-local address keeps its interface."""
    host, scope = str(address[0]), address[3] if len(address) == 4 else 0
    if scope and "%" not in host:
        with suppress(OSError):  # the interface is gone
            scope = socket.if_indextoname(scope)
        host = f"{host}%{scope}"
    return str(_unmapped(host) or host)


def look_up(host: str, port: int = 0) -> list[Target]:
    """The addresses of a host, in the order to try them. Raises OSError if there are none.

    Many hosts have 127.0.1.1, or nothing, for their own name. Other hosts know them by another address, and a program
    may listen there. So for the name of this host, all its addresses follow.
    """
    name = host.rstrip(".").lower()
    if name == "localhost":
        return _look_up(LOOPBACKS, port)
    try:
        targets = _look_up((host,), port)
    except socket.gaierror:
        if name != socket.gethostname().lower():
            raise
        targets = []
    if not is_numeric(host) and all(is_loopback(target.host) for target in targets):
        targets += _look_up((*LOOPBACKS, *own_addresses()), port)
    return list(dict.fromkeys(targets))[:MAX_TRIED_ADDRESSES]


def _look_up(hosts: Sequence[str], port: int) -> list[Target]:
    try:
        return [
            Target(family, address)
            for host in hosts
            for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        ]
    except UnicodeError as error:  # not a valid name of a host
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from error


def is_own_target(target: Target) -> bool:
    """Whether this is an address of this host, that is, of this network namespace."""
    try:
        with socket.socket(target.family, socket.SOCK_DGRAM) as probe:
            probe.bind((target.address[0], 0, *target.address[2:]))
    except OSError as error:
        if raised_by_signal_handler(error):
            raise
        return False
    return True


def is_own_address(host: str) -> bool:
    """Whether `host` is an address, not a name, of this host, at which other hosts could reach it."""
    return _ip(host) is not None and not is_loopback(host) and any(map(is_own_target, look_up(host)))


def loopback() -> str:
    """The loopback address of this host: 127.0.0.1, or ::1 without IPv4."""
    own_hosts = [target.host for target in look_up("localhost") if is_own_target(target)]
    return own_hosts[0] if own_hosts else LOOPBACKS[0]


def listening_target(host: str, port: int = 0) -> Target:
    """The first address of `host` that belongs to this host. ANYWHERE stands for all addresses of both families, or of
    IPv4 alone if the system has no IPv6. Raises OSError."""
    is_all = is_wildcard(host) and ":" in host
    targets = look_up("0.0.0.0" if is_all and not socket.has_dualstack_ipv6() else host, port)
    return next(filter(is_own_target, targets), targets[0])


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """Listen by TCP at the address of `listening_target` (port 0: any free port), non-blocking. Raises OSError."""
    target = listening_target(host, port)
    is_dual_stack = target.family == socket.AF_INET6 and is_wildcard(target.host)
    listener = socket.create_server(target.address, family=target.family, backlog=backlog, dualstack_ipv6=is_dual_stack)
    listener.setblocking(False)
    return listener


def listen_error_text(error: OSError, address: Address) -> str:
    """A text that says why `listen` at `address` has raised this error, and what to do."""
    if isinstance(error, socket.gaierror):
        return f"no host called {address.host} is known here; give the name or an address of this host"
    if error.errno == errno.EADDRINUSE:
        return "another program listens there, perhaps another aggregator; choose another port, or end that program"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is no address of this host; :PORT stands for all its addresses"
    if error.errno in (errno.EACCES, errno.EPERM) and address.port < (first := _first_free_port()):
        return f"ports below {first} are for root and for programs with CAP_NET_BIND_SERVICE; choose a higher port"
    return os.strerror(error.errno) if error.errno else str(error)


def _first_free_port() -> int:
    with suppress(OSError, ValueError):
        return int(_FIRST_FREE_PORT.read_text())
    return 1024


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect by TCP to the first address of `host` that answers. The address that answered last is tried first. Each
    address gets an equal share of the remaining time. Raises OSError, with the reason for each address."""
    deadline, failures = time.monotonic() + timeout_s, list[tuple[Target, OSError]]()
    targets = sorted(look_up(host, port), key=lambda target: target.host != _last_answers.get(host))
    for number, target in enumerate(targets):
        share_s = (deadline - time.monotonic()) / (len(targets) - number)
        try:
            connection = _connect_to(target, max(0.001, share_s))
        except OSError as error:
            if raised_by_signal_handler(error):
                raise
            failures.append((target, error))
        else:
            if failures and len(_last_answers) < MAX_REMEMBERED_NAMES:
                _last_answers[host] = target.host
            return connection
    if len(failures) == 1:
        raise failures[0][1]
    reasons = dict[str, list[str]]()
    for target, reason in failures:
        reasons.setdefault(reason.strerror or str(reason), []).append(target.host)
    raise OSError(
        failures[0][1].errno, "; ".join(f"{reason} ({', '.join(hosts)})" for reason, hosts in reasons.items())
    )


def _connect_to(target: Target, timeout_s: float) -> socket.socket:
    sock = socket.socket(target.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(target.address)
    except BaseException:
        sock.close()
        raise
    return sock


# addresses to tell to others


def source_towards(host: str) -> str:
    """The address of this host from which packets to `host` go, so that `host` can answer there; empty without a route.
    It is a loopback address if `host` is this host. Nothing is sent."""
    sources = []
    try:
        targets = look_up(host, 9)
    except OSError as error:
        if raised_by_signal_handler(error):
            raise
        return ""
    for target in targets:
        with suppress(OSError), socket.socket(target.family, socket.SOCK_DGRAM) as probe:
            probe.connect(target.address)
            sources.append(host_of(probe.getsockname()))
    return min(sources, key=_is_link_local, default="")


def reachable_address(peers: Sequence[str] = ()) -> str:
    """An address of this host at which other hosts reach it: the source address towards the first of `peers` on another
    host, else towards any host, else an address of an interface; empty if there is none."""
    sources = (source_towards(peer) for peer in (*peers, *ELSEWHERE))
    reachable = (source for source in sources if source and not is_loopback(source))
    return next(reachable, "") or next(iter(own_addresses()), "")


def own_addresses() -> list[str]:
    """The addresses of this host at which other hosts may reach it, link-local addresses last."""
    hosts = [host for _, name in socket.if_nameindex() for host in addresses_of_interface(name)]
    return sorted((host for host in hosts if not is_loopback(host)), key=_is_link_local)


def addresses_of_interface(name: str) -> list[str]:
    """The IPv4 address of an interface, and its IPv6 addresses, link-local addresses last. Raises OSError if there is
    no such interface."""
    if name not in (existing for _, existing in socket.if_nameindex()):
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    hosts = []
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        hosts.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a system without IPv6
        lines = [line.split() for line in _INET6.read_text().splitlines()]
        ips = [ipaddress.IPv6Address(bytes.fromhex(line[0])) for line in lines if line[5] == name]
        hosts += sorted((f"{ip}%{name}" if ip.is_link_local else str(ip) for ip in ips), key=_is_link_local)
    return hosts


def _is_link_local(host: str) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_link_local
