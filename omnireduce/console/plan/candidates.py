"""The plans that are worth a look, and the best of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from omnireduce.console.plan.model import (
    Costs,
    Hosts,
    Messages,
    Plan,
    Prediction,
    predict,
    predict_tree,
    ring_time_s,
    windows_for,
)
from omnireduce.console.plan.patterns import Load, Patterns, RememberedPatterns, SummedPatterns, load_of
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.errors import UsageError

NEARLY_AS_FAST = 1.05  # a plan that takes so many times as long as the fastest, and needs less, is better
MOST_LINKS = 1 << 22  # of a plan: there is memory for what each of them carries
ADDRESSES_IN_ROW = 8  # addresses


class Tensors(NamedTuple):
    """Tensors that are combined one after the other, `times` of them. Their blocks, of `block_bytes` each, on each
    rank are `patterns`."""

    patterns: Patterns
    block_bytes: int
    times: int = 1

    @property
    def nbytes(self) -> int:
        return self.times * self.patterns.blocks * self.block_bytes


class Candidate(NamedTuple):
    """A plan, and what it gives."""

    plan: Plan
    prediction: Prediction


class Study(NamedTuple):
    """All candidates, the best one, the time of a ring that sends everything, and the densities of one sender's blocks
    and of the union, by bytes; senders are hosts, or ranks where hosts have one each."""

    candidates: list[Candidate]
    best: Candidate
    ring_s: float
    density: float
    union_density: float


def shard_counts(hosts: int, ranks: int) -> list[int]:
    """A few numbers from 1 up to that of the hosts, each a multiple of the one before, except the last."""
    largest = max(1, min(hosts, MOST_LINKS // (hosts * ranks)))
    step = 2 if largest <= 64 else 8
    counts = [1]
    while step * counts[-1] < largest:
        counts.append(step * counts[-1])
    return [*counts, largest] if largest > 1 else counts


def plans(ranks: int, shards: Iterable[int], *, racks: int = 0) -> list[Plan]:
    """Ranks by host, or one by one where hosts have several; shards beside ranks, or on hosts of their own, and then
    with relays, too, where there are racks."""
    by_host_choices = [True, False] if ranks > 1 else [False]
    shard_placements = [(False, False), (True, False), *([(True, True)] if racks else [])]
    return [
        Plan(ranks, by_host, count, *placement)
        for by_host in by_host_choices
        for placement in shard_placements
        for count in shards
    ]


def study(
    work: Sequence[Tensors],
    hosts: Hosts,
    ranks: int,
    shards: Sequence[int],
    *,
    messages: Messages | None = None,
    costs: Costs | None = None,
) -> Study:
    """Compare the plans for all of the tensors in `work`. Each host has `ranks` ranks.

    Raises UsageError for fewer than two hosts, whose ranks exchange tensors in memory, and for too many links.
    """
    if hosts.number < 2:
        raise UsageError("1 host: its ranks exchange tensors in memory, without shards. Expected 2 hosts or more")
    if hosts.number * ranks * max(shards) > MOST_LINKS:
        links = f"{hosts.number * ranks} ranks with {max(shards)} shards"
        raise UsageError(f"{links} are {hosts.number * ranks * max(shards)} links; expected at most {MOST_LINKS}")
    compared = plans(ranks, shards, racks=hosts.racks)
    sums = [Prediction(0.0, 0, 0.0, 0)] * len(compared)
    weighted_density = weighted_union = 0.0
    for tensors in work:
        loads: dict[Plan, Load] = {}  # there is room for those of one tensor
        patterns = RememberedPatterns(tensors.patterns)
        for index, plan in enumerate(compared):
            prediction = predict_plan(
                patterns, tensors.block_bytes, hosts, plan, messages=messages, costs=costs, loads=loads
            )
            sums[index] = sums[index].and_then(prediction, tensors.times)
        first = next(iter(loads.values()))
        weighted_density, weighted_union = (
            weighted_density + tensors.nbytes * first.density,
            weighted_union + tensors.nbytes * first.union_density,
        )
    candidates = [Candidate(*pair) for pair in zip(compared, sums, strict=True)]
    nbytes = sum(tensors.nbytes for tensors in work)
    slowest = min(hosts.bytes_per_s, hosts.rack_bytes_per_s if hosts.racks else hosts.bytes_per_s)
    ring = ring_time_s(nbytes, hosts.number, slowest)
    return Study(candidates, best(candidates), ring, weighted_density / max(1, nbytes), weighted_union / max(1, nbytes))


def predict_plan(
    patterns: Patterns,
    block_bytes: int,
    hosts: Hosts,
    plan: Plan,
    *,
    messages: Messages | None = None,
    costs: Costs | None = None,
    loads: dict[Plan, Load] | None = None,
) -> Prediction:
    """The prediction of a plan for a tensor whose blocks on each rank are `patterns`. `loads` are kept between
    calls."""
    messages, loads = messages or Messages(), {} if loads is None else loads
    if plan.by_host:
        patterns = SummedPatterns(patterns, plan.ranks)
    density = float(patterns.of(0).mean()) if patterns.blocks else 0.0
    windows = windows_for(patterns.blocks, density, block_bytes, plan.shards, messages)
    layout, senders = Layout(patterns.blocks, 1, plan.shards), hosts.number * plan.senders

    def load(key: Plan, patterns: Patterns, senders: int) -> Load:
        if key not in loads:
            loads[key] = load_of(patterns, senders, layout, windows)
        return loads[key]

    of_senders = load(plan._replace(dedicated=False, relays=False), patterns, senders)
    if not plan.relays:
        return predict(of_senders, block_bytes, hosts, plan, messages=messages, costs=costs)
    of_racks = load(plan, SummedPatterns(patterns, senders // hosts.racks), hosts.racks)
    return predict_tree(of_senders, of_racks, block_bytes, hosts, plan, messages=messages, costs=costs or Costs())


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The cheapest candidate among those that are nearly as fast as the fastest. Cheap means, in this order: no hosts
    for shards alone, no relays, few shards, ranks by host."""
    limit = NEARLY_AS_FAST * min(candidate.prediction.seconds for candidate in candidates)
    good = [candidate for candidate in candidates if candidate.prediction.seconds <= limit]
    return min(
        good,
        key=lambda candidate: (
            candidate.plan.dedicated,
            candidate.plan.relays,
            candidate.plan.shards,
            not candidate.plan.by_host,
        ),
    )


def as_toml(plan: Plan, hosts: int, block_size: int | None) -> str:
    """The configuration of the workers for this plan, with names of hosts that stand for the real ones. `block_size`:
    in elements; None leaves it as it is."""
    kind, count = ("aggregator", plan.shards) if plan.dedicated else ("node", hosts)
    names = [f'"{kind}{index % count + 1}:{7400 + index // count}"' for index in range(plan.shards)]
    rows = [", ".join(names[index : index + ADDRESSES_IN_ROW]) for index in range(0, len(names), ADDRESSES_IN_ROW)]
    addresses = rows[0] if len(rows) == 1 else "".join(f"\n  {row}," for row in rows) + "\n"
    shards = -(-plan.shards // count)
    lines = [f"# on each of these hosts: omnireduce aggregator --listen :7400 --shards {shards}"]
    if plan.relays:
        lines += [
            *(f"#   {row}" for row in rows),
            f"# on a host of each rack: omnireduce aggregator --listen :7400 --shards {plan.shards}",
            "#   with aggregator.upstream = the list above; its ranks name it as follows",
        ]
        addresses = ", ".join(f'"relay:{7400 + index}"' for index in range(plan.shards))
    lines += ["[cluster]", f"aggregators = [{addresses}]"]
    if block_size is not None:
        lines += ["", "[protocol]", f"block_size = {block_size}"]
    if plan.ranks > 1:
        lines += ["", "[transport]", f'host_exchange = "{"auto" if plan.by_host else "off"}"']
    return "\n".join(lines) + "\n"
