"""Check of what ranks ask of gloo, before gloo begins. Gloo takes any message for the one that it waits for: then
tensors have wrong values, and a message that is longer than expected ends the process.

Each rank states its call in a few bytes. One all-gather of the service gives all ranks all statements. If they differ,
every rank raises the same error, nothing has begun, and the next call is sound. A rank that refuses its own call states
why.

In an all-to-all, each rank must send what the receiver expects. Each rank adds a number for each message that it sends,
and subtracts one for each that it expects. The sum over all ranks is 0, modulo 2**64. If sizes differ, it is 0 only by
a chance of one in 2**64.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.errors import UsageError

DIGEST_BYTES, BALANCE_BYTES, TEXT_BYTES = 16, 8, 232
STATEMENT_BYTES = DIGEST_BYTES + BALANCE_BYTES + TEXT_BYTES
MOST_SHOWN = 4  # statements in an error
_ODD = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # of SplitMix64


class Sizes(NamedTuple):
    """Bytes that this rank sends to each rank in an all-to-all, and bytes that it expects from each."""

    sent: Sequence[int]
    expected: Sequence[int]


def statement(words: str, rank: int, sizes: Sizes | None = None) -> Array:
    """The statement of rank `rank`, uint8 (STATEMENT_BYTES,). `words` must be the same on all ranks; `sizes` must fit
    those of the others."""
    text = words if sizes is None else f"{words}, bytes to each rank {sizes.sent}, from each {sizes.expected}"
    own = blake2b(words.encode(), digest_size=DIGEST_BYTES).digest()
    balance = 0 if sizes is None else _balance(rank, sizes)
    shown = text.encode("ascii", "backslashreplace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return np.frombuffer(own + balance.to_bytes(BALANCE_BYTES, "little") + shown, np.uint8)


def check_agreement(statements: Array) -> None:
    """Raises UsageError if the statements of all ranks, uint8 (size, STATEMENT_BYTES), contradict each other."""
    first = statements[0].tobytes()
    if statements.tobytes() == len(statements) * first and not any(first[DIGEST_BYTES : DIGEST_BYTES + BALANCE_BYTES]):
        return  # nearly always
    digests = statements[:, :DIGEST_BYTES]
    balances = statements[:, DIGEST_BYTES : DIGEST_BYTES + BALANCE_BYTES].copy().view("<u8")
    differ = (digests != digests[0]).any()
    if not differ and not balances.sum(dtype=np.uint64):
        return
    texts = [bytes(row).rstrip(b"\0").decode("ascii") for row in statements[:, DIGEST_BYTES + BALANCE_BYTES :]]
    first_ranks: dict[str, int] = {}
    for rank, text in enumerate(texts):
        first_ranks.setdefault(text, rank)
    said = "; ".join(f"rank {rank}: {text}" for text, rank in list(first_ranks.items())[:MOST_SHOWN])
    what = "ranks call different collectives" if differ else "ranks send what others do not expect"
    raise UsageError(f"{what}: {said}{'; ...' if len(first_ranks) > MOST_SHOWN else ''}")


def _balance(rank: int, sizes: Sizes) -> int:
    ranks, own = np.arange(len(sizes.sent), dtype=np.uint64), np.full(len(sizes.sent), rank, np.uint64)
    sent, expected = (np.array(byte_counts, np.uint64) for byte_counts in sizes)
    return (_sum_of_mixed(own, ranks, sent) - _sum_of_mixed(ranks, own, expected)) % (1 << 64)


def _sum_of_mixed(sender: Array, receiver: Array, size: Array) -> int:
    """The sum, modulo 2**64, of a hash of each sender, receiver and size."""
    hashes = np.zeros_like(size)
    for part in (sender, receiver, size):
        hashes = (hashes ^ part) + _ODD[0]
        hashes = (hashes ^ (hashes >> np.uint64(30))) * _ODD[1]
        hashes = (hashes ^ (hashes >> np.uint64(27))) * _ODD[2]
        hashes = hashes ^ (hashes >> np.uint64(31))
    return int(hashes.sum(dtype=np.uint64))
