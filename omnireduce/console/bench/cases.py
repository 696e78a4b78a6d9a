"""The cases of a benchmark, one for each row, of synthetic tensors or of those in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from omnireduce.console.bench.data import Dataset, check_data, check_reduction
from omnireduce.console.bench.recorded_tensors import RecordedArray, RecordedTensors, find_arrays
from omnireduce.core.descriptor import Op
from omnireduce.support.config import Config
from omnireduce.support.printing import density_text, short_count, short_time, times_text


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One case of a benchmark, as its JSON has it. Times are those of the slowest rank, over the timed rounds.

    `transport` is what carried the tensors in the timed rounds, as the ranks have counted it: see `carriers_text`.
    `bytes` is the size of one rank's tensor, `density` the mean over ranks. `algbw_gbps`, the algorithm bandwidth, is
    `bytes` / median time in GB/s (1e9 bytes per second). `wire_up_bytes` and `wire_down_bytes` are what one worker
    sends to and receives from all shards for one collective, framing included, mean over workers and timed rounds.
    `wrong` counts the wrong elements of all ranks in all rounds, warm-up included. `mpi_time_ms` is the median of MPI's
    all-reduce, in place or out of place, whichever is faster. `speedup` is `mpi_time_ms` / `time_ms`. Where MPI was not
    measured, both are None and not in the JSON.
    """

    transport: str
    world_size: int
    shards: int
    op: str
    dtype: str
    elements: int
    bytes: int
    block_size: int
    density: float
    union_density: float
    time_ms: float
    time_ms_p90: float
    time_ms_min: float
    algbw_gbps: float
    wire_up_bytes: int
    wire_down_bytes: int
    wrong: int
    mpi_time_ms: float | None = None
    speedup: float | None = None


class RowTable:
    """Prints rows as they come, one line each, with a line above for what the following rows share."""

    def __init__(self, console: Console, *, against_mpi: bool = False) -> None:
        self._console, self._against_mpi = console, against_mpi
        self._heading = ""

    def add(self, row: Row, data: str) -> None:
        """Print `row`; `data` says what was reduced ("random overlap")."""
        heading = _heading(row, data)
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=not self._heading)
        cells = _cells(row, against_mpi=self._against_mpi)
        for title, width, _ in cells:
            table.add_column(title, min_width=width, justify="right", no_wrap=True, vertical="bottom")
        table.add_row(*(text for _, _, text in cells), style="bold red" if row.wrong else None)
        if heading != self._heading:
            self._console.print(Text(heading, style="bold"))
            self._heading = heading
        self._console.print(table)


def _heading(row: Row, data: str) -> str:
    workers = f"{row.world_size} worker{'s' if row.world_size > 1 else ''}"
    shards = f"{row.shards} shard{'s' if row.shards > 1 else ''}"
    return f"{workers}, {shards}, {row.transport}; {row.op}, blocks of {row.block_size}, {data}"


def _cells(row: Row, *, against_mpi: bool) -> list[tuple[str, int, str]]:
    """Title, least width and text of each cell of the row."""
    elements = str(row.elements)
    cells = [
        ("bytes", 6, short_count(row.bytes)),
        ("elements", 8, elements if len(elements) <= 8 else short_count(row.elements)),
        ("dtype", 8, row.dtype),
        ("density", 7, density_text(row.density)),
        ("union", 6, density_text(row.union_density)),
        ("median\nms", 6, short_time(row.time_ms)),
        ("p90\nms", 6, short_time(row.time_ms_p90)),
        ("min\nms", 6, short_time(row.time_ms_min)),
        ("GB/s", 5, f"{row.algbw_gbps:.4g}"[:5]),
        ("up\nbytes", 6, short_count(row.wire_up_bytes)),
        ("down\nbytes", 6, short_count(row.wire_down_bytes)),
        ("wrong", 5, str(row.wrong)),
    ]
    if against_mpi:
        cells.append(("MPI\nms", 6, "" if row.mpi_time_ms is None else short_time(row.mpi_time_ms)))
        cells.append(("speed\nup", 6, "" if row.speedup is None else times_text(row.speedup)))
    return cells


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyntheticCase:
    """A `Case` of synthetic tensors; see `Dataset`."""

    elements: int
    dtype: str
    op: Op
    block_size: int
    overlap: str
    density: float
    seed: int
    distribution: str = "uniform"

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype}[{self.elements}], density {self.density:g}"

    @property
    def data(self) -> str:
        return f"{self.overlap} overlap{', Zipf' if self.distribution == 'zipf' else ''}"

    def check(self, world_size: int) -> None:
        check_data(self.dtype, self.op, self.density, self.overlap, world_size, self.distribution)

    def tensors(self, world_size: int) -> TensorSource:
        return Dataset(
            self.elements,
            dtype=self.dtype,
            block_size=self.block_size,
            density=self.density,
            overlap=self.overlap,
            op=self.op,
            world_size=world_size,
            seed=self.seed,
            distribution=self.distribution,
        )


@dataclass(frozen=True, slots=True)
class RecordedCase:
    """A `Case` of arrays in files, one file for each rank; see `RecordedTensors`."""

    array: RecordedArray
    op: Op
    block_size: int

    def __str__(self) -> str:
        return f"{self.op} of {self.array}"

    @property
    def elements(self) -> int:
        return self.array.elements

    @property
    def dtype(self) -> str:
        return self.array.dtype

    @property
    def data(self) -> str:
        return str(self.array)

    def check(self, world_size: int) -> None:
        check_reduction(self.dtype, self.op)

    def tensors(self, world_size: int) -> TensorSource:
        return RecordedTensors(self.array, self.op, self.block_size)


# One row of a benchmark: a tensor of `elements` on each rank, and which reduction of it. `check` raises UsageError if
# `tensors` would, without making them.
Case = SyntheticCase | RecordedCase
# The tensors of all ranks for a benchmark, and the oracle that knows what their all-reduce gives.
TensorSource = Dataset | RecordedTensors


def synthetic_cases(config: Config) -> list[SyntheticCase]:
    """The sweep: every combination of the values that [bench] lists, the density varying fastest."""
    bench = config.bench
    ops: tuple[Op, ...] = _listed(bench.op)
    dtypes: tuple[str, ...] = _listed(bench.dtype)
    return [
        SyntheticCase(
            elements=elements, dtype=dtype, op=op, block_size=block_size, overlap=overlap, density=density,
            seed=bench.seed, distribution=distribution,
        )
        for elements in _listed(bench.elements)
        for dtype in dtypes
        for op in ops
        for block_size in _block_sizes(config)
        for distribution in _listed(bench.distribution)
        for overlap in _listed(bench.overlap)
        for density in _listed(bench.density)
    ]  # fmt: skip


def recorded_cases(config: Config, pattern: str, world_size: int) -> list[RecordedCase]:
    """Every array in the files that `pattern` names, with each op and block size of [bench].

    Raises FileError or UsageError; see `find_arrays`.
    """
    arrays = find_arrays(pattern, world_size)
    ops: tuple[Op, ...] = _listed(config.bench.op)
    return [
        RecordedCase(array, op, block_size) for op in ops for block_size in _block_sizes(config) for array in arrays
    ]


def _block_sizes(config: Config) -> list[int]:
    return [size or config.protocol.block_size for size in _listed(config.bench.block_size)]


def _listed(value: T | tuple[T, ...]) -> tuple[T, ...]:
    return value if isinstance(value, tuple) else (value,)
