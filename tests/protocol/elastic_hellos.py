"""Hellos to an elastic job, and who is in it then."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from omnireduce.core.wire.control import PROTOCOL_VERSION, Hello
from omnireduce.protocol.joining.admission import Admission, AdmissionEffect, Admit
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.joining.tickets import ticket

LIMITS = Limits(max_jobs=3, max_world_size=40, max_job_bytes=1 << 26, join_timeout_s=30.0)
SETTLE_S = 5.0
OF_TWO_PAIRS = 2 * (2 + 1) * 4 * 65536  # bytes of slots of two jobs of two ranks: those of each rank, and the results
WHY = "had not left when the others had waited long enough to form the job anew"


def hello(rank: int, *, min_ranks: int = 1, max_ranks: int = 3, survived: int = 0, **changes: Any) -> Hello:
    """With `survived`, the ticket of that formation."""
    fields: dict[str, Any] = {"version": PROTOCOL_VERSION, "job": "job", "rank": rank, "world_size": max_ranks}
    fields |= {"shard": 0, "shards": 1, "slots": 4, "slot_bytes": 65536, "host": "h", "pid": 100 + rank}
    fields |= {"stripe_blocks": 64, "min_ranks": min_ranks, "last_call_s": SETTLE_S, "survived": survived}
    request = Hello(**(fields | changes))
    return replace(request, ticket=ticket(b"", request, survived)) if survived and "ticket" not in changes else request


def last(admission: Admission) -> int:
    """The formation that survivors come from."""
    return max(1, admission._next_generation - 1)


def come(admission: Admission, *ranks: int, now: float = 0.0, survivor: bool = False, **changes: Any) -> list[Any]:
    """Say hello as `ranks`, from connections named after them; return the effects of the last one."""
    effects: list[AdmissionEffect] = []
    changes = {"survived": last(admission) if survivor else 0} | changes
    for rank in ranks:
        effects = list(admission.hello(rank, hello(rank, **changes), now))
    return effects


def places(admit: Admit) -> list[tuple[object, int, int]]:
    """Connection, rank and world size of everybody."""
    return [(key, each.rank, each.world_size) for key, each in zip(admit.keys, admit.hellos, strict=True)]


def running(admission: Admission, *ranks: int) -> Admit:
    (admit,) = come(admission, *ranks, max_ranks=len(ranks))
    assert isinstance(admit, Admit)
    return admit
