"""How long no result has left a shard, and when it says so."""

from __future__ import annotations

from omnireduce.wire.control import ITSELF

BUSY, STOOD_STILL = f"{ITSELF}, which is busy", f"{ITSELF}, which stood still"  # for whom ranks wait, if for no rank
LONGEST_PAUSE_S = 60.0  # between two warnings of waits that ranks report


class Quiet:
    """No result has left a shard since `since`. It says whom it waits for after `after_s`, and again each time that the
    wait has doubled."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self.since = self._said_at = self._warn_again_at = 0.0

    @property
    def deadline(self) -> float:
        """When `say` must be called, if no result leaves before."""
        return self.since + max(self._after_s, 2 * (self._said_at - self.since))

    def say(self, now: float) -> float:
        """The shard says now whom it waits for.

        A shard that is late with that stood still itself, and that time is off the wait. Returns how long it was; 0 if
        the shard is in time.
        """
        late_s = now - self.deadline
        still_s = late_s if late_s >= self._after_s else 0.0
        self.since += still_s
        self._said_at = now
        return still_s

    def may_warn(self, wait_s: float, now: float) -> bool:
        """Whether to warn of a wait of `wait_s` that a rank reports: one warning is enough for all ranks that wait."""
        if now < self._warn_again_at:
            return False
        self._warn_again_at = now + max(self._after_s, min(wait_s, LONGEST_PAUSE_S))
        return True
