"""The gain from codecs: the same all-reduce as float32 and with each codec, on shaped links and over shared memory.

`python -m benchmarks.codecs SOCKET OPTIONS` is one rank of it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import omnireduce as omni
from benchmarks.cases import BLOCK, SIZES
from benchmarks.group import Group, PeerError, daemon, service_group
from benchmarks.orders import serve_turns
from benchmarks.outcomes import show_verdicts
from benchmarks.shaped import OPEN, PORT, Setting
from benchmarks.targets import Verdict, at_least
from omnireduce.kernels.codecs.table import BUILT_IN, NONE

RANKS, DENSITIES = 2, (1.0, 0.1)
EXACT = (NONE, "bf16", "fp16", "int8", "qsgd")  # what sends small integers as they are
LARGEST = 63  # of them: the sum of two ranks still is one
SHAPED, SHM = "dedicated", "shm"
LEAST = {SHAPED: 3.4, SHM: 1.0}  # times as fast as float32 is int8, of a dense tensor
Rows = dict[tuple[float, str], list[dict[str, float]]]  # by density and codec, each rank's of each turn


class Rank:
    """One rank. All values are small integers, so that sums are exact with some codecs."""

    def __init__(self, options: dict[str, Any]) -> None:
        config = omni.load_config(overrides=options["set"], environ={})
        self._comm = omni.connect(config, job=options["job"], rank=options["rank"], size=options["size"])
        self._tensor = np.empty(SIZES["100 MiB"], np.float32)
        self._tensors = {density: self._of(density) for density in DENSITIES}
        self._sums = {density: sum(all_of) for density, all_of in self._tensors.items()}

    def _of(self, density: float) -> list[Any]:
        """Each rank's tensor."""
        tensors = []
        for rank in range(self._comm.size):
            rng = np.random.default_rng([rank, int(1000 * density)])
            values = rng.integers(-LARGEST, LARGEST + 1, self._tensor.size, np.int8).astype(np.float32)
            values.reshape(-1, BLOCK)[rng.random(values.size // BLOCK) >= density] = 0
            tensors.append(values)
        return tensors

    def turn(self, density: float, codec: str) -> dict[str, float]:
        """Milliseconds of one all-reduce, bytes that it sent, and how far its result is from the sum: as a share of the
        sum's norm."""
        comm, tensor = self._comm, self._tensor
        tensor[:] = self._tensors[density][comm.rank]
        comm.barrier()
        before, begin = comm.statistics().sent_bytes, time.perf_counter()
        comm.allreduce(tensor, codec=codec)
        ms, sent = (time.perf_counter() - begin) * 1e3, comm.statistics().sent_bytes - before
        expected = self._sums[density]
        error = float(np.linalg.norm(tensor - expected) / np.linalg.norm(expected))
        wrong = np.count_nonzero(tensor != expected) if codec in EXACT else 0
        return {"ms": ms, "sent": sent, "distance": error, "wrong": int(wrong)}


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the codecs take turns in one job, on each way; return whether all aims are met. Raises PeerError where one
    fails or gives a wrong sum, TestbedError where there can be no hosts with shaped links."""
    verdicts: list[Verdict] = []
    for way in (SHAPED, SHM):
        with tempfile.TemporaryDirectory(prefix="omnireduce-bench-") as folder, _group(way, rate, folder) as group:
            rows = _turns(group, turns)
        if any(row["wrong"] for codec_rows in rows.values() for row in codec_rows):
            raise PeerError(way, "gave wrong sums")
        _show(console, f"{f'{way} {rate}' if way == SHAPED else way}, carried by {group.carrier}", rows)
        ms = {codec: _median(rows[1.0, codec], "ms") for codec in ("int8", NONE)}
        verdicts.append(at_least(f"{way}, dense: int8", ms["int8"], "float32", ms[NONE], LEAST[way]))
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)


def _turns(group: Group, turns: int) -> Rows:
    rows: Rows = {}
    for turn in range(turns + 1):
        for density in DENSITIES:
            for codec in (NONE, *BUILT_IN):
                answers = group.tell(do="turn", density=density, codec=codec)
                if turn:  # the first one warms up
                    slowest = max(answers, key=lambda row: row["ms"])
                    rows.setdefault((density, codec), []).append(slowest)
    return rows


def _median(rows: Sequence[dict[str, float]], key: str) -> float:
    return float(np.median([row[key] for row in rows]))


@contextlib.contextmanager
def _group(way: str, rate: str, folder: str) -> Iterator[Group]:
    program = ("benchmarks.codecs",)
    with contextlib.ExitStack() as stack:
        if way == SHM:
            addresses = stack.enter_context(daemon(RANKS)).addresses
            sets = ("transport.host_exchange=off", "transport.kind=shm")
            yield stack.enter_context(service_group(RANKS, folder, addresses, *sets, program=program, carrier=SHM))
            return
        of_ranks, of_shards = stack.enter_context(Setting.of(SHAPED, RANKS, rate).testbed())
        daemons = [
            stack.enter_context(daemon(1, OPEN, listen=f"{host.address}:{PORT}", prefix=host.prefix))
            for host in of_shards
        ]
        addresses = [address for servers in daemons for address in servers.addresses]
        prefixes = [host.prefix for host in of_ranks]
        yield stack.enter_context(
            service_group(
                RANKS, folder, addresses, "transport.kind=tcp", prefixes=prefixes, program=program, carrier="tcp"
            )
        )


def _show(console: Console, way: str, rows: Rows) -> None:
    for density in DENSITIES:
        table = Table(box=None)
        table.add_column(f"{way}, {RANKS} ranks, 100 MiB, density {density:g}")
        for title in ("ms", "p90", "times as fast", "MB up", "error"):
            table.add_column(title, justify="right")
        plain = _median(rows[density, NONE], "ms")
        for codec in (NONE, *BUILT_IN):
            codec_rows = rows[density, codec]
            ms, p90 = _median(codec_rows, "ms"), float(np.percentile([row["ms"] for row in codec_rows], 90))
            numbers = (f"{ms:.1f}", f"{p90:.1f}", f"{plain / ms:.2f}", f"{_median(codec_rows, 'sent') / 1e6:.2f}")
            table.add_row(codec, *numbers, f"{_median(codec_rows, 'distance'):.2g}")
        console.print(table, "")


if __name__ == "__main__":
    serve_turns(Rank)
