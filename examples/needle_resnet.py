"""Train a residual network of Needle on as many ranks as there are, with the data-parallel flow of its tutorial.

    PYTHONPATH=$NEEDLE/python mpirun -n 3 python examples/needle_resnet.py

NEEDLE: the folder of your checkout. But for `import omnireduce.needle` it is the program that one would write with
Needle's own module. The pictures are drawn: each class is a pattern with noise on it.
"""

from __future__ import annotations

import argparse

import needle as ndl
import numpy as np

import omnireduce.needle as ddp

CLASSES, PIXELS = 10, 64


def pictures(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of pixels, and what they show: the same on all ranks."""
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((CLASSES, PIXELS)).astype(np.float32)
    labels = rng.integers(0, CLASSES, samples)
    noise = rng.standard_normal((samples, PIXELS)).astype(np.float32)
    return patterns[labels] + noise, labels


def network(width: int, blocks: int, device: object) -> ndl.nn.Module:
    def layer(inputs: int, outputs: int) -> list[ndl.nn.Module]:
        return [ndl.nn.Linear(inputs, outputs, device=device), ndl.nn.BatchNorm1d(outputs, device=device)]

    residuals = [
        ndl.nn.Residual(ndl.nn.Sequential(*layer(width, width), ndl.nn.ReLU(), *layer(width, width)))
        for _ in range(blocks)
    ]
    return ndl.nn.Sequential(
        *layer(PIXELS, width), ndl.nn.ReLU(), *residuals, ndl.nn.ReLU(), ndl.nn.Linear(width, CLASSES, device=device)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a residual network of Needle, data parallel.")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="samples of all ranks together")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    arguments = parser.parse_args()

    rank, device = ddp.init()
    dataset = ndl.data.NDArrayDataset(*pictures(arguments.samples))
    loader, _ = ddp.partition_dataset(dataset, arguments.batch, device=device, dtype="float32")
    model = network(arguments.width, arguments.blocks, device)
    ddp.broadcast_parameters(model)
    model.train()
    opt = ndl.optim.Adam(model.parameters(), lr=0.001, weight_decay=0.001)
    opt = ddp.DistributedOptimizer(opt)
    loss_fn = ndl.nn.SoftmaxLoss()
    for epoch in range(arguments.epochs):
        correct, seen = 0, 0
        for X, y in loader:  # noqa: N806  as in the tutorial
            opt.reset_grad()
            out = model(X)
            correct += np.sum(np.argmax(out.numpy(), axis=1) == y.numpy())
            seen += y.shape[0]
            loss = loss_fn(out, y)
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch + 1}/{arguments.epochs}: {correct / seen:.1%} of {seen} pictures read right on rank 0")
    ddp.shutdown()


if __name__ == "__main__":
    main()
