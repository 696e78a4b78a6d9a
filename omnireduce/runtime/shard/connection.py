"""One connection of a shard, and its state, from its first byte to its last."""

from __future__ import annotations

import selectors
from dataclasses import dataclass

from omnireduce.logs import tagged
from omnireduce.protocol.joining.authentication import Gate
from omnireduce.runtime.shard.job import Job
from omnireduce.transport.base import Link
from omnireduce.wire.control import Hello
from omnireduce.wire.safe_text import SHOWN


@dataclass(slots=True, eq=False)
class Connection:
    """A peer: a newcomer, one that waits for its job to begin, a rank of a job, or one that leaves."""

    link: Link
    gate: Gate
    of_monitor: bool = False  # the daemon's own monitor asks here
    hello: Hello | None = None
    job: Job | None = None
    rank: int = -1
    leaving: bool = False
    has_left: bool = False  # it has said so
    number: int = 0  # those that came later have a higher one
    interest: int = selectors.EVENT_READ  # what the selector looks for; 0: it does not look

    def about(self, what: str) -> dict[str, object]:
        """The log's fields for the event `what`, with the facts known of this connection's peer."""
        hello, team = self.hello, self.gate.said or None
        peer: dict[str, object] = {"peer": self.link.peer, "user": self.link.user, "team": team}
        if hello is None or not hello.job.isprintable():
            return tagged(what, **peer)
        return tagged(what, job=hello.job[:SHOWN], rank=hello.rank, **peer)
