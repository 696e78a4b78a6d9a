"""The transports that end-to-end tests run over on this host, and whether they carried what tests have meant for them.

A configuration alone moves nothing: ranks of one host exchange in memory, whatever `transport.kind` says, unless that
is turned off. So after each test, what its configurations name is compared with what its communicators have carried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from omnireduce import Communicator
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.errors import TransportError
from omnireduce.runtime.rank import engine
from omnireduce.transport.kinds import TABLE


def _has_rdma() -> bool:
    try:
        from omnireduce.transport.verbs.devices import list_ports

        return any(port.active for port in list_ports())
    except TransportError:
        return False


RDMA = _has_rdma()
MEMORY = "memory"  # that the ranks share
KINDS = [*(transport.name for transport in TABLE), *(["verbs"] if RDMA else [])]
WAYS = [*KINDS, MEMORY]
HOST_EXCHANGE = "transport.host_exchange"
BY_SHARDS = f"{HOST_EXCHANGE}=off"  # all tensors, though the ranks could share memory
# For `by_ways`: the first type goes by every way, and tools/test_rdma.sh takes it for RDMA.
TYPES = sorted(ELEMENT_TYPES, key=lambda name: name != "float32")


def by_ways(cases: Iterable[Any], ways: Sequence[str] = WAYS) -> list[tuple[Any, str]]:
    """Cases and ways for tests whose cases differ in what ranks compute, not in how it travels. The first case goes by
    every way, each other one in memory, if that is one of the ways, and by one of the transports in turn."""
    first, *others = cases
    kinds = [way for way in ways if way != MEMORY]
    in_memory = [(case, MEMORY) for case in others if MEMORY in ways]
    return [(first, way) for way in ways] + in_memory + list(zip(others, cycle(kinds), strict=False))


def called(way: str) -> str:
    """Name of a transport, or of memory, in the statistics of a communicator."""
    return "memory+shm" if way == MEMORY else way


def over(way: str) -> tuple[str, ...]:
    """The settings that let a job's tensors go that way."""
    return (f"{HOST_EXCHANGE}=auto",) if way == MEMORY else (f"transport.kind={way}", BY_SHARDS)


def meant_by(overrides: Sequence[str]) -> str:
    """The way that settings name, or that all go "by shards"; empty where they name none. TLS goes over TCP."""
    named = dict(override.split("=", 1) for override in overrides if "=" in override)
    kind, exchange = named.get("transport.kind", "auto"), named.get(HOST_EXCHANGE)
    if exchange == "auto":
        return MEMORY
    if kind == "auto" and "security.tls_ca" in named:
        return "tcp"
    return kind if kind in KINDS else "by shards" if exchange == "off" else ""


def missing(meant: str, carried: Counter[str]) -> bool:
    """Whether something was carried, and nothing of it in the way that is meant."""
    own = carried.total() - carried[MEMORY] if meant == "by shards" else carried[meant]
    return bool(meant) and carried.total() > 0 and not own


def check_carried(comm: Communicator, overrides: Sequence[str]) -> None:
    """For a rank in a process of its own: fail where something was carried, and nothing in the way that is meant."""
    carried = Counter(comm.statistics().carried)
    assert not missing(meant_by(overrides), carried), f"{dict(carried)} carried the tensors"


class Carriers:
    """Transports that the configurations since the last `take` name, and those that have carried tensors since then."""

    def __init__(self) -> None:
        self.meant, self._carried = set[str](), Counter[str]()
        self._closed = engine.closed
        engine.closed = self._count  # each communicator calls `closed` when it has left a generation of its job

    def _count(self, communicator: Any) -> None:
        self._carried.update(communicator.statistics().carried)
        self._closed(communicator)

    def take(self) -> list[str]:
        """Transports that were named, and carried nothing though others did. Begin to count anew."""
        for each in engine._process.open:
            self._carried.update(each.statistics().carried)
        results = [each for each in sorted(self.meant) if missing(each, self._carried)]
        self.meant.clear()
        self._carried.clear()
        return results


carriers = Carriers()
