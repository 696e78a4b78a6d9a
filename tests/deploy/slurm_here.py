"""Stands in for `srun` and `scontrol` on one host: starts the tasks of a step with the variables that Slurm sets.

Like srun it hands SIGTERM on to its tasks and ends with their worst status.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path


def next_step() -> int:
    """Steps of an allocation are numbered."""
    with Path(os.environ["STEPS"]).open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = len(file.read())
        file.write(".")
    return number


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--export", choices=["ALL"], required=True)  # a batch of --export=NONE would hand on nothing
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--ntasks", type=int, default=int(os.environ["SLURM_NTASKS"]))
    parser.add_argument("--ntasks-per-node", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    step = {"SLURM_STEP_ID": str(next_step()), "SLURM_STEP_NUM_TASKS": str(options.ntasks)}
    tasks = []
    for rank in range(options.ntasks):
        number = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
        tasks.append(subprocess.Popen(options.command, env=os.environ | step | number))
    signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks] and None)
    return max(abs(task.wait()) for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
