"""A recommender in plain NumPy, on as many ranks as there are. docs/tutorial.md makes it step by step.

python examples/recommender.py
mpirun -n 2 python examples/recommender.py
"""

import numpy as np

import omnireduce as omni

USERS, ITEMS, WIDTH, BATCH, STEPS = 5_000, 50_000, 32, 2_000, 300
comm = omni.init()  # rank and size come from the launcher
rng = np.random.default_rng(0)  # the same numbers on all ranks
tastes, kinds = rng.standard_normal((USERS, 2)), rng.standard_normal((ITEMS, 2))  # unknown to the model
users = rng.standard_normal((USERS, WIDTH)).astype(np.float32) / 8
items = rng.standard_normal((ITEMS, WIDTH)).astype(np.float32) / 8


def ratings(step):
    """Users, items and ratings of a step; a few items are popular."""
    drawn = np.random.default_rng([1, step])
    user_rows, item_rows = drawn.integers(USERS, size=BATCH), (ITEMS * drawn.random(BATCH) ** 4).astype(int)
    return user_rows, item_rows, (tastes[user_rows] * kinds[item_rows]).sum(1).astype(np.float32)


def errors(user_rows, item_rows, score):
    """The difference between prediction and rating, for each rating."""
    return (users[user_rows] * items[item_rows]).sum(1) - score


class Adagrad:
    """Steps that get shorter for rows that have had many."""

    def __init__(self, table):
        self.table, self.squares = table, np.full(len(table), 1e-6, np.float32)

    def step(self, rows, gradient):
        self.squares[rows] += (gradient**2).mean(1)
        self.table[rows] -= 0.1 * gradient / np.sqrt(self.squares[rows])[:, None]


user_optimizer, item_optimizer = Adagrad(users), Adagrad(items)
for step in range(STEPS):
    user_rows, item_rows, score = (drawn[comm.rank :: comm.size] for drawn in ratings(step))  # this rank's part
    error = errors(user_rows, item_rows, score)[:, None]
    changes = [(user_rows, error * items[item_rows], USERS), (item_rows, error * users[user_rows], ITEMS)]
    for optimizer, (rows, sums) in zip((user_optimizer, item_optimizer), omni.allreduce_tables(changes), strict=True):
        optimizer.step(rows, sums)
if comm.rank == 0:
    held_out = ratings(STEPS)
    print(f"mean squared error {np.mean(errors(*held_out) ** 2):.3f}, without a model {np.mean(held_out[2] ** 2):.3f}")
    sent, tables = comm.statistics().sent_bytes / STEPS, users.nbytes + items.nbytes
    print(f"{comm.size} ranks; each sent {sent / 1e3:.0f} kB in a step, for tables of {tables / 1e3:.0f} kB")
omni.shutdown()
