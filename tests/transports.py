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
HOST_EXCHANGE = "transport.host_exchange"
BY_SHARDS = f"{HOST_EXCHANGE}=off"  # all tensors, though the ranks could share memory


def called(way: str) -> str:
    """What a communicator calls that way."""
    return "memory+shm" if way == MEMORY else way


def over(way: str) -> tuple[str, ...]:
    """The settings that let a job's tensors go that way."""
    return (f"{HOST_EXCHANGE}=auto",) if way == MEMORY else (f"transport.kind={way}", BY_SHARDS)
