"""A machine without links: keeps its credits, checks what it asks for, and knows a few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from harness import slot_bytes_for
from samples import Array

from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.dtypes import element_type
from omnireduce.core.wire.blocks import seal
from omnireduce.core.wire.control import ControlMessage, Goodbye
from omnireduce.protocol.collective.dense_operands import DenseTensor
from omnireduce.protocol.collective.effects import Effect, End, Finish, ReturnCredit, Send, SendControl, Warn
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine

RANKS, SLOTS, BLOCK, BLOCKS = 2, 2, 8, 6
DESCRIPTOR = Descriptor("allreduce", "w", "float32", (BLOCK * BLOCKS,), block_size=BLOCK)
SLOT_BYTES = slot_bytes_for(2, BLOCK * 4)


class Bench:
    """A machine without links. Keeps the credits that links would, and checks what the machine asks for.

    `held`: received and not returned; `under_way`: sent and not credited, both as (peer, slot). `ended` as reported.
    """

    def __init__(self, machine: ShardMachine | RankMachine, peers: int, incoming: Callable[[int, int], Array]):
        self.machine, self.peers, self.incoming = machine, peers, incoming
        self.held: set[tuple[int, int]] = set()
        self.under_way: set[tuple[int, int]] = set()
        self.effects: list[Effect] = []
        self.ended: End | None = None
        self.now = 0.0

    def perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            last_words = isinstance(effect, SendControl) and isinstance(effect.message, Goodbye)
            assert self.ended is None or last_words, f"{effect} after the end"
            self.effects.append(effect)
            if isinstance(effect, Send):
                for peer in effect.peers:
                    assert (peer, effect.slot) not in self.under_way, "a slot was sent twice without a credit"
                    self.under_way.add((peer, effect.slot))
            elif isinstance(effect, ReturnCredit):
                self.held.remove((effect.peer, effect.slot))
            elif isinstance(effect, End):
                self.ended = effect
            else:
                assert isinstance(effect, SendControl | Finish | Warn)
        assert (self.ended is None) == (self.machine.ended is None)

    def receive(self, peer: int, fill: Callable[[Array], int]) -> None:
        """A message in the peer's next free slot, if there is one."""
        free = [slot for slot in range(SLOTS) if (peer, slot) not in self.held]
        if free:
            self.held.add((peer, free[0]))
            nbytes = fill(self.incoming(peer, free[0]))
            self.perform(self.machine.received(peer, free[0], nbytes, self.now))

    def credit(self, peer: int) -> None:
        for slot in sorted(slot for owner, slot in self.under_way if owner == peer)[:1]:
            self.under_way.remove((peer, slot))
            self.perform(self.machine.credited(peer, slot, self.now))

    def advance(self) -> None:
        self.perform(self.machine.advance(self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.machine.timer(self.now))

    def told(self, peer: int, message: ControlMessage) -> None:
        self.perform(self.machine.control_received(peer, message, self.now))

    def lost(self, peer: int) -> None:
        self.perform(self.machine.lost(peer, "connection closed", self.now))

    def violate(self, peer: int) -> None:
        self.perform(self.machine.violated(peer, "not a frame", self.now))


def message(number: int, frontier: int, indices: Iterable[int] = (), first: bool = False) -> Callable[[Array], int]:
    extra = DESCRIPTOR.encoded if first else b""
    return lambda slot: seal(slot, number, frontier, np.array([*indices], np.int64), BLOCK * 4, extra)


def garbage(slot: Array) -> int:
    slot[:] = 0xFF
    return slot.size


def aggregator() -> Bench:
    arena, results = np.zeros((RANKS * SLOTS, SLOT_BYTES), np.uint8), np.zeros((SLOTS, SLOT_BYTES), np.uint8)
    machine = ShardMachine(["rank 0", "rank 1"], arena, results)
    return Bench(machine, RANKS, lambda rank, slot: arena[rank * SLOTS + slot])


def worker() -> Bench:
    """Two shards, one block a stripe."""
    slots = [(np.zeros((SLOTS, SLOT_BYTES), np.uint8), np.zeros((SLOTS, SLOT_BYTES), np.uint8)) for _ in range(2)]
    machine = RankMachine(slots, ["a:1", "b:2"], "me", rank=0, scan_span=64, timeout_s=60.0)
    return Bench(machine, 2, lambda shard, slot: slots[shard][1][slot])


def submit(bench: Bench, elements: int = BLOCK * BLOCKS) -> Array:
    """Submit a tensor of ones, to be summed in place, and return it."""
    x = np.ones(elements, np.float32)
    operand = DenseTensor(x, x, Layout(elements, BLOCK, 2, 1), element_type(x.dtype).zero_mask)
    assert isinstance(bench.machine, RankMachine)
    bench.machine.submit(DESCRIPTOR, operand, bench.now)
    return x
