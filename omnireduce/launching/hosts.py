"""Which ranks run on which hosts.

Ranks fill the slots of the first host, then those of the next one, as Horovod and MPI place them.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omnireduce.addresses import is_own_address
from omnireduce.errors import ConfigError
from omnireduce.files.paths import read_text, shown

MOST_SLOTS = 32_000
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.@-]{0,252}[A-Za-z0-9_])?")
_LOCAL = ("localhost", "127.0.0.1", "::1")
_EXPECTED = "expected HOST:SLOTS, such as node1:4"


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and how many ranks it may have."""

    name: str
    slots: int


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


def parse_hosts(text: str, source: str = "-H") -> list[Host]:
    """The hosts in `node1:4,node2:4`; one without a number has one slot. Raises ConfigError, which names `source`."""
    return _all_different([_host(part.strip(), source) for part in text.split(",")], source)


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file with a host on each line: `node1 slots=4`, `node1:4` or `node1`. What follows `#` is a
    comment. Raises ConfigError, which names the line."""
    text, found = read_text(path, f"--hostfile {shown(path)}", expected="a list of hosts"), []
    for number, line in enumerate(text.split("\n"), 1):
        if words := line.partition("#")[0].split():
            found.append(_line(words, f"--hostfile {path}, line {number}"))
    if not found:
        raise ConfigError(f"--hostfile {path}: got no host, expected one on each line, such as: node1 slots=4")
    return _all_different(found, f"--hostfile {path}")


def discovered(text: str, source: str, slots: int) -> list[Host]:
    """What a discovery script prints: a line `HOST:SLOTS` for each host, or `HOST`, which has `slots`."""
    names = [line.strip() for line in text.splitlines() if line.strip()]
    return _all_different([_host(name if ":" in name else f"{name}:{slots}", source) for name in names], source)


def place(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """The place of each rank. Raises ConfigError where the hosts have too few slots."""
    room = sum(host.slots for host in hosts)
    if ranks > room:
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigError(
            f"-np {ranks}: the hosts {names[:200]} have {room} slots: give more, as in -H {hosts[0].name}:{ranks}, or "
            "fewer ranks"
        )
    names_of_ranks = [host.name for host in hosts for _ in range(host.slots)][:ranks]
    return place_on(names_of_ranks)


def place_on(names: Sequence[str]) -> list[Slot]:
    """The place of each rank, when `names` are the ranks' hosts."""
    sizes, seen, found = Counter(names), Counter[str](), []
    order = list(dict.fromkeys(names))
    for rank, name in enumerate(names):
        local = seen[name]
        across = [each for each in order if sizes[each] > local]
        found.append(Slot(rank, name, local, sizes[name], across.index(name), len(across)))
        seen[name] += 1
    return found


def is_here(name: str) -> bool:
    """Whether a host is this one, as far as its name says."""
    own = socket.gethostname()
    return name in _LOCAL or name.lower() in (own.lower(), own.partition(".")[0].lower()) or is_own_address(name)


def _host(text: str, source: str) -> Host:
    name, _, slots = text.rpartition(":") if ":" in text else (text, "", "1")
    if not _HOST.fullmatch(name) or not (slots.isascii() and slots.isdigit()) or not 1 <= int(slots) <= MOST_SLOTS:
        raise ConfigError(f"{source}: got {text[:80]!r}, {_EXPECTED}")
    return Host(name, int(slots))


def _line(words: Sequence[str], source: str) -> Host:
    name, *rest = words
    if not rest:
        return _host(name, source)
    found = re.fullmatch(r"(?:slots|max_slots)=([0-9]+)", rest[0])
    if found is None or len(rest) > 1 or ":" in name:
        raise ConfigError(f"{source}: got {' '.join(words)[:80]!r}, expected HOST slots=N, such as: node1 slots=4")
    return _host(f"{name}:{found[1]}", source)


def _all_different(hosts: Iterable[Host], source: str) -> list[Host]:
    found: dict[str, Host] = {}
    for host in hosts:
        if host.name in found:
            raise ConfigError(f"{source}: got host {host.name} twice, expected it once with all its slots")
        found[host.name] = host
    return list(found.values())
