"""The table of the tutorial's second exercise: goodput by numbers of threads and sizes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
from rich.table import Table

from omnireduce.config import override_config
from omnireduce.files.output import write_json
from omnireduce.printing import carriers_text, make_console, short_count, times_text
from omnireduce.switchml import Context, Distribution, Settings
from omnireduce.worker.switchml.benchmark import BenchmarkOptions, ns_of_jobs, run_groups
from omnireduce.worker.switchml.signals import SignalThread, nothing


class Cell(msgspec.Struct, frozen=True):
    """`goodput_gbps`: of all jobs together. `wrong`: elements, on all ranks."""

    threads: int
    tensor_numel: int
    goodput_gbps: float
    job_ns: Distribution
    wrong: int


def run_table(
    settings: Settings, asked: BenchmarkOptions, threads: Sequence[int], sizes: Sequence[int], json_path: str | None
) -> int:
    """Run the benchmark in each cell; return how many elements were wrong. The context starts anew for
    each number of threads. Rank 0 prints, and writes to `json_path`."""
    context, cells = Context.instance(), list[Cell]()
    for count in threads:
        config = override_config(settings.config, {"transport.threads": count}, source="--threads")
        with context.start(settings._replace(config=config)), SignalThread(context, nothing):
            cells += [_cell(context, replace(asked, tensor_numel=size), count) for size in sizes]
    comm = context.communicator
    console = make_console(quiet=comm.rank != 0)
    shards = "1 shard" if comm.shards == 1 else f"{comm.shards} shards"
    transport = carriers_text(comm.statistics().carried)  # of the last number of threads
    title = f"goodput, Gbit/s: {comm.size} ranks, {shards}, {transport}, {asked.tensor_type}"
    table = Table(title=title, title_justify="left")
    table.add_column("elements", justify="right")
    for count in threads:
        table.add_column(f"{count} threads" if count > 1 else "1 thread", justify="right")
    for size in sizes:
        row = [cell for cell in cells if cell.tensor_numel == size]
        table.add_row(short_count(size), *(f"{cell.goodput_gbps:.4g}" for cell in row))
    console.print(table)
    console.print(trend(cells))
    if json_path is not None and comm.rank == 0:
        write_json(msgspec.json.encode(cells), json_path)
    return sum(cell.wrong for cell in cells)


def _cell(context: Context, asked: BenchmarkOptions, threads: int) -> Cell:
    groups, wrong = run_groups(context, asked, nothing)
    goodput = asked.tensor_numel * 32 * asked.num_jobs / sum(group.ns for group in groups)
    return Cell(threads, asked.tensor_numel, goodput, ns_of_jobs(groups), wrong)


def trend(cells: Sequence[Cell]) -> str:
    """The change of the goodput from the fewest threads to the most, and from the smallest tensor to the largest."""
    goodput = {(cell.threads, cell.tensor_numel): cell.goodput_gbps for cell in cells}
    threads, sizes = sorted({cell.threads for cell in cells}), sorted({cell.tensor_numel for cell in cells})
    by_threads = [goodput[threads[-1], size] / goodput[threads[0], size] for size in sizes]
    by_size = [goodput[count, sizes[-1]] / goodput[count, sizes[0]] for count in threads]
    return (
        f"trend: from {threads[0]} to {threads[-1]} threads {_span(by_threads)} the goodput; "
        f"from {short_count(sizes[0])} to {short_count(sizes[-1])} elements {_span(by_size)}"
    )


def _span(factors: Sequence[float]) -> str:
    return f"{times_text(min(factors))} to {times_text(max(factors))}"
