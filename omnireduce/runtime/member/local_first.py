"""A block of code that one rank of each host runs before the other ranks of the host do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def local_first(is_first: bool, barrier: Callable[[], object]) -> Iterator[bool]:
    """Run a block first, or after the ranks that are first. Each rank calls `barrier` once.

    If the block of a first rank raises, the others are not let in. They hear that this rank has failed when it leaves
    its job, so the exception must not be caught before that.
    """
    if not is_first:
        barrier()
    yield is_first
    if is_first:
        barrier()
