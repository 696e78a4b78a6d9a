"""A rank makes its kernels ready before it joins, so that no collective waits for them."""

from __future__ import annotations

from omnireduce.config import Config
from omnireduce.kernels.warm import COMPILING, Progress, take_trouble, warm_up_worker
from omnireduce.logs import BoundLog, tagged
from omnireduce.progress import Seldom


def progress_of(rank: int, log: BoundLog) -> Progress:
    """What says how many kernels are compiled, on rank 0. It is a warning: a program that sets up no logs shows nothing
    less severe."""

    def say(ready: int, total: int) -> None:
        if rank == 0:
            log.warning(COMPILING, ready, total, extra=tagged("compiling", kernels=ready, total=total))

    return Seldom(say)


def make_kernels_ready(config: Config, progress: Progress, log: BoundLog, *, is_first: bool) -> None:
    """Compile, or load, what this rank needs. The rank that is first on its host says once what was wrong with the
    files of kernels."""
    warm_up_worker(progress, in_memory=config.transport.host_exchange != "off")
    if (trouble := take_trouble()) and is_first:
        log.warning("%s", trouble, extra=tagged("kernels_not_kept"))
