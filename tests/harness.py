"""A whole cluster in one thread: real machines, drivers and links, stepped in a random order from a seed.

Slots lie between guard bytes, so that a write outside of them is seen. A run that cannot go on is known exactly: it is
a sweep over all drivers in which nothing moves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from oracle import bits, indices_of_runs, indices_of_steps
from samples import Array

from benchmarks.harness.inproc import InprocLink
from omnireduce.core.descriptor import Descriptor, describe
from omnireduce.core.dtypes import element_type
from omnireduce.core.wire.blocks import MAX_BLOCKS, Header, capacity, message_list, message_steps, read_header
from omnireduce.kernels.codecs.table import BUILT_IN
from omnireduce.kernels.regions import DESCRIPTORS
from omnireduce.protocol.collective.dense_operands import DenseTensor, Memory, Operand
from omnireduce.protocol.collective.effects import End
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.collective.ragged_parts import RaggedParts, packed
from omnireduce.protocol.collective.row_operands import RowSet
from omnireduce.protocol.host.exchange import HostExchange, region_bytes
from omnireduce.protocol.host.local_ranks import LocalRanks
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.shard import ShardMachine
from omnireduce.protocol.sharding import Sharding
from omnireduce.runtime.driver import Driver
from omnireduce.runtime.rank.calls.single import Pool
from omnireduce.transport.base import Event

GUARD, GUARD_BYTE = 4096, 0xA5
SWEEPS = 200_000  # far more than any test needs: a bound for runs that move and never finish


class Guarded:
    """An array of zeros between guard bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: Any = np.uint8) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._memory = np.full(size + 2 * GUARD, GUARD_BYTE, np.uint8)
        self._size = size
        self.array = self._memory[GUARD : GUARD + size].view(dtype).reshape(shape)
        self.array[...] = np.zeros((), dtype)

    def check(self) -> None:
        outside = np.concatenate([self._memory[:GUARD], self._memory[GUARD + self._size :]])
        assert (outside == GUARD_BYTE).all(), "bytes outside of an array were written"


class Message(NamedTuple):
    """A block message as it was sent. `down` from the aggregator of `shard` to `rank`, else the other way."""

    shard: int
    rank: int
    down: bool
    header: Header
    indices: list[int]


Tamper = Callable[[int, int, bool, Array, int], int]  # (shard, rank, down, slot, nbytes) -> nbytes


def indices_of(slot: Array, header: Header, shards: int = 1, stripe_blocks: int = 64) -> list[int]:
    """The indices of a message, with their marks, in whatever form it lists them."""
    if header.steps:
        return indices_of_steps(message_steps(slot, header).tobytes())
    listed = message_list(slot, header).tolist()
    return indices_of_runs(listed, shards, stripe_blocks) if header.runs else listed


class CountedLink(InprocLink):
    """Counts the events that are put in and taken out, and shows block messages to `record` and `tamper`."""

    def __init__(self, cluster: InprocCluster, shard: int, rank: int, down: bool) -> None:
        super().__init__(f"aggregator {shard}" if not down else f"rank {rank}")
        self._cluster, self._ends = cluster, (shard, rank, down)

    def _send(self, slot: int, nbytes: int) -> None:
        assert len(self._in_flight) <= len(self.send_slots)
        if self._cluster.record is not None:
            header = read_header(self.send_slots[slot], nbytes)
            indices = indices_of(self.send_slots[slot], header, self._cluster.shards, self._cluster.stripe_blocks)
            blocks = [index % MAX_BLOCKS for index in indices]
            self._cluster.record.append(Message(*self._ends, header, blocks))
        if self._cluster.tamper is not None:
            nbytes = self._cluster.tamper(*self._ends, self.send_slots[slot], nbytes)
        super()._send(slot, nbytes)

    def deliver(self, event: Event) -> None:
        self._cluster.moved += 1
        super().deliver(event)

    def poll(self) -> Sequence[Event]:
        events = super().poll()
        self._cluster.moved += len(events)
        return events


class InprocCluster:
    """`world_size` workers and `shards` aggregators.

    `hosts`: the ranks of each host, which exchange tensors in memory that they share; nothing given: none do.

    `record` may be set to a list that collects all block messages, `tamper` to a function that changes them under way.
    """

    def __init__(
        self,
        world_size: int,
        *,
        shards: int = 1,
        slots: int = 2,
        slot_bytes: int = 4096,
        scan_span: int = 64,
        stripe_blocks: int = 4,
        seed: int = 0,
        timeout_s: float = 60.0,
        message_bytes: int | None = None,
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.world_size, self.shards, self.slots, self.stripe_blocks = world_size, shards, slots, stripe_blocks
        self.now, self.moved = 0.0, 0
        self.record: list[Message] | None = None
        self.tamper: Tamper | None = None
        self.random = random.Random(seed)
        self.guards: list[Guarded] = []
        self.finished: list[list[int]] = [[] for _ in range(world_size)]
        self.worker_ends: list[End | None] = [None] * world_size
        self.aggregator_ends: list[End | None] = [None] * shards
        self.warnings: list[str] = []
        self.arenas = [self._guarded(world_size * slots, slot_bytes) for _ in range(shards)]
        self.results = [self._guarded(slots, slot_bytes) for _ in range(shards)]
        self.up = [[CountedLink(self, shard, rank, False) for shard in range(shards)] for rank in range(world_size)]
        self.down = [[CountedLink(self, shard, rank, True) for rank in range(world_size)] for shard in range(shards)]
        for shard in range(shards):
            for rank in range(world_size):
                self._join(shard, rank)
        members = [f"rank {rank} (host h{rank}, pid {100 + rank})" for rank in range(world_size)]
        self._slot_bytes = slot_bytes
        hosts_ranks = [LocalRanks(tuple(ranks), host, len(hosts)) for host, ranks in enumerate(hosts)]
        self.local_ranks = {rank: each for each in hosts_ranks for rank in each.ranks}
        self.sharding = Sharding(shards, stripe_blocks, 0, slot_bytes if len(hosts) > 1 else 0)
        self.aggregators = [
            ShardMachine(
                members,
                arena,
                results,
                sizing=MessageSizing.for_network(message_bytes) if message_bytes else None,
                shard=shard,
                sharding=self.sharding,
                delegates=[each.delegate(shard) for each in hosts_ranks] if len(hosts) > 1 else (),
            )
            for shard, (arena, results) in enumerate(zip(self.arenas, self.results, strict=True))
        ]
        self.regions = [self._guarded(len(ranks), region_bytes(slots, slot_bytes, len(hosts))) for ranks in hosts]
        self._sizing = [MessageSizing.for_network(message_bytes)] * shards if message_bytes else []
        self.hosts = [self._host(rank, members) for rank in range(world_size)]
        self.workers = [self._worker(rank, members[rank], scan_span, timeout_s) for rank in range(world_size)]
        self.worker_drivers = [self._worker_driver(rank) for rank in range(world_size)]
        self.aggregator_drivers = [self._aggregator_driver(shard) for shard in range(shards)]
        self._submitted = [0] * world_size

    def _guarded(self, rows: int, slot_bytes: int) -> Array:
        self.guards.append(Guarded((rows, slot_bytes)))
        return self.guards[-1].array

    def _join(self, shard: int, rank: int) -> None:
        up, down = self.up[rank][shard], self.down[shard][rank]
        up.other_end, down.other_end = down, up
        own_slots = self.arenas[shard][rank * self.slots : (rank + 1) * self.slots]
        up.attach(own_slots, self.results[shard])
        down.attach(self.results[shard], own_slots)

    def _worker(self, rank: int, name: str, scan_span: int, timeout_s: float) -> RankMachine:
        links = self.up[rank]
        slots = [(link.send_slots, link.receive_slots) for link in links]
        addresses = [f"127.0.0.1:{7400 + shard}" for shard in range(self.shards)]
        return RankMachine(
            slots,
            addresses,
            name,
            rank=rank,
            scan_span=scan_span,
            timeout_s=timeout_s,
            sizing=self._sizing,
            host=self.hosts[rank],
            local_ranks=self.local_ranks.get(rank),
        )

    def _host(self, rank: int, members: Sequence[str]) -> HostExchange | None:
        mates = self.local_ranks.get(rank)
        if mates is None or len(mates.ranks) == 1 < mates.hosts:
            return None
        steps, names = self.random.choice([1, 1, 2, 16]), [members[each] for each in mates.ranks]
        return HostExchange(
            self.regions[mates.host], mates.ranks.index(rank), names, self.slots, self._slot_bytes, mates,
            steps=steps, looks=1,
        )  # fmt: skip

    def _worker_driver(self, rank: int) -> Driver:
        def on_end(end: End) -> None:
            self.worker_ends[rank] = end

        return Driver(
            self.workers[rank],
            self.up[rank],
            lambda: self.now,
            on_finish=self.finished[rank].append,
            on_end=on_end,
            on_warn=lambda warning: self.warnings.append(warning.text),
        )

    def _aggregator_driver(self, shard: int) -> Driver:
        def on_end(end: End) -> None:
            self.aggregator_ends[shard] = end

        return Driver(
            self.aggregators[shard],
            self.down[shard],
            lambda: self.now,
            on_end=on_end,
            on_warn=lambda warning: self.warnings.append(warning.text),
        )

    # collectives

    def submit(self, rank: int, descriptor: Descriptor, operand: Operand) -> None:
        assert operand.block_bytes <= self.workers[rank].largest_block_bytes
        self.workers[rank].submit(descriptor, operand, self.now, BUILT_IN.get(descriptor.codec))
        self._submitted[rank] += 1

    def allreduce(
        self,
        rank: int,
        x: Array,
        out: Array | None = None,
        *,
        op: Any = "sum",
        name: str = "",
        block_size: int = 8,
        codec: str = "",
        seed: int = 0,
    ) -> Array:
        """Submit what `Communicator.allreduce` would; the result is there when the run is over."""
        target, element = x if out is None else out, element_type(x.dtype)
        descriptor = describe("allreduce", name, element.name, x.shape, op, block_size, codec=codec, seed=seed)
        source, flat = x.reshape(-1), target.reshape(-1)
        source = flat if target is x else source
        operand = DenseTensor(source, flat, self.sharding.layout(descriptor), element.zero_mask)
        self.submit(rank, descriptor, operand)
        return target

    def rows(
        self, rank: int, numbers: Array, values: Array, n_rows: int, op: Any = "sum", *, memory: Memory | None = None
    ) -> RowSet:
        length, dtype = values.shape[1], element_type(values.dtype).name
        descriptor = describe("allreduce_rows", "", dtype, (n_rows, length), op)
        operand = RowSet(numbers, values, self.sharding.layout(descriptor), memory or Pool().take)
        self.submit(rank, descriptor, operand)
        return operand

    def ragged(self, rank: int, x: Array, limit: int) -> RaggedParts:
        """Submit what `Communicator.allgather_ragged` would; a part has up to `limit` packets."""
        ranks = self.world_size
        descriptor = describe(
            "allgather_ragged", "", str(x.dtype), x.shape[1:], item_bytes=x.dtype.itemsize, parts=ranks, packets=limit
        )
        layout = self.sharding.layout(descriptor)
        operand = RaggedParts(packed(x), x[:0], layout, Pool().take, rank=rank, senders=range(ranks), max_packets=limit)
        self.submit(rank, descriptor, operand)
        return operand

    def move_bytes(self, rank: int, kind: Any, source: Array | None, target: Array, block_size: int = 8) -> None:
        """Submit a collective that moves bytes: broadcast, allgather or barrier. `source` None contributes nothing."""
        same = source is target
        target = target.view(np.uint8)
        source = target if same else source if source is None else source.view(np.uint8)
        descriptor = describe(kind, "", "uint8", target.shape, "sum", block_size, 0, 1)
        operand = DenseTensor(source, target, self.sharding.layout(descriptor), element_type(np.uint8).zero_mask)
        self.submit(rank, descriptor, operand)

    def check_broadcast(self, seed: int, size: int, root: int) -> None:
        """Let all ranks get the bytes of one, over bytes of their own."""
        sent = np.random.default_rng(seed).integers(0, 3, size).astype(np.uint8)
        targets: list[Array] = [np.full(size, 7, np.uint8) for _ in range(self.world_size)]
        targets[root][:] = sent
        for rank, target in enumerate(targets):
            self.move_bytes(rank, "broadcast", target if rank == root else None, target)
        self.run()
        for target in targets:
            assert bits(target) == bits(sent)

    # stepping

    def settle(self, idle: Mapping[Driver, float] | None = None, paused: Collection[Driver] = ()) -> None:
        """Step all drivers in random order until nothing moves any more.

        `idle[driver]` is the probability that a step of that driver is left out as long as others move; without `idle`
        every driver gets one of its own. Drivers that are `paused` do nothing at all.
        """
        drivers = [
            worker_driver
            for worker_driver in (*self.worker_drivers, *self.aggregator_drivers)
            if worker_driver not in paused
        ]
        if idle is None:
            idle = {driver: self.random.choice([0.0, 0.0, 0.5, 0.95]) for driver in drivers}
        steps = [(driver, peer) for driver in drivers for peer in [*range(len(driver.links)), None]]
        patient = False
        for _ in range(SWEEPS):
            before, skipped = self._movement(), False
            self.random.shuffle(steps)
            for driver, peer in steps:
                if not patient and self.random.random() < idle.get(driver, 0.0):
                    skipped = True
                elif peer is None:
                    driver.advance()
                else:
                    driver.feed(peer)
            stands = self._movement() == before and not self._goes_on(drivers)
            if stands and not skipped and patient:
                return
            patient = stands
        raise AssertionError(f"still moving after {SWEEPS} sweeps")

    def _goes_on(self, drivers: Sequence[Driver]) -> bool:
        """Whether one of the workers had enough for one turn, and can go on."""
        pairs = zip(self.hosts, self.worker_drivers, strict=True)
        running = [host for host, each in pairs if host and each in drivers and each.machine.ended is None]
        return any(host.can_go_on for host in running)

    def _movement(self) -> int:
        """A number that grows with everything that moves."""
        return self.moved + sum(int(region[:, : DESCRIPTORS * 8].view(np.int64).sum()) for region in self.regions)

    def run(self, idle: Mapping[Driver, float] | None = None) -> None:
        """Step until every collective is finished on every rank; then nothing may be left over."""
        self.settle(idle)
        for rank, worker in enumerate(self.workers):
            assert self.worker_ends[rank] is None, self.worker_ends[rank]
            assert worker.under_way == 0, f"stuck: rank {rank} has finished {self.finished[rank]}"
            assert self.finished[rank] == list(range(self._submitted[rank]))
        self.check_slots_are_back()
        self.check_guards()

    def check_slots_are_back(self) -> None:
        everything = list(range(self.slots))
        for rank, worker in enumerate(self.workers):
            for stream in worker._streams:
                assert sorted(stream._free) == everything, f"rank {rank} lacks send slots"
        for shard, machine in enumerate(self.aggregators):
            assert machine.idle
            assert sorted(machine._slots.free) == everything, f"aggregator {shard} lacks result slots"
        for link in [link for links in (*self.up, *self.down) for link in links]:
            assert not link._in_flight
            assert not link._held

    def check_guards(self) -> None:
        for guard in self.guards:
            guard.check()

    def culprits(self) -> set[str]:
        """Culprits that the workers' errors name; fails if a worker got no error."""
        assert all(end is not None and end.cause is not None for end in self.worker_ends), self.worker_ends
        return {end.cause.culprit for end in self.worker_ends if end is not None and end.cause is not None}


def slot_bytes_for(blocks: int, block_bytes: int) -> int:
    """The smallest slot size, a multiple of 8, in which `blocks` blocks fit."""
    size = 8
    while capacity(size, block_bytes) < blocks:
        size += 8
    return size


def one_host(ranks: int, block_bytes: int, blocks: int, seed: int, **more: Any) -> InprocCluster:
    """Workers of one host whose slots hold so many blocks."""
    slot_bytes = slot_bytes_for(blocks, block_bytes)
    return InprocCluster(ranks, slots=2, slot_bytes=slot_bytes, seed=seed, hosts=[range(ranks)], **more)
