"""Reductions of a traced job: its tensors by size, and the share of their blocks that the ranks had."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.core.wire.safe_text import listed
from omnireduce.errors import UsageError
from omnireduce.runtime.tracing.aligned_traces import Lane, missing, read_lanes, without_overlap
from omnireduce.runtime.tracing.trace import OF_TENSOR, SpanKind

MOST_BLOCKS = 1 << 27  # of a tensor: to draw more takes gigabytes
MOST_BLOCK_BYTES = 1 << 30
MOST_SIZES = 8  # each costs seconds to plan for thousands of ranks


class Size(NamedTuple):
    """Collectives of tensors of one size, `times` of them: `nbytes` in `blocks`, with `block_bytes` each. `density`:
    the share of its blocks that a rank brought, mean over ranks and collectives; `union_density`: the share that the
    results had."""

    times: int
    nbytes: int
    blocks: int
    block_bytes: int
    density: float
    union_density: float


class TracedReductions(NamedTuple):
    """The reductions of `job` on so many `ranks`: tensors, largest sums of bytes first; of how many sizes they were,
    for `sizes` has no more than MOST_SIZES; how many other collectives there were; for how long the tensors were under
    way, mean over the ranks; and spans that did not fit the traces."""

    job: str
    ranks: int
    sizes: list[Size]
    kinds: int
    others: int
    measured_s: float
    missed: int

    @property
    def all_reduces(self) -> int:
        return sum(size.times for size in self.sizes)


class _TracedRank(NamedTuple):
    """The collectives that one rank traced, in order: bytes; what its instants say, -1 where there are none, (n,
    OF_TENSOR); for how long each was under way, in nanoseconds."""

    nbytes: Array
    blocks: Array
    lasted: Array


def read_reduced(folder: str | Path, job: str | None = None) -> TracedReductions:
    """Read the traces of all ranks of a job.

    Collectives of which a rank has no trace, because its trace was full, do not count. Raises UsageError for what
    `read_lanes` refuses, without a trace of each rank, of one rank alone, for traces of different runs, and where no
    tensor was reduced.
    """
    lanes = read_lanes(folder, job)
    origin, ranks = lanes[0].origin, [lane for lane in lanes if lane.origin.kind == "rank"]
    if absent := [name for name in missing(lanes) if name.startswith("rank")]:
        raise UsageError(
            f"{folder}: expected a trace of each of the {origin.ranks} ranks of job '{origin.job}', got none of "
            f"{listed(absent)}; set trace.folder on all ranks, and bring the files of all hosts together"
        )
    if len(ranks) < 2:
        raise UsageError(
            f"{folder}: job '{origin.job}' has 1 rank; expected 2 or more, for what ranks have in common decides"
        )
    traces = _common_collectives(ranks)
    is_tensor = (traces[0].blocks >= 0).all(1)
    if not is_tensor.any():
        raise UsageError(
            f"{folder}: expected all-reduces of tensors, got none among the {is_tensor.size} collectives of job "
            f"'{origin.job}'; rows, broadcasts and barriers are not planned, and traces of older versions do not tell. "
            "Trace some steps of the training"
        )
    blocks = np.stack([trace.blocks[is_tensor] for trace in traces])
    sizes = _group_by_size(
        traces[0].nbytes[is_tensor], blocks[0, :, :2], blocks[:, :, 2].mean(0), blocks[:, :, 3].max(0)
    )
    return TracedReductions(
        job=origin.job,
        ranks=origin.ranks,
        sizes=combine_small_sizes(sizes, MOST_SIZES),
        kinds=len(sizes),
        others=int(np.count_nonzero(~is_tensor)),
        measured_s=float(np.mean([trace.lasted[is_tensor].sum() for trace in traces])) / 1e9,
        missed=sum(lane.origin.missed for lane in ranks),
    )


def _common_collectives(ranks: Sequence[Lane]) -> list[_TracedRank]:
    """The traces of the collectives that all ranks have recorded, which are the same on each."""
    traces = [_trace_of_lane(lane) for lane in ranks]
    count = min(trace.nbytes.size for trace in traces)
    traces = [_TracedRank(*(part[:count] for part in trace)) for trace in traces]
    first = traces[0]
    for lane, trace in zip(ranks, traces, strict=True):
        is_tensor = first.blocks[:, 0] >= 0
        differ = (trace.blocks[:, :2] != first.blocks[:, :2]).any(1) | (is_tensor & (trace.nbytes != first.nbytes))
        if differ.any():
            raise UsageError(
                f"the traces of {ranks[0].origin} and {lane.origin} do not fit together: collective "
                f"{int(np.argmax(differ))} is not the same; expected those of one run"
            )
    return traces


def _trace_of_lane(lane: Lane) -> _TracedRank:
    spans = lane.spans
    end_indices = np.flatnonzero(spans["what"] == SpanKind.COLLECTIVE)
    blocks = np.full((end_indices.size, len(OF_TENSOR)), -1)
    for column, kind in enumerate(OF_TENSOR):
        positions = np.flatnonzero(spans["what"] == kind)
        owners = np.searchsorted(end_indices, positions)  # the next collective to end
        blocks[owners[owners < end_indices.size], column] = spans["detail"][positions[owners < end_indices.size]]
    _check_tensors(lane, blocks)
    collectives = spans[end_indices]
    begins = without_overlap(collectives["start"], collectives["end"])
    return _TracedRank(collectives["detail"], blocks, collectives["end"] - begins)


def _check_tensors(lane: Lane, details: Array) -> None:
    """Raises UsageError unless what a trace tells of each tensor, (n, OF_TENSOR), may be true."""
    tensors = details[details[:, 0] >= 0]
    blocks, block_bytes, own, union = tensors.T
    is_valid = (blocks <= MOST_BLOCKS) & (block_bytes > 0) & (block_bytes <= MOST_BLOCK_BYTES)
    is_valid &= (own >= 0) & (own <= blocks) & (union >= 0) & (union <= blocks)
    if not is_valid.all():
        values = ", ".join(
            f"{kind.name} {detail}" for kind, detail in zip(OF_TENSOR, tensors[~is_valid][0].tolist(), strict=True)
        )
        raise UsageError(
            f"the trace of {lane.origin} of job '{lane.origin.job}' cannot be true: expected tensors of up to "
            f"{MOST_BLOCKS} blocks, of which ranks have some, got {values}"
        )


def _group_by_size(nbytes: Array, shapes: Array, own_blocks: Array, union_blocks: Array) -> list[Size]:
    """Group collectives of the same size."""
    keys, inverse, counts = np.unique(
        np.column_stack((nbytes, shapes)), axis=0, return_inverse=True, return_counts=True
    )
    block_counts = counts * np.maximum(1, keys[:, 1])
    densities = [
        np.bincount(inverse.reshape(-1), weights, counts.size) / block_counts for weights in (own_blocks, union_blocks)
    ]
    columns = counts.tolist(), *keys.T.tolist(), *(density.tolist() for density in densities)
    sizes = [Size(*row) for row in zip(*columns, strict=True)]
    return sorted(sizes, key=lambda size: -size.times * size.nbytes)


def combine_small_sizes(sizes: Sequence[Size], limit: int) -> list[Size]:
    """No more than `limit` sizes: those of the fewest bytes, if there are more, become as many tensors of one size."""
    largest, small_sizes = list(sizes[: limit - 1]), sizes[limit - 1 :]
    if len(small_sizes) <= 1:
        return list(sizes)

    def sum_over(value: Callable[[Size], float]) -> float:
        return sum(size.times * value(size) for size in small_sizes)

    count, blocks = sum(size.times for size in small_sizes), sum_over(lambda size: size.blocks)
    if not blocks:
        return largest
    nbytes, sent = sum_over(lambda size: size.nbytes), sum_over(lambda size: size.blocks * size.block_bytes)
    own_blocks = sum_over(lambda size: size.blocks * size.density)
    union_blocks = sum_over(lambda size: size.blocks * size.union_density)
    mean = Size(
        count, round(nbytes / count), max(1, round(blocks / count)), round(sent / blocks), own_blocks / blocks,
        union_blocks / blocks,
    )  # fmt: skip
    return [*largest, mean]
