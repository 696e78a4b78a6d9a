"""The transports that end-to-end tests run over on this host."""

from __future__ import annotations

from omnireduce.errors import TransportError


def _has_rdma() -> bool:
    try:
        from omnireduce.transport.verbs.devices import list_ports

        return any(port.active for port in list_ports())
    except TransportError:
        return False


RDMA = _has_rdma()
MEMORY = "memory"  # that the ranks share
KINDS = ["shm", "tcp", *(["verbs"] if RDMA else [])]
WAYS = [*KINDS, MEMORY]


def over(way: str) -> str:
    """The setting that lets a job's tensors go that way."""
    return "transport.host_exchange=auto" if way == MEMORY else f"transport.kind={way}"
