"""The time of an all-reduce, from when each part of it is scanned, sent, summed and placed.

A tensor goes through the service window by window. A window is what makes one message to each shard, or what is scanned
for one. Each step takes place as early as it can: when what it needs is there, and when what does it is free. So the
model keeps the time at which each sender, shard and link is done with what it had so far, and raises these times window
by window. Within a window everything is an array operation over all senders and shards. So thousands of ranks take
seconds.

It leaves out losses, other traffic, and hosts that are slower than others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.core.layout import Layout
from omnireduce.core.wire.blocks import HEADER_BYTES
from omnireduce.errors import UsageError
from omnireduce.protocol.collective.block_lists import MessageSizing
from omnireduce.protocol.host.groups import CHUNK_BYTES


class Load(NamedTuple):
    """Numbers of blocks of a tensor that is cut into windows of successive blocks, for each window and shard.

    `own` (senders, windows, shards): blocks that a sender has, none of zeros; `sole`, of the same shape: those that no
    other sender has; `union` (windows, shards): blocks that any sender has; `all` (windows, shards): all blocks of the
    tensor, even those of zeros.
    """

    own: Array
    sole: Array
    union: Array
    all: Array

    @property
    def density(self) -> float:
        """Blocks that are not zero / blocks, mean over the senders."""
        return float(self.own.sum() / max(1, len(self.own) * self.all.sum()))

    @property
    def union_density(self) -> float:
        """Blocks that are not zero on at least one sender / blocks."""
        return float(self.union.sum() / max(1, self.all.sum()))


def load_of(patterns: Patterns, senders: int, layout: Layout, windows: int) -> Load:
    """The load of a tensor with this layout, whose blocks on the first `senders` ranks are those of `patterns`."""
    blocks = np.arange(layout.blocks)
    window = blocks * windows // max(1, layout.blocks)
    place = window * layout.shards + blocks // layout.stripe_blocks % layout.shards
    owners = np.zeros(layout.blocks, np.int32)
    for sender in range(senders):
        owners += patterns.of(sender)

    starts = np.flatnonzero(np.diff(place, prepend=-1))  # of neighbours that belong to one window and shard

    def counted(chosen: Array) -> Array:
        of_neighbours = np.add.reduceat(chosen.view(np.int8), starts, dtype=np.int64) if starts.size else starts
        counts = np.bincount(place[starts], weights=of_neighbours, minlength=windows * layout.shards)
        return counts.astype(np.int32).reshape(windows, layout.shards)

    alone, shape = owners == 1, (senders, windows, layout.shards)
    own, sole = np.empty(shape, np.int32), np.zeros(shape, np.int32)
    for sender in range(senders):
        mask = patterns.of(sender)
        own[sender] = counted(mask)
        mask = mask & alone
        if mask.any():
            sole[sender] = counted(mask)
    return Load(own, sole, counted(owners > 0), counted(owners >= 0))


OVERLAPS = ("random", "full", "none")
REMEMBERED_BYTES = 1 << 28
LIKELIHOODS = 64  # that blocks can have: exact for 127 ranks, and within 1 % for thousands
LEAST_ALIKE, MOST_ALIKE = 1e-6, 1e6  # all ranks have the same blocks; all blocks are as likely


class Patterns(Protocol):
    """The blocks of each rank that are not zero. They are computed anew at each call, so that thousands of ranks need
    no memory."""

    @property
    def blocks(self) -> int:
        """The number of blocks of the tensor."""

    def of(self, rank: int) -> Array:
        """The blocks that the rank has: bool (blocks,)."""


class DrawnPatterns:
    """Each of `blocks` is not zero with probability `density`: drawn for each rank by itself ("random"), once for all
    ranks ("full"), or so that at most one rank has a block ("none").

    Raises UsageError if that is impossible.
    """

    def __init__(self, blocks: int, density: float, overlap: str, ranks: int, seed: int = 0) -> None:
        if not 0 <= density <= 1:
            raise UsageError(f"density {density:g}: expected from 0 to 1")
        if overlap not in OVERLAPS:
            raise UsageError(f"overlap {overlap!r}: expected one of {', '.join(OVERLAPS)}")
        if overlap == "none" and density * ranks > 1 + 1e-9:
            raise UsageError(
                f"{ranks} ranks cannot have different blocks at density {density:g}; at most at {1 / ranks:g}"
            )
        self.blocks, self._density, self._overlap, self._seed = blocks, density, overlap, seed

    def of(self, rank: int) -> Array:
        alone = self._overlap == "random"
        drawn = np.random.default_rng([self._seed, rank if alone else 0]).random(self.blocks, np.float32)
        if self._overlap == "none":
            drawn -= rank * self._density
            return (drawn >= 0) & (drawn < self._density)
        mask: Array = drawn < self._density
        return mask


class TracedPatterns:
    """Blocks drawn for any number of ranks, as `ranks` ranks of a traced job had them. `density`: the share of blocks
    that a rank had, mean over the ranks; `union_density`: the share that at least one rank had. Some blocks are
    popular, as words of a language are: each block has its own probability, with which each rank has it."""

    def __init__(self, blocks: int, density: float, union_density: float, ranks: int, seed: int = 0) -> None:
        self.blocks, self._seed = blocks, seed
        likelihoods, shares = popularity(density, union_density, ranks)
        random = np.random.default_rng([seed, 0])
        ends = np.floor(np.cumsum(shares) * blocks + random.random()).astype(np.int64)  # few blocks: right on average
        ends[-1] = blocks
        block_likelihoods = np.repeat(likelihoods.astype(np.float32), np.diff(ends, prepend=0))
        self._likelihoods = random.permutation(block_likelihoods)

    def of(self, rank: int) -> Array:
        drawn = np.random.default_rng([self._seed, 1 + rank]).random(self.blocks, np.float32)
        mask: Array = drawn < self._likelihoods
        return mask


def popularity(density: float, union_density: float, ranks: int) -> tuple[Array, Array]:
    """Probabilities that a rank has a block, and the share of blocks with each of them: at most (LIKELIHOODS,) each. A
    rank then has `density` of the blocks, and two or more `ranks` together have `union_density`.

    The probabilities are Gauss nodes of a beta distribution: twice as many of its moments are exact. If ranks have
    less in common than by chance, all blocks are equally likely.
    """
    density = min(1.0, max(0.0, density))
    if density in (0.0, 1.0):
        return np.full(1, density), np.ones(1)
    others, missing = np.arange(ranks), math.log(max(1 - union_density, 1e-300))
    low, high = LEAST_ALIKE, MOST_ALIKE
    while high > low * (1 + 1e-9):
        alike = math.sqrt(low * high)  # the sum of the two parameters
        if np.log1p(-alike * density / (alike + others)).sum() > missing:  # what no rank has is too much
            low = alike
        else:
            high = alike
    return _gauss_nodes(low * density, low * (1 - density))


def _gauss_nodes(a: float, b: float) -> tuple[Array, Array]:
    """Nodes and weights of the beta distribution: eigenvalues of the Jacobi matrix of its orthogonal polynomials, and
    the squares of the first elements of its eigenvectors (Golub and Welsch, 1969)."""
    s, n = a + b, np.arange(1, LIKELIHOODS)
    diagonal = np.concatenate(([(a - b) / s], (a - b) * (s - 2) / ((2 * n + s - 2) * (2 * n + s))))
    n = n[1:]
    beside = (
        4 * n * (n + a - 1) * (n + b - 1) * (n + s - 2) / ((2 * n + s - 2) ** 2 * (2 * n + s - 1) * (2 * n + s - 3))
    )
    beside = np.sqrt(np.concatenate(([4 * a * b / (s * s * (s + 1))], beside)))
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, -1))
    return np.clip((values + 1) / 2, 0, 1), vectors[0] ** 2


class RememberedPatterns:
    """A cache of patterns: as many ranks as fit into `REMEMBERED_BYTES`, with one bit for each block."""

    def __init__(self, patterns: Patterns) -> None:
        self.blocks, self._patterns = patterns.blocks, patterns
        self._known: dict[int, Array] = {}
        self._most = REMEMBERED_BYTES // (1 + patterns.blocks // 8)

    def of(self, rank: int) -> Array:
        known = self._known.get(rank)
        if known is not None:
            return np.unpackbits(known, count=self.blocks).view(np.bool_)
        mask = self._patterns.of(rank)
        if len(self._known) < self._most:
            self._known[rank] = np.packbits(mask)
        return mask


class KnownPatterns:
    """Patterns that are given: the blocks of each rank, bool (blocks,) each."""

    def __init__(self, masks: Sequence[Array]) -> None:
        self.blocks, self._masks = masks[0].size, masks

    def of(self, rank: int) -> Array:
        return self._masks[rank]


class SummedPatterns:
    """The blocks that each group of `size` successive ranks has together, as those of one rank."""

    def __init__(self, patterns: Patterns, size: int) -> None:
        self.blocks, self._patterns, self._size = patterns.blocks, patterns, size

    def of(self, rank: int) -> Array:
        first = rank * self._size
        mask = self._patterns.of(first).copy()
        for other in range(first + 1, first + self._size):
            mask |= self._patterns.of(other)
        return mask


WORTH_LEAVING_OUT = 8  # one in so many blocks of a result that its receiver alone has brought
MOST = 512  # windows


class Hosts(NamedTuple):
    """So many (`number`) hosts with `cores` processors each. Each has a link of `bytes_per_s` each way, over which a
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
    """How ranks and shards are placed. Each host has `ranks`. If `by_host`, they add up what they have in memory, and
    send it as one sender. Shards are on hosts of their own if they are `dedicated`, else on those of the ranks, in
    turn. With `relays`, each rack has a host more, with a relay of so many shards."""

    ranks: int
    by_host: bool
    shards: int
    dedicated: bool
    relays: bool = False

    @property
    def senders(self) -> int:
        """Of each host."""
        return 1 if self.by_host else self.ranks


class Messages(NamedTuple):
    """Messages are as long as `lengths` says, and a sender scans up to `span` blocks for one. A sender is at most
    `slots` messages ahead of a shard."""

    lengths: MessageSizing = MessageSizing.up_to(1 << 20)
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
        """Those of processors so many times as fast."""
        return Costs._make(cost / speed for cost in self)


class Prediction(NamedTuple):
    """Of one all-reduce, or of several: `seconds`; `link_bytes`, what the busiest link carries in its busier direction;
    `processor_s` of all hosts together; `shard_bytes`, the memory for slots that one shard needs."""

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
    message_bytes = messages.lengths.of(int(blocks * density * block_bytes / shards))
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
        self._message_bytes = messages.lengths.of(int(load.own.sum(1).mean() * block_bytes))
        self._result_bytes = messages.lengths.of(int(load.union.sum(0).mean() * block_bytes))
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
    """Those of all nodes."""

    def __init__(self, hosts: Hosts, nodes: int) -> None:
        self._cores, self._of_all, self._worked_s = hosts.cores, hosts.one_machine, np.zeros(nodes)

    def work(self, at: Array, start: Array, seconds: Array) -> Array:
        """One thread of each node in `at` works for so many seconds, from `start` on; return when it is done."""
        at = np.zeros_like(at) if self._of_all else at
        self._worked_s += np.bincount(at, seconds, len(self._worked_s))
        done: Array = np.maximum(start + seconds, self._worked_s[at] / self._cores)
        return done
