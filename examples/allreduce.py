"""Sum a sparse gradient over all workers: the smallest program there is.

Start two workers, on one host:

    mpirun -n 2 python examples/allreduce.py
"""

from __future__ import annotations

import numpy as np

import omnireduce as omni


def main() -> None:
    comm = omni.init()  # rank and size from mpirun, aggregators from the configuration, or rank 0's own
    rng = np.random.default_rng(comm.rank)

    gradient = np.zeros((4096, 1024), np.float32)  # 16 MiB, of which each rank has 40 rows
    rows = rng.choice(len(gradient), size=40, replace=False)
    gradient[rows] = comm.rank + 1

    omni.allreduce(gradient, name="gradient")  # in place; only non-zero blocks travel

    statistics = comm.statistics()
    print(
        f"rank {comm.rank} of {comm.size} by {'+'.join(statistics.carried)}: sum {gradient.sum():.0f}, "
        f"sent {statistics.sent_bytes / 1e3:.0f} kB and received {statistics.received_bytes / 1e3:.0f} kB "
        f"instead of {gradient.nbytes / 1e3:.0f} kB each",
        flush=True,
    )
    omni.shutdown()


if __name__ == "__main__":
    main()
