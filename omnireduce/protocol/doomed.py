"""Launches that cannot start, because one of their ranks was refused for good.

Those of its ranks that wait are refused at once, and those that come later when they come. Only who could have joined
the job can do that to it: the hello is in order, of the same team, job and launch, and gives a rank that is missing.

A job that is not elastic starts with all its ranks or not at all. Only a launch with an id can be doomed. Without one,
the refused rank may be of another job of the same name, or started again by hand with other settings.
"""

from __future__ import annotations

from dataclasses import dataclass

from omnireduce.protocol.gathering import Gathering, Meeting, member_name
from omnireduce.protocol.hello_checks import difference
from omnireduce.wire.control import Hello, other_version

MAX_DOOMED = 64  # launches of which a shard remembers that they are doomed


@dataclass(frozen=True, slots=True)
class _Doom:
    reason: str
    until: float
    told: set[int]  # the ranks that know; one that comes again is of another start of the launch


class Doomed:
    """What a shard remembers of launches that cannot start, each for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._dooms: dict[tuple[str, Meeting], _Doom] = {}  # by team, the oldest first

    def add(self, gathering: Gathering, refused: Hello, wrong: str, now: float) -> str:
        """The launch that gathers cannot start, because `refused` cannot join; return what to tell its ranks."""
        reason = f"job '{refused.job}' cannot start: {member_name(refused)} was refused: {wrong}"
        for key in [key for key, doom in self._dooms.items() if now >= doom.until]:
            del self._dooms[key]
        if len(self._dooms) >= MAX_DOOMED:
            del self._dooms[next(iter(self._dooms))]
        told = {refused.rank, *gathering.attendees}
        self._dooms[refused.team, Meeting.of(refused)] = _Doom(reason, now + self._limit_s, told)
        return reason

    def why(self, hello: Hello, now: float) -> str:
        """Why the launch of a worker cannot start; empty for one that may, or that was started again."""
        key = hello.team, Meeting.of(hello)
        doom = self._dooms.get(key)
        if doom is None:
            return ""
        if now >= doom.until or hello.rank in doom.told:
            del self._dooms[key]
            return ""
        doom.told.add(hello.rank)
        return doom.reason


def dooms(gathering: Gathering, hello: Hello, wrong: str, over: str) -> bool:
    """Whether nobody has to wait for the others any more, now that `hello` was refused because it is `wrong`.

    `over`: which limit of this shard it is beyond, if it is. A duplicate of a rank, here or in a generation that still
    runs, is refused for another reason.
    """
    spec = gathering.spec
    is_missing = hello.rank < spec.world_size and hello.rank not in gathering.attendees
    is_elastic = spec.smallest or spec.formation  # a formation is part of an elastic job
    if is_elastic or not hello.launch or not is_missing:
        return False
    return wrong in (other_version(hello.version), over, difference(spec, hello))
