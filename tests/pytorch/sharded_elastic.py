"""A training whose optimizer keeps its state on the shards, and which outlives its ranks. Arguments: ranks, steps.

All gradients are 1, so weights and momentum follow from the number of steps, whatever ranks there were.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import omnireduce.torch as hvd
from omnireduce.optimizers import Sgd

RANKS, STEPS = map(int, sys.argv[1:3])


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    say(f"rank {hvd.rank()} of {hvd.size()} goes on at step {state.step}")
    while state.step < STEPS or hvd.size() < RANKS:
        state.optimizer.zero_grad()
        state.model.weight.sum().backward()
        state.optimizer.step()
        state.step += 1
        say(f"rank {hvd.rank()} of {hvd.size()}: step {state.step}")
        if state.step % 2 == 0:
            state.commit()
        else:
            state.check_host_updates()


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model = nn.Linear(1, 1000, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hvd.ShardedOptimizer(model.parameters(), Sgd(lr=0.5, momentum=0.5))
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    train(state)
    weight = momentum = 0.0
    for _ in range(state.step):
        momentum = momentum / 2 + 1
        weight -= momentum / 2
    kept = optimizer.state_dict()["state"][0]
    exact = torch.allclose(model.weight.detach(), torch.tensor(weight), rtol=1e-6, atol=0)
    exact = exact and torch.allclose(kept["momentum_buffer"], torch.tensor(momentum), rtol=1e-6, atol=0)
    say(f"rank {hvd.rank()} of {hvd.size()} is done after {state.step}; weights right: {exact}")
    optimizer.close()
    hvd.shutdown()


if __name__ == "__main__":
    main()
