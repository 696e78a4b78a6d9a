"""The address at which other ranks reach a rank's gloo.

Gloo by itself takes what the host's own name means. On many hosts this is 127.0.1.1, at which other hosts do not reach
it; on a host without IPv4 it may be no address of the host at all. So each rank says which addresses its host has, and
takes the one from which packets go to the other hosts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from omnireduce.addresses import is_ipv6, is_numeric, loopback, own_addresses, reachable_address
from omnireduce.runtime.rank.environment import this_host

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
