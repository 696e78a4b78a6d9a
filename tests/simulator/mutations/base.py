"""The type of a mutation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A deliberate bug: in `module`, `new` stands in the place of `old`, which is there exactly once.

    `breaks` says what is lost. Of `within` seeds from `first` on, a run must fail; with `fault`, of the seeds
    with that fault at every event instead of their own. With `test`, a path and a name as pytest takes them, it is that
    test that must fail: some bugs take several faults at the right moments, which chance seldom brings together.
    """

    name: str
    module: str
    breaks: str
    old: str
    new: str
    within: int = 400
    first: int = 0
    fault: str = ""
    test: str = ""
