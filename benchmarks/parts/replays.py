"""The gain from exchanging gradients while layers compute: `omnireduce replay` on shaped links.

Two ranks and an aggregator have a host each. Small layers come first and a large one last: the gradients of the first
layers are submitted last and needed first.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.contest.shaped import OPEN, PORT
from benchmarks.harness.carriers import wrong_carrier
from benchmarks.harness.group import PeerError, daemon
from benchmarks.harness.testbed import Host, testbed
from benchmarks.harness.verdicts import at_least, show_verdicts
from omnireduce.worker.switchml.recording import Layer, write_layers

RANKS, LIMIT_S, CARRIER = 2, 300, "tcp"
LAYERS = [Layer(number, 100_000, 20_000_000, 30_000_000) for number in range(8)]
LAYERS.append(Layer(8, 4_000_000, 5_000_000, 10_000_000))
NONE, URGENT = "none", "iterations, urgent"
VARIANTS = {  # with what the exchange overlaps
    NONE: ("--overlap", "none"),
    "backward": ("--overlap", "backward"),
    "iterations": ("--overlap", "iterations"),
    URGENT: ("--overlap", "iterations", "--set", "protocol.urgent_bytes=1_000_000"),
}
MIN_SPEEDUP = {"backward": 1.3, URGENT: 1.5}  # times as fast as without overlap


def measure(console: Console, turns: int, rate: str) -> bool:
    """Let the variants take turns; return whether all aims are met. Raises PeerError where a training fails,
    TestbedError where there can be no hosts with shaped links."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omnireduce-bench-")))
        write_layers(LAYERS, folder / "model.csv")
        *rank_hosts, shard_host = stack.enter_context(testbed(RANKS + 1, rate))
        listen = f"{shard_host.address}:{PORT}"
        stack.enter_context(daemon(1, OPEN, listen=listen, prefix=shard_host.prefix))
        for turn in range(turns):
            for number, (name, options) in enumerate(VARIANTS.items()):
                sets = (f"cluster.aggregators={listen}", f"cluster.job=replay-{turn}-{number}")
                words = [word for setting in sets for word in ("--set", setting)]
                times[name].append(_iteration_ms(rank_hosts, folder, [*options, *words]))
    return _show(console, rate, times)


def _iteration_ms(hosts: Sequence[Host], folder: Path, options: Sequence[str]) -> float:
    """The median of the iterations of one training, whose last sums are checked."""
    report = folder / "report.json"
    program = [sys.executable, "-m", "omnireduce", "replay", str(folder / "model.csv"), "--verify", *options]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank, host in enumerate(hosts):
            rank_options = ["--rank", str(rank), "--size", str(len(hosts)), "--json", str(report)]
            errors = stack.enter_context((folder / f"errors-{rank}").open("w+"))
            ranks.append(
                stack.enter_context(
                    subprocess.Popen([*host.prefix, *program, *rank_options], stdout=subprocess.DEVNULL, stderr=errors)
                )
            )
            stack.callback(ranks[-1].kill)
        try:
            statuses = [process.wait(LIMIT_S) for process in ranks]
        except subprocess.TimeoutExpired:
            raise PeerError("replay", f"took more than {LIMIT_S} s") from None
    if any(statuses):
        raise PeerError("replay", "failed: " + (folder / "errors-0").read_text().strip().rpartition("\n")[2])
    reported = msgspec.json.decode(report.read_bytes())
    if wrong := wrong_carrier(CARRIER, reported["transport"]):
        raise PeerError("replay", f"failed: {wrong}")
    times: list[int] = reported["ns"]
    return statistics.median(times) / 1e6


def _show(console: Console, rate: str, times_of_variants: Mapping[str, Sequence[float]]) -> bool:
    ms = {name: statistics.median(times) for name, times in times_of_variants.items()}
    title = f"{RANKS} ranks, {len(LAYERS)} layers, links of {rate}, carried by {CARRIER}"
    table = Table(title=title, title_justify="left")
    for column in ("overlap with", "iteration, ms", "least", "most", "times as fast"):
        table.add_column(column, justify="right")
    for name, times in times_of_variants.items():
        cells = (f"{value:.1f}" for value in (ms[name], min(times), max(times)))
        table.add_row(name, *cells, f"{ms[NONE] / ms[name]:.2f}")
    console.print(table)
    verdicts = [at_least(f"overlap: {name}", ms[name], NONE, ms[NONE], target) for name, target in MIN_SPEEDUP.items()]
    show_verdicts(console, verdicts)
    return all(verdict.met for verdict in verdicts)
