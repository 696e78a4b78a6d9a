"""What a seed stands for. Each seed switches whole kinds of fault on or off, so that rare mixtures come up often."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from .workload import Collective, draw_collective

KINDS = (
    "crash",  # a worker is killed; its host closes the connections
    "host death",  # a worker vanishes without a word; its peers notice after a while
    "shard crash",  # an aggregator shard is killed and comes back
    "link loss",  # one connection breaks
    "worker stall",  # a worker is stopped for a while
    "shard stall",  # a shard is stopped for a while
    "freeze",  # a worker is stopped for longer than a collective may take
    "shard freeze",  # a shard is stopped for longer than a collective may take
    "drain",  # a shard is told to stop, and comes back
    "late",  # a rank joins late, sometimes too late
    "duplicate",  # a second process joins as a rank that is there
    "world size",  # a rank believes in another world size
    "mismatch",  # a rank submits another collective than the others
    "early leave",  # a rank shuts down before the others
    "garbage",  # a rank sends a message that means nothing
)


@dataclass(frozen=True)
class NetworkPlan:
    """Seconds and bytes. A process takes its turn `latency_s` after it was woken, on average; slow ones need longer."""

    delay_s: float
    spike: float  # the share of messages that take ten times as long
    latency_s: float
    slow: float  # the share of slow processes
    pipe_bytes: int
    shared_memory: float  # the share of links that are like shared memory


@dataclass(frozen=True)
class ProtocolPlan:
    shards: int
    slots: int
    stripe_blocks: int
    scan_span: int
    timeout_s: float = 20.0
    join_timeout_s: float = 15.0
    aggregator_join_timeout_s: float = 25.0


@dataclass(frozen=True)
class JobPlan:
    """`window` collectives are under way at once; between two, a rank thinks for up to `think_s`.

    A rank that fails joins again until it has joined `attempts` times; one that is done joins again for the next of
    `rounds`, at once, whatever the others do.
    """

    name: str
    ranks: int
    start_s: float
    collectives: tuple[Collective, ...]
    window: int
    think_s: float
    attempts: int = 1
    rounds: int = 1


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `rank` of `job` or to `shard` when `at_event` events have happened; `number` says how much."""

    kind: str
    job: int = 0
    rank: int = 0
    shard: int = 0
    at_event: int = 0
    number: float = 0.0


@dataclass(frozen=True)
class Plan:
    seed: int
    network: NetworkPlan
    protocol: ProtocolPlan
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...] = field(default=())

    def without_faults(self) -> Plan:
        return replace(self, faults=())


def draw_plan(seed: int) -> Plan:
    """The cluster, the workload and the faults of one seed."""
    rng = random.Random(f"{seed}/plan")
    network = NetworkPlan(
        delay_s=rng.choice([1e-5, 1e-3, 0.02]),
        spike=rng.choice([0.0, 0.0, 0.05]),
        latency_s=rng.choice([1e-6, 1e-4, 5e-3]),
        slow=rng.choice([0.0, 0.0, 0.3]),
        pipe_bytes=rng.choice([1 << 12, 1 << 16, 1 << 20]),
        shared_memory=rng.choice([0.0, 0.5, 1.0]),
    )
    protocol = ProtocolPlan(
        shards=rng.choice([1, 1, 2, 3]),
        slots=rng.choice([2, 3, 4]),
        stripe_blocks=rng.choice([1, 3, 16]),
        scan_span=rng.choice([1, 4, 32, 8192]),
    )
    jobs = tuple(_draw_job(rng, f"job{i}") for i in range(rng.choice([1, 1, 2, 3])))
    faults: tuple[Fault, ...] = ()
    if rng.random() < 0.8:
        enabled = [kind for kind in KINDS if rng.random() < 0.3]
        count = rng.choice([1, 1, 2, 4]) if enabled else 0
        faults = tuple(_draw_fault(rng, rng.choice(enabled), jobs, protocol) for _ in range(count))
    return Plan(seed, network, protocol, jobs, faults)


def _draw_job(rng: random.Random, name: str) -> JobPlan:
    ranks = rng.choice([1, 2, 2, 3, 4])
    return JobPlan(
        name,
        ranks,
        start_s=rng.choice([0.0, 0.01, 0.5]),
        collectives=tuple(draw_collective(rng, ranks) for _ in range(rng.choice([0, 1, 3, 8]))),
        window=rng.choice([1, 2, 8]),
        think_s=rng.choice([0.0, 0.0, 0.01, 2.0]),
        attempts=rng.choice([1, 2, 3]),
        rounds=rng.choice([1, 1, 3]),
    )


def _draw_fault(rng: random.Random, kind: str, jobs: tuple[JobPlan, ...], protocol: ProtocolPlan) -> Fault:
    job = rng.randrange(len(jobs))
    at_event = int(10 ** rng.uniform(0, 3.3))
    number = {
        "host death": rng.choice([0.0, 4.0]),
        "link loss": rng.choice([0.0, 4.0]),
        "shard crash": rng.choice([0.0, 0.5, 5.0]),
        "drain": rng.choice([0.0, 0.5, 10.0]),
        "worker stall": rng.choice([0.1, 1.5, 6.0]),
        "shard stall": rng.choice([0.1, 1.5, 6.0]),
        "freeze": protocol.timeout_s + rng.choice([1.0, 30.0]),
        "shard freeze": protocol.timeout_s + rng.choice([1.0, 30.0]),
        "late": rng.choice([0.1, 3.0, protocol.join_timeout_s + 5]),
        "duplicate": rng.choice([0.0, 0.01, 1.0]),
        "mismatch": rng.randrange(max(1, len(jobs[job].collectives))),
        "early leave": rng.randrange(max(1, len(jobs[job].collectives))),
    }.get(kind, 0.0)
    return Fault(kind, job, rng.randrange(jobs[job].ranks), rng.randrange(protocol.shards), at_event, number)
