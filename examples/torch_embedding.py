"""Train a language model with a big embedding, data parallel: it guesses the next word from the two before it.

The text is the source of Python's standard library. Each pair of words has a row of its own in the embedding, as far as
its rows go, so more than 99 % of the gradient is zero.

    torchrun --nproc-per-node 2 examples/torch_embedding.py              # or: mpirun -n 2 python ...
    torchrun --nproc-per-node 2 examples/torch_embedding.py --dense      # gradients as dense tensors
    torchrun --nproc-per-node 2 examples/torch_embedding.py --backend gloo
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import omnireduce.torch  # noqa: F401  registers the backend
from omnireduce.worker.train.corpus import load_corpus, source_files

WORDS, NEGATIVES, PRIME = 5000, 8, 1_000_003


class NextWord(nn.Module):
    """Scores words by the embedding of the pair of words before them."""

    def __init__(self, rows: int, width: int, *, sparse: bool) -> None:
        super().__init__()
        self.pairs = nn.Embedding(rows, width, sparse=sparse)
        self.words = nn.Embedding(WORDS, width, sparse=sparse)

    def forward(self, pairs: Tensor, words: Tensor) -> Tensor:
        """Scores, (batch, n), of the `words`, (batch, n), after the pairs whose rows are `pairs`, (batch,)."""
        return (self.words(words) @ self.pairs(pairs).unsqueeze(2)).squeeze(2)


class Text:
    """Batches of the text that this rank reads: the rows of pairs, and the next word before words drawn at random."""

    def __init__(self, files: int, rows: int, rank: int) -> None:
        text = load_corpus(source_files(files), vocabulary=WORDS, window=2, seed=0).train.tokens.astype(np.int64)
        self._pairs = torch.from_numpy((text[:-2] * PRIME + text[1:-1]) % rows)
        self._next = torch.from_numpy(text[2:])
        self._generator = torch.Generator().manual_seed(rank)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        positions = torch.randint(0, len(self._next), (size,), generator=self._generator)
        random_words = torch.randint(0, WORDS, (size, NEGATIVES), generator=self._generator)
        return self._pairs[positions], torch.cat([self._next[positions].unsqueeze(1), random_words], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a language model with a big embedding, data parallel.")
    parser.add_argument("--backend", default="omnireduce")
    parser.add_argument("--dense", action="store_true", help="gradients are dense tensors, of which most is zero")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=256, help="words of each rank and step")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--files", type=int, default=200, help="of the standard library")
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = DistributedDataParallel(NextWord(arguments.rows, arguments.width, sparse=not arguments.dense))
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    text, losses = Text(arguments.files, arguments.rows, rank), []
    truth = torch.zeros(arguments.batch, 1 + NEGATIVES).index_fill(1, torch.tensor(0), 1)
    for step in range(arguments.steps + 1):
        if step == 1:  # the first one is slower
            dist.barrier()
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(*text.batch(arguments.batch)), truth)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    seconds = time.perf_counter() - began

    if rank == 0:
        kind, last = "dense" if arguments.dense else "sparse", torch.stack(losses[-10:]).mean()
        print(f"{arguments.backend} {kind}, {size} ranks: {arguments.steps / seconds:.2f} steps/s; loss {last:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
