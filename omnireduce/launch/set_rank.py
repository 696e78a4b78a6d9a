"""The process that mpirun, srun and torchrun start for `omnireduce run`. It sets the variables of its rank that scripts
read, and then becomes the user's command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from omnireduce.errors import UsageError
from omnireduce.runtime.rank.launcher_detection import Launch, number_in, own_launch


def variables(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """HOROVOD_RANK and similar variables. With several hosts, only Slurm and torchrun give the number of this host."""
    numbers: dict[str, int | str] = {"RANK": launch.rank, "SIZE": launch.size}
    if launch.local_rank is not None and launch.local_size is not None:
        numbers |= {"LOCAL_RANK": launch.local_rank, "LOCAL_SIZE": launch.local_size}
        if launch.local_size == launch.size:
            numbers |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    for names in (("SLURM_NODEID", "SLURM_STEP_NUM_NODES"), ("GROUP_RANK", "GROUP_WORLD_SIZE")):
        if "CROSS_RANK" not in numbers and all(name in environ for name in names):
            numbers |= zip(("CROSS_RANK", "CROSS_SIZE"), (number_in(name, environ) for name in names), strict=True)
    return {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}


def main() -> None:
    """Become the command in the arguments."""
    words = sys.argv[1:]
    try:
        environ = os.environ | variables(own_launch(), os.environ)
    except UsageError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        sys.stderr.write(f"Error: {words[0]}: {error.strerror}\n")
        sys.exit(2)
