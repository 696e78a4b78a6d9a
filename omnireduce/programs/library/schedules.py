"""Schedules of the programs: the ways in which each can run. All schedules of a program give the same results."""

from __future__ import annotations

from collections.abc import Callable

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllReduce
from omnireduce.programs.library.layers import model_parallel, pipeline_parallel
from omnireduce.programs.library.optimizers import adam, lamb, sgd
from omnireduce.programs.pipeline import Pipeline

Schedules = dict[str, Pipeline]
CHUNKS = 4  # a product that overlaps with communication is computed in this many chunks

# For each optimizer: what it updates, its state, and the expressions that each pass over memory computes.
UPDATES = {"sgd": ["w1"], "adam": ["w1", "m1", "v1"], "lamb": ["w1", "m1", "v1"]}
STATE = {"sgd": [], "adam": ["m", "v"], "lamb": ["m", "v"]}
PASSES = {
    "sgd": [["weights"]],
    "adam": [["mean", "square", "step", "weights"]],
    "lamb": [["mean", "square", "step"], ["weights"]],
}


def optimizer_schedules(pipeline: Pipeline) -> Schedules:
    """ar-c: AllReduce, then all ranks compute all. rs-c-ag: each rank computes a part, and keeps a part of the state.
    fuse-rs-c-ag: the same inside of one AllReduce."""
    updates, state, passes = (table[pipeline.name] for table in (UPDATES, STATE, PASSES))
    whole, cut = pipeline, pipeline.split("g1").reorder([*updates], "g1")
    if state:
        cut = cut.as_slice([*state])
    fused = cut.fuse_into(["g1_rs", *updates], AllReduce)
    for stages in passes:
        whole, cut = whole.fuse([*stages]), cut.fuse([*stages])
    return {"ar-c": whole, "rs-c-ag": cut, "fuse-rs-c-ag": fused}


def model_parallel_schedules(pipeline: Pipeline) -> Schedules:
    """mm-ar-c: the ranks compute what follows the AllReduce all. mm-rs-c-ag: each a part of the rows.
    ol-mm-fuse-rs-c-ag: that inside of one AllReduce, which begins while the product is computed."""
    cut = pipeline.split("total").reorder(["out"], "total")
    fused = cut.fuse_into(["total_rs", "out_ag"], AllReduce)
    return {
        "mm-ar-c": pipeline.fuse(["out"]),
        "mm-rs-c-ag": cut.fuse(["out"]),
        "ol-mm-fuse-rs-c-ag": fused.overlap(["product", "total_rs"], chunks=CHUNKS),
    }


def pipeline_parallel_schedules(pipeline: Pipeline) -> Schedules:
    """ar-p2p-c: each rank sends the whole sum. rs-p2p-c-ag: each sends its part of it, and the next group gathers."""
    return {
        "ar-p2p-c": pipeline.fuse(["out"]),
        "rs-p2p-c-ag": pipeline.split("total").reorder(["out"], "total").fuse(["out"]),
    }


PROGRAMS: dict[str, tuple[Callable[[], Pipeline], Callable[[Pipeline], Schedules]]] = {
    "sgd": (sgd, optimizer_schedules),
    "adam": (adam, optimizer_schedules),
    "lamb": (lamb, optimizer_schedules),
    "model-parallel": (model_parallel, model_parallel_schedules),
    "pipeline-parallel": (pipeline_parallel, pipeline_parallel_schedules),
}


def schedules(program: str | Pipeline) -> Schedules:
    """The schedules of a program of this package by name: "sgd", "adam", "lamb", "model-parallel" or
    "pipeline-parallel", or one that its function has made with other arguments. Raises UsageError for another one."""
    name = program.name if isinstance(program, Pipeline) else program
    if not isinstance(name, str) or name not in PROGRAMS:
        raise UsageError(f"program {name!r}: expected one of {', '.join(PROGRAMS)}")
    make, rewrite = PROGRAMS[name]
    return rewrite(program if isinstance(program, Pipeline) else make())
