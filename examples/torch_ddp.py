"""Train a network to read handwritten digits, data parallel: scikit-learn's 1,797 images of 8 x 8 pixels.

    torchrun --nproc-per-node 2 examples/torch_ddp.py                    # or: mpirun -n 2 python examples/torch_ddp.py
    torchrun --nproc-per-node 2 examples/torch_ddp.py --backend gloo     # for comparison

The network has 25 million parameters with --width 3500.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch  # noqa: F401  registers the backend

HELD_OUT = 297  # images


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    """All images, one row each, from 0 to 1, and what they show; in an order that is the same on all ranks.

    Read from scikit-learn's file: all that it imports would take each rank longer than the training.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        sys.exit("the images are those of scikit-learn, which is not installed: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", np.float32, delimiter=",")
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    rows = torch.from_numpy(table)[order]
    return rows[:, :-1] / 16, rows[:, -1].long()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network to read handwritten digits, data parallel.")
    parser.add_argument("--backend", default="omnireduce")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="images of all ranks together")
    parser.add_argument("--width", type=int, default=256)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(network(arguments.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = digits()
    generator = torch.Generator().manual_seed(1)
    for step in range(arguments.steps + 1):
        if step == 1:  # the first one is slower
            dist.barrier()
            began = time.perf_counter()
        batch = torch.randint(0, len(labels) - HELD_OUT, (arguments.batch,), generator=generator)[rank::size]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    seconds = time.perf_counter() - began

    with torch.no_grad():
        accuracy = (model(images[-HELD_OUT:]).argmax(1) == labels[-HELD_OUT:]).float().mean()
    if rank == 0:
        steps_per_s = arguments.steps / seconds
        print(f"{arguments.backend}, {size} ranks: {steps_per_s:.2f} steps/s; {accuracy:.1%} of digits read right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
