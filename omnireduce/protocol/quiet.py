"""How long no result has left a shard, and when it says so."""

from __future__ import annotations

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

    def say(self, now: float) -> None:
        """The shard says now whom it waits for.

        A shard that is late with that stood still itself. For so long no other was late.
        """
        late_s = now - self.deadline
        if late_s >= self._after_s:
            self.since += late_s
        self._said_at = now

    def may_warn(self, wait_s: float, now: float) -> bool:
        """Whether to warn of a wait of `wait_s` that a rank reports: one warning is enough for all ranks that wait."""
        if now < self._warn_again_at:
            return False
        self._warn_again_at = now + max(self._after_s, min(wait_s, LONGEST_PAUSE_S))
        return True
