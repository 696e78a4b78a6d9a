"""Sum eight tensors at the same time with SwitchML's context and jobs, and check what comes out.

python examples/switchml_hello.py               # alone
mpirun -n 2 python examples/switchml_hello.py   # or more ranks
"""

from __future__ import annotations

import sys

import numpy as np

from omnireduce.switchml import Context

TENSORS, ELEMENTS = 8, 32768


def main() -> None:
    with Context.instance() as context:
        rank, size = context.communicator.rank, context.communicator.size
        tensors = [np.full(ELEMENTS, (rank + 1) * (number + 1), np.float32) for number in range(TENSORS)]
        originals = [tensor.copy() for tensor in tensors]
        sums = [np.empty_like(tensor) for tensor in tensors]

        print(f"rank {rank} of {size}: submitting {TENSORS} tensors of {ELEMENTS} floats", flush=True)
        jobs = [context.allreduce_async(tensor, out) for tensor, out in zip(tensors, sums, strict=True)]
        for job in jobs:
            job.wait()
        print(f"rank {rank}: {context.stats.jobs_finished} jobs finished, the last is {jobs[-1]}", flush=True)

    total = size * (size + 1) / 2  # of the ranks, counted from 1
    if not all(np.array_equal(tensor, original) for tensor, original in zip(tensors, originals, strict=True)):
        sys.exit("the input has changed")
    if not all(np.all(out == total * (number + 1)) for number, out in enumerate(sums)):
        sys.exit("a sum is wrong")
    print("Data verified successfully exiting main program", flush=True)


if __name__ == "__main__":
    main()
