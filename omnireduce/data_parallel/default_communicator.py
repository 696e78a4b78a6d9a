"""The job of a training, whatever its framework."""

from __future__ import annotations

from typing import Any

from omnireduce.runtime.rank import global_communicator
from omnireduce.runtime.rank.communicator import Communicator


def init(config: Any = None, **named: Any) -> tuple[int, int]:
    """Join the job: return the rank of this process, and how many ranks there are.

    Both come from mpirun, torchrun, Slurm or `omnireduce run`; without a launcher this is rank 0 of 1. `config` and
    `named` are the arguments of `omnireduce.init`, whose global communicator is used. Raises what that raises, among
    that UsageError where there is a job already.
    """
    joined = global_communicator.init(config, **named)
    return joined.rank, joined.size


def communicator(comm: Communicator | None = None) -> Communicator:
    """The program's own, or that of the job. Raises UsageError before `init`, and after `shutdown`."""
    return global_communicator.running() if comm is None else comm
