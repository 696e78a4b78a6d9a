"""`omnireduce plan`: how long an all-reduce would take, and how to place ranks and shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console

from omnireduce.console.plan.candidates import Candidate, Study, Tensors, as_toml, shard_counts, study
from omnireduce.console.plan.model import Costs, Hosts
from omnireduce.console.plan.patterns import DrawnPatterns, KnownPatterns, TracedPatterns, read_all
from omnireduce.console.plan.traced_jobs import TracedReductions, read_reduced
from omnireduce.core.dtypes import ELEMENT_TYPES
from omnireduce.errors import UsageError
from omnireduce.support.cli import parse_numbers
from omnireduce.support.files.output import check_writable, write_json
from omnireduce.support.printing import density_text, make_console, short_count, short_time, table_of

MOST_SHARDS = 4096


class PlanRequest(NamedTuple):
    """The options of the command line: files of saved arrays, a folder of traces and a job of it, or a tensor as it is
    drawn; the ranks; the hosts."""

    files: Sequence[str]
    trace: str | None
    job: str | None
    elements: int
    dtype: str
    density: float
    overlap: str
    block_size: int
    ranks: int
    hosts: int
    link_gbps: float
    latency_us: float
    cores: float
    speed: float
    shards: str
    racks: int
    rack_gbps: float


def report_plan(request: PlanRequest, json_path: str | None) -> None:
    """Print the predictions and the best plan. Raises UsageError, FileError."""
    if json_path:
        check_writable(json_path)
    if request.block_size % 8:
        raise UsageError(f"--block-size {request.block_size}: expected a multiple of 8")
    if request.ranks % request.hosts:
        raise UsageError(f"{request.ranks} ranks on {request.hosts} hosts: expected as many ranks on each host")
    if request.racks and request.hosts % request.racks:
        raise UsageError(f"{request.hosts} hosts in {request.racks} racks: expected as many hosts in each rack")
    reduced = None if request.trace is None else read_reduced(request.trace, request.job)
    work = [_requested_tensor(request)] if reduced is None else _traced_tensors(reduced)
    hosts = Hosts(
        request.hosts, request.cores, request.link_gbps * 1e9 / 8, request.latency_us * 1e-6,
        racks=request.racks, rack_bytes_per_s=(request.rack_gbps or request.link_gbps) * 1e9 / 8,
    )  # fmt: skip
    shards = shard_counts(request.hosts, request.ranks // request.hosts)
    if request.shards:
        shards = sorted(set(parse_numbers("--shards", request.shards, 1, MOST_SHARDS)))
    result = study(work, hosts, request.ranks // request.hosts, shards, costs=Costs().at(request.speed))
    _print(make_console(), request, result, sum(tensors.nbytes for tensors in work), reduced)
    if json_path:
        write_json(msgspec.json.encode(_as_json(result, reduced)), json_path)


def _traced_tensors(reduced: TracedReductions) -> list[Tensors]:
    """The tensors of a traced job, as any number of ranks would have them."""
    return [
        Tensors(
            TracedPatterns(size.blocks, size.density, size.union_density, reduced.ranks, seed),
            size.block_bytes,
            size.times,
        )
        for seed, size in enumerate(reduced.sizes)
    ]


def _requested_tensor(request: PlanRequest) -> Tensors:
    """One tensor: that of the files, or one that is drawn."""
    if request.files:
        masks, itemsize = read_all(request.files, request.block_size)
        if len(masks) != request.ranks:
            raise UsageError(f"{len(masks)} files for {request.ranks} ranks: expected one of each rank")
        return Tensors(KnownPatterns(masks), request.block_size * itemsize)
    blocks = -(-request.elements // request.block_size)
    if request.dtype not in ELEMENT_TYPES:
        raise UsageError(f"--dtype {request.dtype}: expected one of {', '.join(ELEMENT_TYPES)}")
    itemsize = ELEMENT_TYPES[request.dtype].itemsize
    patterns = DrawnPatterns(blocks, request.density, request.overlap, request.ranks)
    return Tensors(patterns, request.block_size * itemsize)


def _print(
    console: Console, request: PlanRequest, result: Study, nbytes: int, reduced: TracedReductions | None
) -> None:
    if reduced is not None:
        _print_reduced(console, reduced)
    console.print(
        f"{short_count(nbytes)} bytes on {request.ranks} ranks, {request.hosts} hosts of {request.cores:g} processors, "
        f"links of {request.link_gbps:g} Gbit/s and {request.latency_us:g} us\n"
        f"density of one sender {density_text(result.density)}, of all together {density_text(result.union_density)}"
    )
    titles = ("shards", "where", "ranks", "time ms", "busiest link", "processor ms", "memory of a shard")
    table = table_of(titles, left=("where", "ranks"))
    for candidate in sorted(result.candidates, key=lambda candidate: candidate.prediction.seconds):
        table.add_row(*_cells(candidate), style="bold" if candidate is result.best else None)
    console.print(table)
    verdict = "" if result.ring_s > result.best.prediction.seconds else ": no plan here is faster"
    console.print(f"a ring that sends everything: {short_time(result.ring_s * 1e3)} ms at least{verdict}")
    if reduced is not None:
        console.print(f"measured in the trace: {short_time(reduced.measured_s * 1e3)} ms on {reduced.ranks} ranks")
    block_size = request.block_size if reduced is None else None
    console.print("\n" + as_toml(result.best.plan, request.hosts, block_size), end="")


def _print_reduced(console: Console, reduced: TracedReductions) -> None:
    """Print the collectives in the trace, and those that are planned."""
    console.print(
        f"job '{reduced.job}', traced on {reduced.ranks} ranks: the times below are of all its {reduced.all_reduces} "
        f"all-reduces of tensors together"
    )
    if reduced.others:
        console.print(
            f"other collectives, which are not planned (rows, broadcasts, barriers and such): {reduced.others}"
        )
    if reduced.missed:
        console.print(f"the traces were full and miss {reduced.missed} spans: the job had more; raise trace.events")
    table = table_of(("all-reduces", "bytes of each", "blocks", "density", "of all together"))
    for size in reduced.sizes:
        shares = density_text(size.density), density_text(size.union_density)
        table.add_row(str(size.times), short_count(size.nbytes), str(size.blocks), *shares)
    console.print(table)
    if reduced.kinds > len(reduced.sizes):
        together = reduced.kinds - len(reduced.sizes) + 1
        console.print(f"the last row stands for the {together} sizes with the fewest bytes, by their means")
    console.print()


def _cells(candidate: Candidate) -> list[str]:
    plan, prediction = candidate
    placement = "hosts of their own" if plan.dedicated else "beside ranks"
    return [
        str(plan.shards),
        f"{placement}, relays" if plan.relays else placement,
        "by host" if plan.by_host else "one by one",
        short_time(prediction.seconds * 1e3),
        short_count(prediction.link_bytes),
        short_time(prediction.processor_s * 1e3),
        short_count(prediction.shard_bytes),
    ]


def _as_json(result: Study, reduced: TracedReductions | None) -> dict[str, object]:
    rows = [
        candidate.plan._asdict() | candidate.prediction._asdict() | {"best": candidate is result.best}
        for candidate in result.candidates
    ]
    traced = (
        {} if reduced is None else {"trace": reduced._asdict() | {"sizes": [size._asdict() for size in reduced.sizes]}}
    )
    return {
        "plans": rows,
        "ring_s": result.ring_s,
        "density": result.density,
        "union_density": result.union_density,
    } | traced
