"""Two aggregator shards and two workers on this machine: synthetic tensors, then a short real training.

`make demo` runs this. It starts what it needs on free ports and stops it again, also after a failure or
Ctrl-C. The worker commands that it prints work by hand too, beside
`python -m aggregator --config configs/local.toml`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 2
READY_S = 180  # the first start compiles the kernels
STEP_S = 300
STOP_S = 20
PYTHON = sys.executable
MPIRUN = shutil.which("mpirun", path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")

AGGREGATOR = "python -m aggregator --config configs/local.toml --listen 127.0.0.1:0"
BENCH = (
    "mpirun -n 2 python -m worker bench --config configs/local.toml --against mpi"
    " --set bench.elements=[4_194_304,26_214_400] --set bench.rounds=10"
)
TRAIN = "mpirun -n 2 python -m worker train --config configs/local.toml"


class DemoError(Exception):
    """A part of the demo failed."""


def start(command: str, **options: object) -> subprocess.Popen[str]:
    """Start a command line in the project's folder, with this interpreter and the mpirun beside it."""
    own = {"python": PYTHON, "mpirun": MPIRUN or "mpirun"}
    arguments = [own.get(word, word) for word in shlex.split(command)]
    return subprocess.Popen(arguments, cwd=ROOT, text=True, **options)  # type: ignore[call-overload,no-any-return]


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end and wait; kill it if it does not."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def addresses(daemon: subprocess.Popen[str], log: Path) -> list[str]:
    """Wait for the daemon's line `ready` in its log; return the addresses of its shards."""
    deadline = time.monotonic() + READY_S
    while daemon.poll() is None and time.monotonic() < deadline:
        ready = re.search(r"^ready\b(.*)\n", log.read_text(), re.MULTILINE)
        if ready:
            return re.findall(r"127\.0\.0\.1:\d+", ready[1])
        time.sleep(0.05)
    raise DemoError("the aggregator did not get ready")


@contextmanager
def aggregator(log: Path) -> Iterator[list[str]]:
    """Run the aggregator shards; yield their addresses; stop them in the end."""
    print(
        f"Starting {SHARDS} aggregator shards (the first start compiles the kernels)\n$ {AGGREGATOR}",
        flush=True,
    )
    with log.open(
        "w"
    ) as out:  # in a session of its own: Ctrl-C ends the workers first, then we stop the daemon
        daemon = start(AGGREGATOR, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        found = addresses(daemon, log)
        print(f"ready: {', '.join(found)}", flush=True)
        yield found
        stop(daemon)
        if daemon.returncode:
            raise DemoError(f"the aggregator ended with status {daemon.returncode}")
        print("\nAggregator stopped", flush=True)
    except DemoError as error:
        stop(daemon)
        raise DemoError(f"{error}\nThe aggregator's log:\n{log.read_text()}") from None
    finally:
        stop(daemon)


def step(title: str, command: str, environ: Mapping[str, str]) -> None:
    """Run one program to its end, its output on the terminal."""
    print(f"\n{title}\n$ {command}", flush=True)
    process = start(command, env={**os.environ, **environ})
    try:
        status = process.wait(STEP_S)
    except subprocess.TimeoutExpired:
        raise DemoError(f"took more than {STEP_S} s: {command}") from None
    finally:
        stop(process)
    if status:
        raise DemoError(f"ended with status {status}: {command}")


def demo(folder: Path) -> None:
    """Run every part."""
    with aggregator(folder / "aggregator.log") as found:
        environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": str(found).replace("'", '"')}
        step("Synthetic tensors of 17 and 105 MB, every element checked, against MPI", BENCH, environ)
        step(
            "Real gradients: word embeddings trained on Python's own source files, against MPI",
            TRAIN,
            environ,
        )


def main() -> int:
    """Return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="omnireduce-demo-") as folder:
            demo(Path(folder))
    except DemoError as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that the demo started is stopped", file=sys.stderr)
        return 130
    print(f"Demo done in {time.monotonic() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
