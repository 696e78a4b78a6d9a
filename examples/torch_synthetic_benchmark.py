"""Images per second that all ranks train, on random images: omnireduce run -np 2 python torch_synthetic_benchmark.py

It prints the lines that Horovod's benchmark of this name prints.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import nn

import omnireduce.torch as hvd


def say(text: str) -> None:
    if hvd.rank() == 0:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def network(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 32, 64):
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description="How many images a second all ranks train, on random images.")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--num-classes", type=int, default=1000)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    arguments = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    model = network(arguments.num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if arguments.use_adasum else hvd.size()))
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if arguments.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if arguments.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(arguments.batch_size, 3, arguments.image_size, arguments.image_size)
    labels = torch.randint(arguments.num_classes, (arguments.batch_size,))

    def train(batches: int) -> float:
        begin = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return time.perf_counter() - begin

    say(f"Batch size: {arguments.batch_size}")
    say(f"Number of CPUs: {hvd.size()}")
    say("Running warmup...")
    train(arguments.num_warmup_batches)
    say("Running benchmark...")
    rates = []
    for iteration in range(arguments.num_iters):
        rate = arguments.batch_size * arguments.num_batches_per_iter / train(arguments.num_batches_per_iter)
        say(f"Iter #{iteration}: {rate:.1f} img/sec per CPU")
        rates.append(rate)
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    say(f"Img/sec per CPU: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} CPU(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
