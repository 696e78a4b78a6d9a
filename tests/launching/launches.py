"""Helpers that the tests of launches share: `omnireduce run` as a process, and a check for processes left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from local_cluster import READY_S, ROOT, Process, eventually

RUN = (sys.executable, "-m", "omnireduce", "run")
SUM = """
import os
import numpy as np
import omnireduce as omni
with omni.init() as comm:
    total = omni.allreduce(np.full(100, comm.rank + 1.0))[0]
    os.write(1, f"{comm.rank}/{comm.size} {total:g} {comm.local_rank}/{comm.local_size}\\n".encode())
"""
# A rank with a child, which both live until a signal ends them. They write their numbers.
FAMILY = """
import os, signal
child = os.fork()
if child:
    os.write(1, f"{os.getpid()} {child}\\n".encode())
while True:
    signal.pause()
"""

# A rank that a signal ends with status 0. It writes its number.
ENDS_WELL = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
os.write(1, f"{os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


def environ_of(**more: str) -> dict[str, str]:
    """This process's environment without what concerns the library, and with `more`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("OMNIREDUCE_", "HOROVOD_"))}
    return kept | {"PYTHONPATH": str(ROOT)} | more


def run(
    *words: str, cwd: Path | None = None, prefix: Sequence[str] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """`omnireduce run` with these words, behind `prefix`, to its end."""
    return subprocess.run(
        [*prefix, *RUN, *words], env=environ_of(**environ), cwd=cwd or ROOT, timeout=2 * READY_S,
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def python(code: str) -> list[str]:
    """The command that runs this code."""
    return [sys.executable, "-c", code]


def lines(text: str) -> list[str]:
    """The lines in an order that does not depend on which rank was first."""
    return sorted(text.splitlines())


class Launched(Process):
    """`omnireduce run`, still running; ranks' numbers of processes come on its standard output."""

    def __init__(self, *words: str, **environ: str) -> None:
        super().__init__(*RUN, *words, environ=environ_of(**environ), from_scratch=True)

    def numbers(self, ranks: int) -> dict[int, list[int]]:
        """The numbers that each of so many ranks writes on a line."""
        results = {}
        for _ in range(ranks):
            prefix, _, text = self.line(READY_S).partition(">:")
            results[int(prefix[1 : prefix.index("]")])] = [int(word) for word in text.split()]
        return results


@contextmanager
def launched(*words: str, **environ: str) -> Iterator[Launched]:
    """`Launched`, killed at the end if it runs."""
    with Launched(*words, **environ) as result:
        yield result


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def are_gone(pids: Sequence[int]) -> bool:
    """Whether these processes end soon."""
    return eventually(lambda: not any(map(runs, pids)))
