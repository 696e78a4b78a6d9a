"""The rise of a worker's peak memory above a baseline with its tensor in memory.

    python -m benchmarks.peak_memory SOCKET OPTIONS

The baseline is taken when omnireduce is imported and the tensor is written, before the worker joins. So the imports,
numba and LLVM above all, do not count. The compiled kernels, which are loaded at the join, and the slots do.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import omnireduce as omni
import omnireduce.runtime.rank.communicator  # the package loads it, and numba, when a name is used first
from benchmarks.contest.cases import BLOCK
from benchmarks.harness.orders import serve
from omnireduce.core.dtypes import Array

STEP = 1024  # blocks that are written or checked at once: what that takes is no part of the measurement
DENSITIES = (1.0, 0.1, 0.01)
ROUNDS = 2  # of each


def memory_mib(field: str, pid: int | str = "self") -> float:
    """Resident memory of a process now (`VmRSS`; of it `RssAnon`), or its peak since `forget_peak` (`VmHWM`). Raises
    FileNotFoundError or ProcessLookupError when it is gone."""
    match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    if match is None:  # it waits for its parent
        raise ProcessLookupError(f"process {pid} has ended")
    return int(match[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(options: dict[str, Any], elements: int) -> dict[str, float]:
    """Join, sum tensors of `elements` of float32, leave; MiB above the base line, and the number of wrong elements."""
    tensor = np.ones(elements, np.float32)
    forget_peak()
    before = memory_mib("VmHWM")
    config = omni.load_config(overrides=options["set"], environ={})
    with omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"]) as communicator:
        joined, peak, wrong = memory_mib("VmHWM"), 0.0, 0
        for seed, density in enumerate(DENSITIES * ROUNDS):
            for part, flags in _parts(tensor, density, seed, options["rank"]):
                part[:] = flags
            communicator.allreduce(tensor)
            peak = max(peak, memory_mib("VmHWM"))
            parts_of_ranks = [_parts(tensor, density, seed, rank) for rank in range(options["size"])]
            for parts in zip(*parts_of_ranks, strict=True):
                wrong += int(np.count_nonzero(parts[0][0] != sum(flags.astype(np.float32) for _, flags in parts)))
    return {"joined_mib": joined - before, "peak_mib": peak - before, "wrong": wrong}


def _parts(tensor: Array, density: float, seed: int, rank: int) -> Iterator[tuple[Array, Array]]:
    """Views (blocks, elements) of the tensor, and which of their blocks are not zero on this rank: bool (blocks, 1)."""
    generator = np.random.default_rng([seed, rank])
    blocks = tensor.reshape(-1, BLOCK)
    for start in range(0, len(blocks), STEP):
        part = blocks[start : start + STEP]
        yield part, generator.random((len(part), 1)) < density


def main() -> None:
    path, text = sys.argv[1:]
    options = json.loads(text)
    serve(path, lambda: (options["rank"], {"measure": lambda elements: measure(options, elements)}))


if __name__ == "__main__":
    main()
