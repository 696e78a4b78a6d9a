"""Measure the ways to do a program, and choose the fastest for each size."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from omnireduce.errors import RefusedError, UsageError
from omnireduce.programs.communication import AllReduce, Communication
from omnireduce.programs.expressions import FLOATS, Bool, Expression, Tensor, Variable
from omnireduce.programs.layouts import Layout
from omnireduce.programs.library import PROGRAMS, schedules
from omnireduce.programs.lowering import lowered
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, size_value, sizes_in
from omnireduce.programs.rewrites import MAX_CHUNKS
from omnireduce.programs.shard_runner import OnShards, run_inputs, runs_on_shards
from omnireduce.programs.stages import Overlapped, reachable
from omnireduce.programs.whole_tensor_operations import MatMul, Update
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.files.cache import CACHE_VARIABLE, cache_folders
from omnireduce.support.files.output import make_folder, write_json
from omnireduce.support.logs import tagged
from omnireduce.support.version import __version__

log = logging.getLogger("omnireduce")


class TuningCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the timings depend on. `programs`: label and text of each candidate."""

    version: str
    programs: list[tuple[str, str]]
    sizes: list[dict[str, int]]
    hosts: list[str]
    transport: str


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Median milliseconds of each candidate, in order, for each of the sizes; None for one that cannot run."""

    case: TuningCase
    ms: list[list[float | None]]


def path_of(case: TuningCase, folder: Path) -> Path:
    """The file of a case."""
    return folder / "programs" / f"{hashlib.sha256(msgspec.json.encode(case)).hexdigest()[:32]}.json"


def recalled(case: TuningCase) -> list[list[float | None]] | None:
    """The timings, if they are known."""
    for folder in cache_folders():
        path = path_of(case, folder)
        try:
            timings = msgspec.json.decode(path.read_bytes(), type=Timings)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            _warn(f"{path}: not used: {error}")
            continue
        if timings.case == case and _fits(timings.ms, case):
            return timings.ms
        _warn(f"{path}: not used: it has the timings of another case")
    return None


def _fits(ms: Sequence[Sequence[float | None]], case: TuningCase) -> bool:
    return len(ms) == len(case.sizes) and all(
        len(row) == len(case.programs) and any(median is not None for median in row) for row in ms
    )


def remember(case: TuningCase, ms: list[list[float | None]]) -> None:
    """Write timings to their file."""
    reasons = [f"this user has no home folder: set {CACHE_VARIABLE}"]
    for folder in cache_folders():
        path = path_of(case, folder)
        try:
            make_folder(path.parent)
            write_json(msgspec.json.encode(Timings(case, ms)), path)
        except UsageError as error:
            reasons.append(str(error))
        else:
            return
    _warn(f"what was measured is not kept: {reasons[-1]}")


def _warn(message: str) -> None:
    log.warning(message, extra=tagged("autotune_cache"))


Sizes = Mapping[str, int]
ValuesMaker = Callable[[Pipeline, Communicator, Sizes], Mapping[str, Any]]
"""Makes what `Pipeline.run` is given on this rank."""


def sizes_of(pipeline: Pipeline, requested: int | Sizes) -> Sizes:
    """The sizes of dimensions: as given, or so that the largest tensor has about so many elements. Raises UsageError
    for something else."""
    names = [variable.name for variable in sizes_in(pipeline.nodes)]
    if isinstance(requested, Mapping):
        if set(requested) != set(names):
            raise UsageError(f"sizes {dict(requested)}: expected those of {', '.join(sorted(names))}")
        return {name: size_value(requested[name], name) for name in names}
    if isinstance(requested, bool) or not isinstance(requested, int | np.integer) or requested < 1:
        raise UsageError(
            f"size {requested!r}: expected a number of elements, from 1 on, or sizes of dimensions by name"
        )
    tensors = [node for node in pipeline.inputs if isinstance(node, Tensor)]
    max_dimensions = max(
        (sum(isinstance(dimension, Variable) for dimension in tensor.type.shape) for tensor in tensors), default=1
    )
    return dict.fromkeys(names, max(1, round(int(requested) ** (1 / max(1, max_dimensions)))))


def drawn_values(pipeline: Pipeline, comm: Communicator, sizes: Sizes) -> dict[str, Any]:
    """Small whole numbers in all tensors of this rank's group, of Local ones others on each rank; a rate of 0.01, and
    the first step."""
    ranks = comm.size // pipeline.groups
    group, rank = divmod(comm.rank, ranks)
    variables = {variable: sizes[variable.name] for variable in sizes_in(pipeline.nodes)}
    placement = RankPlacement(rank, ranks, variables)
    values: dict[str, Any] = {variable.name: sizes[variable.name] for variable in _sizes_of_group(pipeline, group)}
    for input_node in pipeline.inputs:
        if isinstance(input_node, Tensor) and input_node.type.group == group:
            is_local = input_node.type.layout is Layout.LOCAL
            rng = np.random.default_rng([*input_node.name.encode(), rank if is_local else 0])
            elements = rng.integers(-4 if is_local else 0, 5, placement.own_shape(input_node.type), np.int8)
            values[input_node.name] = elements.astype(input_node.type.dtype)
        elif isinstance(input_node, Variable) and input_node not in variables:
            dtype = input_node.type.dtype
            values[input_node.name] = True if dtype == Bool else 0.01 if dtype in FLOATS else 1
    return values


def _sizes_of_group(pipeline: Pipeline, group: int) -> list[Variable]:
    nodes: list[Expression] = [node for node in pipeline.nodes if node.type.group in (None, group)]
    return sizes_in(nodes)


class Trial:
    """A candidate with its values. All ranks make it, and call it alike. `number`: its own, of those that are open."""

    def __init__(self, candidate: Candidate, comm: Communicator, number: int, values: Mapping[str, Any]) -> None:
        self._comm, self._values = comm, dict(values)
        self._pipeline = candidate.pipeline.changed({}, program=f"autotune-{number}")  # begins collectives' names
        self._shards: OnShards | None = None
        if candidate.on_shards:
            run_names = [input_node.name for input_node in run_inputs(self._pipeline, lowered(self._pipeline))]
            state = {name: value for name, value in self._values.items() if name not in run_names}
            self._values = {name: value for name, value in self._values.items() if name in run_names}
            self._shards = self._pipeline.on_shards(comm, state)

    def run(self) -> float:
        """Milliseconds of one run on this rank, which begins when all are there."""
        self._comm.barrier(name="autotune: run")
        began = time.perf_counter()
        if self._shards is None:
            self._pipeline.run(self._comm, self._values)
        else:
            self._shards.run(self._values)
        return 1e3 * (time.perf_counter() - began)

    def close(self) -> None:
        """Give back what shards keep."""
        if self._shards is not None:
            self._shards.close()


CHUNKS = (2, 4, 8)
Program = str | Pipeline | Mapping[str, Pipeline]


class Candidate(NamedTuple):
    """A way to do a program. `chunks`: in how many a product is overlapped, None where none is; `on_shards`: whether
    its fused AllReduce runs there."""

    schedule: str
    pipeline: Pipeline
    chunks: int | None = None
    on_shards: bool = False

    @property
    def label(self) -> str:
        """The name in tables."""
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.schedule}{chunks}{', on shards' if self.on_shards else ''}"


def candidates(program: Program, chunks: Sequence[int] = CHUNKS, *, on_shards: bool = True) -> list[Candidate]:
    """All ways to do `program`: the name of one that is written already, schedules by name, or a pipeline, whose
    schedules are those of its name, or follow from it. Raises UsageError for something else."""
    if not isinstance(chunks, Sequence) or not chunks or not all(map(_is_chunks, chunks)):
        raise UsageError(f"chunks is {chunks!r}: expected a list of ints from 2 to {MAX_CHUNKS}")
    found_candidates = []
    for name, pipeline in _schedules(program).items():
        overlapped = next((compound for compound in pipeline.compounds if isinstance(compound, Overlapped)), None)
        if overlapped is None:
            found_candidates.append(Candidate(name, pipeline))
        else:
            found_candidates += [Candidate(name, _with_chunks(pipeline, overlapped, count), count) for count in chunks]
        if on_shards and runs_on_shards(pipeline):
            found_candidates.append(Candidate(name, pipeline, on_shards=True))
    return found_candidates


def _schedules(program: Program) -> Mapping[str, Pipeline]:
    if isinstance(program, Pipeline):
        is_ready = program.name in PROGRAMS and not program.compounds
        return schedules(program) if is_ready else derived(program)
    if isinstance(program, str):
        return schedules(program)
    if not isinstance(program, Mapping) or not all(isinstance(pipeline, Pipeline) for pipeline in program.values()):
        raise UsageError(f"got {type(program).__name__}; expected a program's name, a Pipeline, or several by name")
    if not program:
        raise UsageError("no schedules: expected one at least")
    return program


def _is_chunks(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 2 <= number <= MAX_CHUNKS


def _with_chunks(pipeline: Pipeline, overlapped: Overlapped, chunks: int) -> Pipeline:
    compounds = [
        replace(compound, chunks=chunks) if compound is overlapped else compound for compound in pipeline.compounds
    ]
    return pipeline.changed({}, compounds=compounds)


def derived(pipeline: Pipeline) -> dict[str, Pipeline]:
    """The schedules that follow from a pipeline. Schedules that are not legal are left out.

    as-written; ol: a product overlaps with its sum. For the first AllReduce that allows it, rs-c-ag: what follows is
    computed in parts, and what is updated is kept in parts, but for the first output; fuse-rs-c-ag: as one AllReduce.
    """
    schedules = {"as-written": pipeline}
    for node in pipeline.nodes:
        if not isinstance(node, AllReduce) or node not in pipeline.names:
            continue
        name, product = pipeline.names[node], node.operands[0]
        if isinstance(product, MatMul) and "ol" not in schedules:
            schedules |= _try_schedule("ol", Pipeline.overlap, pipeline, [product, node])
        if "rs-c-ag" not in schedules:
            schedules |= _try_schedule("rs-c-ag", _split_and_reorder, pipeline, name)
            if "rs-c-ag" in schedules:
                schedules |= _try_schedule("fuse-rs-c-ag", _fuse_all, schedules["rs-c-ag"], name)
    return schedules


def _try_schedule(name: str, rewrite: Callable[..., Pipeline], *arguments: object) -> dict[str, Pipeline]:
    """A schedule by its name, if its rewrites are legal."""
    try:
        return {name: rewrite(*arguments)}
    except UsageError:
        return {}


def _split_and_reorder(pipeline: Pipeline, name: str) -> Pipeline:
    """All that can be computed in parts behind the AllReduce is. Tensors that are updated are kept in parts, but for
    the first output: that is what ranks go on with."""
    cut = pipeline.split(name)
    dependents = [cut.names[node] for node in _computed_after(cut, cut[name])]
    cut = cut.reorder(dependents, name)
    first_output = cut.outputs[0]
    for update in [node for node in cut.nodes if isinstance(node, Update)]:
        if update is not first_output and update.tensor.type.layout is Layout.REPLICATED:
            cut = _sliced(cut, update.tensor)
    return cut


def _sliced(pipeline: Pipeline, tensor: Tensor) -> Pipeline:
    try:
        return pipeline.as_slice([tensor.name])
    except UsageError:
        return pipeline  # a stage needs it whole


def _computed_after(pipeline: Pipeline, gather: Expression) -> list[Expression]:
    """Stages that need `gather`, up to the next communication."""
    dependents = reachable([gather], pipeline.users)
    after_communication = reachable([node for node in dependents if isinstance(node, Communication)], pipeline.users)
    return [
        node
        for node in pipeline.nodes
        if node in dependents - after_communication and node in pipeline.names and not isinstance(node, Communication)
    ]


def _fuse_all(cut: Pipeline, name: str) -> Pipeline:
    ends = [cut.names[node] for node in cut.nodes if isinstance(node, Update)]
    return cut.fuse_into([f"{name}_rs", *ends])


TURNS, WARM_UP = 7, 2


class Choice(NamedTuple):
    """The fastest way for some sizes. `schedule`, `chunks`, `on_shards`: how; `pipeline`: that, to run or, where
    `on_shards`, for `Pipeline.on_shards`; `ms`: by label the median milliseconds of each way that can run here."""

    sizes: Sizes
    schedule: str
    chunks: int | None
    on_shards: bool
    pipeline: Pipeline
    ms: dict[str, float]


class Tuned(NamedTuple):
    """The choice for each of the sizes; `is_recalled`: whether it was known before."""

    choices: list[Choice]
    is_recalled: bool


def autotune(
    program: Program,
    comm: Communicator,
    *,
    sizes: Sequence[int | Sizes],
    values: ValuesMaker = drawn_values,
    chunks: Sequence[int] = CHUNKS,
    on_shards: bool = True,
    turns: int = TURNS,
    cache: bool = True,
) -> Tuned:
    """Find the fastest way to do `program` for each of `sizes`. All ranks of `comm` call this; all get the same answer.

    `program`: the name of one in `library`, pipelines by the names of schedules, or a Pipeline, from which they follow.
    `sizes`: of dimensions by name, or how many elements a tensor has, about. `values`: makes what a run is
    given; by default small whole numbers. `chunks`: numbers to try where a product is overlapped. `on_shards`: also try
    fused AllReduces on the shards. The ways take turns, each `turns` times; a time is that of the slowest rank, and a
    way counts by its median. Tensors that `values` makes are written.

    With `cache` the timings are kept in a file, and not taken again for the same program, sizes, hosts of ranks,
    transport and version of the library. Raises UsageError for what cannot be tuned; otherwise what runs raise.
    """
    options = candidates(program, chunks, on_shards=on_shards)
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise UsageError(f"turns is {turns!r}: expected an int from 1 on")
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"sizes is {sizes!r}: expected a list, such as [1000, 1_000_000]")
    all_sizes = [sizes_of(options[0].pipeline, requested) for requested in sizes]
    hosts = comm.allgather_object(socket.gethostname(), name="autotune: hosts")
    programs = [(option.label, str(option.pipeline)) for option in options]
    case = TuningCase(__version__, programs, [dict(dimensions) for dimensions in all_sizes], hosts, comm.transport)
    cached = recalled(case) if cache and comm.rank == 0 else None
    cached = comm.broadcast_object(cached, name="autotune: known")
    medians = cached or [_measured(options, comm, dimensions, values, turns) for dimensions in all_sizes]
    medians = comm.broadcast_object(medians, name="autotune: choice")  # of rank 0: so that all choose alike
    if cache and cached is None and comm.rank == 0:
        remember(case, medians)
    return Tuned([_choice(options, *pair) for pair in zip(all_sizes, medians, strict=True)], cached is not None)


def _measured(
    options: Sequence[Candidate], comm: Communicator, sizes: Sizes, values: ValuesMaker, turns: int
) -> list[float | None]:
    """The median milliseconds of each way; None where shards have no room for it."""
    with ExitStack() as stack:
        trials: dict[int, Trial] = {}
        for at, option in enumerate(options):
            trial = _trial(option, comm, at, values(option.pipeline, comm, sizes))
            if trial is not None:
                stack.callback(trial.close)
                trials[at] = trial
        times = np.zeros((len(options), turns))
        for turn in range(-WARM_UP, turns):
            for at in trials if turn % 2 else reversed(trials):
                ms = trials[at].run()
                if turn >= 0:
                    times[at, turn] = ms
        slowest = comm.allreduce(times, op="max", name="autotune: times")
        comm.barrier(name="autotune: done")
    medians = np.median(slowest, axis=1)
    return [float(medians[at]) if at in trials else None for at in range(len(options))]


def _trial(candidate: Candidate, comm: Communicator, number: int, values: Mapping[str, Any]) -> Trial | None:
    """The way, if shards have room for it."""
    try:
        return Trial(candidate, comm, number, values)
    except RefusedError:
        return None


def _choice(options: Sequence[Candidate], sizes: Sizes, medians: Sequence[float | None]) -> Choice:
    ms = {option.label: median for option, median in zip(options, medians, strict=True) if median is not None}
    best = min(options, key=lambda option: ms.get(option.label, float("inf")))
    return Choice(sizes, best.schedule, best.chunks, best.on_shards, best.pipeline, ms)
