"""Ranks whose kernels compile: they have said who they are, and will come later.

Others wait for them meanwhile, and that does not count as time to join.
"""

from __future__ import annotations

from collections.abc import Hashable

from omnireduce.protocol.gathering import Place
from omnireduce.status import LISTED
from omnireduce.wire.control import Hello

COMPILING_S = 1800.0  # longer than that nobody waits: a process that has been stopped says no more that it is


class Compilers:
    """They are known by their connections, which last until they are ready."""

    def __init__(self) -> None:
        self._until: dict[Place, dict[Hashable, tuple[int, float]]] = {}  # of each connection its rank, and how long
        self._places: dict[Hashable, Place] = {}

    @property
    def keys(self) -> list[Hashable]:
        """Their connections."""
        return list(self._places)

    def add(self, key: Hashable, hello: Hello, now: float) -> None:
        """A worker compiles its kernels."""
        place = self._places[key] = Place.of(hello)
        self._until.setdefault(place, {})[key] = hello.rank, now + COMPILING_S

    def remove(self, key: Hashable) -> Place | None:
        """Its connection is over; where it would have come, if it was one of them."""
        place = self._places.pop(key, None)
        if place is not None:
            del self._until[place][key]
            if not self._until[place]:
                del self._until[place]
        return place

    def until(self, place: Place) -> float:
        """How long those who wait there may have to wait for them."""
        return max((until for _, until in self._until.get(place, {}).values()), default=0.0)

    def ranks(self, place: Place, now: float) -> list[int]:
        """The first of them, in order."""
        return sorted({rank for rank, until in self._until.get(place, {}).values() if until > now})[:LISTED]
