"""How far a worker's peak memory rises above what it had with its tensor in hand; rank 0 writes the ranks' maximum.

The base line is taken after importing omnireduce: what its imports take, numba and LLVM above all, is not counted.

    mpirun -n 2 python benchmarks/peak_memory.py --json FILE [--set section.key=value]...
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np

import omnireduce as omni

ELEMENTS = 26_214_400
BLOCK = 256


def memory_mib(what: str) -> float:
    """Resident memory now (`VmRSS`), or its peak since the last `forget_peak` (`VmHWM`)."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    tensor = np.ones(ELEMENTS, np.float32)
    forget_peak()
    before = memory_mib("VmHWM")
    with omni.connect(omni.load_config(overrides=options.overrides)) as communicator:
        generator = np.random.default_rng(communicator.rank)
        for density in (1.0, 0.1, 0.01):
            blocks = tensor.reshape(-1, BLOCK)
            for start in range(0, len(blocks), 4096):
                part = blocks[start : start + 4096]
                part[:] = generator.random((len(part), 1)) < density
            communicator.allreduce(tensor)
        grown = communicator.allreduce(np.array([memory_mib("VmHWM") - before]), op="max")
        if communicator.rank == 0:
            options.json.write_text(json.dumps({"beyond_tensor_mib": float(grown[0])}) + "\n")


if __name__ == "__main__":
    main()
