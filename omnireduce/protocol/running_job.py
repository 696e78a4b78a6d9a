"""A generation of a job that runs on one shard, as far as admission needs to know it."""

from __future__ import annotations

from typing import NamedTuple

from omnireduce.protocol.hello_checks import ADVICE, SHAPE, difference, taken
from omnireduce.protocol.pending_job import Claim, FormationKey
from omnireduce.wire.control import Hello


class RunningJob(NamedTuple):
    """`spec`: the hello of its first worker. `formation`: a number that no other generation has. `ranks`: those that
    have not left. `asked`: the ranks that its workers gave in their hellos, also those that have left."""

    meeting: FormationKey
    spec: Hello
    formation: int
    ranks: dict[int, Hello]
    asked: frozenset[int]

    def has_group(self, hello: Hello) -> bool:
        """Whether one of its ranks has said this hello, which is to a group of them: the name of a group begins with
        that of its job."""
        mine, spec = self.ranks.get(hello.parent_rank), self.spec
        is_named = hello.job.startswith(f"{spec.job}+") and (hello.team, hello.launch) == (spec.team, spec.launch)
        return is_named and mine is not None and (mine.host, mine.pid) == (hello.host, hello.pid)

    def objection(self, hello: Hello, claim: Claim) -> str:
        """What is wrong with a hello to this job while it runs."""
        if not hello.smallest:
            if self.spec.smallest:
                return f"job '{hello.job}' runs, and is elastic: {ADVICE['smallest']}"
            return taken(self.ranks[hello.rank]) if hello.rank in self.ranks else ""
        return "" if claim else difference(self.spec, hello, SHAPE)
