"""A rank that trains a small model with GRACE's names, as a user's script does. It reports as lines of JSON.

Arguments: rank, size, and where the ranks of torch meet.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch as hvd
from omnireduce.compression import grace_from_params

STEPS, SEEN, SAID = 40, 20, 4
PARAMS: dict[str, dict[str, Any]] = {
    "aggregator": {"compressor": "topk", "compress_ratio": 0.1, "memory": "residual"},
    "allgather": {"compressor": "topk", "compress_ratio": 0.1, "memory": "residual"},
    "alltoall": {"compressor": "qsgd"},
    "allreduce": {"compressor": "powersgd", "compress_rank": 2, "memory": "powersgd"},
    "broadcast": {"compressor": "efsignsgd", "memory": "efsignsgd", "lr": 0.1},
}


def model() -> nn.Module:
    torch.manual_seed(hvd.rank())  # the root's parameters count
    return nn.Sequential(nn.Linear(SEEN, 32), nn.Tanh(), nn.Linear(32, SAID))


def loss_of(net: nn.Module, step: int) -> Tensor:
    """Squared distance of the net from a linear map that it should learn, on other numbers at each step and rank."""
    x = torch.randn(32, SEEN, generator=torch.Generator().manual_seed(100 * step + hvd.rank()))
    line = torch.linspace(-1, 1, SEEN * SAID).view(SEEN, SAID)
    return (net(x) - x @ line).square().mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """The losses before and after, each of several steps."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [sum(losses[:5]) / 5, sum(losses[-5:]) / 5]


def by_optimizer(params: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    net = model()
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    grc = grace_from_params(params) if params else None
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, train(net, hvd.DistributedOptimizer(plain, named_parameters=net.named_parameters(), grace=grc))


def by_hook(params: dict[str, Any]) -> tuple[nn.Module, list[float]]:
    net = DistributedDataParallel(model())
    grc = grace_from_params(params)
    net.register_comm_hook(grc.state, grc.hook)
    return net, train(net, torch.optim.SGD(net.parameters(), lr=0.1))


def say(**event: Any) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def report(way: str, make: Callable[[dict[str, Any]], tuple[nn.Module, list[float]]], params: dict[str, Any]) -> None:
    net, losses = make(params)
    digest = hashlib.sha256(b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters()))
    say(way=way, losses=losses, digest=digest.hexdigest())


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    hvd.init(job=sys.argv[4], rank=rank, size=size)
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=size)
    report("plain", by_optimizer, {})
    for communicator, params in PARAMS.items():
        for way in (by_optimizer, by_hook):
            report(f"{way.__name__} {communicator}", way, {**params, "communicator": communicator, "world_size": size})
    mean = hvd.allreduce(torch.full((3,), float(rank)))
    say(way="mean", losses=mean.tolist(), digest=str(hvd.allreduce(torch.ones(2, dtype=torch.int64), average=False)))
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main()
