"""What can be wrong among the ranks of a host."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.descriptor import decode_descriptor, told_apart
from omnireduce.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.regions import EXTRA_WORDS


class DifferenceError(Exception):
    """The first rank and `rank` have begun different collectives."""

    def __init__(self, rank: int, difference: str) -> None:
        super().__init__(difference)
        self.rank = rank


class HostError(Exception):
    """The memory of `rank` is not as the exchange leaves it."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class ShortageError(Exception):
    """This rank has no memory for `what`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no memory for {what}")


def encoded_at(ints: Array, at: int) -> bytes:
    """The encoded descriptor that a rank has put there; its length is not believed."""
    size = max(0, min(int(ints[at]), EXTRA_WORDS * 8))
    found: bytes = ints[at + 1 : at + 1 + EXTRA_WORDS].tobytes()
    return found[:size]


def difference(number: int, encoded: Sequence[bytes], culprit: int, ranks: Sequence[int]) -> Exception:
    """What the first rank has begun as collective `number`, and another that has begun something else; `encoded` are
    the descriptors of all ranks of the host, which are `ranks` of the job. One that cannot be read is the fault of
    `culprit`."""
    other = next((rank for rank in range(1, len(encoded)) if encoded[rank] != encoded[0]), 0)
    try:
        words = told_apart(decode_descriptor(encoded[0]), decode_descriptor(encoded[other]))
    except ProtocolError:
        return HostError(culprit)
    said = "; ".join(f"rank {ranks[each]} called {what}" for each, what in zip((0, other), words, strict=True))
    return DifferenceError(other, f"collective {number}: {said}")
