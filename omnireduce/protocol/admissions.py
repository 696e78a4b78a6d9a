"""What the membership of a shard decides about those who want to join, and about jobs that run."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from omnireduce.wire.control import Cause, Hello, Pending, Refused


class Answer(NamedTuple):
    """Send `message` to connection `key`; after a Refused the connection ends."""

    key: Hashable
    message: Refused | Pending


class Admit(NamedTuple):
    """All ranks of a job are here: start generation `generation` with these connections, in rank order."""

    generation: int
    job: str
    keys: list[Hashable]
    hellos: list[Hello]


class Announce(NamedTuple):
    """Tell the ranks of running `generation` that `workers` others wait to join their job."""

    generation: int
    workers: int


class Replace(NamedTuple):
    """End running `generation` because of `cause`: survivors have waited long enough for those who are still in it."""

    generation: int
    cause: Cause


MembershipEffect = Answer | Admit | Announce | Replace
