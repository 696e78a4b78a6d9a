"""Train a network that is written in plain NumPy, on as many ranks as there are.

    mpirun -n 3 python examples/numpy_data_parallel.py

Each rank has the whole network and a part of the samples. In each step the gradients of all ranks are averaged.
"""

from __future__ import annotations

import argparse

import numpy as np

from omnireduce import data_parallel as ddp

Parameters = dict[str, np.ndarray]


class Momentum:
    """Gradient descent with momentum, whose step takes the gradients."""

    def __init__(self, params: Parameters, rate: float, momentum: float = 0.9) -> None:
        self.params, self.rate, self.momentum = params, rate, momentum
        self.velocity = {name: np.zeros_like(param) for name, param in params.items()}

    def step(self, gradients: Parameters) -> None:
        for name, gradient in gradients.items():
            self.velocity[name] = self.momentum * self.velocity[name] - self.rate * gradient
            self.params[name] += self.velocity[name]


def loss_and_gradients(params: Parameters, x: np.ndarray, y: np.ndarray) -> tuple[float, Parameters]:
    """The mean squared error of a network with one hidden layer, and what it changes with."""
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    error = hidden @ params["w2"] + params["b2"] - y
    output_gradient = 2 * error / len(x)
    hidden_gradient = output_gradient @ params["w2"].T * (1 - hidden**2)
    gradients = {
        "w1": x.T @ hidden_gradient, "b1": hidden_gradient.sum(0),
        "w2": hidden.T @ output_gradient, "b2": output_gradient.sum(0),
    }  # fmt: skip
    return float(np.mean(error**2)), gradients


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network that is written in plain NumPy, data parallel.")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=100, help="samples of all ranks together")
    arguments = parser.parse_args()

    rank, size = ddp.init()  # from mpirun, torchrun or Slurm; without them one process trains alone
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (arguments.samples, 2)).astype(np.float32)
    y = np.sin(3 * x[:, :1]) * x[:, 1:]
    loader, _ = ddp.partition_dataset((x, y), arguments.batch)

    rank_rng = np.random.default_rng(rank)  # other numbers on each rank, until rank 0 sends its own
    params = {
        "w1": rank_rng.standard_normal((2, 32)).astype(np.float32), "b1": np.zeros(32, np.float32),
        "w2": rank_rng.standard_normal((32, 1)).astype(np.float32) / 6, "b2": np.zeros(1, np.float32),
    }  # fmt: skip
    opt = Momentum(params, 0.02)
    ddp.broadcast_parameters(params, optimizer=opt)
    opt = ddp.DistributedOptimizer(opt, loader=loader)
    for epoch in range(arguments.epochs):
        losses = []
        for inputs, targets in loader:
            loss, gradients = loss_and_gradients(params, inputs, targets)
            opt.step(gradients)
            losses.append(loss)
        if rank == 0 and epoch in (0, arguments.epochs - 1):
            print(
                f"{size} rank{'s' * (size > 1)}, epoch {epoch + 1}: mean squared error {np.mean(losses):.4f} on rank 0"
            )
    ddp.shutdown()


if __name__ == "__main__":
    main()
