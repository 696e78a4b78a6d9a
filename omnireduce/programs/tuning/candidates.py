"""The ways in which a program can be done: its schedules, each with several numbers of chunks, or on the shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from omnireduce.errors import UsageError
from omnireduce.programs.communication import AllReduce, Communication
from omnireduce.programs.expressions import Expression, Tensor
from omnireduce.programs.graph import reachable
from omnireduce.programs.layouts import Layout
from omnireduce.programs.on_shards import runs_on_shards
from omnireduce.programs.operations import MatMul, Update
from omnireduce.programs.pipeline import Pipeline
from omnireduce.programs.ready import PROGRAMS, schedules
from omnireduce.programs.rewrites.overlap import MOST_CHUNKS
from omnireduce.programs.stages import Overlapped

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
        """What a table calls it."""
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.schedule}{chunks}{', on shards' if self.on_shards else ''}"


def candidates(program: Program, chunks: Sequence[int] = CHUNKS, *, on_shards: bool = True) -> list[Candidate]:
    """All ways to do `program`: the name of one that is written already, schedules by name, or a pipeline, whose
    schedules are those of its name, or follow from it. Raises UsageError for something else."""
    if not isinstance(chunks, Sequence) or not chunks or not all(map(_is_chunks, chunks)):
        raise UsageError(f"chunks is {chunks!r}: expected a list of ints from 2 to {MOST_CHUNKS}")
    ways = []
    for name, pipeline in _schedules(program).items():
        overlapped = next((compound for compound in pipeline.compounds if isinstance(compound, Overlapped)), None)
        if overlapped is None:
            ways.append(Candidate(name, pipeline))
        else:
            ways += [Candidate(name, _in_chunks(pipeline, overlapped, count), count) for count in chunks]
        if on_shards and runs_on_shards(pipeline):
            ways.append(Candidate(name, pipeline, on_shards=True))
    return ways


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
    return isinstance(number, int) and not isinstance(number, bool) and 2 <= number <= MOST_CHUNKS


def _in_chunks(pipeline: Pipeline, overlapped: Overlapped, chunks: int) -> Pipeline:
    changed = [
        replace(compound, chunks=chunks) if compound is overlapped else compound for compound in pipeline.compounds
    ]
    return pipeline.changed({}, compounds=changed)


def derived(pipeline: Pipeline) -> dict[str, Pipeline]:
    """The schedules that follow from a pipeline. What is not legal is left out.

    as-written; ol: a product overlaps with its sum. For the first AllReduce that allows it, rs-c-ag: what follows is
    computed in parts, and what is updated is kept in parts, but for the first output; fuse-rs-c-ag: as one AllReduce.
    """
    legal = {"as-written": pipeline}
    for node in pipeline.nodes:
        if not isinstance(node, AllReduce) or node not in pipeline.names:
            continue
        name, product = pipeline.names[node], node.operands[0]
        if isinstance(product, MatMul) and "ol" not in legal:
            legal |= _legal("ol", Pipeline.overlap, pipeline, [product, node])
        if "rs-c-ag" not in legal:
            legal |= _legal("rs-c-ag", _cut, pipeline, name)
            if "rs-c-ag" in legal:
                legal |= _legal("fuse-rs-c-ag", _fused, legal["rs-c-ag"], name)
    return legal


def _legal(name: str, rewrite: Callable[..., Pipeline], *arguments: object) -> dict[str, Pipeline]:
    """A schedule by its name, if its rewrites are legal."""
    try:
        return {name: rewrite(*arguments)}
    except UsageError:
        return {}


def _cut(pipeline: Pipeline, name: str) -> Pipeline:
    """All that can be computed in parts behind the AllReduce is. Tensors that are updated are kept in parts, but for
    the first output: that is what ranks go on with."""
    cut = pipeline.split(name)
    behind = [cut.names[node] for node in _computed_behind(cut, cut[name])]
    cut = cut.reorder(behind, name)
    kept = cut.outputs[0]
    for update in [node for node in cut.nodes if isinstance(node, Update)]:
        if update is not kept and update.tensor.type.layout is Layout.REPLICATED:
            cut = _sliced(cut, update.tensor)
    return cut


def _sliced(pipeline: Pipeline, tensor: Tensor) -> Pipeline:
    try:
        return pipeline.as_slice([tensor.name])
    except UsageError:
        return pipeline  # a stage needs it whole


def _computed_behind(pipeline: Pipeline, gather: Expression) -> list[Expression]:
    """Stages that need `gather`, up to the next communication."""
    behind = reachable([gather], pipeline.users)
    beyond = reachable([node for node in behind if isinstance(node, Communication)], pipeline.users)
    return [
        node
        for node in pipeline.nodes
        if node in behind - beyond and node in pipeline.names and not isinstance(node, Communication)
    ]


def _fused(cut: Pipeline, name: str) -> Pipeline:
    ends = [cut.names[node] for node in cut.nodes if isinstance(node, Update)]
    return cut.fuse_into([f"{name}_rs", *ends])
