"""The memory of the service's processes, each measured in a process that has done nothing else.

For a worker, its peak counts without its tensor and its imports (see `benchmarks.peak_memory`). What remains are the
compiled kernels, its slots, and whatever exchanges need. For an aggregator shard, its peak counts without the anonymous
memory of a process that only has its imports, and without the slots, (ranks + 1) x slots x slot size. What remains are
the compiled kernels, every library page that it touched, and whatever exchanges need. A shard shares most of that with
its supervisor; it counts all the same. The daemon finds its kernels compiled. If it has to compile them, at the first
start on a machine, shards take more.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.contest.cases import Case
from benchmarks.harness.environments import HERE, Tree
from benchmarks.harness.group import PeerError, daemon, service_group
from benchmarks.peak_memory import memory_mib
from omnireduce.support.config import Config

MIB = 1 << 20
SLOTS = Config().protocol.slots * Config().protocol.slot_bytes / MIB  # of one rank, one way
IMPORTS = """
import sys
try:
    import omnireduce.aggregator.daemon
except ImportError:  # an older tree
    import aggregator.daemon
print(flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Memory:
    """MiB: of the worker and of the shard that took most; see the module's text for what counts.

    `joined` is the worker's share that it had before its first exchange, `resident` all that the shard had in memory.
    """

    case: Case
    worker: float
    joined: float
    shard: float
    slots: float
    resident: float
    wrong: int
    ready_s: float
    carried_by: str = ""  # as the ranks have counted


@contextmanager
def importer(tree: Tree) -> Iterator[int]:
    """A process that has imported what a shard imports, and waits; its number. Raises PeerError."""
    command = [str(tree.python), "-c", IMPORTS]
    with subprocess.Popen(command, cwd=tree.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PeerError(tree.name_in_errors("the aggregator"), "could not be imported")
        yield process.pid  # at the end its input is closed, and it ends


def measure(case: Case, tree: Tree = HERE) -> Memory:
    """Let workers and a daemon of `tree` exchange tensors of the case's size. Raises PeerError when one fails."""
    setup = case.setup
    with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder, daemon(setup.shards, tree=tree) as running:
        program = ("benchmarks.peak_memory",)
        with service_group(
            setup.ranks, folder, running.addresses, *tree.supported_settings(setup.settings), program=program,
            tree=tree, carrier=setup.transport if tree == HERE else "",
        ) as group:  # fmt: skip
            answers = group.tell(do="measure", elements=case.elements)
        resident = max(running.read(lambda pid: memory_mib("VmHWM", pid)))
    with importer(tree) as pid:
        imports = memory_mib("RssAnon", pid)
    slots = (setup.ranks + 1) * SLOTS
    return Memory(
        case,
        worker=max(answer["peak_mib"] for answer in answers),
        joined=max(answer["joined_mib"] for answer in answers),
        shard=resident - imports - slots,
        slots=slots,
        resident=resident,
        wrong=int(sum(answer["wrong"] for answer in answers)),
        ready_s=running.ready_s,
        carried_by=group.carrier,
    )
