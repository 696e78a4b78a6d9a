"""Sum the gradient of an embedding: each worker has a few rows of a matrix too tall to look at.

Start two workers, on one host:

    mpirun -n 2 python examples/embedding_rows.py
"""

from __future__ import annotations

import numpy as np

import omnireduce as omni

WORDS, DIM, BATCH = 10_000_000, 64, 512


def main() -> None:
    with omni.connect() as comm:  # a communicator of its own instead of the global one
        rng = np.random.default_rng(comm.rank)
        words = rng.zipf(1.3, BATCH) % WORDS  # frequent words come more than once
        gradients = rng.standard_normal((BATCH, DIM)).astype(np.float32)

        rows, sums = comm.allreduce_rows(words, gradients, WORDS, name="embedding")

        shared = comm.allreduce(np.array([len(np.unique(words))]), name="count")[0] - len(rows)
        print(
            f"rank {comm.rank} of {comm.size}: {BATCH} gradients of {len(np.unique(words))} words in, "
            f"{len(rows)} rows out, {shared} of them shared; norm {np.linalg.norm(sums):.4f}; "
            f"moved {(comm.statistics().sent_bytes + comm.statistics().received_bytes) / 1e3:.0f} kB "
            f"for a matrix of {WORDS * DIM * 4 / 1e9:.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
