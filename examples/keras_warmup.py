"""A large batch needs a learning rate that grows: scikit-learn's 1,797 images of digits, on as many ranks as there are.

    export KERAS_BACKEND=torch                                        # or jax
    mpirun -n 8 python examples/keras_warmup.py --warmup_epochs 0     # ends near chance: one of ten digits is right
    mpirun -n 8 python examples/keras_warmup.py --warmup_epochs 3     # learns

The rate of each rank is --lr, and that of all together is so many times as much. A network that begins with that rate
takes steps which its weights do not survive. After the ALCF tutorial on Horovod, whose steps are numbered here.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import keras
import numpy as np

import omnireduce.keras as hvd

HELD_OUT = 297  # images


def network() -> keras.Model:
    hidden = [keras.layers.Dense(128, "relu") for _ in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images, one row each, from 0 to 1, and what they show; in an order that is the same on all ranks.

    Read from scikit-learn's file: all that it imports would take each rank longer than the training.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        sys.exit("the images are those of scikit-learn, which is not installed: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", np.float32, delimiter=",")
    rows = np.random.default_rng(0).permutation(table)
    return rows[:, :-1] / 16, rows[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description="A large batch needs a learning rate that grows.")
    parser.add_argument("--warmup_epochs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=32, help="images of each rank")
    parser.add_argument("--lr", type=float, default=0.02, help="of each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="", help="file for the best model, such as best.keras")
    arguments = parser.parse_args()

    hvd.init()  # 1. Who is there? (2. was to choose a GPU, by hvd.local_rank().)
    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(arguments.seed + rank)
    images, labels = digits()
    steps = (len(images) - HELD_OUT) // size // arguments.batch  # 8. fewer steps in an epoch
    rank_images = steps * arguments.batch
    rank_slice = slice(rank * rank_images, (rank + 1) * rank_images)  # 7. other images on each rank

    model = network()
    rate = arguments.lr * size  # 3. a higher rate
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate))  # 4. the gradients of all ranks
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # 5. all begin with the same weights
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=arguments.warmup_epochs, verbose=rank == 0),
    ]
    if arguments.checkpoint:  # 6. one rank saves: this callback does so on rank 0 alone
        callbacks.append(hvd.callbacks.BestModelCheckpoint(filepath=arguments.checkpoint, monitor="loss"))
    began = time.perf_counter()
    model.fit(
        images[rank_slice],
        labels[rank_slice],
        arguments.batch,
        arguments.epochs,
        verbose=2 if rank == 0 else 0,
        callbacks=callbacks,
    )
    seconds = time.perf_counter() - began

    if rank == 0:
        _, accuracy = model.evaluate(images[-HELD_OUT:], labels[-HELD_OUT:], verbose=0)
        print(f"{accuracy:.1%} of digits read right")
        print(f"Hvd Procs {size} Total time: {seconds} second")
    hvd.shutdown()


if __name__ == "__main__":
    main()
