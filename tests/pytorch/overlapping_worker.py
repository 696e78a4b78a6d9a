"""A rank that trains. Of each step the last gradient is computed only when the ranks have combined an earlier one.

Prints one line of JSON: of each step, when the backward pass began and when the last gradient was computed, in
nanoseconds of the monotonic clock.
"""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

import json
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch  # noqa: F401  registers the backend

STEPS, WAIT_S = 4, 60.0


def main() -> None:
    init, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("omnireduce", init_method=init, rank=rank, world_size=size)
    layers = [nn.Linear(300, 300) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.3)
    combined, began, computed = threading.Event(), [], []

    def allreduce(_: object, bucket: dist.GradBucket) -> Future[Tensor]:
        def note(future: Future[Tensor]) -> Tensor:
            combined.set()
            return future.value()[0] / size

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(note)

    def await_another(gradient: Tensor) -> None:
        if not combined.wait(WAIT_S):
            raise RuntimeError(f"nothing was combined within {WAIT_S:g} s of the backward pass")
        computed.append(time.monotonic_ns())

    model.register_comm_hook(None, allreduce)
    model(torch.ones(4, 300)).sum().backward()  # in one bucket; then torch knows the order of the gradients
    layers[0].weight.register_hook(await_another)
    for _ in range(STEPS):
        combined.clear()
        loss = model(torch.ones(4, 300)).sum()
        began.append(time.monotonic_ns())
        loss.backward()
    sys.stdout.write(json.dumps(list(zip(began, computed, strict=True))) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
