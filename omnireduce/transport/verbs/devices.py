"""RDMA devices with their ports and addresses, and the choice of a port for a link."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnireduce.core.wire.control import Mtu
from omnireduce.errors import TransportError
from omnireduce.support.config import Verbs

try:
    import pyverbs.enums as enums
    from pyverbs.device import Context, get_device_list
    from pyverbs.pyverbs_error import PyverbsError
except ImportError as problem:
    raise TransportError(f"RDMA needs pyverbs ({problem}); in a checkout, `make rdma` installs it") from problem

GID_KINDS = {enums.IBV_GID_TYPE_IB: "IB", enums.IBV_GID_TYPE_ROCE_V1: "RoCE v1", enums.IBV_GID_TYPE_ROCE_V2: "RoCE v2"}
STATES = {
    enums.IBV_PORT_DOWN: "down",
    enums.IBV_PORT_INIT: "init",
    enums.IBV_PORT_ARMED: "armed",
    enums.IBV_PORT_ACTIVE: "active",
}
MTU_BYTES: dict[int, Mtu] = {
    enums.IBV_MTU_256: 256,
    enums.IBV_MTU_512: 512,
    enums.IBV_MTU_1024: 1024,
    enums.IBV_MTU_2048: 2048,
    enums.IBV_MTU_4096: 4096,
}

# Held while devices and channels are opened and closed: the descriptor of a new channel is found by comparison.
opening = threading.RLock()


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's table of addresses."""

    index: int
    text: str
    kind: str

    @property
    def ipv4(self) -> str:
        """The IPv4 address that the GID stands for; empty if it is none."""
        mapped = ipaddress.IPv6Address(self.text).ipv4_mapped
        return str(mapped) if mapped else ""


@dataclass(frozen=True, slots=True)
class Port:
    """One port of one device."""

    device: str
    number: int
    state: str
    mtu: Mtu
    lid: int
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "active"

    def __str__(self) -> str:
        return f"{self.device} port {self.number} ({self.state})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The origin of a link: a port and one of its addresses."""

    port: Port
    gid: Gid


def list_ports() -> list[Port]:
    """Every port of every RDMA device of this host. Raises TransportError."""
    try:
        with opening:
            return [port for name in _device_names() for port in _ports_of(name)]
    except PyverbsError as error:
        raise TransportError(
            f"this host has no RDMA device ({error}); is the kernel module ib_uverbs loaded?"
        ) from error


def _device_names() -> list[str]:
    return [device.name.decode() for device in get_device_list()]


def _ports_of(name: str) -> list[Port]:
    """The ports of a device; none if it was removed after it was listed."""
    try:
        with Context(name=name) as context:
            count = context.query_device().phys_port_cnt
            return [_port(context, name, number) for number in range(1, count + 1)]
    except PyverbsError:
        if name in _device_names():
            raise
        return []


def _port(context: Any, device: str, number: int) -> Port:
    attributes = context.query_port(number)
    gids = []
    with contextlib.suppress(PyverbsError):  # a port that is down may have no table of addresses
        for entry in context.query_gid_table(max(1, attributes.gid_tbl_len)):
            if entry.port_num == number:
                text = str(ipaddress.IPv6Address(entry.gid_str()))
                gids.append(Gid(entry.gid_index, text, GID_KINDS.get(entry.gid_type, "?")))
    state = STATES.get(attributes.state, str(attributes.state))
    return Port(device, number, state, MTU_BYTES.get(attributes.active_mtu, 1024), attributes.lid, tuple(gids))


def choose(settings: Verbs, local_address: str) -> Choice:
    """The port and GID for a link whose control connection has the local address `local_address`.

    A port with this address is preferred, so that blocks take the path of the control connection. Otherwise it is the
    first active port. Raises TransportError, with a list of all ports.
    """
    ports = list_ports()
    usable = [port for port in ports if port.active and _matches(port, settings)]
    if not usable:
        ports_text = ", ".join(map(str, ports)) or "no RDMA device at all"
        raise TransportError(
            f"no active RDMA port that is verbs.device = {settings.device!r}, verbs.port = {settings.port}; "
            f"this host has {ports_text}"
        )
    choices = [(port, gid) for port in usable for gid in _candidates(port, settings.gid_index)]
    if not choices:
        raise TransportError(
            f"{usable[0]} has no GID {_gid_text(settings.gid_index)}; its table: {_table(usable[0].gids)}"
        )
    best = min(choices, key=lambda choice: choice[1].ipv4 != local_address)
    return Choice(*best)


def _matches(port: Port, settings: Verbs) -> bool:
    return settings.device in ("auto", port.device) and port.number == settings.port


def _candidates(port: Port, gid_index: int) -> list[Gid]:
    """The GIDs that may be used; -1 asks for RoCE v2 with an IPv4 address, or the first GID of InfiniBand."""
    if gid_index >= 0:
        return [gid for gid in port.gids if gid.index == gid_index]
    roce_v2 = [gid for gid in port.gids if gid.kind == "RoCE v2" and gid.ipv4]
    return roce_v2 or [gid for gid in port.gids if gid.kind == "IB"][:1]


def _gid_text(gid_index: int) -> str:
    return f"with index {gid_index}" if gid_index >= 0 else "for RoCE v2 with an IPv4 address"


def _table(gids: Sequence[Gid]) -> str:
    return ", ".join(f"{gid.index}: {gid.text} {gid.kind}" for gid in gids) or "empty"
