"""Negotiation of RDMA between two ends: the worker's Hello carries an endpoint, the aggregator's Welcome the answer.

With "auto", RDMA is used if it takes the path of the control connection: each end needs a port with the address that it
has on that connection. If there is none, a worker that requires RDMA ("verbs") takes any active port.
"""

from __future__ import annotations

import ipaddress

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.control import Endpoint
from omnireduce.errors import TransportError
from omnireduce.support.config import Verbs
from omnireduce.transport.slot_memory import private_slots
from omnireduce.transport.tcp import TcpLink
from omnireduce.transport.verbs.devices import choose
from omnireduce.transport.verbs.link import VerbsLink
from omnireduce.transport.verbs.queue_pair import VerbsQueuePair


class Offer:
    """A worker's readiness for RDMA with one aggregator: a queue, and slots that are registered already.

    `required`: take any active port, if none has the address of `control`. Raises TransportError.
    """

    def __init__(self, control: TcpLink, settings: Verbs, slots: int, slot_bytes: int, *, required: bool) -> None:
        self._control = control
        self._send_slots, self._receive_slots = private_slots(slots, slot_bytes), private_slots(slots, slot_bytes)
        self._queue = _queue(control, settings, self._send_slots, self._receive_slots, anywhere=required)
        self.endpoint = self._queue.endpoint

    def accepted(self, answer: Endpoint) -> VerbsLink:
        """The link, with the endpoint that the aggregator has answered. Raises TransportError."""
        self._queue.connect(answer)
        return VerbsLink(self._control, self._queue, self._send_slots, self._receive_slots)

    def close(self) -> None:
        """Withdraw the offer."""
        self._queue.close()


def answer(
    control: TcpLink, settings: Verbs, offered: Endpoint, send_slots: Array, receive_slots: Array
) -> tuple[Endpoint, VerbsLink]:
    """Aggregator side: connect to a worker's endpoint; return the endpoint for the Welcome, and the link.

    Raises TransportError, and OSError when no descriptors are left.
    """
    anywhere = _ipv4(offered.gid) != _ipv4(control.remote_host)
    queue = _queue(control, settings, send_slots, receive_slots, anywhere=anywhere)
    try:
        queue.connect(offered)
        return queue.endpoint, VerbsLink(control, queue, send_slots, receive_slots)
    except BaseException:
        queue.close()
        raise


def _queue(
    control: TcpLink, settings: Verbs, send_slots: Array, receive_slots: Array, *, anywhere: bool
) -> VerbsQueuePair:
    local_address = _ipv4(control.local_host)
    choice = choose(settings, local_address)
    if not anywhere and choice.gid.ipv4 != local_address:
        raise TransportError(
            f"no RDMA port here has the address of the connection, {local_address or control.local_host}"
        )
    return VerbsQueuePair(choice, settings, send_slots, receive_slots)


def _ipv4(text: str) -> str:
    """The IPv4 address in `text`, which may be mapped to IPv6; empty if there is none."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:  # a peer may send any text
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or "")
    return str(address)
