"""Faults in the exchange among the ranks of a host."""

from __future__ import annotations

from collections.abc import Sequence

from omnireduce.core.descriptor import decode_descriptor
from omnireduce.core.dtypes import Array
from omnireduce.errors import ProtocolError
from omnireduce.kernels.regions import EXTRA_WORDS
from omnireduce.protocol.collective.mismatches import BegunCall, check_different_calls


class HostError(Exception):
    """The shared memory of `rank` holds values that the exchange never writes."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class ShortageError(Exception):
    """This rank has no memory for `purpose`."""

    def __init__(self, purpose: str) -> None:
        super().__init__(f"no memory for {purpose}")


def encoded_at(ints: Array, at: int) -> bytes:
    """The encoded descriptor of a rank, at this place in memory. The length that the rank wrote is bounded."""
    size = max(0, min(int(ints[at]), EXTRA_WORDS * 8))
    padded: bytes = ints[at + 1 : at + 1 + EXTRA_WORDS].tobytes()
    return padded[:size]


def check_begun(
    number: int, encoded: Sequence[bytes], culprit: int, ranks: Sequence[int], names: Sequence[str]
) -> None:
    """Check that the ranks of a host have begun the same collective. `encoded` are their descriptors, `ranks` their
    ranks in the job, `number` is the number of the collective.

    Raises MismatchError when the descriptors differ, unless all ranks have refused their call. Raises HostError for a
    descriptor that cannot be read: it is the fault of rank `culprit`.
    """
    try:
        begun = [
            BegunCall(rank, name, number, decode_descriptor(descriptor))
            for rank, name, descriptor in zip(ranks, names, encoded, strict=True)
        ]
    except ProtocolError as error:
        raise HostError(culprit) from error
    calls = [call for call in begun if not call.descriptor.refused]
    first = next((call for call in begun if call.descriptor.refused), begun[0])
    for call in calls:
        if call.descriptor != first.descriptor:
            check_different_calls(first, call)
