"""Accuracy of `omnireduce plan`, against measurements between hosts with shaped links."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.contest.cases import BLOCK
from benchmarks.contest.contest import OURS
from benchmarks.contest.relays import FLAT, HOST_BYTES_PER_S, RACKS, RELAYS
from benchmarks.contest.shaped import SHARED_HOSTS
from benchmarks.harness.testbed import BURST_BYTES
from benchmarks.harness.verdicts import Verdict, below, show_verdicts
from omnireduce.console.plan.candidates import predict_plan
from omnireduce.console.plan.model import Costs, Hosts, Plan, Prediction
from omnireduce.console.plan.patterns import DrawnPatterns

ITEM_BYTES = 4  # float32
LATENCY_S = 1e-4  # of a small message through the testbed
MAX_PERCENT = 10.0
OWN_ENTRANTS = (OURS, FLAT, RELAYS)


class PlanComparison(NamedTuple):
    """A row of `testbed.json`, and what the model says of it."""

    row: dict[str, Any]
    prediction: Prediction

    @property
    def name(self) -> str:
        suffix = "" if self.row["entrant"] == OURS else f" {self.row['entrant']}"
        return f"{self.row['layout']}{suffix}, {self.row['ranks']} ranks, density {self.row['density']:g}"

    @property
    def predicted_ms(self) -> float:
        return self.prediction.seconds * 1e3

    @property
    def processor_ms(self) -> float:
        """The processor time of all processes together."""
        return float(self.row["cpu_s_per_gb"] * self.row["bytes"] / 1e6)

    @property
    def verdict(self) -> Verdict:
        """Whether the time comes within 10 %."""
        return below(self.name, abs(self.predicted_ms / self.row["ms"] - 1) * 100, MAX_PERCENT, "%")


def compare_plans(folder: Path) -> list[PlanComparison]:
    """Predict what `testbed.json` and `relays.json` in this folder have. Raises OSError, ValueError where they cannot
    be read."""
    paths = [folder / name for name in ("testbed.json", "relays.json")]
    rows = [row for path in paths if path.exists() for row in json.loads(path.read_text())]
    rows = [row for row in rows if row["entrant"] in OWN_ENTRANTS and row["kind"] == "dense"]
    costs = Costs().at(speed_of([PlanComparison(row, _predict(row, Costs())) for row in rows]))
    return [PlanComparison(row, _predict(row, costs)) for row in rows]


def speed_of(comparisons: Sequence[PlanComparison]) -> float:
    """The speed of the processors, by what all rows took of them: machines that others use, too, differ by hours."""
    return float(
        np.median(
            [comparison.prediction.processor_s * 1e3 / comparison.processor_ms for comparison in comparisons] or [1.0]
        )
    )


def _predict(row: dict[str, Any], costs: Costs) -> Prediction:
    layout, ranks = row["layout"], row["ranks"]
    number = SHARED_HOSTS if layout == "shared" else ranks
    hosts = Hosts(number, os.cpu_count() or 1, row["link_bytes_per_s"], LATENCY_S, BURST_BYTES, one_machine=True)
    plan = Plan(ranks // number, layout == "shared", number, layout == "dedicated")
    if layout == "racks":
        rack_rate = row["link_bytes_per_s"]
        hosts = hosts._replace(bytes_per_s=HOST_BYTES_PER_S, racks=RACKS, rack_bytes_per_s=rack_rate)
        plan = Plan(1, False, 1, dedicated=True, relays=row["entrant"] == RELAYS)
    block_bytes = BLOCK * ITEM_BYTES
    patterns = DrawnPatterns(row["bytes"] // block_bytes, row["density"], row["overlap"], ranks)
    return predict_plan(patterns, block_bytes, hosts, plan, costs=costs)


def show_plans(console: Console, comparisons: Sequence[PlanComparison]) -> None:
    """A table of both, and which are near enough."""
    table = Table(box=None)
    table.add_column("between shaped links")
    table.add_column("carried by")
    for title in ("ms", "predicted", "ratio", "processor ms", "predicted", "ratio"):
        table.add_column(title, justify="right")
    for comparison in comparisons:
        pairs = [
            (comparison.row["ms"], comparison.predicted_ms),
            (comparison.processor_ms, comparison.prediction.processor_s * 1e3),
        ]
        cells = [
            (f"{measured:.4g}", f"{predicted:.4g}", f"{predicted / measured:.2f}") for measured, predicted in pairs
        ]
        table.add_row(comparison.name, comparison.row.get("carried_by", ""), *cells[0], *cells[1])
    console.print(table, "")
    show_verdicts(console, [comparison.verdict for comparison in comparisons])
