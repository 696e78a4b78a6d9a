"""Rendezvous of ranks whose launcher names no port: one is drawn for the launch. Another process may have taken it.

Torch's own rendezvous has one port, at which rank 0 has a store. If that is taken, rank 0 raises. The others wait for
ever if its owner sends nothing. So here rank 0 has its store at any free port, and a signpost at the first port that
is free of those drawn. The signpost tells everybody who connects whose store is at which port.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlparse

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers

from omnireduce.protocol.reminders import Reminders
from omnireduce.runtime.rank.launcher_detection import this_host
from omnireduce.support.addresses import (
    ANYWHERE,
    Address,
    connect,
    host_of,
    is_ipv6,
    is_loopback,
    is_numeric,
    listen,
    loopback,
    own_addresses,
    reachable_address,
    where_to_listen,
)
from omnireduce.support.logs import tagged
from omnireduce.support.os_error_origin import from_a_handler

MOST_SAID = 8  # addresses of a host
CHOSEN_BY_USER = "GLOO_SOCKET_IFNAME"  # names of interfaces, as gloo reads them


class HostOfRank(msgspec.Struct, frozen=True, array_like=True):
    """The host of a rank: an identity that no other host has, and its addresses, first the one on the way to the
    store."""

    identity: str
    addresses: list[str]


_host_of_rank = msgspec.json.Decoder(HostOfRank)


def said_of_host(store: dist.Store) -> str:
    """The message of this rank to the others, who meet at `store`: its host, and the addresses of that."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    way = reachable_address([store.host] if isinstance(store, dist.TCPStore) else [])
    addresses = list(dict.fromkeys(address for address in (way, *own_addresses()) if address))
    return msgspec.json.encode(HostOfRank(this_host(), addresses[:MOST_SAID])).decode()


def address_for_gloo(said: Sequence[str]) -> str:
    """An address of this host, after all ranks have said `said_of_host`: of loopback if they share this host. Empty
    where the user has chosen interfaces, or where nothing leads to the others: then gloo chooses."""
    if os.environ.get(CHOSEN_BY_USER):
        return ""
    hosts = [_host_of_rank.decode(text) for text in said]
    ways = ways_to_others(hosts, this_host())
    return loopback() if ways is None else reachable_address(ways) if ways else ""


def ways_to_others(hosts: Sequence[HostOfRank], own: str) -> list[str] | None:
    """An address of each host but `own`, all of one family; None if there is no other host. The family is that of the
    ways to the store or, where some of these are IPv4 and some IPv6, one that all hosts have."""
    of_host = {host.identity: [text for text in host.addresses[:MOST_SAID] if is_numeric(text)] for host in hosts}
    if of_host.keys() <= {own}:
        return None
    families = {is_ipv6(addresses[0]) for addresses in of_host.values() if addresses}
    takes_ipv6 = any(families)
    if len(families) > 1:
        takes_ipv6 = all(any(map(is_ipv6, addresses)) for addresses in of_host.values())
    others = [addresses for identity, addresses in of_host.items() if identity != own]
    fitting = [[text for text in addresses if is_ipv6(text) == takes_ipv6] for addresses in others]
    return [addresses[0] for addresses in fitting if addresses]


SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1  # between two looks into the store
LISTED = 8  # ranks in a message
FEW = 64  # ranks
_log = logging.getLogger("omnireduce")


class RendezvousEntry(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a rank: a number that no other rank has, and `said`, a text for all others."""

    number: str
    said: str


class Rendezvous(NamedTuple):
    """All ranks are here. `key`: not used in the store before. `said`: the text of each rank."""

    key: str
    said: list[str]


_arrival = msgspec.json.Decoder(RendezvousEntry)
_arrivals = msgspec.json.Decoder(list[RendezvousEntry])


def meet(store: dist.Store, rank: int, size: int, said: str, timeout: timedelta) -> Rendezvous:
    """Return when all ranks have called it with this store. Raises DistStoreError, a RuntimeError, if they have not
    after `timeout`, and any error of the store."""
    own = RendezvousEntry(secrets.token_hex(8), said)
    store.set(f"rank {rank}", msgspec.json.encode(own))
    waiting = _Waiting(store, rank, size, timeout)
    key = _call_up(waiting, own) if rank == 0 else _answer(waiting, own)
    return Rendezvous(key, [arrival.said for arrival in _arrivals.decode(store.get(key))])


def _call_up(waiting: _Waiting, own: RendezvousEntry) -> str:
    store, ranks, key = waiting.store, range(waiting.size), own.number
    waiting.wait([f"rank {rank}" for rank in ranks])
    known = list[RendezvousEntry]()
    while True:
        arrivals = [_arrival.decode(store.get(f"rank {rank}")) for rank in ranks]
        for arrival in arrivals[1:]:
            if arrival not in known:
                store.set(arrival.number, key)
        known = arrivals
        if waiting.pause([f"{key} {rank}" for rank in ranks[1:]]):
            break
    store.set(key, msgspec.json.encode(known))
    return key


def _answer(waiting: _Waiting, own: RendezvousEntry) -> str:
    store = waiting.store
    waiting.wait([own.number])
    key: str = store.get(own.number).decode()
    store.set(f"{key} {waiting.rank}", "")
    waiting.wait([key])
    return key


class _Waiting:
    """Waits for keys that other ranks put into a store, for `timeout` in total. After 1, 2, 4, ... seconds it logs who
    is missing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._timeout_s, begun = timeout.total_seconds(), time.monotonic()
        self._deadline, self._reminders, self._pause_s = begun + self._timeout_s, Reminders(begun), SHORTEST_PAUSE_S

    def wait(self, keys: Sequence[str]) -> None:
        """Return when the store has all these keys."""
        while not self.pause(keys):
            pass

    def pause(self, keys: Sequence[str]) -> bool:
        """Return whether the store has these keys. If it has not, pause first, longer each time."""
        if self.store.check(list(keys)):  # not its `wait`: that of torch writes two lines when its time is over
            self._pause_s = SHORTEST_PAUSE_S
            return True
        now = time.monotonic()
        if now > self._deadline:
            raise dist.DistStoreError(
                f"omnireduce: {self._missing(keys)} did not join a process group of {self.size} ranks within "
                f"{self._timeout_s:g} s (its timeout); start all ranks, each with a rank of its own"
            )
        if waited_s := self._reminders.due(now):
            what = f"waiting for {self._missing(keys)} to join a process group of {self.size} ranks"
            _log.warning("%s since %.0f s", what, waited_s, extra=tagged("waiting_for_ranks", rank=self.rank))
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return False

    def _missing(self, keys: Sequence[str]) -> str:
        """The ranks that this rank waits for, in words. Among many ranks, only rank 0 looks who is missing."""
        if self.rank and self.size > FEW:
            return "other ranks"
        answers = list(enumerate(keys, 1)) if self.rank == 0 and len(keys) < self.size else []
        here = {rank: f"rank {rank}" for rank in range(self.size)} | dict(answers)
        missing = [rank for rank, key in here.items() if not self.store.check([key])] or [0]
        return f"rank {', '.join(map(str, missing[:LISTED]))}{' …' if len(missing) > LISTED else ''}"


FIRST_PORT, PORTS = 20000, 12000  # below those that systems give out by themselves
TRIES = 16  # ports of one launch
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 8.0  # for what a signpost says: doubled after a round in which some port was silent
PAUSE_S, MOMENT_S = 0.1, 0.001
BACKLOG = 1024
LONGEST = 300  # bytes that a signpost says
PREFIXES_OF_USER = 2  # of the group and the device

log = logging.getLogger("omnireduce")


class MeetingPoint(NamedTuple):
    """Meeting point of the ranks of the launch `identity`: the host `address`. The signpost is at one of `ports`."""

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
