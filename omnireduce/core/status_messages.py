"""Status of an aggregator shard. It answers a StatusRequest with a Status, page by page.

Bytes are those of `Link.counters`, framing included. Times are in seconds. `received` is from workers, `sent` is to
workers. Densities count this shard's blocks of all-reduces and of row sets.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

LISTED = 16  # the most ranks in a list
MAX_TOTAL = 2**63 - 1  # totals stop here: ranks can announce more than an integer of a message can hold

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Traffic(msgspec.Struct, kw_only=True):
    """Totals of one job or of a shard.

    `blocks`: the blocks of all tensors. `rank_blocks`: the same times ranks. `own_blocks`: the blocks that ranks sent.
    `union_blocks`: the blocks of the results. `up_received_bytes` and `up_sent_bytes`: from and to the upstream of a
    relay; the other bytes are from and to its members.
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
        """Non-zero blocks / blocks of a rank's tensor, on average; None without blocks."""
        return self.own_blocks / self.rank_blocks if self.rank_blocks else None

    @property
    def union_density(self) -> float | None:
        """Blocks that are non-zero on at least one rank / blocks; None without blocks."""
        return self.union_blocks / self.blocks if self.blocks else None

    def add(self, other: Traffic) -> None:
        """Add all totals of `other`. No total goes beyond MOST."""
        for name in self.__struct_fields__:
            setattr(self, name, min(getattr(self, name) + getattr(other, name), MAX_TOTAL))


class Stragglers(msgspec.Struct, frozen=True):
    """A collective, which `what` describes, waits for `total` ranks: `who` names them, `ranks` lists at most LISTED of
    them. No result has left for `seconds`."""

    what: str
    ranks: list[_Count]
    total: _Count
    who: str
    seconds: _Seconds


class LateRank(msgspec.Struct, frozen=True):
    """The total time that the others waited for `rank`, in the collectives that it began last."""

    rank: _Count
    seconds: _Seconds


class JobRelay(msgspec.Struct, frozen=True):
    """A relay through which `ranks` ranks of a job come."""

    address: str
    ranks: _Count


JobKey = tuple[str, int, str]  # name, generation and launch: jobs of several launches may gather under one name
FIRST_KEY: JobKey = ("", 0, "")


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job. `generation` is 0 while the job still gathers its ranks; then `missing` names some of the ranks that are
    not here. The ranks have proved the secret of `team`.

    `carried`: bytes of tensors by the kind that carried them: messages by "shm", "tcp" or "verbs", and exchanges of
    ranks of a host in "memory". `slots_in_use`: receive slots whose message is still needed. `results_in_use`: result
    slots that are being filled, or that a rank has not read yet. `late` names the ranks that others waited for, longest
    first. On a relay, `upstream` is the aggregator above it, and only members that come through this relay count as
    joined. `relays`: the relays directly below this shard, at most LISTED.
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
    late: list[LateRank] = []
    upstream: str = ""
    relays: list[JobRelay] = []

    @property
    def key(self) -> JobKey:
        """The job's place in the order of jobs."""
        return self.name, self.generation, self.launch


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Client to aggregator, in place of a Hello: send your status. `after`: the key of the last job of the page
    before."""

    version: int
    after: JobKey = FIRST_KEY


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The aggregator's answer. `traffic` and the fields after it count since the shard started; `aborts` by AbortKind.

    `jobs` are in the order of their keys. With `more` there are further jobs: ask again with the key of the last job. A
    client that has proved the secret of a team gets only the team's jobs; all other fields are about the whole shard.
    `draining`: it takes no new jobs. `wants_secret`: workers must prove a secret. `refused_users`: the number of
    refused connections by local user.
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
