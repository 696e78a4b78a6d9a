"""What all ranks do and have alike, or get an error: a rank that fails alone would let the others wait for it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar

import msgspec
import numpy as np

from omnireduce.errors import UsageError
from omnireduce.runtime.member.communicator import Communicator
from omnireduce.runtime.member.refusals import reason_of, told

T = TypeVar("T")


def together(comm: Communicator, name: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` on each rank, and return what it gives here. Where it raises anything on one, the others raise
    UsageError."""
    found, wrong = list[T](), list[Exception]()
    try:
        found.append(attempt())
    except Exception as error:
        wrong.append(error)
    texts = comm.allgather_object(reason_of(wrong[0]) if wrong else "", name=name)
    if wrong:
        raise told(wrong[0])
    for rank, text in enumerate(texts):
        if text:
            raise told(UsageError(f"rank {rank}: {text}"))
    return found[0]


def check_alike(comm: Communicator, own: Sequence[tuple[str, str]], name: str) -> None:
    """All ranks call this with what it is, and what this rank has of it. Raises UsageError on all of them, with the
    first difference, unless all have the same. `name`: of the collective."""
    digest = hashlib.sha256(msgspec.json.encode(own)).digest()
    digests = comm.allgather(np.frombuffer(digest, np.uint8), name=name)
    if (digests == digests[0]).all():
        return
    first, *others = comm.allgather_object([list(each) for each in own], name=name)
    for rank, theirs in enumerate(others, 1):
        for mine, other in zip_longest(first, theirs):
            if mine != other:
                raise told(UsageError(_difference(mine, other, rank)))


def _difference(first: Sequence[str] | None, other: Sequence[str] | None, rank: int) -> str:
    what = (first or other or ("",))[0]
    if first and other and first[0] != other[0]:
        said = f"rank 0 has {' '.join(first)}, rank {rank} has {' '.join(other)} in its place"
    else:
        said = f"rank 0 has {first[1] if first else 'nothing'}, rank {rank} has {other[1] if other else 'nothing'}"
    return f"'{what}' differs between ranks: {said}; expected the same on all ranks"
