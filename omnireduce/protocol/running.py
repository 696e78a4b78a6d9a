"""A generation of a job that runs on one shard, as far as it matters to those who want to join."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.protocol.gathering import Meeting, Standing
from omnireduce.protocol.hello_checks import ADVICE, SHAPE, difference, taken
from omnireduce.wire.control import Hello


class Running(NamedTuple):
    """`spec`: the hello of who came first. `formation`: a number that no other generation has. `ranks`: those that have
    not left, with the ranks that they have. `asked`: the ranks that all its workers gave in their hellos, also those
    that have left."""

    meeting: Meeting
    spec: Hello
    formation: int
    ranks: dict[int, Hello]
    asked: frozenset[int]

    def objection(self, hello: Hello, standing: Standing) -> str:
        """What is wrong with a hello to this job while it runs."""
        if not hello.smallest:
            if self.spec.smallest:
                return f"job '{hello.job}' runs, and is elastic: {ADVICE['smallest']}"
            return taken(self.ranks[hello.rank]) if hello.rank in self.ranks else ""
        return "" if standing else difference(self.spec, hello, SHAPE)
