"""Heartbeats of the shards. Each shard notes its turns in memory that it shares with supervisor and monitor."""

from __future__ import annotations

import mmap
import time

LOOK_S = 1.0  # longest time between two looks of the supervisor, and between two turns of a shard


class Heartbeat:
    """The time of a shard's last turn. It is made before the fork. A restarted shard uses the same object."""

    def __init__(self) -> None:
        self._at = memoryview(mmap.mmap(-1, 8)).cast("d")

    def beat(self) -> None:
        """Note that a turn is over, or that the shard was started again."""
        self._at[0] = time.monotonic()

    def rest(self) -> None:
        """Note that the shard has ended as it should: no turn is expected."""
        self._at[0] = 0.0

    @property
    def last(self) -> float:
        """The time of the last turn, by the monotonic clock, which all processes share; 0 before the first turn and
        after the end."""
        return float(self._at[0])


class HeartbeatWatch:
    """The time that a shard has taken no turn while its supervisor looked on.

    A long time between two looks counts for little: if the whole host was stopped, the shard was stopped, too.
    """

    def __init__(self, pulse: Heartbeat) -> None:
        self._pulse = pulse
        self._seen = self.silent_s = 0.0
        self._looked_at = time.monotonic()

    def look(self, now: float) -> None:
        """Look at the shard's last turn. Call this at the latest LOOK_S after the previous call."""
        if self._pulse.last != self._seen:
            self._seen, self.silent_s = self._pulse.last, 0.0
        else:
            self.silent_s += min(now - self._looked_at, 2 * LOOK_S)
        self._looked_at = now

    def begin_anew(self) -> None:
        """Begin anew, because the shard was started again."""
        self._pulse.beat()
        self.look(time.monotonic())


def look_s(watchdog_s: float) -> float:
    """The seconds between two looks, and between two turns: LOOK_S, or a quarter of `watchdog_s` (0: no limit) if
    less."""
    return min(LOOK_S, watchdog_s / 4) if watchdog_s else LOOK_S
