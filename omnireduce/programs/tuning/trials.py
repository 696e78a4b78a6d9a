"""One candidate on this rank: its values, and how long a run takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from omnireduce.errors import UsageError
from omnireduce.programs.expressions import FLOATS, Bool, Expression, Tensor, Variable
from omnireduce.programs.layouts import Layout
from omnireduce.programs.lowering import lowered
from omnireduce.programs.on_shards import OnShards, given_in_runs
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.placement import RankPlacement, size_value, sizes_in
from omnireduce.programs.tuning.candidates import Candidate
from omnireduce.runtime.rank.communicator import Communicator

Sizes = Mapping[str, int]
ValuesMaker = Callable[[Pipeline, Communicator, Sizes], Mapping[str, Any]]
"""Makes what `Pipeline.run` is given on this rank."""


def sizes_of(pipeline: Pipeline, asked: int | Sizes) -> Sizes:
    """The sizes of dimensions: as given, or so that the largest tensor has about so many elements. Raises UsageError
    for something else."""
    names = [variable.name for variable in sizes_in(pipeline.nodes)]
    if isinstance(asked, Mapping):
        if set(asked) != set(names):
            raise UsageError(f"sizes {dict(asked)}: expected those of {', '.join(sorted(names))}")
        return {name: size_value(asked[name], name) for name in names}
    if isinstance(asked, bool) or not isinstance(asked, int | np.integer) or asked < 1:
        raise UsageError(f"size {asked!r}: expected a number of elements, from 1 on, or sizes of dimensions by name")
    tensors = [node for node in pipeline.inputs if isinstance(node, Tensor)]
    most = max(
        (sum(isinstance(dimension, Variable) for dimension in tensor.type.shape) for tensor in tensors), default=1
    )
    return dict.fromkeys(names, max(1, round(int(asked) ** (1 / max(1, most)))))


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
            drawn = rng.integers(-4 if is_local else 0, 5, placement.own_shape(input_node.type), np.int8)
            values[input_node.name] = drawn.astype(input_node.type.dtype)
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
            each_run = [input_node.name for input_node in given_in_runs(self._pipeline, lowered(self._pipeline))]
            kept = {name: value for name, value in self._values.items() if name not in each_run}
            self._values = {name: value for name, value in self._values.items() if name in each_run}
            self._shards = self._pipeline.on_shards(comm, kept)

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
