"""A worker for tests: joins a job that has a timeline, does what a queue does again and again, and says each round.

Arguments: the configuration's `section.key=value`, then rank and size, and the job.
"""

from __future__ import annotations

import sys

from pictured import queued

import omnireduce as omni
from omnireduce.runtime.rank import profiler


def main() -> None:
    *overrides, rank, size, job = sys.argv[1:]
    profiler.REFRESH_S, profiler.SHARE = 0.002, 0  # rank 0 writes the file again and again
    with omni.connect(omni.load_config(overrides=overrides), job=job, rank=int(rank), size=int(size)) as comm:
        for step in range(1_000_000):
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()
            queued(comm, "w", step)


if __name__ == "__main__":
    main()
