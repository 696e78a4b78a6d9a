"""Learn what users like from the stars that they gave, with weights that the aggregators update.

    mpirun -n 2 python examples/sharded_optimizer.py

Each user and each item is a row of a table; the product of two rows guesses how many stars there are. A batch looks up
few rows. So the gradient is zero but for these, and only they travel: gradients to the aggregators, and new weights
back. What the rule keeps for each row is there, too, and no rank has any of it.
"""

from __future__ import annotations

import argparse

import numpy as np

import omnireduce as omni
from omnireduce.optimizers import RowAdagrad

Tables = dict[str, np.ndarray]


def stars(users: int, items: int, width: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items, and what these users gave these items: by tastes that are the same on all ranks."""
    taste_rng, rng = np.random.default_rng(0), np.random.default_rng([1, seed])
    user_tastes, item_tastes = (taste_rng.standard_normal((rows, width)).astype(np.float32) for rows in (users, items))
    user_rows, item_rows = rng.integers(0, users, samples), rng.integers(0, items, samples)
    return user_rows, item_rows, (user_tastes[user_rows] * item_tastes[item_rows]).sum(1)


def gradients(
    tables: Tables, user_rows: np.ndarray, item_rows: np.ndarray, star_counts: np.ndarray
) -> tuple[float, dict[str, tuple]]:
    """The mean squared error, and what it changes with: for each table the numbers of rows, and rows."""
    user_weights, item_weights = tables["users"][user_rows], tables["items"][item_rows]
    error = (user_weights * item_weights).sum(1) - star_counts
    scale = (2 * error / len(user_rows))[:, None]
    row_gradients = {"users": (user_rows, scale * item_weights), "items": (item_rows, scale * user_weights)}
    return float(np.mean(error**2)), row_gradients


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from stars, with weights that the aggregators update.")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1024, help="samples of each rank and step")
    arguments = parser.parse_args()

    comm = omni.init()  # rank and size come from mpirun
    samples = arguments.steps * arguments.batch
    user_rows, item_rows, star_counts = stars(arguments.users, arguments.items, 2, samples, comm.rank)
    rank_rng = np.random.default_rng(comm.rank)
    tables = {
        name: rank_rng.standard_normal((rows, arguments.width)).astype(np.float32)
        for name, rows in (("users", arguments.users), ("items", arguments.items))
    }
    with omni.ShardedOptimizer(tables, RowAdagrad(lr=0.3), tables=list(tables)) as optimizer:
        optimizer.restore()  # all ranks begin with the rows of rank 0
        losses = []
        for step in range(arguments.steps):
            batch = slice(step * arguments.batch, (step + 1) * arguments.batch)
            loss, grads = gradients(tables, user_rows[batch], item_rows[batch], star_counts[batch])
            optimizer.step(grads)
            losses.append(loss)
        if comm.rank == 0:
            rows = sum(len(np.unique(numbers)) for numbers, _ in grads.values())
            print(
                f"{comm.size} rank{'s' * (comm.size > 1)}: mean squared error {np.mean(losses[:10]):.3f} at first, "
                f"{np.mean(losses[-10:]):.3f} after {optimizer.steps} steps; a rank sent {rows} rows in the last one, "
                f"of {sum(map(len, tables.values()))}; a shard keeps {optimizer.state_bytes} bytes"
            )
    omni.shutdown()


if __name__ == "__main__":
    main()
