"""Rendezvous of ranks whose launcher names no port: one is drawn for the launch. Another process may have taken it.

Torch's own rendezvous has one port, at which rank 0 has a store. If that is taken, rank 0 raises. The others wait for
ever if its owner sends nothing. So here rank 0 has its store at any free port, and a signpost at the first port that
is free of those drawn. The signpost tells every process that connects the launch, and the port of its store.
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

from omnireduce.protocol.wait_notices import WaitNotices
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
    listening_target,
    loopback,
    own_addresses,
    reachable_address,
)
from omnireduce.support.logs import tagged
from omnireduce.support.os_error_origin import raised_by_signal_handler

MAX_ADDRESSES = 8  # addresses of a host
CHOSEN_BY_USER = "GLOO_SOCKET_IFNAME"  # names of interfaces, as gloo reads them


class HostOfRank(msgspec.Struct, frozen=True, array_like=True):
    """The host of a rank: an identity that no other host has, and its addresses, first the one on the way to the
    store."""

    identity: str
    addresses: list[str]


_host_of_rank = msgspec.json.Decoder(HostOfRank)


def host_message(store: dist.Store) -> str:
    """The message of this rank to the others, which meet at `store`: its host, and the addresses of the host."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    address_to_store = reachable_address([store.host] if isinstance(store, dist.TCPStore) else [])
    addresses = list(dict.fromkeys(address for address in (address_to_store, *own_addresses()) if address))
    return msgspec.json.encode(HostOfRank(this_host(), addresses[:MAX_ADDRESSES])).decode()


def address_for_gloo(messages: Sequence[str]) -> str:
    """An address of this host, from the `host_message` of each rank: of loopback if they share this host. Empty if the
    user has chosen interfaces, or if no address reaches the others: then gloo chooses."""
    if os.environ.get(CHOSEN_BY_USER):
        return ""
    hosts = [_host_of_rank.decode(text) for text in messages]
    addresses = addresses_of_others(hosts, this_host())
    return loopback() if addresses is None else reachable_address(addresses) if addresses else ""


def addresses_of_others(hosts: Sequence[HostOfRank], own_identity: str) -> list[str] | None:
    """An address of each host but this one, whose identity is `own_identity`, all of one family; None if there is no
    other host. The family is that of the addresses on the way to the store. If some of these are IPv4 and some IPv6, it
    is one that all hosts have."""
    host_addresses = {
        host.identity: [text for text in host.addresses[:MAX_ADDRESSES] if is_numeric(text)] for host in hosts
    }
    if host_addresses.keys() <= {own_identity}:
        return None
    families = {is_ipv6(addresses[0]) for addresses in host_addresses.values() if addresses}
    takes_ipv6 = any(families)
    if len(families) > 1:
        takes_ipv6 = all(any(map(is_ipv6, addresses)) for addresses in host_addresses.values())
    other_addresses = [addresses for identity, addresses in host_addresses.items() if identity != own_identity]
    same_family = [[text for text in addresses if is_ipv6(text) == takes_ipv6] for addresses in other_addresses]
    return [addresses[0] for addresses in same_family if addresses]


SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.1  # between two looks into the store
MAX_LISTED = 8  # ranks in a message
FEW_RANKS = 64  # of so many each looks who is missing
_log = logging.getLogger("omnireduce")


class RendezvousEntry(msgspec.Struct, frozen=True, array_like=True):
    """The entry of a rank: a number that no other rank has, and `message`, a text for all others."""

    number: str
    message: str


class Rendezvous(NamedTuple):
    """All ranks are here. `key`: not used in the store before. `messages`: the text of each rank."""

    key: str
    messages: list[str]


_entry_decoder = msgspec.json.Decoder(RendezvousEntry)
_entries_decoder = msgspec.json.Decoder(list[RendezvousEntry])


def await_all_ranks(store: dist.Store, rank: int, size: int, message: str, timeout: timedelta) -> Rendezvous:
    """Return when all ranks have called it with this store. `message`: for all of them. Raises DistStoreError, a
    RuntimeError, if some have not called it after `timeout`, and any error of the store."""
    own_entry = RendezvousEntry(secrets.token_hex(8), message)
    store.set(f"rank {rank}", msgspec.json.encode(own_entry))
    waiting = _StoreWait(store, rank, size, timeout)
    key = _invite_ranks(waiting, own_entry) if rank == 0 else _answer_invitation(waiting, own_entry)
    return Rendezvous(key, [entry.message for entry in _entries_decoder.decode(store.get(key))])


def _invite_ranks(waiting: _StoreWait, own_entry: RendezvousEntry) -> str:
    store, ranks, key = waiting.store, range(waiting.size), own_entry.number
    waiting.wait([f"rank {rank}" for rank in ranks])
    previous = list[RendezvousEntry]()
    while True:
        entries = [_entry_decoder.decode(store.get(f"rank {rank}")) for rank in ranks]
        for entry in entries[1:]:
            if entry not in previous:
                store.set(entry.number, key)
        previous = entries
        if waiting.pause([f"{key} {rank}" for rank in ranks[1:]]):
            break
    store.set(key, msgspec.json.encode(previous))
    return key


def _answer_invitation(waiting: _StoreWait, own_entry: RendezvousEntry) -> str:
    store = waiting.store
    waiting.wait([own_entry.number])
    key: str = store.get(own_entry.number).decode()
    store.set(f"{key} {waiting.rank}", "")
    waiting.wait([key])
    return key


class _StoreWait:
    """A wait for keys that other ranks put into a store, for `timeout` in total. After 1, 2, 4, ... seconds it logs
    which ranks are missing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._timeout_s, started = timeout.total_seconds(), time.monotonic()
        self._deadline, self._reminders, self._pause_s = (
            started + self._timeout_s,
            WaitNotices(started),
            SHORTEST_PAUSE_S,
        )

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
            event = f"waiting for {self._missing(keys)} to join a process group of {self.size} ranks"
            _log.warning("%s since %.0f s", event, waited_s, extra=tagged("waiting_for_ranks", rank=self.rank))
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return False

    def _missing(self, keys: Sequence[str]) -> str:
        """The ranks that this rank waits for, in words. Among many ranks, only rank 0 looks who is missing."""
        if self.rank and self.size > FEW_RANKS:
            return "other ranks"
        answers = list(enumerate(keys, 1)) if self.rank == 0 and len(keys) < self.size else []
        rank_keys = {rank: f"rank {rank}" for rank in range(self.size)} | dict(answers)
        missing = [rank for rank, key in rank_keys.items() if not self.store.check([key])] or [0]
        return f"rank {', '.join(map(str, missing[:MAX_LISTED]))}{' …' if len(missing) > MAX_LISTED else ''}"


FIRST_PORT, PORTS = 20000, 12000  # below those that systems give out by themselves
TRIES = 16  # ports of one launch
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 8.0  # for what a signpost says: doubled after a round in which some port was silent
PAUSE_S, MOMENT_S = 0.1, 0.001
BACKLOG = 1024
MAX_SIGNPOST_BYTES = 300  # of the line of a signpost
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


def register_rendezvous(point: MeetingPoint) -> None:
    """Let `init_process_group` meet at `point` from now on, as long as MASTER_ADDR and MASTER_PORT still name it.
    Afterwards MASTER_PORT is the port of the store."""
    torch_handler, signpost_rendezvous = _rendezvous_handlers["env"], SignpostRendezvous(point)

    def handler(url: str, timeout: timedelta = default_pg_timeout, **options: Any) -> Iterator[Any]:
        if not signpost_rendezvous.is_current():
            stores: Iterator[Any] = torch_handler(url, timeout=timeout, **options)
            return stores
        return signpost_rendezvous.begin(url, timeout)

    _rendezvous_handlers["env"] = handler


class SignpostRendezvous:
    """The rendezvous of the ranks of a launch, whose signpost is at `point`."""

    def __init__(self, point: MeetingPoint) -> None:
        self._point = point
        self._port = 0  # of the store; 0: not known yet
        self._signpost: socket.socket | None = None

    def is_current(self) -> bool:
        """Whether the environment still names this meeting point."""
        ports = [str(port) for port in (self._port, *self._point.ports)]
        return os.environ.get("MASTER_ADDR") == self._point.address and os.environ.get("MASTER_PORT") in ports

    def begin(self, url: str, timeout: timedelta) -> Iterator[Any]:
        query = parse_qs(urlparse(url).query)
        rank, size = (int(query.get(key, [os.environ.get(key.upper(), "")])[0]) for key in ("rank", "world_size"))
        store = self._serve(size, timeout) if rank == 0 else self._find(timeout)
        self._port = store.port
        os.environ["MASTER_PORT"] = str(self._port)
        yield store, rank, size

    def _serve(self, size: int, timeout: timedelta) -> dist.TCPStore:
        store = dist.TCPStore(
            listening_target(self._point.address).host, self._port, size,
            is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True,
        )  # fmt: skip
        keep_store(store)
        if self._signpost is None:
            self._signpost = _listen(self._point)
            text = _signpost_text(self._point, store.port)
            threading.Thread(
                target=_serve_signpost, args=(self._signpost, text), name="omnireduce.signpost", daemon=True
            ).start()
        return store

    def _find(self, timeout: timedelta) -> dist.TCPStore:
        started, wait_s = time.monotonic(), FIRST_WAIT_S
        deadline, reminders = started + timeout.total_seconds(), WaitNotices(started)
        while (now := time.monotonic()) < deadline:
            if waited_s := reminders.due(now):
                event = f"waiting for rank 0 to come to {self._point.address}"
                log.warning("%s since %.0f s", event, waited_s, extra=tagged("waiting_for_ranks"))
            next_wait_s = wait_s
            for port in self._point.ports:
                try:
                    store_address = _ask_signpost(self._point, port, min(wait_s, deadline - now))
                except _SilentError:
                    next_wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                    continue
                if store_address is not None:
                    return dist.TCPStore(*store_address, None, is_master=False, timeout=timeout, wait_for_workers=False)
            wait_s = next_wait_s
            time.sleep(PAUSE_S)
        raise dist.DistNetworkError(
            f"omnireduce: rank 0 has not come to {self._point.address} after {timeout.total_seconds():g} s; "
            f"looked for it at ports {', '.join(map(str, self._point.ports))}"
        )


def _listen(point: MeetingPoint) -> socket.socket:
    for port in point.ports:
        with suppress(OSError):
            return listen(point.address if is_loopback(point.address) else ANYWHERE, port, BACKLOG)
    raise dist.DistNetworkError(
        f"omnireduce: none of the ports {', '.join(map(str, point.ports))} is free on this host; set MASTER_ADDR and "
        "MASTER_PORT"
    )


def _signpost_text(point: MeetingPoint, port: int) -> bytes:
    return f"omnireduce {point.identity} {port}\n".encode()


def _serve_signpost(signpost: socket.socket, text: bytes) -> None:
    """Send `text` to everybody who connects, until this process ends."""
    signpost.setblocking(True)
    while True:
        with suppress(OSError), signpost.accept()[0] as connection:
            connection.settimeout(FIRST_WAIT_S)
            connection.sendall(text)


class _SilentError(Exception):
    """A port is in use, but sends no line in time."""


def _ask_signpost(point: MeetingPoint, port: int, wait_s: float) -> Address | None:
    """The store's address: the host that has answered, and the port that its signpost names. None if there is no
    signpost: another program may send anything. Raises _SilentError if no line comes in time."""
    received, chunk, deadline = b"", b"?", time.monotonic() + wait_s
    try:
        with connect(point.address, port, wait_s) as connection:
            host = host_of(connection.getpeername())
            while chunk and len(received) < MAX_SIGNPOST_BYTES and not received.endswith(b"\n"):
                connection.settimeout(max(deadline - time.monotonic(), MOMENT_S))  # 0 would not raise TimeoutError
                chunk = connection.recv(MAX_SIGNPOST_BYTES - len(received))
                received += chunk
    except OSError as error:
        if raised_by_signal_handler(error):
            raise
        if isinstance(error, TimeoutError):
            raise _SilentError from None
        return None
    digits = received.rpartition(b" ")[2].strip()
    store_port = int(digits) if digits.isdigit() and len(digits) <= len("65535") else 0
    return Address(host, store_port) if store_port < 1 << 16 and received == _signpost_text(point, store_port) else None


_kept_store: dist.Store | None = None


def keep_store(store: dist.Store) -> None:
    """Serve this store even after its group is destroyed, until another store is kept. Other ranks may be at the next
    group before this rank destroys the last one, and meet at this store."""
    global _kept_store
    _kept_store = store


def is_made_by_torch(store: dist.Store) -> bool:
    """Whether `init_process_group` made the store behind this one, which it has given to a back end. If so, there is
    one more prefix. A store that the user made is the user's to end."""
    prefixes = 0
    while isinstance(store, dist.PrefixStore):
        store, prefixes = store.underlying_store, prefixes + 1
    return isinstance(store, dist.TCPStore) and prefixes > PREFIXES_OF_USER
