"""Heartbeats of the shards. Each shard notes its turns in memory that it shares with supervisor and monitor.

The supervisor ends and restarts a shard that is silent for too long: `Daemon._check_heartbeats`.
"""

from __future__ import annotations

import mmap
import time

CHECK_S = 1.0  # longest time between two checks of the supervisor, and between two turns of a shard


class Heartbeat:
    """The time of a shard's last turn. It is made before the fork. A restarted shard uses the same object."""

    def __init__(self) -> None:
        self._last_turn = memoryview(mmap.mmap(-1, 8)).cast("d")

    def beat(self) -> None:
        """Note that a turn is over, or that the shard was started again."""
        self._last_turn[0] = time.monotonic()

    def rest(self) -> None:
        """Note that the shard has ended as it should: no turn is expected."""
        self._last_turn[0] = 0.0

    @property
    def last(self) -> float:
        """The time of the last turn, by the monotonic clock, which all processes share; 0 before the first turn and
        after the end."""
        return float(self._last_turn[0])


class HeartbeatWatch:
    """Measures for how long a shard has taken no turn, as its supervisor sees it.

    A long time between two checks counts for little: if the whole host was stopped, the shard was stopped, too.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._last_seen = self.silent_s = 0.0
        self._checked_at = time.monotonic()

    def check(self, now: float) -> None:
        """Check the shard's last turn. Call this at the latest CHECK_S after the previous call."""
        if self._heartbeat.last != self._last_seen:
            self._last_seen, self.silent_s = self._heartbeat.last, 0.0
        else:
            self.silent_s += min(now - self._checked_at, 2 * CHECK_S)
        self._checked_at = now

    def reset(self) -> None:
        """Start the measurement again, because the shard was started again."""
        self._heartbeat.beat()
        self.check(time.monotonic())


def check_interval_s(watchdog_s: float) -> float:
    """The seconds between two checks, and between two turns: CHECK_S, or a quarter of `watchdog_s` (0: no limit) if
    that is less."""
    return min(CHECK_S, watchdog_s / 4) if watchdog_s else CHECK_S
