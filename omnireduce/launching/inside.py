"""What mpirun, srun and torchrun start for `omnireduce run`: a process that says of its rank what scripts read, and
then becomes the user's command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from omnireduce.runtime.member.launcher import Launch, detect_launch


def variables(launch: Launch, environ: Mapping[str, str]) -> dict[str, str]:
    """HOROVOD_RANK and its like. Of the ranks of several hosts only Slurm and torchrun say on which one this is."""
    found = {"RANK": launch.rank, "SIZE": launch.size}
    if launch.local_rank is not None and launch.local_size is not None:
        found |= {"LOCAL_RANK": launch.local_rank, "LOCAL_SIZE": launch.local_size}
        if launch.local_size == launch.size:
            found |= {"CROSS_RANK": 0, "CROSS_SIZE": 1}
    for rank, size in (("SLURM_NODEID", "SLURM_STEP_NUM_NODES"), ("GROUP_RANK", "GROUP_WORLD_SIZE")):
        if "CROSS_RANK" not in found and rank in environ and size in environ:
            found |= {"CROSS_RANK": int(environ[rank]), "CROSS_SIZE": int(environ[size])}
    return {f"HOROVOD_{name}": str(number) for name, number in found.items()}


def main() -> None:
    """Become the command in the arguments."""
    words = sys.argv[1:]
    environ = os.environ | variables(detect_launch(), os.environ)
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        sys.stderr.write(f"Error: {words[0]}: {error.strerror}\n")
        sys.exit(2)
