"""A rank whose training ends with an error. It trains until then, says its steps, and prints the error.

`dies`: the rank and the step at which it kills itself, in the middle of the backward pass.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch  # noqa: F401  registers the backend


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--init")
    parser.add_argument("--rank", type=int, default=-1)
    parser.add_argument("--size", type=int, default=-1)
    parser.add_argument("--dies", type=int, nargs=2, default=(-1, -1))
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "omnireduce", init_method=options.init, rank=options.rank, world_size=options.size, timeout=limit
    )
    layers = [nn.Linear(200, 200) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.2)
    step = 0

    def die(_: torch.Tensor) -> None:
        if (dist.get_rank(), step) == tuple(options.dies):
            os.kill(os.getpid(), signal.SIGKILL)

    layers[1].weight.register_hook(die)  # when some buckets are under way
    try:
        while True:
            model(torch.ones(4, 200)).sum().backward()
            if step == 0:
                say("trains")
            step += 1
    except RuntimeError as error:
        say(f"RuntimeError: {error}")


if __name__ == "__main__":
    main()
