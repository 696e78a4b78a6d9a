"""The placement of ranks on hosts.

Ranks fill the slots of the first host, then those of the next one, as Horovod and MPI place them.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from omnireduce.addresses import is_own_address
from omnireduce.errors import ConfigError
from omnireduce.launching.host_lists import Host

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a rank. `local_rank` of `local_size` is its place on its host; `cross_rank` of `cross_size` its
    place among the ranks of all hosts that have the same local rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """The place of each rank. Raises ConfigError where the hosts have too few slots."""
    room = sum(host.slots for host in hosts)
    if ranks > room:
        names, more = ",".join(map(str, hosts)), Host(hosts[0].name, ranks)
        raise ConfigError(
            f"-np {ranks}: the hosts {names[:200]} have {room} slots: give more, as in -H {more}, or fewer ranks"
        )
    names_of_ranks = [host.name for host in hosts for _ in range(host.slots)][:ranks]
    return place_on(names_of_ranks)


def place_on(names: Sequence[str]) -> list[Slot]:
    """The place of each rank, when `names` are the ranks' hosts."""
    sizes, seen, slots = Counter(names), Counter[str](), []
    order = list(dict.fromkeys(names))
    for rank, name in enumerate(names):
        local = seen[name]
        across = [host for host in order if sizes[host] > local]
        slots.append(Slot(rank, name, local, sizes[name], across.index(name), len(across)))
        seen[name] += 1
    return slots


def is_here(name: str) -> bool:
    """Whether a host is this one, as far as its name says."""
    own = socket.gethostname()
    return name in _LOCAL or name.lower() in (own.lower(), own.partition(".")[0].lower()) or is_own_address(name)
