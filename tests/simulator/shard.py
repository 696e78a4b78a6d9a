"""An aggregator shard as a process: the real `ShardServer` behind a simulated selector."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping, Sized
from typing import Any

from omnireduce.core.admin_messages import Order
from omnireduce.protocol.collective.reduction import BLOCK_WORK, Budget
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.shard import RANK_WORK, ROUND_WORK
from omnireduce.runtime.shard.access import Access
from omnireduce.runtime.shard.relay_admission import Relaying, Upstream
from omnireduce.runtime.shard.server import ShardServer

from .audit import audit_server, audit_turn
from .links import SimLink
from .world import Process, World

IDLE_S = 60.0
DRAIN_S = 1.0  # for jobs that run when a shard drains
BUSY_TURNS = 2000  # turns in a row that find something to do; more means that the server spins


class SimSelector(selectors.BaseSelector):
    """Says which links are ready now, in random order, and remembers how long the server would have waited."""

    def __init__(self, shuffle: Callable[[list[Any]], None]) -> None:
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self._shuffle = shuffle
        self.patience_s = 0.0
        self.found = 0

    @property
    def links(self) -> list[SimLink]:
        return list(self._keys)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        assert fileobj not in self._keys, "registered twice"
        self._keys[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = []
        for link, key in self._keys.items():
            mask = selectors.EVENT_READ if link.readable else 0
            mask |= selectors.EVENT_WRITE if link.writable else 0
            if mask & key.events:
                ready.append((key, mask & key.events))
        self._shuffle(ready)
        self.patience_s, self.found = timeout or 0.0, len(ready)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class Shard(Process):
    """A shard called `name`. It can be killed, drained and started again. `upstream` makes it one of a relay."""

    def __init__(
        self, world: World, name: str, latency_s: Callable[[], float], ahead_s: float,
        *, limits: Limits, access: Access, upstream: Callable[[Shard], Upstream | None],
    ) -> None:  # fmt: skip
        super().__init__(world, name, latency_s, ahead_s)
        self.address = f"{name}:7400"
        self.limits, self._access, self._upstream = limits, access, upstream
        self.supervised = True  # the listening socket outlives the process
        self.found: list[str] = []  # faults inside
        self._back_after_s = 0.0
        self._backlog: list[SimLink] = []
        self._random = world.random(self.name)
        self._budget = self._random.choice([Budget(), Budget(), self._small_budget()])
        self.start()

    def start(self) -> None:
        """Run a server that knows nothing of an earlier one."""
        self.slow_turn_s = 0.0
        self._last_generation: int | None = None  # once it is told to stop
        self.alive, self.supervised, self._due = True, True, None
        self.selector = SimSelector(self._random.shuffle)
        self.server = ShardServer(
            self.address, [], self.limits, finish_s=5.0, budget=self._budget, access=self._access, clock=self.now,
            processor_s=self.now, selector=self.selector, upstream=self._upstream(self),
        )  # fmt: skip
        self._merged: dict[int, int] = {}  # by generation, blocks of results after the last turn
        self.log("up")
        self.wake()

    def _small_budget(self) -> Budget:
        """One that divides even small tensors in time, messages in windows, blocks in pieces and results."""
        choose = self._random.choice
        return Budget(
            work=choose([(1 << 16) + 8000, (1 << 16) + 30_000, 1 << 17]),
            window=choose([1, 3, 4096]),
            piece_bytes=choose([500, 4000, 1 << 20]),
            blocks=choose([2, 9, 1 << 16]),
            output=choose([1, 5000, 1 << 20]),
        )

    def turns(self, blocks: int, block_bytes: int, ranks: int) -> float:
        """In how many turns that take time its budget lets it reduce so many blocks, at the least in each."""
        if not self.slow_turn_s:
            return 0.0
        budget = self._budget
        blocks_per_turn = (budget.work - ROUND_WORK - ranks * RANK_WORK) // (ranks * (block_bytes + BLOCK_WORK))
        pieces = max(1.0, ranks * block_bytes / budget.piece_bytes)
        return blocks * pieces / max(1, min(blocks_per_turn, budget.blocks))

    @property
    def listening(self) -> bool:
        return self.alive or self.supervised

    def accept(self, link: SimLink) -> None:
        """A connection has arrived; the server sees it in its next turn."""
        if self.listening:
            self._backlog.append(link)
            self.wake()
        else:
            link.close()

    def read_slowly(self, turn_s: float) -> None:
        super().read_slowly(turn_s)
        for link in self.selector.links:
            link.max_events = self.max_events

    def _adopt(self) -> bool:
        """Let the server take what waits at its listening socket; return whether there was anything."""
        backlog, self._backlog = self._backlog, []
        for link in backlog:
            link.on_ready = self.wake
            link.max_events = self.max_events
            self.server.adopt(link)
        return bool(backlog)

    def turn(self) -> None:
        """Let the server run until it would wait, and wake it when it would stop waiting."""
        for _ in range(BUSY_TURNS):
            if self.server.stopped:
                self.kill(self._back_after_s, supervised=False)
                return
            self.server.turn(IDLE_S)
            self._audit()
            if not self._adopt() and not self.selector.found and self.selector.patience_s > 0:
                self.wake_at(self.now() + self.selector.patience_s + 1e-6)
                return
            if self.slow_turn_s:
                self.wake()
                return
        self.found.append(f"{BUSY_TURNS} turns without progress")
        self.wake_at(self.now() + 1.0)

    def _audit(self) -> None:
        if not self.found:
            self.found += audit_server(self.server, self.limits)
            self.found += audit_turn(self.server, self._budget, self._merged)
            if self._last_generation not in (None, self.server._admission._next_generation):
                self.found.append("a job was admitted by a shard that was told to stop")

    def kill(self, back_after_s: float, *, supervised: bool) -> None:
        """End at once; the system closes the connections. Start again after some seconds."""
        self.log("down")
        self.alive, self.supervised = False, supervised
        links = self.selector.links
        if not supervised:
            links += self._backlog
            self._backlog = []
        jobs = {connection.job for connection in self.server._connections if connection.job is not None}
        del self.server, self.selector
        for link in links:
            link.close()
        for job in jobs:
            job.close()  # the system takes back the memory of a dead process
        self.world.at(self.world.now() + back_after_s, self.start)

    def drain(self, back_after_s: float) -> None:
        """Stop as after SIGTERM, in every other millisecond of `back_after_s` with a second for those that run. Start
        again some seconds after the end."""
        self._back_after_s, server = back_after_s, self.server
        if int(back_after_s * 1000) % 2 == 0:
            self._stop()
            return
        server.administration.obey(Order("drain", "the operator"))
        self._audit()
        self.wake()
        self.world.at(self.world.now() + DRAIN_S, lambda: self._stop() if self._is(server) else None)

    def _is(self, server: ShardServer) -> bool:
        return self.alive and self.server is server

    def _stop(self) -> None:
        self.server.stop()
        self._audit()
        self._last_generation = self.server._admission._next_generation
        self.wake()

    def residue(self) -> dict[str, int]:
        """Sizes of the server's tables that still have entries; empty when all is given back."""
        server = self.server
        admission = server._admission
        kept: dict[str, Sized] = {
            "connections": server._connections,
            "unidentified": server._connections.unidentified,
            "closing": server._connections.closing,
            "staying": server._connections.staying,
            "questions": server._status_requests,
            "jobs": server._jobs,
            "links of jobs": server._teardown._members,
            "gathering": admission._pending_jobs,
            "running": admission._running,
            "names": admission._welcome if isinstance(admission, Relaying) else admission._by_name,
            "in memory": admission._in_memory,
            "selector": self.selector.links,
        }
        return {name: len(value) for name, value in kept.items() if value}
