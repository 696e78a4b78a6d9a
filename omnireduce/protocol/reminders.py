"""When to tell users, again and again, whom something waits for at its start. Pure."""

from __future__ import annotations

FIRST_S = 1.0  # how long to wait before saying so the first time


class Reminders:
    """Of a wait since `now`: due after 1, 2, 4, ... seconds."""

    def __init__(self, now: float) -> None:
        self._since, self.at = now, now + FIRST_S

    def due(self, now: float) -> float:
        """How many seconds the wait has lasted, if that is to be said now, which the caller does; else 0."""
        if now < self.at:
            return 0.0
        waited_s = now - self._since
        self.at = self._since + 2 * waited_s
        return waited_s
