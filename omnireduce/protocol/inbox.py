"""Receive slots of one rank: messages that a shard's machine has not used up yet."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from omnireduce.wire.blocks import Header


@dataclass(slots=True)
class Inbox:
    """The messages of rank `name`, each with its arena row, in the order in which they came."""

    name: str
    messages: deque[tuple[int, Header]] = field(default_factory=deque)
    open_row: int = -1  # arena row of the message in use, -1 for none
    joined: bool = False  # has sent its first message of the current collective
