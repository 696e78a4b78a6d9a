"""The time to submit an all-reduce, and the time to wait for it: the third exercise of SwitchML's tutorial.

python examples/switchml_job.py                        # alone
mpirun -n 2 python examples/switchml_job.py 1000000    # two ranks; how many elements
"""

from __future__ import annotations

import sys
import time

import numpy as np

from omnireduce.switchml import Context


def main() -> None:
    elements = int(sys.argv[1]) if len(sys.argv) > 1 else 1 << 24  # 64 MiB of float32
    tensor = np.ones(elements, np.float32)
    context = Context.instance().start()
    size, is_first = context.communicator.size, context.communicator.rank == 0

    def report(action: str, begin: int) -> int:
        now = time.perf_counter_ns()
        if is_first:
            print(f"{action} took {now - begin} ns", flush=True)
        return time.perf_counter_ns()

    begin = time.perf_counter_ns()
    context.allreduce(tensor)
    begin = report("the synchronous all-reduce", begin)
    job = context.allreduce_async(tensor)
    begin = report("submitting the asynchronous one", begin)
    job.wait()
    report("waiting for it", begin)
    context.stop()

    assert tensor[0] == tensor[-1] == size**2
    if is_first:
        print(f"world size {size}, {job}, context {context.state.value}", flush=True)


if __name__ == "__main__":
    main()
