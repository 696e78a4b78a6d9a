"""The job of a training, whatever its framework, and what its ranks must have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np

from omnireduce.errors import UsageError
from omnireduce.runtime.member import world
from omnireduce.runtime.member.communicator import Communicator


def init(config: Any = None, **named: Any) -> tuple[int, int]:
    """Join the job: return the rank of this process, and how many ranks there are.

    Both come from mpirun, torchrun, Slurm or `omnireduce run`; without a launcher this is rank 0 of 1. `config` and
    `named` are the arguments of `omnireduce.init`, whose global communicator is used. Raises what that raises, among
    that UsageError where there is a job already.
    """
    joined = world.init(config, **named)
    return joined.rank, joined.size


def communicator(own: Communicator | None = None) -> Communicator:
    """The program's own, or that of the job. Raises UsageError before `init`, and after `shutdown`."""
    return world.running() if own is None else own


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
                raise UsageError(_difference(mine, other, rank))


def check_rank(comm: Communicator, rank: object, what: str) -> int:
    """A rank of the job, which an argument names. Raises UsageError unless there is one."""
    if not isinstance(rank, int | np.integer) or not 0 <= rank < comm.size:
        raise UsageError(f"{what} is {rank!r}: expected a rank of the job, 0 to {comm.size - 1}")
    return int(rank)


def _difference(first: Sequence[str] | None, other: Sequence[str] | None, rank: int) -> str:
    what = (first or other or ("",))[0]
    if first and other and first[0] != other[0]:
        said = f"rank 0 has {' '.join(first)}, rank {rank} has {' '.join(other)} in its place"
    else:
        said = f"rank 0 has {first[1] if first else 'nothing'}, rank {rank} has {other[1] if other else 'nothing'}"
    return f"'{what}' differs between ranks: {said}; expected the same on all ranks"
