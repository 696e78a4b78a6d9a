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
    tastes, chance = np.random.default_rng(0), np.random.default_rng([1, seed])
    of_users, of_items = (tastes.standard_normal((rows, width)).astype(np.float32) for rows in (users, items))
    who, what = chance.integers(0, users, samples), chance.integers(0, items, samples)
    return who, what, (of_users[who] * of_items[what]).sum(1)


def gradients(tables: Tables, who: np.ndarray, what: np.ndarray, given: np.ndarray) -> tuple[float, dict[str, tuple]]:
    """The mean squared error, and what it changes with: for each table the numbers of rows, and rows."""
    of_users, of_items = tables["users"][who], tables["items"][what]
    error = (of_users * of_items).sum(1) - given
    scale = (2 * error / len(who))[:, None]
    return float(np.mean(error**2)), {"users": (who, scale * of_items), "items": (what, scale * of_users)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn from stars, with weights that the aggregators update.")
    parser.add_argument("--users", type=int, default=20_000)
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=1024, help="samples of each rank and step")
    asked = parser.parse_args()

    comm = omni.init()  # rank and size come from mpirun
    who, what, given = stars(asked.users, asked.items, 2, asked.steps * asked.batch, comm.rank)
    own = np.random.default_rng(comm.rank)
    tables = {
        name: own.standard_normal((rows, asked.width)).astype(np.float32)
        for name, rows in (("users", asked.users), ("items", asked.items))
    }
    with omni.ShardedOptimizer(tables, RowAdagrad(lr=0.3), tables=list(tables)) as optimizer:
        optimizer.restore()  # all ranks begin with the rows of rank 0
        losses = []
        for step in range(asked.steps):
            batch = slice(step * asked.batch, (step + 1) * asked.batch)
            loss, grads = gradients(tables, who[batch], what[batch], given[batch])
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
