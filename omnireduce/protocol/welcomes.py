"""Welcome messages to the ranks of a job, once all of them have come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from omnireduce.protocol.hosts import JobRank, LocalRanks, hosts_of
from omnireduce.wire.control import Hello, RankAssignment, Welcome


def welcomes_of(generation: int, hellos: Sequence[Hello], draw: Callable[[], bytes]) -> list[Welcome]:
    """The welcome of each rank, except what concerns its link; `hellos[r]` is that of rank r. `draw` gives random
    tokens, by which the ranks of a host meet."""
    whole_bytes = min(hello.whole_bytes for hello in hellos)
    welcomes = [Welcome(generation, whole_bytes=whole_bytes) for _ in hellos]
    if hellos[0].shard == 0:
        welcomes = [replace(welcome, seat=_seat(rank, hellos[rank])) for rank, welcome in enumerate(welcomes)]
    for host in hosts_of(hellos):
        meeting = draw() if hellos[0].shard == 0 else None  # the first shard tells the ranks where
        for rank in host.ranks:
            welcomes[rank] = replace(
                welcomes[rank], meeting=meeting, neighbours=host.ranks, host=host.host, hosts=host.hosts
            )
    return placed(welcomes, hellos)


def placed(welcomes: Sequence[Welcome], hellos: Sequence[Hello]) -> list[Welcome]:
    """The welcomes of those who are connected here, in this order, with their places, and the number of ranks of each
    relay."""
    relayed = Counter(hello.relay for hello in hellos if hello.relay)
    both = zip(welcomes, hellos, strict=True)
    return [replace(welcome, place=place, relayed=relayed[hello.relay]) for place, (welcome, hello) in enumerate(both)]


def members_of(welcomes: Sequence[Welcome], hellos: Sequence[Hello]) -> list[JobRank]:
    """Who is connected here, in this order."""
    return [
        JobRank(
            hello.rank,
            hello.relay,
            LocalRanks(welcome.neighbours, welcome.host, welcome.hosts) if welcome.neighbours else None,
        )
        for welcome, hello in zip(welcomes, hellos, strict=True)
    ]


def _seat(rank: int, hello: Hello) -> RankAssignment:
    return RankAssignment(rank, hello.world_size, hello.formation, hello.ticket)
