"""Exchanges of an optimizer's step: gradients go to the shards, and new weights come back. If a rule or a clip needs
norms first, they have an exchange of their own.

Each function starts the exchanges of all parts. It returns a function that waits for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from omnireduce.block_program import SUM, Assembly, BlockProgram, Operation
from omnireduce.optimizers.parts import Part
from omnireduce.optimizers.rules import Lamb, Rule, Step
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.handles import Handle

T = TypeVar("T")
AT_ONCE = 16  # exchanges that are under way, where each parameter has its own
Steps = Sequence[tuple[Part, Step]]


def start_squares(group: Communicator, steps: Steps, rule: Rule, given: Mapping[str, Any]) -> Callable[[], float]:
    """Start to add up the squares of the gradients. The returned function gives the sum."""
    handles = [(part.start(group, _squares(rule, step), given), step.scale) for part, step in steps]
    return lambda: sum(float(handle.wait().totals[0]) * scale**2 for handle, scale in handles)


def _squares(rule: Rule, step: Step) -> BlockProgram:
    """The program whose total is the sum of the squares of the gradient. It changes nothing."""
    code = Assembly()
    code.add(Operation.SQUARE, SUM)
    code.add(Operation.ADD_TO_TOTAL, SUM)
    return code.program(step.state, 1 + len(rule.columns), len(rule.cells), totals=1, returns=False)


def start_update(group: Communicator, steps: Steps, rule: Rule, given: Mapping[str, Any]) -> Callable[[], None]:
    """Start to update the weights."""
    if isinstance(rule, Lamb):
        return _start_update_by_norms(group, steps, rule, given)
    handles = [part.start(group, rule.program(step), given) for part, step in steps]

    def end() -> None:
        for (part, _), handle in zip(steps, handles, strict=True):
            handle.wait()
            part.done()

    return end


def _start_update_by_norms(
    group: Communicator, steps: Steps, rule: Lamb, given: Mapping[str, Any]
) -> Callable[[], None]:
    results = _in_turn(lambda one: one[0].start(group, rule.norms(one[1]), given), steps)
    norms = [[math.sqrt(total) for total in result.totals] for result in results]

    def end() -> None:
        updates = [(part, rule.apply(step, *norm)) for (part, step), norm in zip(steps, norms, strict=True)]
        for _ in _in_turn(lambda one: one[0].start(group, one[1], {}), updates):
            pass
        for part, _ in steps:
            part.done()

    return end


def _in_turn(start: Callable[[T], Handle[Any]], items: Iterable[T]) -> Iterator[Any]:
    """The results of one collective for each item, in order. Up to `AT_ONCE` are under way at once."""
    handles = deque[Handle[Any]]()
    for item in items:
        handles.append(start(item))
        if len(handles) == AT_ONCE:
            yield handles.popleft().wait()
    while handles:
        yield handles.popleft().wait()
