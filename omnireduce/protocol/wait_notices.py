"""Reminders of a long wait at the start of a job: when to tell users again. Pure."""

from __future__ import annotations

FIRST_S = 1.0  # the wait before the first reminder


class WaitNotices:
    """Reminders of a wait that began at `now`: due after 1, 2, 4, ... seconds."""

    def __init__(self, now: float) -> None:
        self._since, self.at = now, now + FIRST_S

    def due(self, now: float) -> float:
        """The seconds that the wait has lasted, if the caller is to say so now; else 0."""
        if now < self.at:
            return 0.0
        waited_s = now - self._since
        self.at = self._since + 2 * waited_s
        return waited_s
