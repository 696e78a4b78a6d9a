"""One generation of a job on an aggregator shard: its slot memory, its links, its machine and their driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from omnireduce.protocol.aggregator import AggregatorMachine
from omnireduce.protocol.effects import End
from omnireduce.protocol.membership import member_name
from omnireduce.runtime.driver import Clock, Driver
from omnireduce.transport.base import Link
from omnireduce.transport.memory import Region
from omnireduce.transport.shm import ShmLink
from omnireduce.wire import Hello, Welcome, encode_control

log = logging.getLogger("omnireduce.aggregator")
WARN_AFTER_S = 1.0  # how long a collective may stand still before all ranks are told whom they wait for


class Job:
    """Made when all ranks are there; tells each rank so. `links[r]` and `hellos[r]` belong to rank r."""

    def __init__(
        self,
        generation: int,
        name: str,
        links: Sequence[Link],
        hellos: Sequence[Hello],
        clock: Clock,
        on_end: Callable[[Job, End], None],
    ) -> None:
        self.generation, self.name, self.links = generation, name, links
        slots, slot_bytes, ranks = hellos[0].slots, hellos[0].slot_bytes, len(links)
        self._arena = Region(ranks * slots, slot_bytes)
        try:
            self._results = Region(slots, slot_bytes)
        except OSError:
            self._arena.close()
            raise
        members = [member_name(hello) for hello in hellos]
        warn_after_s = min([WARN_AFTER_S, *(hello.timeout_s / 2 for hello in hellos)])
        self.machine = AggregatorMachine(members, self._arena.slots, self._results.slots, warn_after_s=warn_after_s)
        self.driver = Driver(
            self.machine,
            links,
            clock,
            on_end=lambda end: on_end(self, end),
            on_warn=lambda text: log.warning("%s: %s", self, text),
        )
        welcome = encode_control(Welcome(generation))
        for rank, link in enumerate(links):
            link.attach(self._results.slots, self._arena.slots[rank * slots : (rank + 1) * slots])
            if isinstance(link, ShmLink):
                link.send_control_with_memory(welcome, self._arena.fd, self._results.fd)
            else:
                link.send_control(welcome)
        log.info("%s: %d ranks joined by %s", self, ranks, "+".join(sorted({link.kind for link in links})))

    def __str__(self) -> str:
        return f"job '{self.name}' generation {self.generation}"

    def close(self) -> None:
        """Close the links and give the memory back."""
        for link in self.links:
            link.close()
        self._arena.close()
        self._results.close()
        # They refer to this job: without this the slots would wait for the cycle collector.
        del self.driver, self.machine
