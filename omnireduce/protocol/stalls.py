"""Stall detector of a shard: how long no result has left, when to warn, and whether the shard itself stood still."""

from __future__ import annotations

from omnireduce.core.wire.control import ITSELF, Waiting
from omnireduce.core.wire.safe_text import shown

BUSY, STOOD_STILL = f"{ITSELF}, which is busy", f"{ITSELF}, which stood still"  # culprits when ranks wait for no rank
LONGEST_PAUSE_S = 60.0  # between two warnings of waits that ranks report


def wait_text(message: Waiting) -> str:
    """The text of a Waiting message for the user."""
    preposition = "for" if message.who.endswith(STOOD_STILL.removeprefix(ITSELF)) else "since"
    return f"{shown(message.what)}: waiting for {shown(message.who)} {preposition} {message.seconds:.1f} s"


class StallDetector:
    """No result has left a shard since `since`. After `after_s` the shard names the ranks that it waits for, and again
    each time that the wait has doubled.

    While a result is awaited, the shard has a turn at least every `after_s`. If a turn is late by as much, the shard
    itself stood still. That time does not count as a wait.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._warn_again_at = 0.0
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """A result has left now, or is awaited from now on."""
        self.since = self._turn_at = now
        self.deadline = self._warn_at = now + self.after_s  # `deadline`: the next turn is due; `_warn_at`: time to warn

    def turn(self, now: float) -> float:
        """The shard has a turn while a result is awaited. Returns how long it stood still before; 0 if it did not."""
        late_s = now - self._turn_at - self.after_s
        self._turn_at, next_at = now, now + self.after_s
        self.deadline = next_at if next_at < self._warn_at else self._warn_at
        if late_s < self.after_s:
            return 0.0
        self.since += late_s
        self.deadline = self._warn_at = now
        return late_s

    def is_due(self, now: float) -> bool:
        """Whether to name the ranks that the shard waits for now. If so, the caller does."""
        if now < self._warn_at:
            return False
        self._warn_at = self.since + 2 * (now - self.since)
        self.deadline = min(self._turn_at + self.after_s, self._warn_at)
        return True

    def may_warn(self, wait_s: float, now: float) -> bool:
        """Whether to warn of a wait of `wait_s` that a rank reports: one warning is enough for all ranks that wait."""
        if now < self._warn_again_at:
            return False
        self._warn_again_at = now + max(self.after_s, min(wait_s, LONGEST_PAUSE_S))
        return True
