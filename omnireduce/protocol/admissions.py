"""Decisions of a shard's membership: answers to workers that want to join, and changes to running jobs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from omnireduce.wire.control import Aborted, Cause, Hello, Newcomers, Pending, Refused, Waiting, Welcome


class Answer(NamedTuple):
    """Send `message` to connection `key`; after Refused or Aborted the connection ends."""

    key: Hashable
    message: Refused | Pending | Waiting | Newcomers | Aborted


class Relayed(NamedTuple):
    """The job of a relay has begun on its upstream, the aggregator `address`. For each member: the upstream's Welcome,
    and the key of the member's uplink."""

    address: str
    welcomes: list[Welcome]
    uplinks: list[Hashable]


class Admit(NamedTuple):
    """All ranks of a job are here: start generation `generation` with these connections, in rank order. On a relay
    these are its members, and `relayed` says what it is part of."""

    generation: int
    job: str
    keys: list[Hashable]
    hellos: list[Hello]
    relayed: Relayed | None = None


class Announce(NamedTuple):
    """Tell the ranks of running `generation` that `workers` others wait to join their job."""

    generation: int
    workers: int


class Replace(NamedTuple):
    """End running `generation` because of `cause`: survivors have waited long enough for the ranks still in it."""

    generation: int
    cause: Cause


MembershipEffect = Answer | Admit | Announce | Replace
