"""Measure the ways to do a program, and choose the fastest for each size."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from omnireduce.errors import RefusedError, UsageError
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.tuning.candidates import CHUNKS, Candidate, Program, candidates
from omnireduce.programs.tuning.memory import Question, recalled, remember
from omnireduce.programs.tuning.trials import Sizes, Trial, ValuesMaker, drawn_values, sizes_of
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.version import __version__

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
    """What was chosen, for each of the sizes; `is_recalled`: whether that was known before."""

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

    `program`: the name of one in `ready`, pipelines by the names of schedules, or a Pipeline, from which these follow.
    `sizes`: of dimensions by name, or how many elements a tensor has, about. `values`: makes what a run is
    given; by default small whole numbers. `chunks`: numbers to try where a product is overlapped. `on_shards`: also try
    fused AllReduces on the shards. The ways take turns, each `turns` times; a time is that of the slowest rank, and a
    way counts by its median. Tensors that `values` makes are written.

    With `cache` the answer is kept in a file, and not measured again for the same program, sizes, hosts of ranks,
    transport and version of the library. Raises UsageError for what cannot be tuned; otherwise what runs raise.
    """
    ways = candidates(program, chunks, on_shards=on_shards)
    if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
        raise UsageError(f"turns is {turns!r}: expected an int from 1 on")
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise UsageError(f"sizes is {sizes!r}: expected a list, such as [1000, 1_000_000]")
    all_sizes = [sizes_of(ways[0].pipeline, asked) for asked in sizes]
    hosts = comm.allgather_object(socket.gethostname(), name="autotune: hosts")
    programs = [(way.label, str(way.pipeline)) for way in ways]
    question = Question(__version__, programs, [dict(dimensions) for dimensions in all_sizes], hosts, comm.transport)
    known = recalled(question) if cache and comm.rank == 0 else None
    known = comm.broadcast_object(known, name="autotune: known")
    medians = known or [_measured(ways, comm, dimensions, values, turns) for dimensions in all_sizes]
    medians = comm.broadcast_object(medians, name="autotune: choice")  # of rank 0: so that all choose alike
    if cache and known is None and comm.rank == 0:
        remember(question, medians)
    return Tuned([_choice(ways, *pair) for pair in zip(all_sizes, medians, strict=True)], known is not None)


def _measured(
    ways: Sequence[Candidate], comm: Communicator, sizes: Sizes, values: ValuesMaker, turns: int
) -> list[float | None]:
    """The median milliseconds of each way; None where shards have no room for it."""
    with ExitStack() as stack:
        trials: dict[int, Trial] = {}
        for at, way in enumerate(ways):
            trial = _trial(way, comm, at, values(way.pipeline, comm, sizes))
            if trial is not None:
                stack.callback(trial.close)
                trials[at] = trial
        times = np.zeros((len(ways), turns))
        for turn in range(-WARM_UP, turns):
            for at in trials if turn % 2 else reversed(trials):
                ms = trials[at].run()
                if turn >= 0:
                    times[at, turn] = ms
        slowest = comm.allreduce(times, op="max", name="autotune: times")
        comm.barrier(name="autotune: done")
    medians = np.median(slowest, axis=1)
    return [float(medians[at]) if at in trials else None for at in range(len(ways))]


def _trial(way: Candidate, comm: Communicator, number: int, values: Mapping[str, Any]) -> Trial | None:
    """The way, if shards have room for it."""
    try:
        return Trial(way, comm, number, values)
    except RefusedError:
        return None


def _choice(ways: Sequence[Candidate], sizes: Sizes, found: Sequence[float | None]) -> Choice:
    ms = {way.label: median for way, median in zip(ways, found, strict=True) if median is not None}
    best = min(ways, key=lambda way: ms.get(way.label, float("inf")))
    return Choice(sizes, best.schedule, best.chunks, best.on_shards, best.pipeline, ms)
