"""Two aggregator shards and two workers on this machine: a short real training, then what the service makes of it.

`make demo` runs this. It starts what it needs on free ports and stops it again, also after a failure or Ctrl-C. The
worker commands that it prints work by hand too, beside `omnireduce aggregator --config configs/local.toml`.
"""

from __future__ import annotations

import os
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
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 300
STOP_S = 20
SEARCH_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
PROGRAMS = {name: shutil.which(name, path=SEARCH_PATH) or name for name in ("omnireduce", "mpirun")}

AGGREGATOR = "omnireduce aggregator --config configs/local.toml --listen localhost:0"
TRAIN = "mpirun -n 2 omnireduce train --config configs/local.toml"
BENCH = "mpirun -n 2 omnireduce bench --config configs/local.toml --against mpi"


class DemoError(Exception):
    """A part of the demo failed."""


def start(command: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command line in the project's folder, with the programs beside this interpreter."""
    arguments = [PROGRAMS.get(word, word) for word in shlex.split(command)]
    try:
        return subprocess.Popen(arguments, cwd=ROOT, text=True, **options)
    except OSError as error:
        raise DemoError(f"{arguments[0]}: {error.strerror}") from None


def stop(process: subprocess.Popen[str]) -> None:
    """Ask the process to end and wait; kill it if it does not."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def aggregator(log: Path) -> Iterator[list[str]]:
    """Run the aggregator shards; yield their addresses; stop them in the end."""
    print(f"Two aggregator shards (the first start compiles the kernels)\n$ {AGGREGATOR}", flush=True)
    with log.open("w") as errors:  # in a session of its own: Ctrl-C ends the workers first, then we stop the daemon
        daemon = start(AGGREGATOR, stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    try:
        line = daemon.stdout.readline() if daemon.stdout else ""  # empty if it ends before it is ready
        if not line.startswith("ready "):
            raise DemoError("the aggregator did not get ready")
        print(line, end="", flush=True)
        yield line.split()[1:]
    except DemoError as error:
        raise DemoError(f"{error}\nThe aggregator's log:\n{log.read_text()}") from None
    finally:
        stop(daemon)
    if daemon.returncode:
        raise DemoError(f"the aggregator ended with status {daemon.returncode}:\n{log.read_text()}")
    print("\nAggregator stopped", flush=True)


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
    gradients = shlex.quote(str(folder))
    with aggregator(folder / "aggregator.log") as addresses:
        environ = {"OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(addresses)}
        title = "A real training: word embeddings of Python's own source files; each worker saves its last gradient"
        step(title, f"{TRAIN} --save-gradients {gradients}", environ)
        step("Is such a gradient sparse?", f"omnireduce density {gradients}/gradient-0.npy", environ)
        step("These gradients, every element checked", f"{BENCH} --input {gradients}/gradient-{{rank}}.npy", environ)
        step("Synthetic tensors of 105 MB, every element checked", BENCH, environ)


def main() -> int:
    """Return the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` runs
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="omnireduce-") as folder:
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
