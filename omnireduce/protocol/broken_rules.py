"""What ranks can do wrong on a shard."""

from __future__ import annotations

from omnireduce.descriptor import Descriptor, decode_descriptor, told_apart
from omnireduce.errors import ProtocolError


class BrokenRuleError(Exception):
    """`rank` broke the protocol."""

    def __init__(self, rank: int, error: ProtocolError) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error


class MismatchError(ProtocolError):
    """Two ranks submitted different collectives in the same place."""


def mismatch(first: tuple[int, int, Descriptor], other: tuple[int, int, bytes]) -> MismatchError:
    """What two ranks called, each as (rank, number of the collective, call). Raises ProtocolError when the second call
    cannot be read."""
    words = told_apart(first[2], decode_descriptor(other[2]))
    sides = sorted(zip((first[0], other[0]), (first[1], other[1]), words, strict=True))
    place = " as number {}" if first[1] != other[1] else ""
    said = "; ".join(f"rank {rank} called {what}{place.format(number)}" for rank, number, what in sides)
    return MismatchError(f"collective {first[1]}: {said}")
