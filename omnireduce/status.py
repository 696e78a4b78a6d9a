"""What an aggregator shard says about itself to who asks: a StatusRequest is answered by a Status, page by page.

Bytes are as `Link.counters` counts them, framing included; times are seconds; `received` is from workers, `sent` to
them. Densities count the blocks of all-reduces and of row sets, this shard's part of them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LISTED = 16  # how many ranks a list names at most
MOST = 2**63 - 1  # where a total stays: what ranks announce can go beyond the integers that can be sent

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Traffic(msgspec.Struct, kw_only=True):
    """Totals of one job or of a shard. `blocks` are those of the tensors, `own` those of them that ranks sent, added
    up over `rank_blocks` = ranks × blocks, and `union` those that results had."""

    collectives: _Count = 0
    received_bytes: _Count = 0
    sent_bytes: _Count = 0
    blocks: _Count = 0
    rank_blocks: _Count = 0
    own_blocks: _Count = 0
    union_blocks: _Count = 0

    @property
    def density(self) -> float | None:
        """Non-zero blocks / blocks of a rank's tensor, on average; None when there were none."""
        return self.own_blocks / self.rank_blocks if self.rank_blocks else None

    @property
    def union_density(self) -> float | None:
        """Blocks that are non-zero on at least one rank / blocks; None when there were none."""
        return self.union_blocks / self.blocks if self.blocks else None

    def add(self, other: Traffic) -> None:
        """Add all totals of `other`; none passes MOST."""
        for name in self.__struct_fields__:
            setattr(self, name, min(getattr(self, name) + getattr(other, name), MOST))


class Waiting(msgspec.Struct, frozen=True):
    """The collective `what` waits for `ranks` (at most LISTED of `total`), called `who`: no result for `seconds`."""

    what: str
    ranks: list[_Count]
    total: _Count
    who: str
    seconds: _Seconds


class Late(msgspec.Struct, frozen=True):
    """How long the others have waited, all in all, for `rank` to begin the collectives that it began last."""

    rank: _Count
    seconds: _Seconds


JobKey = tuple[str, int, str]  # name, generation and launch: jobs of several launches may gather under one name
FIRST_KEY: JobKey = ("", 0, "")


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `generation` is 0 while it still gathers its ranks; then `missing` names some of those not here. Its
    ranks have proved the secret of `team`.

    `slots_in_use` are receive slots with a message that is still needed, `results_in_use` result slots that are being
    filled, or that a rank has not read yet. `late` names the ranks that were waited for most, longest first.
    """

    name: str
    generation: _Count
    launch: str = ""
    world_size: _Count
    joined: _Count
    age_s: _Seconds
    missing: list[_Count] = []
    team: str = ""
    transport: str = ""
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    slots: _Count = 0
    slots_in_use: _Count = 0
    results: _Count = 0
    results_in_use: _Count = 0
    waiting: Waiting | None = None
    late: list[Late] = []

    @property
    def key(self) -> JobKey:
        """Where it stands in the order of jobs."""
        return self.name, self.generation, self.launch


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """To an aggregator, instead of a Hello: how are you? `after` is the key of the last job known already."""

    version: int
    after: JobKey = FIRST_KEY


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Aggregator's answer. `traffic` and what follows count since the shard started; `aborts` by AbortKind.

    `jobs` are in the order of their keys; with `more`, ask again after the last one. Who has proved the secret of a
    team is told of its jobs alone; all else is of the whole shard.
    """

    shard: str
    pid: _Count
    version: str
    uptime_s: _Seconds
    connections: _Count
    running: _Count
    gathering: _Count
    traffic: Traffic
    jobs_started: _Count
    jobs_ended: _Count
    aborts: dict[str, _Count]
    refused: _Count
    jobs: list[JobStatus]
    more: bool = False
