"""Helpers that several rewrites share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from omnireduce.errors import UsageError
from omnireduce.programs.expressions import Expression, formula
from omnireduce.programs.stages import Compound
from omnireduce.programs.text import title

if TYPE_CHECKING:
    from omnireduce.programs.pipeline import Handle, Pipeline


def called(pipeline: Pipeline, node: Expression) -> str:
    """An expression, for a message: its name, its formula, and its file and line."""
    name = pipeline.names.get(node)
    what = formula(node, pipeline.names)
    return f"{f'{name} = ' if name and name != what else ''}{what} ({node.place.file}:{node.place.line})"


def reason(error: UsageError) -> str:
    """The message of an error of the checker, without the place and the source line."""
    return str(error).split("\n")[0].split(": ", 1)[1]


def compound_of(pipeline: Pipeline, node: Expression) -> Compound | None:
    """The compound stage that contains this expression, or None."""
    return next((compound for compound in pipeline.compounds if node in compound.nodes), None)


def check_single(pipeline: Pipeline, nodes: Iterable[Expression], what: str) -> None:
    """Raises UsageError if one of `nodes` is part of a compound stage: how it runs is decided already."""
    for node in nodes:
        compound = compound_of(pipeline, node)
        if compound is not None:
            raise UsageError(f"cannot {what} {called(pipeline, node)}: it is {title(compound)} already; do this before")


def stage_list(pipeline: Pipeline, stages: Sequence[Handle], what: str) -> list[Expression]:
    """The expressions that `stages` name. Raises UsageError unless it is a list of stages."""
    if isinstance(stages, str) or not isinstance(stages, Sequence) or not stages:
        raise UsageError(f"cannot {what} {stages!r}: expected a list of stages, or of their names")
    return [pipeline[stage] for stage in stages]
