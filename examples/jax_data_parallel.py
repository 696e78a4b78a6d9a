"""Train a network that is written in JAX, on as many ranks as there are.

    mpirun -n 3 python examples/jax_data_parallel.py

Each rank has the whole network and a part of the samples. The compiled step averages loss and gradients of all ranks,
each of which counts by its samples: so any batch size gives what one process gets.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import omnireduce.jax as ddp

Parameters = dict[str, jax.Array]


def loss_of(params: Parameters, x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - y) ** 2)


@ddp.jit
def step(params: Parameters, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Parameters]:
    loss, gradients = ddp.value_and_grad(loss_of, weights=len(x))(params, x, y)
    return loss, jax.tree_util.tree_map(lambda p, g: p - 0.2 * g, params, gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a network that is written in JAX, data parallel.")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=100, help="samples of all ranks together")
    arguments = parser.parse_args()

    rank, size = ddp.init()  # from mpirun, torchrun or Slurm; without them one process trains alone
    x = np.random.default_rng(0).uniform(-1, 1, (arguments.samples, 2)).astype(np.float32)
    loader, _ = ddp.partition_dataset((x, np.sin(3 * x[:, :1]) * x[:, 1:]), arguments.batch)
    first, second = jax.random.split(jax.random.key(rank))  # other numbers on each rank, until rank 0 sends its own
    params = ddp.broadcast(
        {
            "w1": jax.random.normal(first, (2, 32)), "b1": jnp.zeros(32),
            "w2": jax.random.normal(second, (32, 1)) / 6, "b2": jnp.zeros(1),
        }
    )  # fmt: skip
    for epoch in range(arguments.epochs):
        losses = []
        for batch in loader:
            loss, params = step(params, *batch)
            losses.append(float(loss))
        if rank == 0 and epoch in (0, arguments.epochs - 1):
            print(f"{size} rank{'s' * (size > 1)}, epoch {epoch + 1}: mean squared error {np.mean(losses):.4f}")
    ddp.shutdown()


if __name__ == "__main__":
    main()
