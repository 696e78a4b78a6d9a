"""The cost of selection: top-k of elements against `torch.topk`, top-k of blocks against the scan for zero blocks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import BLOCK
from benchmarks.harness.verdicts import Verdict, at_least, at_most, show_verdicts
from omnireduce.compression import (
    Adaptive,
    BlockTopK,
    DgcSampling,
    GuardedThreshold,
    RandomK,
    Selector,
    Threshold,
    TopK,
)
from omnireduce.core.dtypes import Array
from omnireduce.kernels.nonzero_blocks import find_blocks

SIZE, RATIO = 1 << 20, 0.01
TORCH, SCAN = "torch.topk", "bare scan"
MIN_SPEEDUP, MAX_RATIO = 4.0, 1.3


def measure(console: Console, turns: int) -> bool:
    """Let all take turns on one tensor; return whether all aims are met. Raises ImportError without torch."""
    x = np.random.default_rng(1).standard_normal(SIZE).astype(np.float32)
    methods: dict[str, Callable[[], object]] = {TORCH: _torch_topk(x), SCAN: lambda: find_blocks(x, BLOCK)}
    selectors: list[Selector] = [
        TopK(RATIO), BlockTopK(RATIO, BLOCK), RandomK(RATIO), Threshold(2.5), GuardedThreshold(9.0, RATIO),
        DgcSampling(RATIO), Adaptive(RATIO),
    ]  # fmt: skip
    for selector in selectors:
        methods[type(selector).__name__] = partial(selector.select, x)
    ms: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(turns + 1):
        for name, method in methods.items():
            begin = time.perf_counter()
            method()
            if turn:  # the first one warms up
                ms[name].append((time.perf_counter() - begin) * 1e3)
    medians = {name: float(np.median(times)) for name, times in ms.items()}
    table = Table(box=None)
    for title in (f"1 Mi elements, ratio {RATIO:g}", "ms", "p90"):
        table.add_column(title, justify="right")
    for name, times in ms.items():
        table.add_row(name, f"{medians[name]:.3f}", f"{np.percentile(times, 90):.3f}")
    console.print(table, "")
    verdicts = verdicts_of(medians)
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def verdicts_of(medians: dict[str, float]) -> list[Verdict]:
    return [
        at_least("top-k", medians["TopK"], TORCH, medians[TORCH], MIN_SPEEDUP),
        at_most("block top-k", medians["BlockTopK"], SCAN, medians[SCAN], MAX_RATIO),
    ]


def _torch_topk(x: Array) -> Callable[[], object]:
    """Selection as users of torch write it: magnitudes, top-k, the values."""
    import torch

    tensor: Any = torch.from_numpy(x)
    k = int(x.size * RATIO)

    def select() -> object:
        _, positions = torch.topk(tensor.abs(), k, sorted=False)
        return tensor[positions], positions

    return select
