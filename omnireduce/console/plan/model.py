"""Cost model of an all-reduce: bytes and seconds, on hosts that need not exist.

`least_s` is the bound that a link sets; `omnireduce density` knows no more. `predict` follows each part of a tensor as
it is scanned, sent, summed and placed, for `omnireduce plan`. If processors cost nothing, its time comes down to
`least_s`.

A tensor goes through the service window by window. A window is what makes one message to each shard, or what is scanned
for one. Each step takes place as early as it can: when what it needs is there, and when what does it is free. So the
model keeps the time at which each sender, shard and link is done with what it had so far, and raises these times window
by window. Within a window everything is an array operation over all senders and shards. So thousands of ranks take
seconds.

With relays, one in each rack, the blocks pass more stations in the same way.

The model leaves out losses, other traffic, and hosts that are slower than others.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from omnireduce.console.plan.patterns import Load
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import HEADER_BYTES, INDEX_BYTES, RUN_BYTES
from omnireduce.protocol.collective.block_lists import MessageSizing
from omnireduce.protocol.host.groups import CHUNK_BYTES

COLLECTIVE_MS, RING_MS = 0.3, 0.03  # what a collective costs however small it is, as measured on one host


def union_density(density: float, ranks: int) -> float:
    """The share of blocks that at least one rank has, if each has `density` of them at independent places."""
    return float(1 - (1 - density) ** ranks)


def index_bytes(density: float) -> float:
    """The bytes of a block's index. Among blocks at random places, one in 1 / (1 - `density`) begins a run."""
    return min(INDEX_BYTES, RUN_BYTES * (1 - density))


def least_s(up_bytes: float, down_bytes: float, bytes_per_s: float) -> float:
    """The seconds that a link needs at least, for bytes in both directions at once."""
    return max(up_bytes, down_bytes) / bytes_per_s


def ring_s(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """The seconds of a dense ring all-reduce at least (Patarasu and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * nbytes / bytes_per_s


WORTH_LEAVING_OUT = 8  # one in so many blocks of a result that its receiver alone has brought
MOST = 512  # windows


class Hosts(NamedTuple):
    """Hosts, `number` of them, with `cores` processors each. Each has a link of `bytes_per_s` each way, over which a
    byte takes `latency_s`; after a pause `burst_bytes` pass at once. `one_machine`: the hosts are parts of one machine,
    as in a testbed, and have `cores` all together. They are divided into `racks`, if there are any. A rack has one link
    to all others, of `rack_bytes_per_s` each way. Hosts of shards alone are in no rack."""

    number: int
    cores: float
    bytes_per_s: float
    latency_s: float
    burst_bytes: int = 0
    one_machine: bool = False
    racks: int = 0
    rack_bytes_per_s: float = 0.0

    def rack_of(self, host: Array) -> Array:
        """The rack of each host; what is in none gets the number of racks."""
        racks: Array = np.minimum(host * self.racks // self.number, self.racks)
        return racks


class Plan(NamedTuple):
    """Placement of ranks and shards. Each host has `ranks`. If `by_host`, they add up what they have in memory, and
    send it as one sender. Shards are on hosts of their own if they are `dedicated`, else on those of the ranks, in
    turn. With `relays`, each rack has a host more, with a relay of so many shards."""

    ranks: int
    by_host: bool
    shards: int
    dedicated: bool
    relays: bool = False

    @property
    def senders(self) -> int:
        """The number of senders on each host."""
        return 1 if self.by_host else self.ranks


class Messages(NamedTuple):
    """Messages are as long as `lengths` says, and a sender scans up to `span` blocks for one. A sender is at most
    `slots` messages ahead of a shard."""

    lengths: MessageSizing = MessageSizing.for_network(1 << 20)
    slots: int = 3
    span: int = 1 << 14


class Costs(NamedTuple):
    """Processor time in seconds. Of one byte: to `scan` it, to `pack` it into a message, to `reduce` it on a shard, to
    `place` it in the result, to add it to the `host_sum`, and to hand it to the network or take it from there. Of one
    message, on each side: `message`. Of one chunk of a host's sum, on each of its ranks: `chunk`."""

    scan: float = 0.04e-9
    pack: float = 0.12e-9
    reduce: float = 0.16e-9
    place: float = 0.12e-9
    host_sum: float = 0.8e-9
    network: float = 0.31e-9
    message: float = 130e-6
    chunk: float = 110e-6

    def at(self, speed: float) -> Costs:
        """The costs on processors that are `speed` times as fast."""
        return Costs._make(cost / speed for cost in self)


class Prediction(NamedTuple):
    """Cost of one all-reduce, or of several: `seconds`; `link_bytes`, those of the busiest link in its busier
    direction; `processor_s` of all hosts together; `shard_bytes`, the memory for slots that one shard needs."""

    seconds: float
    link_bytes: int
    processor_s: float
    shard_bytes: int

    def and_then(self, other: Prediction, times: int) -> Prediction:
        """These, and after them so many others. The busiest link counts as the same in all."""
        return Prediction(
            self.seconds + times * other.seconds,
            self.link_bytes + times * other.link_bytes,
            self.processor_s + times * other.processor_s,
            max(self.shard_bytes, other.shard_bytes),
        )


def windows_for(blocks: int, density: float, block_bytes: int, shards: int, messages: Messages) -> int:
    """In how many windows to look at a tensor: so that each makes about one message to each shard."""
    message_bytes = messages.lengths.message_bytes(int(blocks * density * block_bytes / shards))
    fitting = message_bytes * shards / (block_bytes * max(density, 1e-9))
    wanted = math.ceil(blocks / max(1.0, min(messages.span, fitting)))
    return max(1, min(wanted, MOST))


def predict(
    load: Load,
    block_bytes: int,
    hosts: Hosts,
    plan: Plan,
    *,
    messages: Messages | None = None,
    costs: Costs | None = None,
) -> Prediction:
    """The all-reduce of a tensor with blocks of `block_bytes`."""
    return _Exchange(load, block_bytes, hosts, plan, messages or Messages()).run(costs or Costs())


class _Work(NamedTuple):
    """Bytes that senders put on their links and take from there, (senders, windows), and the same for shards, (shards,
    windows). Seconds of processor, likewise. Bytes that leave racks on the way up, and enter them, and the same on the
    way down: (racks and 1, windows)."""

    sent: Array
    got: Array
    taken: Array
    given: Array
    pack_s: Array
    place_s: Array
    reduce_s: Array
    lifted: Array
    lowered: Array
    lifted_results: Array
    lowered_results: Array


class _Exchange:
    """Times are in seconds since the beginning. A node is a host, of ranks or of shards."""

    def __init__(self, load: Load, block_bytes: int, hosts: Hosts, plan: Plan, messages: Messages) -> None:
        self._load, self._hosts, self._plan, self._messages = load, hosts, plan, messages
        self._block_bytes = block_bytes
        self._message_bytes = messages.lengths.message_bytes(int(load.own.sum(1).mean() * block_bytes))
        self._result_bytes = messages.lengths.message_bytes(int(load.union.sum(0).mean() * block_bytes))
        self._home = np.arange(hosts.number * plan.senders) // plan.senders  # node of each sender
        shards = np.arange(plan.shards)
        self._node = hosts.number + shards if plan.dedicated else shards % hosts.number  # of each shard
        self._nodes = hosts.number + (plan.shards if plan.dedicated else 0)
        self._rack_of_home, self._rack_of_node = hosts.rack_of(self._home), hosts.rack_of(self._node)

    def run(self, costs: Costs) -> Prediction:
        work = self._work(costs)
        out = self._by_node(work.sent.sum(1), work.given.sum(1))
        into = self._by_node(work.got.sum(1), work.taken.sum(1))
        return Prediction(
            seconds=self._seconds(work),
            link_bytes=int(max(out.max(), into.max())),
            processor_s=float(work.pack_s.sum() + work.place_s.sum() + work.reduce_s.sum()),
            shard_bytes=(len(self._home) + 1) * self._messages.slots * self._messages.lengths.longest,
        )

    def _work(self, costs: Costs) -> _Work:
        """One window at a time: of all together there may be too much for the memory."""
        windows = [self._window(window, costs) for window in range(len(self._load.all))]
        return _Work._make(np.stack(field, 1) for field in zip(*windows, strict=True))

    def _window(self, window: int, costs: Costs) -> _Work:
        """The same for one window, without that dimension."""
        load, plan, block_bytes = self._load, self._plan, self._block_bytes
        own, sole, union = load.own[:, window], load.sole[:, window], load.union[window]
        begun = load.all[window] > 0  # shards that have a part in this window: others get no message
        begun[0] |= not load.all.any()  # the first shard knows of every collective
        remote = begun & (self._home[:, None] != self._node)  # what stays on its host is not sent
        up = own.astype(np.int64) * block_bytes + HEADER_BYTES * begun
        left_out = np.where(remote & (sole * WORTH_LEAVING_OUT >= union), sole, 0)
        sent, got = up * remote, ((union - left_out) * block_bytes + HEADER_BYTES) * remote
        messages = begun * np.maximum(1, -(-own.astype(np.int64) * block_bytes // self._message_bytes))
        results = begun * np.maximum(1, -(-union.astype(np.int64) * block_bytes // self._result_bytes))
        results = np.broadcast_to(results, up.shape)
        summed = plan.ranks if plan.by_host and plan.ranks > 1 else 0
        nbytes = load.all[window].sum() * block_bytes
        pack_s = costs.scan * max(1, summed) * nbytes + costs.chunk * summed * nbytes / CHUNK_BYTES
        pack_s = pack_s + (costs.pack + costs.host_sum * summed) * up.sum(1)
        place_s = costs.place * max(1, summed) * union.sum() * block_bytes
        reduce_s = (costs.reduce * up + costs.network * (sent + got) + costs.message * (messages + results)).sum(0)
        crosses = self._rack_of_home[:, None] != self._rack_of_node
        return _Work(
            lifted=self._by_rack(self._rack_of_home, (sent * crosses).sum(1)),
            lowered=self._by_rack(self._rack_of_node, (sent * crosses).sum(0)),
            lifted_results=self._by_rack(self._rack_of_node, (got * crosses).sum(0)),
            lowered_results=self._by_rack(self._rack_of_home, (got * crosses).sum(1)),
            sent=sent.sum(1),
            got=got.sum(1),
            taken=sent.sum(0),
            given=got.sum(0),
            pack_s=pack_s + costs.network * sent.sum(1) + costs.message * messages.sum(1),
            place_s=place_s + costs.network * got.sum(1) + costs.message * results.sum(1),
            reduce_s=reduce_s,
        )

    def _by_rack(self, racks: Array, nbytes: Array) -> Array:
        """The bytes of each rack; those of what is in none are on no rack's link."""
        totals = np.bincount(racks, nbytes, self._hosts.racks + 1)
        totals[-1] = 0
        return totals

    def _by_node(self, of_senders: Array, of_shards: Array) -> Array:
        totals = np.bincount(self._home, of_senders, self._nodes)
        return totals + np.bincount(self._node, of_shards, self._nodes)

    def _seconds(self, work: _Work) -> float:
        """The time at which the last sender has placed the last window."""
        home, node, latency = self._home, self._node, self._hosts.latency_s
        hosts, racks = self._hosts, np.arange(self._hosts.racks + 1)
        out, into = (Links(hosts.bytes_per_s, hosts.burst_bytes, self._nodes) for _ in range(2))
        lift, lower = (Links(hosts.rack_bytes_per_s or math.inf, hosts.burst_bytes, len(racks)) for _ in range(2))
        cores = Processors(hosts, self._nodes)
        lifted, lowered, lifted_results, lowered_results = (np.zeros(len(racks)) for _ in range(4))
        packed, sent, got, placed = (np.zeros(len(home)) for _ in range(4))
        taken, reduced, given = (np.zeros(len(node)) for _ in range(3))
        freed: list[float] = []  # when the messages of each window had been used
        ahead = self._windows_ahead()
        for window in range(len(self._load.all)):
            free = freed[window - ahead] if window >= ahead else 0.0
            packed = cores.work(home, np.maximum(packed, free), work.pack_s[:, window])
            sent = out.carry(home, sent, packed, work.sent[:, window])
            lifted = lift.carry(racks, lifted, np.full(len(racks), sent.max()), work.lifted[:, window])
            lowered = lower.carry(racks, lowered, np.full(len(racks), lifted.max()), work.lowered[:, window])
            taken = into.carry(node, taken, lowered.max() + latency, work.taken[:, window])
            reduced = cores.work(node, np.maximum(reduced, taken), work.reduce_s[:, window])
            freed.append(float(reduced.max()) + latency)
            given = out.carry(node, given, reduced, work.given[:, window])
            ready = np.full(len(racks), given.max())
            lifted_results = lift.carry(racks, lifted_results, ready, work.lifted_results[:, window])
            ready = np.full(len(racks), lifted_results.max())
            lowered_results = lower.carry(racks, lowered_results, ready, work.lowered_results[:, window])
            got = into.carry(home, got, lowered_results.max() + latency, work.got[:, window])
            placed = cores.work(home, np.maximum(placed, got), work.place_s[:, window])
        return float(placed.max())

    def _windows_ahead(self) -> int:
        """The number of windows that a sender may be ahead of the shards."""
        count = 1 + self._load.own.mean() * self._block_bytes // self._message_bytes
        return max(1, int(self._messages.slots // count))


class Links:
    """One direction of the links of all nodes, or racks. After a pause `burst_bytes` pass at once."""

    def __init__(self, bytes_per_s: float, burst_bytes: int, nodes: int) -> None:
        self._rate, self._burst, self._carried = bytes_per_s, burst_bytes, np.zeros(nodes)

    def carry(self, at: Array, before: Array, ready: Array, nbytes: Array) -> Array:
        """Bytes that are `ready` at a time pass the links of the nodes `at`; return when they have passed. Those that
        went the same way last had passed at `before`.

        Other bytes on the same links go in between.
        """
        rate, more = self._rate, np.bincount(at, nbytes, len(self._carried))
        self._carried += more
        busy_until = np.maximum(0.0, self._carried - self._burst) / rate
        return np.maximum(np.maximum(ready, busy_until[at]), before + more[at] / rate)


class Processors:
    """The processors of all nodes."""

    def __init__(self, hosts: Hosts, nodes: int) -> None:
        self._cores, self._of_all, self._worked_s = hosts.cores, hosts.one_machine, np.zeros(nodes)

    def work(self, at: Array, start: Array, seconds: Array) -> Array:
        """One thread of each node in `at` works for so many seconds, from `start` on; return when it is done."""
        at = np.zeros_like(at) if self._of_all else at
        self._worked_s += np.bincount(at, seconds, len(self._worked_s))
        done: Array = np.maximum(start + seconds, self._worked_s[at] / self._cores)
        return done


def predict_tree(
    load: Load, of_racks: Load, block_bytes: int, hosts: Hosts, plan: Plan, *, messages: Messages, costs: Costs
) -> Prediction:
    """The all-reduce of a tensor with blocks of `block_bytes`. `load`: what each sender has; `of_racks`, cut into the
    same windows: what each rack has together."""
    return _Tree(load, of_racks, block_bytes, hosts, plan, messages=messages, costs=costs).run()


class _Tree:
    """Nodes are the hosts of ranks, then those of the relays, then those of the shards. All of a relay's shards are on
    one host, and count as one."""

    def __init__(
        self, load: Load, of_racks: Load, block_bytes: int, hosts: Hosts, plan: Plan,
        *, messages: Messages, costs: Costs,
    ) -> None:  # fmt: skip
        self._hosts, self._plan, self._messages, self._costs = hosts, plan, messages, costs
        senders = hosts.number * plan.senders
        self._home = np.arange(senders) // plan.senders
        self._rack = hosts.rack_of(self._home)
        self._relay = hosts.number + np.arange(hosts.racks)
        self._node = hosts.number + hosts.racks + np.arange(plan.shards)
        self._nodes = hosts.number + hosts.racks + plan.shards
        self._members = np.bincount(self._rack, minlength=hosts.racks)
        header = HEADER_BYTES * plan.shards
        self._tensor = load.all.sum(1) * block_bytes  # (windows,)
        self._up = load.own.sum(2) * block_bytes + header  # (senders, windows)
        self._lifted = of_racks.own.sum(2) * block_bytes + header  # (racks, windows)
        self._to_shard = of_racks.own.sum(0).T * block_bytes + HEADER_BYTES * hosts.racks  # (shards, windows)
        self._result = load.union.T * block_bytes + HEADER_BYTES  # (shards, windows)
        self._down = self._result.sum(0)  # (windows,)
        lengths = messages.lengths
        self._lengths = [
            lengths.message_bytes(int(nbytes)) for nbytes in (self._up.sum(1).mean(), self._lifted.sum(1).mean())
        ]

    def run(self) -> Prediction:
        seconds, racks = self._seconds(), self._hosts.racks
        out_of_relay = self._lifted.sum(1) + self._members * self._down.sum()
        busiest = max(self._up.sum(1).max(), self._down.sum(), out_of_relay.max(), (self._result.sum(1) * racks).max())
        slots = self._messages.slots * self._messages.lengths.longest
        return Prediction(seconds, int(busiest), self._worked_s, (int(self._members.max()) + 2) * slots)

    def _messages_of(self, nbytes: Array, level: int) -> Array:
        """The number of messages for so many bytes, to or from all shards."""
        counts: Array = np.maximum(self._plan.shards, -(-nbytes // self._lengths[level]))
        return counts

    def _seconds(self) -> float:
        """The time at which the last sender has placed the last window. Work is in seconds of processor."""
        hosts, plan, costs, racks = self._hosts, self._plan, self._costs, np.arange(self._hosts.racks)
        latency = hosts.latency_s
        out, into = (Links(hosts.bytes_per_s, hosts.burst_bytes, self._nodes) for _ in range(2))
        lift, lower = (Links(hosts.rack_bytes_per_s, hosts.burst_bytes, len(racks)) for _ in range(2))
        cores = Processors(hosts, self._nodes)
        packed, sent, got, placed = (np.zeros(len(self._home)) for _ in range(4))
        joined, merged, relayed, lifted, lowered, back, passed, shown = (np.zeros(len(racks)) for _ in range(8))
        taken, reduced, given = (np.zeros(plan.shards) for _ in range(3))
        freed: list[float] = []
        summed = plan.ranks if plan.by_host and plan.ranks > 1 else 0
        moved = costs.network + costs.reduce
        ahead = max(1, int(self._messages.slots // (1 + self._up.mean() // (self._lengths[0] * plan.shards))))
        self._worked_s = 0.0

        def work(at: Array, start: Array, seconds: Array) -> Array:
            self._worked_s += float(seconds.sum())
            return cores.work(at, start, seconds)

        for window in range(len(self._tensor)):
            up, lifting, down = self._up[:, window], self._lifted[:, window], self._down[window]
            free = freed[window - ahead] if window >= ahead else 0.0
            pack_s = costs.scan * self._tensor[window] * max(1, summed) + (costs.pack + costs.network) * up
            pack_s = pack_s + costs.host_sum * summed * up + costs.message * self._messages_of(up, 0)
            packed = work(self._home, np.maximum(packed, free), pack_s)
            sent = out.carry(self._home, sent, packed, up)
            from_members = np.bincount(self._rack, up)
            ready = self._last_of_racks(sent) + latency
            joined = into.carry(self._relay, joined, ready, from_members)
            merge_s = moved * from_members + costs.network * lifting
            merge_s = merge_s + costs.message * (self._members * self._messages_of(up.mean(), 0))
            merge_s = merge_s + costs.message * self._messages_of(lifting, 1)
            merged = work(self._relay, np.maximum(merged, joined), merge_s)
            freed.append(float(merged.max()) + latency)
            relayed = out.carry(self._relay, relayed, merged, lifting)
            lifted = lift.carry(racks, lifted, relayed, lifting)
            taken = into.carry(
                self._node, taken, np.full(plan.shards, lifted.max() + latency), self._to_shard[:, window]
            )
            results = len(racks) * self._result[:, window]
            reduce_s = moved * self._to_shard[:, window] + costs.network * results
            reduce_s = reduce_s + costs.message * len(racks) * 2 * self._messages_of(down, 1) / plan.shards
            reduced = work(self._node, np.maximum(reduced, taken), reduce_s)
            given = out.carry(self._node, given, reduced, results)
            lowered = lower.carry(racks, lowered, np.full(len(racks), given.max()), np.full(len(racks), down))
            back = into.carry(self._relay, back, lowered + latency, np.full(len(racks), down))
            pass_s = costs.network * down * (1 + self._members) + costs.message * self._messages_of(down, 1)
            passed = work(self._relay, np.maximum(passed, back), pass_s)
            shown = out.carry(self._relay, shown, passed, down * self._members)
            got = into.carry(self._home, got, shown[self._rack] + latency, np.full(len(got), down))
            place_s = (costs.place * max(1, summed) + costs.network) * down + costs.message * self._messages_of(down, 1)
            placed = work(self._home, np.maximum(placed, got), np.broadcast_to(place_s, got.shape))
        return float(placed.max())

    def _last_of_racks(self, times: Array) -> Array:
        """The last time of each rack's senders."""
        last_times = np.zeros(self._hosts.racks)
        np.maximum.at(last_times, self._rack, times)
        return last_times
