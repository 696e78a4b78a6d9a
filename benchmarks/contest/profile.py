"""One case of the service, traced: where the time of a collective goes, as a table and as a trace for Perfetto."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.contest.cases import BLOCK, Case
from benchmarks.contest.contest import SCAN, SEED
from benchmarks.harness.group import Group, daemon, service_group
from omnireduce.console.trace import break_down, show_breakdown
from omnireduce.runtime.tracing.aligned_traces import Lane, read_lanes
from omnireduce.runtime.tracing.merged_timeline import chrome_trace
from omnireduce.support.files.output import make_folder, write_file

WARM_UP = 3  # rounds
Rounds = list[list[dict[str, Any]]]  # the answers of all ranks, by round


def profile_case(console: Console, case: Case, shards: int, results: Path) -> int:
    """Run the case with traces on, print its table, and write profile.json; return how many elements were wrong.

    Raises PeerError when the service does not start or fails, and UsageError when a file cannot be written.
    """
    make_folder(results)
    lanes, exchanges, scans = _trace(case, shards)
    breakdown = break_down(lanes, skip=WARM_UP)
    title = f"{case.transport}, {case.ranks} ranks, {shards} shards, {case.size}, density {case.density:g}"
    scan_ms = [1e3 * float(np.median([answers[rank]["seconds"] for answers in scans])) for rank in range(case.ranks)]
    references = [(f"rank {rank}, {SCAN}", ms) for rank, ms in enumerate(scan_ms)]
    show_breakdown(console, title, breakdown, lanes, references)
    path = results / "profile.json"
    write_file(chrome_trace(lanes, breakdown.begin, breakdown.end), path)
    console.print(f"{path}: open it in ui.perfetto.dev")
    return sum(answer["wrong"] for answers in exchanges for answer in answers)


def _trace(case: Case, shards: int) -> tuple[list[Lane], Rounds, Rounds]:
    """Run all rounds; return the traces, and what the ranks answered to exchanges and, without the warm-up, to bare
    scans, in which all ranks read their tensors at the same time."""
    with tempfile.TemporaryDirectory(prefix="omnireduce-trace-") as folder:
        tracing = f"trace.folder={folder}"
        with (
            daemon(shards, tracing) as aggregator,
            service_group(
                case.ranks, folder, aggregator.addresses, *case.setup.settings, tracing, carrier=case.transport
            ) as group,
        ):
            data: dict[str, Any] = {"density": case.density, "overlap": case.overlap, "distribution": case.distribution}
            group.tell(do="case", elements=case.elements, block_size=BLOCK, seed=SEED, **data)
            exchanges, scans = [], []
            for number in range(WARM_UP + case.rounds):
                exchanges.append(_round(group, "allreduce", number, check=True))
                scans.append(_round(group, "scan", number, check=False))
        return read_lanes(folder), exchanges, scans[WARM_UP:]


def _round(group: Group, method: str, number: int, *, check: bool) -> list[dict[str, Any]]:
    return group.tell(do="round", kind="dense", method=method, number=number, check=check)
