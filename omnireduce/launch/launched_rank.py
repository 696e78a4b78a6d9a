"""A rank that a launch has started, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnireduce.launch.connection import Connection


@dataclass
class LaunchedRank:
    """The process of rank `number`, and the connection to the supervisor that started it."""

    number: int
    connection: Connection
    status: int | None = None
    pid: int = 0
    was_asked: bool = False  # its supervisor asked it to end
    why: str = ""  # the reason for its end that the system knows
    result: bytearray = field(default_factory=bytearray)


def how_it_ended(rank: LaunchedRank, status: int) -> str:
    """A text about the end of a rank that has failed."""
    text = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    if rank.was_asked:  # by its host, not by this program
        text += ", after its host had told it to end"
    return f"{text}: {rank.why}" if rank.why else text


def exit_status(status: int) -> int:
    """The exit status of a job whose rank has failed with `status`: for a signal 128 and its number, as shells do."""
    return status if status > 0 else 128 - status
