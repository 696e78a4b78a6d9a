"""Rendezvous of ranks whose launcher names no port: one is drawn for the launch. Another process may have taken it.

Torch's own rendezvous has one port, at which rank 0 has a store. If that is taken, rank 0 raises. The others wait for
ever if its owner sends nothing. So here rank 0 has its store at any free port, and a signpost at the first port that
is free of those drawn. The signpost tells everybody who connects whose store is at which port.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from omnireduce.addresses import ANYWHERE, Address, connect, host_of, is_loopback, listen, where_to_listen
from omnireduce.blame import from_a_handler
from omnireduce.logs import tagged
from omnireduce.protocol.deadlines import Reminders

FIRST_PORT, PORTS = 20000, 12000  # below those that systems give out by themselves
TRIES = 16  # ports of one launch
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 8.0  # for what a signpost says: doubled after a round in which some port was silent
PAUSE_S, MOMENT_S = 0.1, 0.001
BACKLOG = 1024
LONGEST = 300  # bytes that a signpost says
PREFIXES_OF_USER = 2  # of the group and the device

log = logging.getLogger("omnireduce")


class MeetingPoint(NamedTuple):
    """Where the ranks of the launch `identity` meet: on the host `address`; the signpost is at one of the `ports`."""

    identity: str
    address: str
    ports: Sequence[int]


def drawn_ports(identity: str) -> list[int]:
    """The ports of a launch, the same for all its ranks."""
    drawn = (hashlib.sha256(f"{identity}{number or ''}".encode()).digest() for number in range(TRIES))
    return [FIRST_PORT + int.from_bytes(digest[:8], "big") % PORTS for digest in drawn]


def meet_at(place: MeetingPoint) -> None:
    """From now on, `init_process_group` meets at `place`, as long as MASTER_ADDR and MASTER_PORT still name it.
    Afterwards MASTER_PORT is the port of the store."""
    way_of_torch, meeting = _rendezvous_handlers["env"], _Meeting(place)

    def handler(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
        if not meeting.is_meant():
            stores: Iterator[Any] = way_of_torch(url, timeout=timeout, **options)
            return stores
        return meeting.begin(url, timeout)

    _rendezvous_handlers["env"] = handler


class _Meeting:
    def __init__(self, place: MeetingPoint) -> None:
        self._place = place
        self._port = 0  # of the store; 0: not known yet
        self._signpost: socket.socket | None = None

    def is_meant(self) -> bool:
        """Whether the environment still says to meet here."""
        ports = [str(port) for port in (self._port, *self._place.ports)]
        return os.environ.get("MASTER_ADDR") == self._place.address and os.environ.get("MASTER_PORT") in ports

    def begin(self, url: str, timeout: timedelta) -> Iterator[Any]:
        said = parse_qs(urlparse(url).query)
        rank, size = (int(said.get(key, [os.environ.get(key.upper(), "")])[0]) for key in ("rank", "world_size"))
        store = self._serve(size, timeout) if rank == 0 else self._find(timeout)
        self._port = store.port
        os.environ["MASTER_PORT"] = str(self._port)
        yield store, rank, size

    def _serve(self, size: int, timeout: timedelta) -> dist.TCPStore:
        store = dist.TCPStore(
            where_to_listen(self._place.address).host, self._port, size,
            is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
        keep(store)
        if self._signpost is None:
            self._signpost = _listen(self._place)
            text = _text(self._place, store.port)
            threading.Thread(target=_tell, args=(self._signpost, text), name="omnireduce.signpost", daemon=True).start()
        return store

    def _find(self, timeout: timedelta) -> dist.TCPStore:
        begun, wait_s = time.monotonic(), FIRST_WAIT_S
        deadline, reminders = begun + timeout.total_seconds(), Reminders(begun)
        while (now := time.monotonic()) < deadline:
            if waited_s := reminders.due(now):
                what = f"waiting for rank 0 to come to {self._place.address}"
                log.warning("%s since %.0f s", what, waited_s, extra=tagged("waiting_for_ranks"))
            next_wait_s = wait_s
            for port in self._place.ports:
                try:
                    there = _asked(self._place, port, min(wait_s, deadline - now))
                except _SilentError:
                    next_wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                    continue
                if there is not None:
                    return dist.TCPStore(*there, None, is_master=False, timeout=timeout, wait_for_workers=False)
            wait_s = next_wait_s
            time.sleep(PAUSE_S)
        raise dist.DistNetworkError(
            f"omnireduce: rank 0 has not come to {self._place.address} after {timeout.total_seconds():g} s; "
            f"looked for it at ports {', '.join(map(str, self._place.ports))}"
        )


def _listen(place: MeetingPoint) -> socket.socket:
    for port in place.ports:
        with suppress(OSError):
            return listen(place.address if is_loopback(place.address) else ANYWHERE, port, BACKLOG)
    raise dist.DistNetworkError(
        f"omnireduce: none of the ports {', '.join(map(str, place.ports))} is free on this host; set MASTER_ADDR and "
        "MASTER_PORT"
    )


def _text(place: MeetingPoint, port: int) -> bytes:
    return f"omnireduce {place.identity} {port}\n".encode()


def _tell(signpost: socket.socket, text: bytes) -> None:
    """Send `text` to everybody who connects, until this process ends."""
    signpost.setblocking(True)
    while True:
        with suppress(OSError), signpost.accept()[0] as guest:
            guest.settimeout(FIRST_WAIT_S)
            guest.sendall(text)


class _SilentError(Exception):
    """A port is in use, but sends no line in time."""


def _asked(place: MeetingPoint, port: int, wait_s: float) -> Address | None:
    """The store's address: the host that has answered, and the port that its signpost names. None if there is no
    signpost: another program may send anything. Raises _SilentError if no line comes in time."""
    said, part, deadline = b"", b"?", time.monotonic() + wait_s
    try:
        with connect(place.address, port, wait_s) as connection:
            host = host_of(connection.getpeername())
            while part and len(said) < LONGEST and not said.endswith(b"\n"):
                connection.settimeout(max(deadline - time.monotonic(), MOMENT_S))  # 0 would not raise TimeoutError
                part = connection.recv(LONGEST - len(said))
                said += part
    except OSError as error:
        if from_a_handler(error):
            raise
        if isinstance(error, TimeoutError):
            raise _SilentError from None
        return None
    last = said.rpartition(b" ")[2].strip()
    there = int(last) if last.isdigit() and len(last) <= len("65535") else 0
    return Address(host, there) if there < 1 << 16 and said == _text(place, there) else None


_kept: dist.Store | None = None


def keep(store: dist.Store) -> None:
    """Serve this store even after its group is destroyed, until another one is kept. Other ranks may be at the next
    group before this rank destroys the last one, and meet here."""
    global _kept
    _kept = store


def is_torchs_own(store: dist.Store) -> bool:
    """Whether `init_process_group` made the store behind this one, which it has given to a back end. If so, there is
    one more prefix. A store that the user made is the user's to end."""
    prefixes = 0
    while isinstance(store, dist.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    return isinstance(store, dist.TCPStore) and prefixes > PREFIXES_OF_USER
