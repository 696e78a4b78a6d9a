"""The gain from updating weights on the shards: Adam of a dense and of a sparse gradient, and an embedding; and the
cost of clipping gradients by their norm there.

The others sum the gradient, and then each rank makes the whole step: with NumPy, an operation after the other over
arrays that are there; with one loop that Numba has compiled; with torch's Adam, which has one loop, too. All are given
one thread of a rank each, as the ranks fill the processors.

`python -m benchmarks.parts.updates KIND SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numba
import numpy as np
from rich.console import Console
from rich.table import Table

import omnireduce as omni
from benchmarks.contest.cases import MEMORY
from benchmarks.harness.carriers import count_socket_bytes
from benchmarks.harness.group import Group, PeerError, group_here
from benchmarks.harness.orders import Order, join, serve
from benchmarks.harness.verdicts import Verdict, at_least, below, show_verdicts
from benchmarks.peak_memory import memory_mib
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel import session
from omnireduce.optimizers import Adam, RowAdagrad, Sgd, SparseAdam

FUSED, NUMPY, COMPILED, TORCH = (
    "updates on the shards",
    "NumPy on each rank",
    "one compiled loop",
    "torch's Adam, fused",
)
CLIPPED = "updates on the shards, with clip_norm"
OTHERS = NUMPY, COMPILED, TORCH
VARIANTS = FUSED, CLIPPED, *OTHERS
ELEMENTS, BLOCK, SPARSE = 16 << 20, 256, 0.01
LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
DENSE_TARGET, SPARSE_TARGET, EMBEDDING_TARGET = 1.15, 3.0, 2.0
SHARDED, DDP = "row-wise Adagrad on the shards", "DDP over gloo, SparseAdam"
WORDS, WIDTH, LOOKED_UP = 200_000, 64, 16384
CARRIERS = {FUSED: "shm", CLIPPED: "shm"} | dict.fromkeys(OTHERS, MEMORY)
CARRIERS_OF_EMBEDDING = {SHARDED: "shm", DDP: "tcp"}
TOLERANCE = 1e-4  # of weights after some steps of 1e-3


@numba.njit(error_model="numpy")
def compiled_adam(g: Array, m: Array, v: Array, w: Array, rate: Any, root: Any) -> None:
    """A step of Adam in one pass. `rate`: lr over the first correction; `root`: of the second one."""
    one, b1, b2, eps = np.float32(1), np.float32(0.9), np.float32(0.999), np.float32(1e-8)
    for i in range(g.size):
        m[i] = m[i] * b1 + g[i] * (one - b1)
        v[i] = v[i] * b2 + g[i] * g[i] * (one - b2)
        w[i] -= rate * m[i] / (np.sqrt(v[i]) * root + eps)


class Weights:
    """The weights and states of one variant."""

    def __init__(self) -> None:
        self.w, self.m, self.v, self.a, self.b = np.zeros((5, ELEMENTS), np.float32)
        self.steps = 0

    def corrections(self) -> tuple[np.float32, np.float32]:
        self.steps += 1
        first, second = (1 - beta**self.steps for beta in BETAS)
        return np.float32(LR / first), np.float32(1 / np.sqrt(second))

    def numpy_step(self, g: Array) -> None:
        """An operation after the other, without new arrays."""
        rate, root = self.corrections()
        m, v, a, b = self.m, self.v, self.a, self.b
        m *= np.float32(BETAS[0])
        np.multiply(g, np.float32(1 - BETAS[0]), out=a)
        m += a
        v *= np.float32(BETAS[1])
        np.multiply(g, g, out=a)
        a *= np.float32(1 - BETAS[1])
        v += a
        np.sqrt(v, out=b)
        b *= root
        b += np.float32(EPS)
        np.divide(m, b, out=b)
        b *= rate
        self.w -= b

    def compiled_step(self, g: Array) -> None:
        rate, root = self.corrections()
        compiled_adam(g, self.m, self.v, self.w, rate, root)


class Updating:
    """A rank with a gradient of which so many blocks are not zero."""

    def __init__(self, options: dict[str, Any], density: float) -> None:
        import torch

        torch.set_num_threads(1)
        join(options)
        rng = np.random.default_rng(options["rank"])
        blocks = np.zeros((ELEMENTS // BLOCK, BLOCK), np.float32)
        is_nonzero = rng.random(len(blocks)) < density
        blocks[is_nonzero] = rng.standard_normal((int(is_nonzero.sum()), BLOCK)).astype(np.float32)
        self._gradient: Array = blocks.reshape(-1)
        self._mean = np.zeros(ELEMENTS, np.float32)
        self._weights_by_variant = {variant: Weights() for variant in (NUMPY, COMPILED)}
        self._weights = np.zeros(ELEMENTS, np.float32)
        rule = Adam(lr=LR) if density == 1 else SparseAdam(lr=LR)
        self._weights.fill(0)  # so that its memory is there
        before = memory_mib("RssAnon")
        self._optimizer = omni.ShardedOptimizer([self._weights], rule, comm=session.communicator())
        self._optimizer.step([self._gradient])
        self._state_mib = memory_mib("RssAnon") - before
        clipped = np.zeros(ELEMENTS, np.float32)
        self._clipping = omni.ShardedOptimizer([clipped], rule, clip_norm=1.0, comm=session.communicator())
        self._parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
        self._torch = torch.optim.Adam([self._parameter], lr=LR, fused=True)
        self._parameter.grad = torch.from_numpy(self._mean)

    def turn(self, variant: str) -> dict[str, float]:
        """Milliseconds of one step, the exchange included."""
        comm = session.communicator()
        comm.barrier()
        begin = perf_counter()
        if variant in (FUSED, CLIPPED):
            (self._optimizer if variant == FUSED else self._clipping).step([self._gradient])
        else:
            comm.allreduce(self._gradient, out=self._mean, op="mean")
            exchanged = perf_counter()
            if variant == TORCH:
                self._torch.step()
            elif variant == NUMPY:
                self._weights_by_variant[variant].numpy_step(self._mean)
            else:
                self._weights_by_variant[variant].compiled_step(self._mean)
            return {"ms": (perf_counter() - begin) * 1e3, "exchange_ms": (exchanged - begin) * 1e3}
        return {"ms": (perf_counter() - begin) * 1e3, "exchange_ms": 0.0}

    def check(self) -> dict[str, float]:
        """Make the one step more that the shards have made, in all other variants. Return how far the weights are
        apart, and the memory that a rank needs for what the shards keep, beside its own weights and gradient."""
        self._weights_by_variant[NUMPY].numpy_step(self._mean)
        self._weights_by_variant[COMPILED].compiled_step(self._mean)
        self._torch.step()
        other_weights = [
            self._weights_by_variant[NUMPY].w,
            self._weights_by_variant[COMPILED].w,
            self._parameter.detach().numpy(),
        ]
        dense = [
            weights
            for weights in other_weights
            if isinstance(self._optimizer.rule, Adam) and not self._optimizer.rule.lazy
        ]
        return {
            "apart": max((float(np.abs(self._weights - weights).max()) for weights in dense), default=0.0),
            "kept_mib": self._state_mib,
        }


class Embedding:
    """A rank that trains an embedding and a layer, in two copies."""

    def __init__(self, options: dict[str, Any], folder: str) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import omnireduce.torch as hvd

        torch.set_num_threads(1)
        join(options)
        store = dist.FileStore(f"{folder}/gloo", options["size"])
        dist.init_process_group("gloo", store=store, rank=options["rank"], world_size=options["size"])
        self._rank, self._models = options["rank"], dict[str, Any]()
        for variant in (SHARDED, DDP):
            torch.manual_seed(1)
            table, layer = torch.nn.Embedding(WORDS, WIDTH, sparse=True), torch.nn.Linear(WIDTH, 1)
            model = torch.nn.Sequential(table, layer)
            if variant == SHARDED:
                groups = [
                    {"params": [table.weight], "rows": True, "rule": RowAdagrad(lr=0.01)},
                    {"params": layer.parameters()},
                ]
                steps = [hvd.ShardedOptimizer(groups, Sgd(lr=0.01))]
            else:
                steps = [torch.optim.SparseAdam([table.weight]), torch.optim.SGD(layer.parameters(), lr=0.01)]
            self._models[variant] = DistributedDataParallel(model) if variant == DDP else model, steps
        self._seed = 0

    def turn(self, variant: str) -> dict[str, Any]:
        """Milliseconds of a step: forward, backward, exchange and update."""
        import torch

        model, optimizers = self._models[variant]
        self._seed += 1
        rng = np.random.default_rng([self._seed // 2, self._rank])
        words = torch.from_numpy(np.minimum(rng.zipf(1.2, LOOKED_UP), WORDS) - 1)
        session.communicator().barrier()
        with count_socket_bytes() as carried:
            begin = perf_counter()
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(words).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
            ms = (perf_counter() - begin) * 1e3
        return {"ms": ms} | ({"carried": carried} if variant == DDP else {})


def measure(console: Console, turns: int) -> bool:
    """Let the variants take turns; return whether the aims are met. Raises PeerError where one fails or gives other
    weights, ImportError without torch."""
    import torch  # noqa: F401  the ranks have the same environment

    verdicts = []
    for ranks in (2, 4):
        for density, target in ((1.0, DENSE_TARGET), (SPARSE, SPARSE_TARGET)):
            verdicts += _adam(console, ranks, density, target, turns)
    verdicts.append(_embedding(console, turns))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _medians(group: Group, variants: tuple[str, ...], turns: int) -> dict[str, dict[str, float]]:
    """Each variant's measurements on the slowest rank: the median of all turns except the first two, which warm up."""
    rows = group.in_turns(turns + 1, {variant: {"variant": variant} for variant in variants})
    return {
        variant: {key: float(np.median([row[key] for row in variant_rows[1:]])) for key in variant_rows[0]}
        for variant, variant_rows in rows.items()
    }


def _adam(console: Console, ranks: int, density: float, target: float, turns: int) -> list[Verdict]:
    program = "benchmarks.parts.updates", f"adam-{density:g}"
    with group_here(ranks, program=program, carrier=CARRIERS) as group:
        medians = _medians(group, VARIANTS, turns)
        checks = group.tell(do="check")
    apart, state_mib = (max(row[key] for row in checks) for key in ("apart", "kept_mib"))
    if apart > TOLERANCE:
        raise PeerError("updates", f"gave weights that are {apart:g} apart")
    case = f"Adam of {ELEMENTS >> 20} Mi, density {density:g}, {ranks} ranks"
    table = Table(box=None)
    for name in (case, "ms", "of it the exchange", "times", "carried by"):
        table.add_column(name, justify="right" if name != case else "left")
    ours = medians[FUSED]["ms"]
    for variant, row in medians.items():
        numbers = f"{row['ms']:.1f}", f"{row['exchange_ms']:.1f}", f"{row['ms'] / ours:.2f}"
        table.add_row(variant, *numbers, group.carrier_of(variant))
    console.print(table, "")
    return [
        *(at_least(case, ours, variant, medians[variant]["ms"], target) for variant in OTHERS),
        below(f"{case}: memory of a rank for it", state_mib, 1.0, "MiB"),
    ]


def _embedding(console: Console, turns: int) -> Verdict:
    program = "benchmarks.parts.updates", "embedding"
    with group_here(2, program=program, carrier=CARRIERS_OF_EMBEDDING) as group:
        medians = _medians(group, (SHARDED, DDP), turns)
    case = f"step of an embedding of {WORDS} words of {WIDTH}, {LOOKED_UP} looked up"
    texts = (
        f"{variant}: {medians[variant]['ms']:.2f} ms, carried by {group.carrier_of(variant)}" for variant in medians
    )
    console.print(f"{case}: {'; '.join(texts)}", "")
    return at_least(case, medians[SHARDED]["ms"], DDP, medians[DDP]["ms"], EMBEDDING_TARGET)


def _start(kind: str, options: dict[str, Any], path: str) -> tuple[int, Mapping[str, Order]]:
    if kind == "embedding":
        return options["rank"], {"turn": Embedding(options, str(Path(path).parent)).turn}
    updating = Updating(options, float(kind.removeprefix("adam-")))
    return options["rank"], {"turn": updating.turn, "check": updating.check}


if __name__ == "__main__":
    kind, path, text = sys.argv[1:]
    serve(path, lambda: _start(kind, json.loads(text), path))
