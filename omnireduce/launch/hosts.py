"""Hosts of a launch: lists and files of them, the place of each rank, and the report of `--check-build`."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from omnireduce.errors import ConfigError
from omnireduce.support.addresses import Address, is_host, is_ipv6, is_own_address
from omnireduce.support.files.paths import one_line, read_text
from omnireduce.support.version import __version__

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a rank. `local_rank` of `local_size`: its number on its host. `cross_rank` of `cross_size`: its
    number among the ranks of all hosts with the same local rank."""

    rank: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def place_ranks(hosts: Sequence[Host], ranks: int) -> list[Slot]:
    """The place of each rank. Raises ConfigError if the hosts have too few slots."""
    slots = sum(host.slots for host in hosts)
    if ranks > slots:
        names, enough = ",".join(map(str, hosts))[:200], Host(hosts[0].name, ranks)
        raise ConfigError(
            f"-np {ranks}: the hosts {names} have {slots} slots: give more, as in -H {enough}, or fewer ranks"
        )
    names_of_ranks = [host.name for host in hosts for _ in range(host.slots)][:ranks]
    return place_ranks_on(names_of_ranks)


def place_ranks_on(names: Sequence[str]) -> list[Slot]:
    """The place of each rank, when `names` are the ranks' hosts."""
    sizes, ranks_before, slots = Counter(names), Counter[str](), []
    hosts_in_order = list(dict.fromkeys(names))
    for rank, name in enumerate(names):
        local_rank = ranks_before[name]
        hosts_with_local_rank = [host for host in hosts_in_order if sizes[host] > local_rank]
        slots.append(
            Slot(rank, name, local_rank, sizes[name], hosts_with_local_rank.index(name), len(hosts_with_local_rank))
        )
        ranks_before[name] += 1
    return slots


def is_this_host(name: str) -> bool:
    """Whether this is the name or an address of this host."""
    own_name = socket.gethostname()
    return (
        name in _LOCAL or name.lower() in (own_name.lower(), own_name.partition(".")[0].lower()) or is_own_address(name)
    )


MOST_SLOTS = 32_000  # the most slots of a host
MOST_BYTES = 1 << 22  # the largest file
MOST_NAMES = 1 << 16  # the most names in a list, with repeated names
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_IN_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_IPV6 = re.compile(r"\[([^\[\]]*:[^\[\]]*)\](?::(.*))?")
_KEYS = {  # the keys of Open MPI
    **dict.fromkeys(("slots", "cpus", "cpu", "count"), "slots"),
    **dict.fromkeys(("max_slots", "max-slots", "slots_max", "slots-max"), "max_slots"),
    **dict.fromkeys(("user", "username", "user_name", "user-name"), "user"),
}
_IN_A_LIST = "expected HOST:SLOTS, such as node1:4, node[01-16]:4 or [fd00::1]:4"
_IN_A_LINE = "expected HOST slots=N, HOST:N or HOST, such as: node1 slots=4"


@dataclass(frozen=True, slots=True)
class Host:
    """A host, and the most ranks on it. An IPv6 address stands in `name` without brackets, as ssh takes it."""

    name: str
    slots: int

    def __str__(self) -> str:
        user, at, host = self.name.rpartition("@")
        return f"{user}{at}{Address(host, self.slots)}"


def parse_hosts(text: str, source: str = "-H") -> list[Host]:
    """The hosts in a text such as `node1:4,node2:4`. A host without a number gets one slot each time that it is named.
    Raises ConfigError, which names `source`."""
    hosts = _Hosts()
    for entry in _entries(text):
        hosts.add(entry.strip(), source, _IN_A_LIST, lambda text: _hosts(text, 1))
    return hosts.listed()


def parse_lines(text: str, source: str, slots: int = 1) -> list[Host]:
    """The hosts of a text with a host, or a list of hosts, in each line. A host without a number gets `slots` slots
    each time that it is named. Raises ConfigError, which names `source` and the line."""
    hosts = _Hosts()
    for number, line in enumerate(text.splitlines(), 1):
        words = " ".join(line.partition("#")[0].replace("=", " = ").split()).replace(" = ", "=")
        if words:
            hosts.add(words, f"{source}, line {number}", _IN_A_LINE, lambda text: _hosts_of_line(text, slots))
    return hosts.listed()


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a file. Raises ConfigError, which names the line."""
    source = f"--hostfile {one_line(path)}"
    hosts = parse_lines(read_text(path, source, expected="a list of hosts", most_bytes=MOST_BYTES), source)
    if not hosts:
        raise ConfigError(f"{source}: got no host, expected one on each line, such as: node1 slots=4")
    return hosts


def names_in(nodelist: str) -> list[str]:
    """The hosts in a list of Slurm, such as SLURM_JOB_NODELIST; empty for any other text."""
    try:
        return [host.name for host in parse_hosts(nodelist)]
    except ConfigError:
        return []


class _InvalidHostError(Exception):
    """An invalid host; the message may say why."""


class _Hosts:
    """Hosts in the order in which they were named first, each with all its slots."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._names = 0

    def add(self, text: str, source: str, expected: str, parse: Callable[[str], Iterable[Host]]) -> None:
        """Add what `parse` finds in a text. Raises ConfigError."""
        try:
            for host in parse(text):
                slots = self._slots[host.name] = self._slots.get(host.name, 0) + host.slots
                self._names += 1
                if slots > MOST_SLOTS:
                    raise _InvalidHostError(f"expected at most {MOST_SLOTS} slots on {host.name}")
                if self._names > MOST_NAMES:
                    raise _InvalidHostError(f"expected at most {MOST_NAMES} hosts in all")
        except _InvalidHostError as error:
            raise ConfigError(f"{source}: got {text[:80]!r}, {str(error) or expected}") from None

    def listed(self) -> list[Host]:
        return [Host(name, slots) for name, slots in self._slots.items()]


def _entries(text: str) -> Iterator[str]:
    """The entries between commas that are not in brackets."""
    parts, depth = list[str](), 0
    for part in text.split(","):
        parts.append(part)
        depth += part.count("[") - part.count("]")
        if depth <= 0:
            yield ",".join(parts)
            parts, depth = [], 0
    if parts:
        yield ",".join(parts)


def _hosts_of_line(line: str, slots: int) -> Iterator[Host]:
    entries, *words = line.split()
    settings = dict[str, str]()
    for word in words:
        key, _, value = word.partition("=")
        if _KEYS.get(key, key) in settings or key not in _KEYS:
            raise _InvalidHostError
        settings[_KEYS[key]] = value
    numbers = [_number(settings[key]) for key in ("slots", "max_slots") if key in settings]
    if numbers != sorted(numbers):
        raise _InvalidHostError("expected max_slots to be no less than slots")
    user = f"{settings['user']}@" if "user" in settings else ""
    for entry in _entries(entries):
        yield from _hosts(user + entry, numbers[0] if numbers else slots, has_slots=bool(numbers))


def _hosts(entry: str, slots: int, *, has_slots: bool = False) -> Iterator[Host]:
    """The hosts of an entry, each with the number behind it, or else with `slots` slots. `has_slots`: the slots were
    given elsewhere, so a number here is an error."""
    user, at, host = entry.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise _InvalidHostError
    names, number = _split(host)
    if number is not None:
        if has_slots:
            raise _InvalidHostError
        slots = _number(number)
    for name in names:
        yield Host(f"{user}{at}{name}", slots)


def _split(entry: str) -> tuple[Iterable[str], str | None]:
    """The names in an entry, and the number behind them, if there is one."""
    if is_ipv6(entry):
        return [entry], None
    if match := _IPV6.fullmatch(entry):
        if not is_ipv6(match[1]):
            raise _InvalidHostError
        return [match[1]], match[2]
    names, colon, number = entry.partition(":")
    return _expanded(names), number if colon else None


def _expanded(names: str) -> Iterator[str]:
    """`node[1-2]` as node1 and node2. With several brackets, the last counts up first."""
    choices, combinations = list[list[str]](), 1
    for index, piece in enumerate(_IN_BRACKETS.split(names)):
        choices.append(_numbers(piece) if index % 2 else [piece])
        combinations *= len(choices[-1])
        if combinations > MOST_NAMES:
            raise _InvalidHostError(f"expected at most {MOST_NAMES} hosts in all")
    for parts in product(*choices):
        name = "".join(parts)
        if not is_host(name):
            raise _InvalidHostError
        yield name


def _numbers(text: str) -> list[str]:
    """`01-03,7` as 01, 02, 03 and 7."""
    numbers = list[str]()
    for part in text.split(","):
        ends = _RANGE.fullmatch(part)
        if ends is None:
            raise _InvalidHostError
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise _InvalidHostError(f"expected the smaller number first in {part}")
        if last - first >= MOST_NAMES - len(numbers):
            raise _InvalidHostError(f"expected at most {MOST_NAMES} hosts in all")
        numbers += [f"{number:0{len(ends[1])}}" for number in range(first, last + 1)]
    return numbers


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= MOST_SLOTS:
        raise _InvalidHostError(f"expected 1 to {MOST_SLOTS} slots")
    return int(text)


_FRAMEWORKS = (("NumPy", "numpy"), ("PyTorch", "torch"), ("Keras", "keras"), ("Ray", "ray"))
_LAUNCHERS = (("ssh", "ssh"), ("mpirun", "mpirun"), ("srun", "srun"), ("torchrun", "torchrun"))
_INFINIBAND = Path("/sys/class/infiniband")


def report_available() -> str:
    """The report of `--check-build`, in the form of horovodrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    launchers = [
        ("this program", True),
        *((name, shutil.which(word, path=path) is not None) for name, word in _LAUNCHERS),
    ]
    devices = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    sections = (
        ("Available Frameworks", [(name, _is_importable(module)) for name, module in _FRAMEWORKS]),
        ("Available Controllers", launchers),
        (
            "Available Tensor Operations",
            [
                ("shared memory", Path("/dev/shm").is_dir()),
                ("TCP", True),
                ("RDMA", _is_importable("pyverbs") and devices),
            ],
        ),
    )
    text = f"omnireduce v{__version__}:\n"
    for title, entries in sections:
        text += f"\n{title}:\n" + "".join(
            f"    [{'X' if is_available else ' '}] {name}\n" for name, is_available in entries
        )
    return text


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
