"""Somebody who connects to a shard and is no worker, or one whose peers never come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnireduce.core.wire.control import PROTOCOL_VERSION, Goodbye, Hello, encode_control
from omnireduce.support.config import Aggregator
from omnireduce.transport.base import Credited, Received

from .links import SimLink
from .world import Process

if TYPE_CHECKING:
    from .cluster import Cluster
    from .plan import JobPlan

SILENT, NOISE, NO_HELLO, MESSAGE, LONELY = range(5)
FOREIGN = "(host foreign, pid 1)"
TICKETS = (b"", b"guessed" + bytes(25), b"too short")
GUESSES = 1, 2, 1 << 61  # formations


class _ConnectedStranger(Process):
    """Has one connection to a shard, if the shard listens."""

    link: SimLink | None

    @property
    def there(self) -> bool:
        """The shard still keeps the connection."""
        return self.link is not None and not self.link.over

    def turn(self) -> None:
        if self.link is not None:
            self.link.poll()
            self.link.flush()


class Stranger(_ConnectedStranger):
    """Comes at once and never goes by itself: the shard has to hang up."""

    def __init__(self, cluster: Cluster, shard: int, manner: int) -> None:
        super().__init__(cluster.world, f"stranger at shard{shard}", lambda: 1e-4)
        protocol = cluster.protocol
        patience = {SILENT: Aggregator().hello_timeout_s, LONELY: protocol.aggregator_join_timeout_s}
        self.leave_by = self.world.now() + patience.get(manner, 0.0)
        link = cluster.connect(self, cluster.shards[shard].address)
        self.link = link
        if link is None:
            return
        if manner == NOISE:
            link.send_control(b"GET / HTTP/1.1")
        elif manner == NO_HELLO:
            link.send_control(encode_control(Goodbye()))
        elif manner == MESSAGE:
            link._output += [Received(0, 64), Credited(0)]
            link.flush()
        elif manner == LONELY:
            hello = Hello(
                PROTOCOL_VERSION, "lonely", 0, 2, shard, protocol.shards, protocol.slots, protocol.slot_bytes,
                "host", 1, protocol.stripe_blocks, protocol.timeout_s,
            )  # fmt: skip
            link.send_control(encode_control(hello))
        self.log(f"comes, manner {manner}")


class ForeignSurvivor(_ConnectedStranger):
    """Says to the first shard that it was in a job, of which it knows all but the ticket; goes after some time."""

    def __init__(self, cluster: Cluster, job: JobPlan, number: int) -> None:
        super().__init__(cluster.world, "foreign survivor", lambda: 1e-4)
        self.leave_by = self.world.now() + 3 * job.last_call_s + 1.0
        self.link = cluster.connect(self, cluster.shards[0].address)
        if self.link is None:
            return
        protocol = cluster.protocol
        hello = Hello(
            PROTOCOL_VERSION, job.name, 40 + number, job.ranks, 0, protocol.shards, protocol.slots, protocol.slot_bytes,
            "foreign", 1, protocol.stripe_blocks, protocol.timeout_s, min_ranks=max(1, job.min_ranks),
            last_call_s=job.last_call_s, survived=GUESSES[number], ticket=TICKETS[number],
        )  # fmt: skip
        self.link.send_control(encode_control(hello))
        self.wake_at(self.leave_by)

    def turn(self) -> None:
        super().turn()
        if self.link is not None:
            if self.now() >= self.leave_by:
                self.link.close()
            else:
                self.wake_at(self.leave_by)
