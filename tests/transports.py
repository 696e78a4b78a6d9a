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
TRANSPORTS = [*KINDS, MEMORY]
HOST_EXCHANGE = "transport.host_exchange"
BY_SHARDS = f"{HOST_EXCHANGE}=off"  # all tensors, though the ranks could share memory
# For `by_transports`: the first type goes by every transport, and tools/test_rdma.sh takes it for RDMA.
TYPES = sorted(ELEMENT_TYPES, key=lambda name: name != "float32")


def by_transports(cases: Iterable[Any], transports: Sequence[str] = TRANSPORTS) -> list[tuple[Any, str]]:
    """Cases and transports for tests whose cases differ in what ranks compute, not in how it travels.

    The first case goes by every transport. Each other case goes in memory, if that is one of them, and by one of the
    others in turn.
    """
    first, *others = cases
    kinds = [transport for transport in transports if transport != MEMORY]
    in_memory = [(case, MEMORY) for case in others if MEMORY in transports]
    return [(first, transport) for transport in transports] + in_memory + list(zip(others, cycle(kinds), strict=False))


def called(transport: str) -> str:
    """Name of a transport, or of memory, in the statistics of a communicator."""
    return "memory+shm" if transport == MEMORY else transport


def over(transport: str) -> tuple[str, ...]:
    """Settings that let a job's tensors go by a transport."""
    return (f"{HOST_EXCHANGE}=auto",) if transport == MEMORY else (f"transport.kind={transport}", BY_SHARDS)


def meant_by(overrides: Sequence[str]) -> str:
    """The transport that settings name, "by shards" if they only exclude memory, or "". TLS goes over TCP."""
    named = dict(override.split("=", 1) for override in overrides if "=" in override)
    kind, exchange = named.get("transport.kind", "auto"), named.get(HOST_EXCHANGE)
    if exchange == "auto":
        return MEMORY
    if kind == "auto" and "security.tls_ca" in named:
        return "tcp"
    return kind if kind in KINDS else "by shards" if exchange == "off" else ""


def missing(meant: str, carried: Counter[str]) -> bool:
    """Whether tensors were carried, and none of them by the transport that is meant."""
    by_meant = carried.total() - carried[MEMORY] if meant == "by shards" else carried[meant]
    return bool(meant) and carried.total() > 0 and not by_meant


def check_carried(comm: Communicator, overrides: Sequence[str]) -> None:
    """Fail if a rank in a process of its own has carried tensors, and none by the transport that is meant."""
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
