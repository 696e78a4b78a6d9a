"""The service's speed, memory and start-up on one host, as ratios taken in one run.

    python benchmarks/service.py [--rounds N] [--shards N] [--json FILE]        needs the extra `mpi`

Starts an aggregator twice (the second start has its kernels in the cache and is timed), runs `worker bench --against
mpi` with two workers over shared memory, and measures how far a worker's peak memory rises above its tensor and its
imports. The exit status is 1 when an element was wrong; a missed target is reported, not hidden, and does not change
it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
ELEMENTS = 26_214_400  # 104,857,600 bytes of float32
SPEEDUP_TARGETS = {1.0: 1.2, 0.1: 4.0, 0.01: 6.0}
READY_TARGET_S = 5.0
MEMORY_TARGET_MIB = 64.0


@contextmanager
def aggregator(shards: int, *overrides: str) -> Iterator[tuple[list[str], float]]:
    """Run a daemon; yield its addresses and the seconds it took to get ready."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "aggregator", "--listen", "127.0.0.1:0", "--shards", str(shards)]
    command += [word for override in overrides for word in ("--set", override)]
    daemon = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert daemon.stdout is not None
        line = daemon.stdout.readline().split()
        if not line or line[0] != "ready":
            raise SystemExit("the aggregator did not get ready")
        yield line[1:], time.perf_counter() - started
    finally:
        daemon.terminate()
        daemon.wait(30)


def worker(addresses: list[str], *arguments: str) -> None:
    """Run two workers under mpirun."""
    command = [str(BIN / "mpirun"), "-n", "2", sys.executable, *arguments]
    command += ["--set", f"cluster.aggregators={json.dumps(addresses)}", "--set", "transport.kind=shm"]
    subprocess.run(command, cwd=ROOT, check=True)


def measure(shards: int, rounds: int, folder: Path) -> dict[str, object]:
    """Everything, as one JSON object."""
    rows, memory = folder / "rows.json", folder / "memory.json"
    with aggregator(shards):
        pass
    with aggregator(shards) as (addresses, ready_s):
        bench = ["-m", "worker", "bench", "--against", "mpi", "--json", str(rows)]
        sets = {"elements": ELEMENTS, "density": "[1.0,0.1,0.01]", "dtype": "float32", "rounds": rounds}
        worker(addresses, *bench, *(f"--set=bench.{key}={value}" for key, value in sets.items()))
        worker(addresses, str(ROOT / "benchmarks" / "peak_memory.py"), "--json", str(memory))
    return {
        "ready_s": ready_s,
        "rows": json.loads(rows.read_text()),
        "beyond_tensor_mib": json.loads(memory.read_text())["beyond_tensor_mib"],
    }


def report(found: dict[str, object]) -> int:
    """Print each figure beside its target; return the number of wrong elements."""
    verdict = {True: "met", False: "MISSED"}
    rows = found["rows"]
    assert isinstance(rows, list)
    for row in rows:
        target = SPEEDUP_TARGETS[row["density"]]
        print(
            f"density {row['density']:<5} {row['time_ms']:7.2f} ms, MPI {row['mpi_time_ms']:7.2f} ms, "
            f"speed-up {row['speedup']:.2f}x (target {target:g}x: {verdict[row['speedup'] >= target]}), "
            f"wrong {row['wrong']}"
        )
    for name, key, target, unit in (
        ("start-up of a warm daemon", "ready_s", READY_TARGET_S, "s"),
        ("peak memory of a worker beyond its tensor and its imports", "beyond_tensor_mib", MEMORY_TARGET_MIB, "MiB"),
    ):
        value = found[key]
        assert isinstance(value, float)
        print(f"{name}: {value:.1f} {unit} (target at most {target:g} {unit}: {verdict[value <= target]})")
    return sum(row["wrong"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder:
        found = measure(options.shards, options.rounds, Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(1 if report(found) else 0)


if __name__ == "__main__":
    main()
