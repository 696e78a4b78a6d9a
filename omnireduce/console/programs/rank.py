"""A rank of `omnireduce coconet run`. All ranks run the program; rank 0 compares and prints."""

from __future__ import annotations

import os
import sys

import msgspec
import numpy as np
from rich.table import Table

import omnireduce as omni
from omnireduce.cli import reporting_errors
from omnireduce.config import load_config
from omnireduce.console.programs.trial import (
    CLOSE,
    NOT_EXACT,
    Outcome,
    TrialRequest,
    difference,
    reference,
    run_schedule,
)
from omnireduce.dtypes import Array
from omnireduce.launching.messages import RESULT_FD
from omnireduce.logs import start_logs
from omnireduce.printing import carriers_text, make_console, short_count, short_time
from omnireduce.programs import Pipeline
from omnireduce.runtime.rank.communicator import Communicator


def main() -> None:
    """The process of a rank. It reads its task as JSON from standard input. Whether all is right goes to a pipe."""
    pipe = int(os.environ.pop(RESULT_FD))
    os.set_inheritable(pipe, False)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    with reporting_errors():
        config = load_config(wanted.config_file, overrides=wanted.overrides)
        start_logs(config.log)
        with omni.connect(config) as comm:
            outcomes = {name: _on_all_ranks(wanted, pipeline, comm) for name, pipeline in wanted.pipelines().items()}
            size, transport = comm.size, carriers_text(comm.statistics().carried)
        with open(pipe, "wb") as file:
            is_right = comm.rank > 0 or _report(wanted, outcomes, size, transport)
            file.write(msgspec.json.encode(is_right))


def _on_all_ranks(wanted: TrialRequest, pipeline: Pipeline, comm: Communicator) -> Outcome:
    """Run a schedule. The result is NaN if it is not the same on all ranks that have it."""
    outcome = run_schedule(wanted, pipeline, comm)
    result: Array = comm.broadcast_object(outcome.result, comm.size - 1, name="coconet: result")
    is_same = outcome.result is None or np.array_equal(outcome.result, result)
    if not all(comm.allgather_object(is_same, name="coconet: same")):
        result = np.full_like(result, np.nan)
    return outcome._replace(result=result)


def _report(wanted: TrialRequest, outcomes: dict[str, Outcome], size: int, transport: str) -> bool:
    """Print the schedules, and return whether all results are as they should be."""
    expected = reference(wanted, size)
    console, table = make_console(), Table(box=None, pad_edge=False)
    for title in ("schedule", "ms/step", "state", "up", "largest difference"):
        table.add_column(title, justify="left" if title == "schedule" else "right")
    differences = {name: difference(outcome.result, expected) for name, outcome in outcomes.items()}
    for name, outcome in outcomes.items():
        table.add_row(*_row(name, outcome, differences[name]))
    what = f"{wanted.elements} elements, {wanted.steps} step{'s' * (wanted.steps > 1)}"
    console.print(f"{wanted.program} on {size} rank{'s' * (size > 1)}: {what}, {transport}")
    console.print(table)
    limit = CLOSE if wanted.program in NOT_EXACT else 0.0
    is_right = all(largest <= limit for largest in differences.values())  # not where it is NaN
    worst = max(differences.values())
    if not any(differences.values()):
        console.print("All results are those of one process, bit for bit.")
    elif is_right:
        console.print(f"All results are those of one process, to {worst:.1g} of the largest element.")
    else:
        console.print(f"Results differ from those of one process, by more than {limit:g} of the largest element.")
    return is_right


def _row(name: str, outcome: Outcome, largest: float) -> list[str]:
    counts = (short_count(nbytes) for nbytes in (outcome.state_bytes, outcome.up_bytes))
    return [name, short_time(outcome.step_ms), *counts, "0" if largest == 0 else f"{largest:.1e}"]
