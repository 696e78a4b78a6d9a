"""`omnireduce density`: how block-sparse the arrays in files are, and whether the service would help."""

from __future__ import annotations

from collections.abc import Sequence

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnireduce.console.density.estimate import (
    HELPS,
    Density,
    Estimate,
    MethodEstimate,
    advise,
    estimate,
    measure,
)
from omnireduce.console.plan.model import COLLECTIVE_MS, RING_MS
from omnireduce.errors import UsageError
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.files.tensors import FileError, Tensor, read_tensors
from omnireduce.support.printing import density_text, make_console, short_count, short_time, table_of, times_text

LITTLE_LOST = 0.02  # of the norm: a method that loses at most this share in a step counts as losing little


class ArrayReport(msgspec.Struct, frozen=True):
    """One array. `density` is that of its elements; the estimates hold those of its blocks. `methods`: other ways to
    send it, if they were asked for."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    bytes: int
    density: float
    estimates: list[Estimate]
    methods: list[MethodEstimate]


class FileReport(msgspec.Struct, frozen=True):
    """One file: its arrays, the estimates for all of them together, and what could not be read."""

    file: str
    world_size: int
    link_gbps: float
    arrays: list[ArrayReport]
    estimates: list[Estimate]
    best_block_size: int | None
    helps: bool
    errors: list[str]


def report_files(
    files: Sequence[str],
    *,
    block_sizes: Sequence[int],
    world_size: int,
    link_gbps: float,
    json_path: str | None,
    methods: bool = False,
) -> bool:
    """Print a report of each file, with `methods` of compression for each array. Return whether all arrays of all
    files could be read; errors go to stderr."""
    if json_path:
        check_writable(json_path)
    console = make_console()
    reports: list[FileReport] = []
    for file in files:
        report = _report(file, block_sizes, world_size, link_gbps, methods)
        if report.arrays:
            if reports:
                console.print()
            _print(console, report)
        for error in report.errors:
            click.echo(f"Error: {error}", err=True)
        reports.append(report)
    if json_path:
        write_json(msgspec.json.encode(reports), json_path)
    return not any(report.errors for report in reports)


def _report(file: str, block_sizes: Sequence[int], world_size: int, link_gbps: float, methods: bool) -> FileReport:
    arrays: list[ArrayReport] = []
    parts: list[Density] = []
    errors: list[str] = []

    def estimates(densities: Sequence[Density]) -> list[Estimate]:
        return [estimate(densities, size, world_size=world_size, link_gbps=link_gbps) for size in block_sizes]

    try:
        for tensor in read_tensors(file):
            try:
                part = measure(tensor.values, block_sizes)
            except UsageError as error:
                errors.append(f"{file}: {tensor.name}: {error}")
                continue
            parts.append(part)
            advice = list[MethodEstimate]()
            if methods:
                advice = advise(tensor.values, tensor.shape, part, world_size=world_size, link_gbps=link_gbps)
            arrays.append(_array_report(tensor, part, estimates([part]), advice))
    except FileError as error:
        errors.append(str(error))
    if not arrays and not errors:
        errors.append(f"{file}: holds no arrays")
    totals = estimates(parts)
    best = _best(totals)
    return FileReport(
        file=file,
        world_size=world_size,
        link_gbps=link_gbps,
        arrays=arrays,
        estimates=totals,
        best_block_size=best.block_size if best.speedup else None,
        helps=best.helps,
        errors=errors,
    )


def _array_report(
    tensor: Tensor, part: Density, estimates: list[Estimate], methods: list[MethodEstimate]
) -> ArrayReport:
    return ArrayReport(
        name=tensor.name,
        shape=tensor.shape,
        dtype=str(tensor.values.dtype.newbyteorder("=")),
        elements=part.elements,
        bytes=part.bytes,
        density=part.element_density,
        estimates=estimates,
        methods=methods,
    )


def _print(console: Console, report: FileReport) -> None:
    console.print(Text(report.file, style="bold"))
    console.print(_arrays_table(report))
    console.print(
        Text(
            f"\nPredicted all-reduce of this among {report.world_size} workers, {report.link_gbps:g} Gbit/s "
            "each way, non-zero blocks at\n"
            "independent places on each worker; up and down are bytes per worker, the times include\n"
            f"{COLLECTIVE_MS:g} ms for messages and wake-ups of each array, {RING_MS:g} ms for the ring"
        )
    )
    console.print(_estimates_table(report))
    for array in report.arrays:
        if array.methods:
            console.print(Text(f"\n{array.name}: what each method would take, and what one step of it would lose"))
            console.print(_methods_table(array.methods))
            console.print(Text(_advice(array.methods), style="bold"))
    console.print(Text(_verdict(report), style="bold"))


def _arrays_table(report: FileReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("array", overflow="fold", vertical="bottom")
    table.add_column("shape", overflow="fold", vertical="bottom", min_width=12)
    for title in ("dtype", "bytes", "density:\nelements"):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for estimated in report.estimates:
        table.add_column(f"blocks\nof {estimated.block_size}", justify="right", no_wrap=True, vertical="bottom")
    for array in report.arrays:
        densities = [array.density, *(estimated.density for estimated in array.estimates)]
        shape = "x".join(map(str, array.shape)) or "scalar"
        names = (Text(array.name), Text(shape), array.dtype, short_count(array.bytes))
        table.add_row(*names, *map(density_text, densities))
    return table


def _estimates_table(report: FileReport) -> Table:
    table = table_of(("block", "density", "union", "up", "down", "time ms", "dense ring ms", "speed-up"))
    for estimated in report.estimates:
        table.add_row(
            str(estimated.block_size),
            density_text(estimated.density),
            density_text(estimated.union_density),
            short_count(estimated.wire_up_bytes),
            short_count(estimated.wire_down_bytes),
            short_time(estimated.time_ms),
            short_time(estimated.dense_time_ms),
            times_text(estimated.speedup),
            style="bold" if estimated.helps and estimated.block_size == report.best_block_size else None,
        )
    return table


def _methods_table(methods: Sequence[MethodEstimate]) -> Table:
    table = table_of(("method", "up", "down", "time ms", "speed-up", "lost"), left=("method",))
    for row in methods:
        table.add_row(
            row.method, short_count(row.wire_up_bytes), short_count(row.wire_down_bytes), short_time(row.time_ms),
            times_text(row.speedup), "nothing" if row.exact else f"{row.lost:.2%}",
        )  # fmt: skip
    return table


def _advice(methods: Sequence[MethodEstimate]) -> str:
    """The fastest that is exact, and the fastest of those that lose little."""
    exact = max((method for method in methods if method.exact), key=lambda method: method.speedup)
    nearly_exact = max((method for method in methods if method.lost <= LITTLE_LOST), key=lambda method: method.speedup)
    text = f"Exact: {exact.method}, {times_text(exact.speedup)} as fast as a dense ring"
    if nearly_exact.speedup < HELPS * exact.speedup:
        return f"{text}; no method that loses less than {LITTLE_LOST:.0%} is faster"
    speed = times_text(nearly_exact.speedup)
    return f"{text}; {nearly_exact.method} would lose {nearly_exact.lost:.2%} in a step, {speed} as fast"


def _verdict(report: FileReport) -> str:
    best = _best(report.estimates)
    if not best.speedup:
        return "There is nothing to reduce in this file"
    speed_text = f"{times_text(best.speedup)} as fast as a dense ring all-reduce"
    if not report.helps:
        is_latency_bound = best.time_ms < 2 * COLLECTIVE_MS * len(report.arrays)
        reason = "; arrays this small pay for latency: reduce them together" if is_latency_bound else ""
        return f"The service would not help: at best {speed_text}{reason}"
    return f"The service would help: {speed_text}, with protocol.block_size={best.block_size}"


def _best(estimates: Sequence[Estimate]) -> Estimate:
    """The fastest; of equal ones the one with the largest blocks, which cost least to handle."""
    return max(estimates, key=lambda estimated: (estimated.speedup, estimated.block_size))
