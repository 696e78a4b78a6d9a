"""Status of an aggregator shard. It answers a StatusRequest with a Status, page by page.

Bytes are counted as `Link.counters` does, framing included. Times are in seconds. `received` is from workers, `sent` is
to workers. Densities count this shard's blocks of all-reduces and of row sets.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LISTED = 16  # how many ranks a list names at most
MOST = 2**63 - 1  # no total goes beyond: ranks can announce more than an integer that is sent can hold

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Traffic(msgspec.Struct, kw_only=True):
    """Totals of one job or of a shard.

    `blocks`: the blocks of all tensors. `rank_blocks`: the same times ranks. `own_blocks`: how many of these the ranks
    sent. `union_blocks`: how many blocks the results had. `up_received_bytes` and `up_sent_bytes`: from and to the
    upstream of a relay; the others are from and to its members.
    """

    collectives: _Count = 0
    received_bytes: _Count = 0
    sent_bytes: _Count = 0
    blocks: _Count = 0
    rank_blocks: _Count = 0
    own_blocks: _Count = 0
    union_blocks: _Count = 0
    up_received_bytes: _Count = 0
    up_sent_bytes: _Count = 0

    @property
    def density(self) -> float | None:
        """Non-zero blocks / blocks of a rank's tensor, on average; None when there were none."""
        return self.own_blocks / self.rank_blocks if self.rank_blocks else None

    @property
    def union_density(self) -> float | None:
        """Blocks that are non-zero on at least one rank / blocks; None when there were none."""
        return self.union_blocks / self.blocks if self.blocks else None

    def add(self, other: Traffic) -> None:
        """Add all totals of `other`. No total goes beyond MOST."""
        for name in self.__struct_fields__:
            setattr(self, name, min(getattr(self, name) + getattr(other, name), MOST))


class Stragglers(msgspec.Struct, frozen=True):
    """The collective `what` waits for `total` ranks: `who` names them, `ranks` lists at most LISTED of them. No result
    has left for `seconds`."""

    what: str
    ranks: list[_Count]
    total: _Count
    who: str
    seconds: _Seconds


class Late(msgspec.Struct, frozen=True):
    """The total time for which the others waited for `rank`, in those collectives that it began last."""

    rank: _Count
    seconds: _Seconds


class Below(msgspec.Struct, frozen=True):
    """A relay through which `ranks` ranks of a job come."""

    address: str
    ranks: _Count


JobKey = tuple[str, int, str]  # name, generation and launch: jobs of several launches may gather under one name
FIRST_KEY: JobKey = ("", 0, "")


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `generation` is 0 while the job still gathers its ranks; then `missing` names some of the ranks that are
    not here. The ranks have proved the secret of `team`.

    `carried`: bytes of tensors by what carried them, which are messages by "shm", "tcp" or "verbs", and what ranks of a
    host have exchanged in "memory". `slots_in_use`: receive slots whose message is still needed. `results_in_use`:
    result slots that are being filled, or that a rank has not read yet. `late` names the ranks that were waited for
    most, longest first. On a relay `upstream` is the aggregator of which it is part, and only members that come through
    it count as joined. `relays`: those next below this shard, at most LISTED.
    """

    name: str
    generation: _Count
    launch: str = ""
    world_size: _Count
    joined: _Count
    age_s: _Seconds
    missing: list[_Count] = []
    team: str = ""
    carried: dict[str, _Count] = {}
    traffic: Traffic = msgspec.field(default_factory=Traffic)
    slots: _Count = 0
    slots_in_use: _Count = 0
    results: _Count = 0
    results_in_use: _Count = 0
    waiting: Stragglers | None = None
    late: list[Late] = []
    upstream: str = ""
    relays: list[Below] = []

    @property
    def key(self) -> JobKey:
        """The job's place in the order of jobs."""
        return self.name, self.generation, self.launch


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """To an aggregator, instead of a Hello: how are you? `after` is the key of the last job known already."""

    version: int
    after: JobKey = FIRST_KEY


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Aggregator's answer. `traffic` and the fields after it count since the shard started; `aborts` by AbortKind.

    `jobs` are in the order of their keys. With `more` there are further ones: ask again with the key of the last. A
    worker that has proved the secret of a team is told only of the team's jobs; all other fields are about the whole
    shard. `draining`: it takes no new jobs. `wants_secret`: workers must prove one. `refused_users`: how many of the
    refused were which local user's.
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
    draining: bool = False
    wants_secret: bool = False
    refused_users: dict[str, _Count] = {}
