"""Agreement of all ranks: either all go on, or all raise an error. A rank that fails alone would leave others
waiting."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec
import numpy as np

from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls import single
from omnireduce.runtime.rank.calls.single import Call, CallContext
from omnireduce.runtime.rank.handles import Handle
from omnireduce.runtime.rank.reported_errors import mark_reported, reason_of

T = TypeVar("T")
P = ParamSpec("P")
DIGEST_BYTES = 8


class Agreeing(Protocol):
    """The part of a communicator that an agreement needs."""

    def allgather_object(self, x: object, *, name: str = "") -> list[Any]: ...

    def _start(
        self, make: Callable[Concatenate[CallContext, P], Call[T]], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[T]: ...


def run_agreed(comm: Agreeing, name: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` on each rank, and return this rank's result. If it raises on one rank, the others raise
    UsageError."""
    return run_agreed_by(attempt, lambda _, reason: comm.allgather_object(reason, name=name))


def run_agreed_by(attempt: Callable[[], T], exchange: Callable[[T | None, str], Sequence[str]]) -> T:
    """As `run_agreed`, with a function in place of a communicator. `exchange` gets the result of this rank, or None and
    the reason of its error. It returns the reasons of all ranks, an empty text for each rank without an error."""
    results, errors = list[T](), list[Exception]()
    try:
        results.append(attempt())
    except Exception as error:
        errors.append(error)
    reasons = exchange(results[0] if results else None, reason_of(errors[0]) if errors else "")
    if errors:
        raise mark_reported(errors[0])
    for rank, reason in enumerate(reasons):
        if reason:
            raise mark_reported(UsageError(f"rank {rank}: {reason}"))
    return results[0]


class Comparison:
    """A comparison of values that should be the same on all ranks of `comm`. `local_values`: names, and this rank's
    values.

    It starts an exchange of a checksum of 8 bytes. The ranks may exchange other tensors before they call `settle`.
    `name`: the name of the collective.
    """

    def __init__(self, comm: Agreeing, local_values: Sequence[tuple[str, str]], name: str) -> None:
        self._comm, self._local_values, self._name = comm, local_values, name
        digest = hashlib.blake2b(msgspec.json.encode(local_values), digest_size=DIGEST_BYTES).digest()
        # `_start` needs no thread to drive the exchange meanwhile; `allgather_async` would start one
        self._handle = comm._start(single.all_parts, np.frombuffer(digest, np.uint8), name)

    def settle(self) -> None:
        """Raises UsageError on all ranks, with the first difference, unless all have the same values. Raises the errors
        of the exchange, too."""
        digests = self._handle.wait()
        if (digests == digests[0]).all():
            return
        first, *others = self._comm.allgather_object([list(pair) for pair in self._local_values], name=self._name)
        for rank, other_values in enumerate(others, 1):
            for first_value, other_value in zip_longest(first, other_values):
                if first_value != other_value:
                    raise mark_reported(UsageError(_difference_text(first_value, other_value, rank)))


def check_agreement(comm: Agreeing, local_values: Sequence[tuple[str, str]], name: str) -> None:
    """Raises UsageError on all ranks, with the first difference, unless all have the same values. All ranks call this.
    `local_values`: names, and this rank's values. `name`: the name of the collective."""
    Comparison(comm, local_values, name).settle()


def _difference_text(first: Sequence[str] | None, other: Sequence[str] | None, rank: int) -> str:
    name = (first or other or ("",))[0]
    if first and other and first[0] != other[0]:
        text = f"rank 0 has {' '.join(first)}, rank {rank} has {' '.join(other)} in its place"
    else:
        text = f"rank 0 has {first[1] if first else 'nothing'}, rank {rank} has {other[1] if other else 'nothing'}"
    return f"'{name}' differs between ranks: {text}; expected the same on all ranks"
