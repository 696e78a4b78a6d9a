"""`omnireduce coconet run` on a rank: the schedules of a program, and the result of one process beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import omnireduce as omni
from omnireduce.console.rank_processes import RankRequest
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.programs import Local, Pipeline, Tensor
from omnireduce.programs.library import schedules
from omnireduce.programs.library.schedules import STATE
from omnireduce.programs.placement import RankPlacement
from omnireduce.programs.rank_groups import resources_of
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import Config
from omnireduce.support.printing import carriers_text, make_console, short_count, short_time, table_of

RATE = 0.01
TOLERANCE = 1e-6  # of the largest element, where ranks add up in another order than one process
INEXACT_PROGRAMS = ("lamb",)
UPDATED_INPUTS = ("w", "m", "v")  # what optimizers update


class Request(RankRequest, frozen=True, kw_only=True):
    """The options of the command line; see `omnireduce coconet run --help`."""

    program: str
    schedule: str | None
    elements: int
    steps: int
    seed: int

    @property
    def is_optimizer(self) -> bool:
        return self.program in STATE

    def pipelines(self) -> dict[str, Pipeline]:
        """The schedules to run. Raises UsageError for a program or a schedule that does not exist."""
        return choose_pipelines(self.program, self.schedule)


def run(request: Request, config: Config) -> bool:
    """Run the schedules, as all ranks do. Rank 0 prints a table. Returns whether all results are right, as far as this
    rank knows."""
    with omni.connect(config) as comm:
        outcomes = {name: _run_on_all_ranks(request, pipeline, comm) for name, pipeline in request.pipelines().items()}
        size, transport = comm.size, carriers_text(comm.statistics().carried)
    return comm.rank > 0 or _report(request, outcomes, size, transport)


def _run_on_all_ranks(request: Request, pipeline: Pipeline, comm: Communicator) -> Outcome:
    """Run a schedule. The result is NaN if it is not the same on all ranks that have it."""
    outcome = run_schedule(request, pipeline, comm)
    result: Array = comm.broadcast_object(outcome.result, comm.size - 1, name="coconet: result")
    is_same = outcome.result is None or np.array_equal(outcome.result, result)
    if not all(comm.allgather_object(is_same, name="coconet: same")):
        result = np.full_like(result, np.nan)
    return outcome._replace(result=result)


def _report(request: Request, outcomes: dict[str, Outcome], size: int, transport: str) -> bool:
    """Print the schedules, and return whether all results are as they should be."""
    expected = reference(request, size)
    titles = ("schedule", "ms/step", "state", "up", "largest difference")
    console, table = make_console(), table_of(titles, left=("schedule",), no_wrap=False)
    differences = {name: difference(outcome.result, expected) for name, outcome in outcomes.items()}
    for name, outcome in outcomes.items():
        table.add_row(*_row(name, outcome, differences[name]))
    size_text = f"{request.elements} elements, {request.steps} step{'s' * (request.steps > 1)}"
    console.print(f"{request.program} on {size} rank{'s' * (size > 1)}: {size_text}, {transport}")
    console.print(table)
    limit = TOLERANCE if request.program in INEXACT_PROGRAMS else 0.0
    is_right = all(largest <= limit for largest in differences.values())  # not where it is NaN
    largest_difference = max(differences.values())
    if not any(differences.values()):
        console.print("All results are those of one process, bit for bit.")
    elif is_right:
        console.print(f"All results are those of one process, to {largest_difference:.1g} of the largest element.")
    else:
        console.print(f"Results differ from those of one process, by more than {limit:g} of the largest element.")
    return is_right


def _row(name: str, outcome: Outcome, largest: float) -> list[str]:
    counts = (short_count(nbytes) for nbytes in (outcome.state_bytes, outcome.up_bytes))
    return [name, short_time(outcome.step_ms), *counts, "0" if largest == 0 else f"{largest:.1e}"]


def choose_pipelines(program: str, schedule: str | None) -> dict[str, Pipeline]:
    """The schedules that a command line names; None: all. Raises UsageError for what does not exist."""
    pipelines = schedules(program)
    if schedule is None:
        return pipelines
    if schedule not in pipelines:
        raise UsageError(f"--schedule {schedule}: expected one of {', '.join(pipelines)} for {program}")
    return {schedule: pipelines[schedule]}


def check_ranks(ranks: int, pipelines: Iterable[Pipeline]) -> None:
    """Raises UsageError where so many ranks are not so many groups of one size as one of these wants."""
    groups = max(pipeline.groups for pipeline in pipelines)
    if ranks % groups:
        raise UsageError(f"-np {ranks}: expected a multiple of {groups}, for so many groups of ranks")


class Outcome(NamedTuple):
    """The result of a schedule; None on a rank whose group does not have it. `step_ms`: the median of a step;
    `state_bytes`: what is kept between steps; `up_bytes`: what was sent in a step."""

    result: Array | None
    step_ms: float
    state_bytes: int
    up_bytes: int


class Values:
    """The values of all inputs, which follow from the seed. `ranks` is how many a group has."""

    def __init__(self, request: Request, ranks: int) -> None:
        self._request, self._ranks = request, ranks
        side = max(1, math.isqrt(request.elements))
        self.sizes = {"N": request.elements, "T": side, "K": side, "H": side}

    def whole_tensor(self, tensor: Tensor, step: int, rank: int = 0) -> Array:
        """The whole tensor in this step. Each rank has another one, if it is Local."""
        shape = tuple(
            dimension if isinstance(dimension, int) else self.sizes[dimension.name] for dimension in tensor.type.shape
        )
        if tensor.name in ("m", "v"):
            return np.zeros(shape, np.float32)
        varies = (rank, step) if tensor.type.layout is Local else (0, 0)
        rng = np.random.default_rng([self._request.seed, *tensor.name.encode(), *varies])
        if self._request.is_optimizer:
            return rng.standard_normal(shape, np.float32)
        return rng.integers(-3, 4, shape).astype(np.float32)  # so that sums are exact in any order

    def part(self, tensor: Tensor, step: int, rank: int) -> Array:
        """The part of the tensor that `rank` has."""
        whole_tensor, layout = self.whole_tensor(tensor, step, rank), tensor.type.layout
        if not layout.is_sliced:
            return whole_tensor
        return np.array(RankPlacement(rank, self._ranks, {}).part(whole_tensor, layout), order="C")

    def numbers(self, pipeline: Pipeline, step: int) -> dict[str, Any]:
        """The Variables of a step, and the sizes."""
        known_sizes = {name for name in pipeline.names.values() if name in self.sizes}
        names = {variable.name for variable in pipeline.inputs}
        return {name: self.sizes[name] for name in known_sizes - names} | {
            name: value for name, value in (("lr", RATE), ("t", step)) if name in names
        }


def run_schedule(request: Request, pipeline: Pipeline, comm: Communicator) -> Outcome:
    """Run the steps, as all ranks do."""
    ranks = comm.size // pipeline.groups
    group, rank = divmod(comm.rank, ranks)
    values = Values(request, ranks)
    tensors = [tensor for tensor in pipeline.inputs if isinstance(tensor, Tensor) and tensor.type.group == group]
    persistent = {tensor.name: values.part(tensor, 1, rank) for tensor in tensors if tensor.type.layout is not Local}
    outputs: dict[str, Array] = {}
    times, sent = [], _sent_bytes(comm)
    for step in range(1, request.steps + 1):
        step_inputs = {
            tensor.name: values.part(tensor, step, rank) for tensor in tensors if tensor.type.layout is Local
        }
        comm.barrier(name="coconet: step")
        started_at = time.perf_counter()
        outputs = pipeline.run(comm, {**persistent, **step_inputs, **values.numbers(pipeline, step)})
        times.append(time.perf_counter() - started_at)
    sent = _sent_bytes(comm) - sent
    state = sum(persistent[name].nbytes for name in STATE.get(request.program, ()))
    result = outputs.get(pipeline.output_names[0])
    return Outcome(result, 1e3 * float(np.median(times)), state, sent // request.steps)


def _sent_bytes(comm: Communicator) -> int:
    """The bytes that this rank has sent so far, in groups, too."""
    return sum(communicator.statistics().sent_bytes for communicator in [comm, *resources_of(comm).communicators])


def reference(request: Request, size: int) -> Array:
    """The result of a program by its definition, computed in this process."""
    pipeline = next(iter(schedules(request.program).values()))
    ranks = size // pipeline.groups
    values = Values(request, ranks)
    tensors = [tensor for tensor in pipeline.inputs if isinstance(tensor, Tensor)]
    persistent = {tensor.name: [values.part(tensor, 1, rank) for rank in range(ranks)] for tensor in tensors}
    outputs: dict[str, list[Array]] = {}
    for step in range(1, request.steps + 1):
        step_inputs = {
            tensor.name: [values.part(tensor, step, rank) for rank in range(ranks)]
            for tensor in tensors
            if tensor.type.layout is Local
        }
        outputs = pipeline.interpret({**persistent, **step_inputs, **values.numbers(pipeline, step)}, ranks)
        persistent |= {name: outputs[f"{name}1"] for name in UPDATED_INPUTS if f"{name}1" in outputs}
    return outputs[pipeline.output_names[0]][0]


def difference(result: Array | None, expected: Array) -> float:
    """The largest difference of two arrays, as a share of the largest element of the expected one."""
    assert result is not None
    if np.array_equal(result, expected):
        return 0.0
    largest = float(np.abs(expected).max())
    return float(np.abs(result.astype(np.float64) - expected).max()) / (largest or 1.0)
