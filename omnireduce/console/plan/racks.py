"""The time of an all-reduce through relays, one in each rack. As in the model without them, window by window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from omnireduce.console.plan.model import Costs, Hosts, Links, Load, Messages, Plan, Prediction, Processors
from omnireduce.core.dtypes import Array
from omnireduce.core.wire.blocks import HEADER_BYTES
from omnireduce.errors import UsageError
from omnireduce.kernels.density import find_blocks
from omnireduce.support.files.tensors import read_tensors


class Saved(NamedTuple):
    """The arrays of a file one behind the other, each from a new block on: which blocks are not zero, bool (blocks,),
    and the bytes of an element."""

    mask: Array
    itemsize: int


def read_blocks(path: str, block_size: int) -> Saved:
    """Read a file. Raises FileError, and UsageError for what the service does not reduce, for arrays of elements of
    different sizes, and for none."""
    masks, sizes = [], set()
    for tensor in read_tensors(path):
        try:
            masks.append(find_blocks(tensor.values, block_size))
        except UsageError as error:
            raise UsageError(f"{path}: {tensor.name}: {error}") from None
        sizes.add(tensor.values.itemsize)
    if len(sizes) != 1:
        contents = "no arrays" if not sizes else f"elements of {' and '.join(map(str, sorted(sizes)))} bytes"
        raise UsageError(f"{path} holds {contents}; expected arrays whose elements have one size")
    return Saved(np.concatenate(masks), sizes.pop())


def read_all(paths: Sequence[str], block_size: int) -> tuple[list[Array], int]:
    """The blocks of each file, and the bytes of an element. Raises what `read_blocks` raises, and UsageError where the
    files do not hold the same tensors."""
    all_saved = [read_blocks(path, block_size) for path in paths]
    for path, saved in zip(paths, all_saved, strict=True):
        if (saved.mask.size, saved.itemsize) != (all_saved[0].mask.size, all_saved[0].itemsize):
            raise UsageError(f"{path} holds other tensors than {paths[0]}; expected one file of each rank")
    return [saved.mask for saved in all_saved], all_saved[0].itemsize


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
        self._lengths = [lengths.of(int(nbytes)) for nbytes in (self._up.sum(1).mean(), self._lifted.sum(1).mean())]

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
        """When the last sender has placed the last window. Work is in seconds of processor."""
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
