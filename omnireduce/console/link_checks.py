"""Checks of this host's links: its transports, its RDMA devices, and whether the aggregators answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from omnireduce.addresses import loopback
from omnireduce.config import Config
from omnireduce.config.security import SECRET_VARIABLE
from omnireduce.console.finding import Finding, State
from omnireduce.errors import ConfigError, OmniReduceError, TransportError
from omnireduce.protocol.joining.authentication import WANTS_PROOF
from omnireduce.runtime.asking.observe import AT_ONCE, question, reach
from omnireduce.runtime.rank.embedded import identify
from omnireduce.runtime.rank.environment import detect_launch
from omnireduce.secret import load_secret
from omnireduce.transport.memory import Region
from omnireduce.transport.shm import connect_shm, listen_shm
from omnireduce.transport.stream import StreamLink
from omnireduce.transport.tcp import TcpLink, connect_tcp, listen_tcp
from omnireduce.transport.tls import TlsLink
from omnireduce.version import __version__
from omnireduce.wire.safe_text import shown

if TYPE_CHECKING:  # importing it needs pyverbs
    from omnireduce.transport.verbs.devices import Port

ANSWER_S = 2.0  # how long an aggregator may take to answer


def check_transports(config: Config) -> Iterator[Finding]:
    """Try shared memory and TCP, over loopback. RDMA is looked at by `check_rdma`."""
    yield _tried("shm", config, _try_shm, "does the sandbox allow memfd_create and abstract Unix sockets?")
    yield _tried("tcp", config, _try_tcp, "is the loopback interface up (ip link set lo up)?")


def _tried(kind: str, config: Config, attempt: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding("ok", kind, attempt())
    except OSError as error:
        state: State = "fail" if config.transport.kind == kind else "warn"
        return Finding(state, kind, f"not available: {error.strerror or error}", advice)


def _try_shm() -> str:
    host = loopback()
    with listen_tcp(host, 0) as holder:  # its port makes the name of the Unix socket unique
        port = holder.getsockname()[1]
        Region(1, 65536).close()
        with listen_shm(host, port), contextlib.closing(connect_shm(host, port, ANSWER_S)):
            return "available on this host"


def _try_tcp() -> str:
    host = loopback()
    with listen_tcp(host, 0) as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(connect_tcp(host, port, ANSWER_S, dead_peer_s=1.0)):
            return "available"


def find_ports() -> tuple[list[Port], str]:
    """The ports of all RDMA devices here, or why there are none."""
    try:
        from omnireduce.transport.verbs.devices import list_ports

        ports = list_ports()
    except TransportError as error:
        return [], str(error)
    return ports, "" if ports else "this host has no RDMA device"


def check_rdma(config: Config, ports: list[Port], why_none: str) -> Iterator[Finding]:
    """Ports with their state and GIDs, and which one is taken."""
    required: State = "fail" if config.transport.kind == "verbs" else "info"
    if not ports:
        advice = "or choose another transport.kind; docs/rdma.md" if required == "fail" else ""
        yield Finding(required, "verbs", f"not available: {why_none}", advice)
        return
    for port in ports:
        yield _port(port)
    from omnireduce.transport.verbs.devices import choose

    try:
        choice = choose(config.verbs, near="")
    except TransportError as error:
        advice = "give the port's interface an IPv4 address and a link, or set verbs.device, port and gid_index"
        yield Finding(required if required == "fail" else "warn", "verbs", f"not available: {error}", advice)
        return
    gid = f"GID {choice.gid.index}, {choice.gid.ipv4 or choice.gid.text}"
    yield Finding("ok", "verbs", f"available, by default {choice.port.device} port {choice.port.number}, {gid}")


def _port(port: Port) -> Finding:
    what = f"RDMA port {port.device}/{port.number}"
    gids = ", ".join(f"{gid.index}: {gid.kind} {gid.ipv4 or gid.text}" for gid in port.gids)
    text = f"{port.state}, MTU {port.mtu}, GIDs {gids or 'none'}"
    if not port.active:
        return Finding(
            "warn", what, text, "is its cable in, its interface up (ip link set IFACE up), or a subnet manager?"
        )
    if not any(gid.kind == "IB" or (gid.kind == "RoCE v2" and gid.ipv4) for gid in port.gids):
        return Finding("warn", what, text, "give its interface an IPv4 address, for RoCE v2")
    return Finding("ok", what, text)


def check_secret(config: Config) -> Iterator[Finding]:
    """Say where the secret comes from. Whether it is that of the aggregators, `check_aggregators` finds out."""
    try:
        secret = load_secret(config.security)
    except ConfigError as error:
        yield Finding("fail", "secret", str(error))
        return
    if secret is None:
        yield Finding("info", "secret", "none: whoever can reach an aggregator without one may join; docs/security.md")
    else:
        team = f", of team {secret.team}" if secret.team else ""
        yield Finding("ok", "secret", f"from {config.security.secret_file or SECRET_VARIABLE}{team}")


def check_aggregators(config: Config) -> Iterator[Finding]:
    """Ask each configured aggregator, by the transport and with the proof that a worker would use."""
    addresses = config.cluster.aggregators
    if not addresses:
        yield _none_configured(config)
        return
    with ThreadPoolExecutor(min(len(addresses), AT_ONCE)) as pool:
        yield from pool.map(lambda address: _aggregator(address, config), addresses)


def _none_configured(config: Config) -> Finding:
    try:
        launch = detect_launch()
        identify(config, launch, is_named=launch.job is not None or config.cluster.job != "auto")
    except OmniReduceError as error:
        return Finding("fail", "aggregator", str(error))
    text = "none configured: rank 0 of a job whose ranks are all on this host starts one for it"
    return Finding("info", "aggregator", text, "for several hosts start some, and set cluster.aggregators")


def _aggregator(address: str, config: Config) -> Finding:
    what, started = f"aggregator {address}", time.monotonic()
    try:
        secret = load_secret(config.security)
        with contextlib.closing(reach(address, config, secret, started + ANSWER_S)) as link:
            status = question(link, started + ANSWER_S)
            way = _way(link)
    except OmniReduceError as error:
        return Finding("fail", what, shown(str(error)))
    if secret is None and status.wants_secret:  # this user may ask without it, and no worker may
        return Finding("fail", what, WANTS_PROOF)
    took_ms = (time.monotonic() - started) * 1000
    proved = "" if secret is None else ", both proved the secret"
    text = f"answers by {way} after {took_ms:.1f} ms{proved}; version {shown(status.version)}, {status.running} jobs"
    if status.version != __version__:
        return Finding("warn", what, text, f"here is {__version__}: install the same omnireduce everywhere")
    return Finding("ok", what, text)


def _way(link: StreamLink) -> str:
    tls = " with TLS" if isinstance(link, TlsLink) else ""
    return f"{link.kind}{tls}, from {link.local_host}" if isinstance(link, TcpLink) else link.kind
