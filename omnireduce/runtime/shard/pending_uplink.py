"""A worker that wants to join a job through a relay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from omnireduce.protocol.joining.authentication import Candidate
from omnireduce.protocol.joining.pending_job import FormationKey
from omnireduce.status import JobStatus
from omnireduce.transport.base import Link
from omnireduce.wire.control import Hello, Pending, Welcome


@dataclass(eq=False)
class PendingUplink:
    """A worker that wants to join; `link` is its uplink."""

    key: Hashable
    hello: Hello
    address: str
    since: float
    link: Link | None = None
    candidate: Candidate | None = None  # until the upstream has proved that it knows the secret
    pending: Pending = field(default_factory=lambda: Pending([], 0))
    welcome: Welcome | None = None
    again_at: float | None = None  # when to connect once more
    give_up: Callable[[], object] = lambda: None  # the attempt to connect
    why: str = ""  # why the upstream could not be reached

    @property
    def meeting(self) -> FormationKey:
        return FormationKey.of(self.hello)


def rank_of(hello: Hello, welcome: Welcome) -> int:
    """The rank that a worker has in its job. In an elastic one the upstream gives it."""
    return hello.rank if welcome.seat is None else welcome.seat.rank


def seated(hello: Hello, welcome: Welcome) -> Hello:
    """The hello with the place that the worker has in its job."""
    size = hello.world_size if welcome.seat is None else welcome.seat.world_size
    return replace(hello, rank=rank_of(hello, welcome), world_size=size)


def status_of(uplinks: Sequence[PendingUplink], now: float) -> JobStatus:
    """The status of a job that gathers, of which these workers are here."""
    here = [uplink for uplink in uplinks if not uplink.hello.compiling]
    first = (here or uplinks)[0]
    return JobStatus(
        name=first.hello.job, team=first.hello.team, generation=0, launch=first.hello.launch,
        world_size=first.hello.world_size, joined=len(here), missing=first.pending.missing,
        age_s=now - first.since, upstream=first.address,
    )  # fmt: skip
