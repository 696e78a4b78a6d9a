"""Cost model of an all-reduce: bytes and seconds, on hosts that need not exist.

`link_time_s` is the bound that a link sets; `omnireduce density` knows no more. `predict` follows each part of a tensor
as it is scanned, sent, summed and placed, for `omnireduce plan`. If processors cost nothing, its time comes down to
`link_time_s`.

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
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.sharding import CHUNK_BYTES

COLLECTIVE_MS, RING_MS = 0.3, 0.03  # what a collective costs however small it is, as measured on one host


def union_density(density: float, ranks: int) -> float:
    """The share of blocks that at least one rank has, if each has `density` of them at independent places."""
    return float(1 - (1 - density) ** ranks)


def index_bytes(density: float) -> float:
    """The bytes of a block's index. Among blocks at random places, one in 1 / (1 - `density`) begins a run."""
    return min(INDEX_BYTES, RUN_BYTES * (1 - density))


def link_time_s(up_bytes: float, down_bytes: float, bytes_per_s: float) -> float:
    """The seconds that a link needs at least, for bytes in both directions at once."""
    return max(up_bytes, down_bytes) / bytes_per_s


def ring_time_s(nbytes: float, ranks: int, bytes_per_s: float) -> float:
    """The seconds of a dense ring all-reduce at least (Patarasu and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * nbytes / bytes_per_s


WORTH_LEAVING_OUT = 8  # one in so many blocks of a result that its receiver alone has brought
MAX_WINDOWS = 512


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
        """The rack of each host; a host in no rack gets `racks`, the number of racks."""
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
        """The cost of this, then of `other`, `times` times. The busiest link counts as the same in all."""
        return Prediction(
            self.seconds + times * other.seconds,
            self.link_bytes + times * other.link_bytes,
            self.processor_s + times * other.processor_s,
            max(self.shard_bytes, other.shard_bytes),
        )


def windows_for(blocks: int, density: float, block_bytes: int, shards: int, messages: Messages) -> int:
    """The number of windows of a tensor: each makes about one message to each shard."""
    message_bytes = messages.lengths.message_bytes(int(blocks * density * block_bytes / shards))
    fitting = message_bytes * shards / (block_bytes * max(density, 1e-9))
    windows = math.ceil(blocks / max(1.0, min(messages.span, fitting)))
    return max(1, min(windows, MAX_WINDOWS))


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
    return _FlatExchange(load, block_bytes, hosts, plan, messages or Messages()).run(costs or Costs())


class _WindowWork(NamedTuple):
    """Bytes and processor time of each window. Bytes that senders put on their links and receive: (senders, windows);
    that shards receive and send: (shards, windows). Bytes on the way to the shards that leave racks and enter racks,
    and the same for results on the way back: (racks + 1, windows). Processor time, in seconds: `pack_s` and `place_s`
    of senders, `reduce_s` of shards."""

    sent: Array
    received: Array
    shard_received: Array
    shard_sent: Array
    pack_s: Array
    place_s: Array
    reduce_s: Array
    out_of_racks: Array
    into_racks: Array
    results_out_of_racks: Array
    results_into_racks: Array


class _FlatExchange:
    """Times are in seconds since the beginning. A node is a host, of ranks or of shards."""

    def __init__(self, load: Load, block_bytes: int, hosts: Hosts, plan: Plan, messages: Messages) -> None:
        self._load, self._hosts, self._plan, self._messages = load, hosts, plan, messages
        self._block_bytes = block_bytes
        self._message_bytes = messages.lengths.message_bytes(int(load.own.sum(1).mean() * block_bytes))
        self._result_bytes = messages.lengths.message_bytes(int(load.union.sum(0).mean() * block_bytes))
        self._node_of_sender = np.arange(hosts.number * plan.senders) // plan.senders
        shards = np.arange(plan.shards)
        self._node_of_shard = hosts.number + shards if plan.dedicated else shards % hosts.number
        self._node_count = hosts.number + (plan.shards if plan.dedicated else 0)
        self._rack_of_sender = hosts.rack_of(self._node_of_sender)
        self._rack_of_shard = hosts.rack_of(self._node_of_shard)

    def run(self, costs: Costs) -> Prediction:
        work = self._work(costs)
        sent_by_node = self._by_node(work.sent.sum(1), work.shard_sent.sum(1))
        received_by_node = self._by_node(work.received.sum(1), work.shard_received.sum(1))
        return Prediction(
            seconds=self._seconds(work),
            link_bytes=int(max(sent_by_node.max(), received_by_node.max())),
            processor_s=float(work.pack_s.sum() + work.place_s.sum() + work.reduce_s.sum()),
            shard_bytes=(len(self._node_of_sender) + 1) * self._messages.slots * self._messages.lengths.longest,
        )

    def _work(self, costs: Costs) -> _WindowWork:
        """One window at a time: of all together there may be too much for the memory."""
        windows = [self._window(window, costs) for window in range(len(self._load.all))]
        return _WindowWork._make(np.stack(field, 1) for field in zip(*windows, strict=True))

    def _window(self, window: int, costs: Costs) -> _WindowWork:
        """The same for one window, without that dimension."""
        load, plan, block_bytes = self._load, self._plan, self._block_bytes
        sender_blocks, sole_blocks, union_blocks = load.own[:, window], load.sole[:, window], load.union[window]
        takes_part = load.all[window] > 0  # shards that have a part in this window: others get no message
        takes_part[0] |= not load.all.any()  # the first shard knows of every collective
        # bytes that stay on their host are not sent
        remote = takes_part & (self._node_of_sender[:, None] != self._node_of_shard)
        up_bytes = sender_blocks.astype(np.int64) * block_bytes + HEADER_BYTES * takes_part
        left_out = np.where(remote & (sole_blocks * WORTH_LEAVING_OUT >= union_blocks), sole_blocks, 0)
        sent, received = up_bytes * remote, ((union_blocks - left_out) * block_bytes + HEADER_BYTES) * remote
        messages = takes_part * np.maximum(1, -(-sender_blocks.astype(np.int64) * block_bytes // self._message_bytes))
        results = takes_part * np.maximum(1, -(-union_blocks.astype(np.int64) * block_bytes // self._result_bytes))
        results = np.broadcast_to(results, up_bytes.shape)
        summing_ranks = plan.ranks if plan.by_host and plan.ranks > 1 else 0
        nbytes = load.all[window].sum() * block_bytes
        pack_s = costs.scan * max(1, summing_ranks) * nbytes + costs.chunk * summing_ranks * nbytes / CHUNK_BYTES
        pack_s = pack_s + (costs.pack + costs.host_sum * summing_ranks) * up_bytes.sum(1)
        place_s = costs.place * max(1, summing_ranks) * union_blocks.sum() * block_bytes
        reduce_s = (
            costs.reduce * up_bytes + costs.network * (sent + received) + costs.message * (messages + results)
        ).sum(0)
        crosses = self._rack_of_sender[:, None] != self._rack_of_shard
        return _WindowWork(
            out_of_racks=self._by_rack(self._rack_of_sender, (sent * crosses).sum(1)),
            into_racks=self._by_rack(self._rack_of_shard, (sent * crosses).sum(0)),
            results_out_of_racks=self._by_rack(self._rack_of_shard, (received * crosses).sum(0)),
            results_into_racks=self._by_rack(self._rack_of_sender, (received * crosses).sum(1)),
            sent=sent.sum(1),
            received=received.sum(1),
            shard_received=sent.sum(0),
            shard_sent=received.sum(0),
            pack_s=pack_s + costs.network * sent.sum(1) + costs.message * messages.sum(1),
            place_s=place_s + costs.network * received.sum(1) + costs.message * results.sum(1),
            reduce_s=reduce_s,
        )

    def _by_rack(self, racks: Array, nbytes: Array) -> Array:
        """The bytes of each rack; those of what is in none are on no rack's link."""
        totals = np.bincount(racks, nbytes, self._hosts.racks + 1)
        totals[-1] = 0
        return totals

    def _by_node(self, of_senders: Array, of_shards: Array) -> Array:
        totals = np.bincount(self._node_of_sender, of_senders, self._node_count)
        return totals + np.bincount(self._node_of_shard, of_shards, self._node_count)

    def _seconds(self, work: _WindowWork) -> float:
        """The time at which the last sender has placed the last window."""
        node_of_sender, node_of_shard, latency = self._node_of_sender, self._node_of_shard, self._hosts.latency_s
        hosts, racks = self._hosts, np.arange(self._hosts.racks + 1)
        host_out, host_in = (Links(hosts.bytes_per_s, hosts.burst_bytes, self._node_count) for _ in range(2))
        rack_out, rack_in = (Links(hosts.rack_bytes_per_s or math.inf, hosts.burst_bytes, len(racks)) for _ in range(2))
        cores = Processors(hosts, self._node_count)
        left_rack, entered_rack, results_left_rack, results_entered_rack = (np.zeros(len(racks)) for _ in range(4))
        packed, sent, received, placed = (np.zeros(len(node_of_sender)) for _ in range(4))
        shard_received, reduced, shard_sent = (np.zeros(len(node_of_shard)) for _ in range(3))
        slots_freed: list[float] = []  # when the messages of each window had been used
        windows_ahead = self._windows_ahead()
        for window in range(len(self._load.all)):
            slots_free = slots_freed[window - windows_ahead] if window >= windows_ahead else 0.0
            packed = cores.work(node_of_sender, np.maximum(packed, slots_free), work.pack_s[:, window])
            sent = host_out.carry(node_of_sender, sent, packed, work.sent[:, window])
            left_rack = rack_out.carry(racks, left_rack, np.full(len(racks), sent.max()), work.out_of_racks[:, window])
            entered_rack = rack_in.carry(
                racks, entered_rack, np.full(len(racks), left_rack.max()), work.into_racks[:, window]
            )
            shard_received = host_in.carry(
                node_of_shard, shard_received, entered_rack.max() + latency, work.shard_received[:, window]
            )
            reduced = cores.work(node_of_shard, np.maximum(reduced, shard_received), work.reduce_s[:, window])
            slots_freed.append(float(reduced.max()) + latency)
            shard_sent = host_out.carry(node_of_shard, shard_sent, reduced, work.shard_sent[:, window])
            ready = np.full(len(racks), shard_sent.max())
            results_left_rack = rack_out.carry(racks, results_left_rack, ready, work.results_out_of_racks[:, window])
            ready = np.full(len(racks), results_left_rack.max())
            results_entered_rack = rack_in.carry(racks, results_entered_rack, ready, work.results_into_racks[:, window])
            received = host_in.carry(
                node_of_sender, received, results_entered_rack.max() + latency, work.received[:, window]
            )
            placed = cores.work(node_of_sender, np.maximum(placed, received), work.place_s[:, window])
        return float(placed.max())

    def _windows_ahead(self) -> int:
        """The number of windows that a sender may be ahead of the shards."""
        count = 1 + self._load.own.mean() * self._block_bytes // self._message_bytes
        return max(1, int(self._messages.slots // count))


class Links:
    """One direction of the links of all nodes, or racks. After a pause `burst_bytes` pass at once."""

    def __init__(self, bytes_per_s: float, burst_bytes: int, nodes: int) -> None:
        self._rate, self._burst, self._carried_bytes = bytes_per_s, burst_bytes, np.zeros(nodes)

    def carry(self, nodes: Array, earlier_end: Array, ready: Array, nbytes: Array) -> Array:
        """Let bytes that are `ready` at a time pass the links of `nodes`; return the times at which they have passed.
        The bytes before them on the same path had passed at `earlier_end`.

        Other bytes on the same links go in between.
        """
        rate, added_bytes = self._rate, np.bincount(nodes, nbytes, len(self._carried_bytes))
        self._carried_bytes += added_bytes
        busy_until = np.maximum(0.0, self._carried_bytes - self._burst) / rate
        return np.maximum(np.maximum(ready, busy_until[nodes]), earlier_end + added_bytes[nodes] / rate)


class Processors:
    """The processors of all nodes."""

    def __init__(self, hosts: Hosts, nodes: int) -> None:
        self._cores, self._is_one_machine, self._worked_s = hosts.cores, hosts.one_machine, np.zeros(nodes)

    def work(self, nodes: Array, start: Array, seconds: Array) -> Array:
        """One thread of each node in `nodes` works for so many seconds, from `start` on; return when it is done."""
        nodes = np.zeros_like(nodes) if self._is_one_machine else nodes
        self._worked_s += np.bincount(nodes, seconds, len(self._worked_s))
        end: Array = np.maximum(start + seconds, self._worked_s[nodes] / self._cores)
        return end


def predict_tree(
    load: Load, of_racks: Load, block_bytes: int, hosts: Hosts, plan: Plan, *, messages: Messages, costs: Costs
) -> Prediction:
    """The all-reduce of a tensor with blocks of `block_bytes`. `load`: what each sender has; `of_racks`, cut into the
    same windows: what each rack has together."""
    return _RelayExchange(load, of_racks, block_bytes, hosts, plan, messages=messages, costs=costs).run()


class _RelayExchange:
    """Nodes are the hosts of ranks, then those of the relays, then those of the shards. All of a relay's shards are on
    one host, and count as one."""

    def __init__(
        self, load: Load, of_racks: Load, block_bytes: int, hosts: Hosts, plan: Plan,
        *, messages: Messages, costs: Costs,
    ) -> None:  # fmt: skip
        self._hosts, self._plan, self._messages, self._costs = hosts, plan, messages, costs
        senders = hosts.number * plan.senders
        self._node_of_sender = np.arange(senders) // plan.senders
        self._rack_of_sender = hosts.rack_of(self._node_of_sender)
        self._node_of_relay = hosts.number + np.arange(hosts.racks)
        self._node_of_shard = hosts.number + hosts.racks + np.arange(plan.shards)
        self._node_count = hosts.number + hosts.racks + plan.shards
        self._senders_of_rack = np.bincount(self._rack_of_sender, minlength=hosts.racks)
        header = HEADER_BYTES * plan.shards
        self._tensor_bytes = load.all.sum(1) * block_bytes  # (windows,)
        self._up_bytes = load.own.sum(2) * block_bytes + header  # (senders, windows)
        self._relay_bytes = of_racks.own.sum(2) * block_bytes + header  # (racks, windows)
        self._bytes_to_shard = of_racks.own.sum(0).T * block_bytes + HEADER_BYTES * hosts.racks  # (shards, windows)
        self._result_bytes = load.union.T * block_bytes + HEADER_BYTES  # (shards, windows)
        self._down_bytes = self._result_bytes.sum(0)  # (windows,)
        lengths = messages.lengths
        self._lengths = [
            lengths.message_bytes(int(nbytes))
            for nbytes in (self._up_bytes.sum(1).mean(), self._relay_bytes.sum(1).mean())
        ]

    def run(self) -> Prediction:
        seconds, racks = self._seconds(), self._hosts.racks
        out_of_relay = self._relay_bytes.sum(1) + self._senders_of_rack * self._down_bytes.sum()
        busiest = max(
            self._up_bytes.sum(1).max(),
            self._down_bytes.sum(),
            out_of_relay.max(),
            (self._result_bytes.sum(1) * racks).max(),
        )
        slots = self._messages.slots * self._messages.lengths.longest
        return Prediction(seconds, int(busiest), self._worked_s, (int(self._senders_of_rack.max()) + 2) * slots)

    def _messages_of(self, nbytes: Array, level: int) -> Array:
        """The number of messages for so many bytes, to or from all shards."""
        counts: Array = np.maximum(self._plan.shards, -(-nbytes // self._lengths[level]))
        return counts

    def _seconds(self) -> float:
        """The time at which the last sender has placed the last window. Work is in seconds of processor."""
        hosts, plan, costs, racks = self._hosts, self._plan, self._costs, np.arange(self._hosts.racks)
        latency = hosts.latency_s
        host_out, host_in = (Links(hosts.bytes_per_s, hosts.burst_bytes, self._node_count) for _ in range(2))
        rack_out, rack_in = (Links(hosts.rack_bytes_per_s, hosts.burst_bytes, len(racks)) for _ in range(2))
        cores = Processors(hosts, self._node_count)
        packed, sent, received, placed = (np.zeros(len(self._node_of_sender)) for _ in range(4))
        relay_received, relay_merged, relay_sent, left_rack = (np.zeros(len(racks)) for _ in range(4))
        entered_rack, results_at_relay, results_handled, results_passed_on = (np.zeros(len(racks)) for _ in range(4))
        shard_received, reduced, shard_sent = (np.zeros(plan.shards) for _ in range(3))
        slots_freed: list[float] = []
        summing_ranks = plan.ranks if plan.by_host and plan.ranks > 1 else 0
        byte_cost_s = costs.network + costs.reduce
        windows_ahead = max(
            1, int(self._messages.slots // (1 + self._up_bytes.mean() // (self._lengths[0] * plan.shards)))
        )
        self._worked_s = 0.0

        def work(nodes: Array, start: Array, seconds: Array) -> Array:
            self._worked_s += float(seconds.sum())
            return cores.work(nodes, start, seconds)

        for window in range(len(self._tensor_bytes)):
            up_bytes, relay_bytes, down_bytes = (
                self._up_bytes[:, window],
                self._relay_bytes[:, window],
                self._down_bytes[window],
            )
            slots_free = slots_freed[window - windows_ahead] if window >= windows_ahead else 0.0
            pack_s = (
                costs.scan * self._tensor_bytes[window] * max(1, summing_ranks)
                + (costs.pack + costs.network) * up_bytes
            )
            pack_s = pack_s + costs.host_sum * summing_ranks * up_bytes + costs.message * self._messages_of(up_bytes, 0)
            packed = work(self._node_of_sender, np.maximum(packed, slots_free), pack_s)
            sent = host_out.carry(self._node_of_sender, sent, packed, up_bytes)
            from_members = np.bincount(self._rack_of_sender, up_bytes)
            ready = self._last_of_racks(sent) + latency
            relay_received = host_in.carry(self._node_of_relay, relay_received, ready, from_members)
            merge_s = byte_cost_s * from_members + costs.network * relay_bytes
            merge_s = merge_s + costs.message * (self._senders_of_rack * self._messages_of(up_bytes.mean(), 0))
            merge_s = merge_s + costs.message * self._messages_of(relay_bytes, 1)
            relay_merged = work(self._node_of_relay, np.maximum(relay_merged, relay_received), merge_s)
            slots_freed.append(float(relay_merged.max()) + latency)
            relay_sent = host_out.carry(self._node_of_relay, relay_sent, relay_merged, relay_bytes)
            left_rack = rack_out.carry(racks, left_rack, relay_sent, relay_bytes)
            shard_received = host_in.carry(
                self._node_of_shard,
                shard_received,
                np.full(plan.shards, left_rack.max() + latency),
                self._bytes_to_shard[:, window],
            )
            results = len(racks) * self._result_bytes[:, window]
            reduce_s = byte_cost_s * self._bytes_to_shard[:, window] + costs.network * results
            reduce_s = reduce_s + costs.message * len(racks) * 2 * self._messages_of(down_bytes, 1) / plan.shards
            reduced = work(self._node_of_shard, np.maximum(reduced, shard_received), reduce_s)
            shard_sent = host_out.carry(self._node_of_shard, shard_sent, reduced, results)
            entered_rack = rack_in.carry(
                racks, entered_rack, np.full(len(racks), shard_sent.max()), np.full(len(racks), down_bytes)
            )
            results_at_relay = host_in.carry(
                self._node_of_relay, results_at_relay, entered_rack + latency, np.full(len(racks), down_bytes)
            )
            pass_s = costs.network * down_bytes * (1 + self._senders_of_rack) + costs.message * self._messages_of(
                down_bytes, 1
            )
            results_handled = work(self._node_of_relay, np.maximum(results_handled, results_at_relay), pass_s)
            results_passed_on = host_out.carry(
                self._node_of_relay, results_passed_on, results_handled, down_bytes * self._senders_of_rack
            )
            received = host_in.carry(
                self._node_of_sender,
                received,
                results_passed_on[self._rack_of_sender] + latency,
                np.full(len(received), down_bytes),
            )
            place_s = (
                costs.place * max(1, summing_ranks) + costs.network
            ) * down_bytes + costs.message * self._messages_of(down_bytes, 1)
            placed = work(self._node_of_sender, np.maximum(placed, received), np.broadcast_to(place_s, received.shape))
        return float(placed.max())

    def _last_of_racks(self, times: Array) -> Array:
        """The last time of each rack's senders."""
        last_times = np.zeros(self._hosts.racks)
        np.maximum.at(last_times, self._rack_of_sender, times)
        return last_times
