"""The error for a rank that breaks the protocol."""

from __future__ import annotations

from omnireduce.errors import ProtocolError


class BrokenRuleError(Exception):
    """`rank` broke the protocol."""

    def __init__(self, rank: int, error: ProtocolError) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error
