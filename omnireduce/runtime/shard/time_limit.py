"""Connections with a time limit."""

from __future__ import annotations

from collections.abc import Iterator

from omnireduce.runtime.shard.connection import Connection


class TimeLimit:
    """Connections, each of which may stay for `limit_s`. The oldest stands first, so no method has to look at all."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._since

    def add(self, connection: Connection, now: float) -> None:
        """The connection's time begins now."""
        assert connection not in self._since
        self._since[connection] = now

    def discard(self, connection: Connection) -> None:
        """The connection is gone, or may stay."""
        self._since.pop(connection, None)

    @property
    def oldest(self) -> Connection:
        """The connection that has been here for longest."""
        return next(iter(self._since))

    @property
    def deadline(self) -> float | None:
        """When the time of the oldest is over."""
        return self._since[self.oldest] + self.limit_s if self._since else None

    def over(self, now: float) -> Iterator[Connection]:
        """Take out those whose time is over."""
        while self._since and now >= self._since[self.oldest] + self.limit_s:
            connection = self.oldest
            self.discard(connection)
            yield connection
