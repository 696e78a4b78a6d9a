"""A process of a job, as the launcher sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from omnireduce.launching.connection import Connection


@dataclass
class Rank:
    """A process of the job, and where it runs."""

    number: int
    connection: Connection
    status: int | None = None
    pid: int = 0
    was_asked: bool = False  # to end, by its supervisor
    why: str = ""  # it ended, as the system says
    result: bytearray = field(default_factory=bytearray)


def how_it_ended(rank: Rank, status: int) -> str:
    """The end of a rank that has failed, in words."""
    how = f"ended with status {status}" if status > 0 else f"was ended by signal {-status}"
    if rank.was_asked:  # this program has not
        how += ", after its host had told it to end"
    return f"{how}: {rank.why}" if rank.why else how
