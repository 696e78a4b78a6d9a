"""What all ranks do, or none: a rank that fails alone would let the others wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from omnireduce.errors import UsageError
from omnireduce.runtime.member.communicator import Communicator

T = TypeVar("T")


def together(comm: Communicator, name: str, attempt: Callable[[], T]) -> T:
    """Call `attempt` on each rank, and return what it gives here. Where it raises UsageError on one, all raise it."""
    found, wrong = list[T](), ""
    try:
        found.append(attempt())
    except UsageError as error:
        wrong = str(error)
    texts = comm.allgather_object(wrong, name=name)
    if wrong:
        raise UsageError(wrong)
    for rank, text in enumerate(texts):
        if text:
            raise UsageError(f"rank {rank}: {text}")
    return found[0]


def check_alike(comm: Communicator, name: str, what: Mapping[str, object]) -> None:
    """Raises UsageError on all ranks where one has said something else: the first difference, and both sides."""
    said = comm.allgather_object({key: str(value) for key, value in what.items()}, name=name)
    for rank, theirs in enumerate(said):
        for key, value in said[0].items():
            if theirs.get(key) != value:
                raise UsageError(f"ranks differ in {key}: rank 0 has {value}, rank {rank} has {theirs.get(key)}")
