"""The plan of a run: network, protocol settings, jobs, faults. `draw` makes one from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .workload import Collective

RARE = 10  # times as long takes a rare message
SLOWER = 20  # times as long until a slow process is scheduled
KINDS = {  # kinds of fault
    "crash": "a worker is killed; its host closes the connections",
    "host death": "a worker vanishes without a word; its peers notice after a while",
    "shard crash": "an aggregator shard is killed and comes back",
    "link loss": "one connection breaks",
    "worker stall": "a worker is stopped for a while",
    "shard stall": "a shard is stopped for a while",
    "freeze": "a worker is stopped for longer than a collective may take",
    "shard freeze": "a shard is stopped for longer than a collective may take",
    "drain": "a shard is told to stop, and comes back",
    "late": "a rank joins late, sometimes too late",
    "duplicate": "a second process joins as a rank that is there",
    "world size": "a rank believes in another world size",
    "misconfigured": "a rank has other slots, stripes, order of shards or version than its peers, or says nonsense",
    "mismatch": "a rank submits another collective than the others, or one of another shape",
    "refusal": "a rank refuses a call that the others make",
    "early leave": "a rank shuts down before the others",
    "garbage": "a rank sends what means nothing",
    "tampering": "a rank sends one message that breaks a rule of the protocol",
    "lying shard": "a shard sends one result that breaks a rule of the protocol",
    "stranger": "somebody connects who is no worker, or one that never gets its peers",
    "slow reader": "a rank reads one event of each connection at a time, and seldom",
    "slow shard": "a shard reads one event of each connection at a time, and seldom",
    "clock jump": "the clock of a rank's host jumps ahead",
    "shard clock jump": "the clock of a shard's host jumps ahead",
    "other secret": "a rank has another secret than the shards, or one of the two has none",
    "foreign survivor": "somebody claims to have been in a job in which he never was",
    "second launch": "the same job is launched once more, under the same name, at the same time",
}
OF_A_SHARD = (
    "shard crash",
    "shard stall",
    "shard freeze",
    "drain",
    "slow shard",
    "shard clock jump",
    "stranger",
    "foreign survivor",
)
OF_JOINING = ("other secret", "foreign survivor", "second launch")
DRAWN_APART = (*OF_JOINING, "refusal")  # so that older seeds stay as they are


@dataclass(frozen=True)
class NetworkPlan:
    """Seconds and bytes. A process takes its turn `latency_s` after it was woken, on average; slow ones need longer."""

    delay_s: float
    spike: float  # the share of messages that take RARE times as long
    latency_s: float
    slow: float  # the share of slow processes
    pipe_bytes: int
    shared_memory: float  # the share of links that are like shared memory
    clocks_apart: bool = False


@dataclass(frozen=True)
class ProtocolPlan:
    shards: int
    slots: int
    stripe_blocks: int
    scan_span: int
    message_bytes: int = 1 << 18  # over links that are not like shared memory
    slot_bytes: int = 65536
    timeout_s: float = 20.0
    join_timeout_s: float = 15.0
    aggregator_join_timeout_s: float = 25.0
    max_jobs: int = 9
    whole_bytes: int = 0
    secret: bool = False  # everybody has to prove one
    relays: tuple[int, ...] = ()  # number of the relay above each relay; -1: the shards are above it
    direct: bool = False  # some ranks come through no relay

    def addresses(self, relay: int) -> list[str]:
        """The names of the shards of a relay; -1: of the aggregator."""
        return [f"shard{i}" if relay < 0 else f"relay{relay}shard{i}" for i in range(self.shards)]

    def way(self, rank: int) -> tuple[int, ...]:
        """The relays through which a rank comes, the one next to the shards first."""
        choices = len(self.relays) + self.direct
        relay, results = rank % choices - self.direct if choices else -1, list[int]()
        while relay >= 0:
            results.insert(0, relay)
            relay = self.relays[relay]
        return tuple(results)


@dataclass(frozen=True)
class JobPlan:
    """`window` collectives are under way at once; between two, a rank thinks for up to `think_s`, and in the middle of
    its work for `pause_s` more, as all ranks do.

    Ranks of an elastic job (`min_ranks` > 0) form it anew after a fault, as often as they would join again.

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
    pause_s: float = 0.0
    min_ranks: int = 0
    last_call_s: float = 0.0
    launch: str = ""
    state_bytes: int = 0  # state of programs on a shard; if there is any, no ranks share memory
    hosts: int = 0  # on which its ranks are, in turn, and exchange tensors in memory; 0: no two of them share one

    @property
    def idle_s(self) -> float:
        """Seconds for which a rank may have no reason to submit the next collective."""
        return self.think_s + self.pause_s


@dataclass(frozen=True)
class Fault:
    """`kind` happens to `rank` of `job` or to `shard` when `at_event` events have happened; `number` says how much."""

    kind: str
    job: int = 0
    rank: int = 0
    shard: int = 0
    at_event: int = 0
    number: float = 0.0

    def __str__(self) -> str:
        victim = f"rank {self.rank} of job{self.job}, shard {self.shard}"
        return f"{self.kind} ({victim}) at event {self.at_event}, {self.number:g}"


@dataclass(frozen=True)
class Plan:
    """`options`: the kinds of fault that the seed has switched on, of which `faults` were drawn."""

    seed: int
    network: NetworkPlan
    protocol: ProtocolPlan
    jobs: tuple[JobPlan, ...]
    faults: tuple[Fault, ...] = field(default=())
    options: tuple[str, ...] = field(default=())

    @property
    def max_jobs(self) -> int:
        """Number of jobs that a shard admits. Each second launch has the room of a job of its own."""
        return self.protocol.max_jobs + 3 * sum(fault.kind == "second launch" for fault in self.faults)

    @property
    def crowded(self) -> bool:
        """There may be more jobs at once than are allowed: their next generations count too."""
        return self.protocol.max_jobs < 3 * len(self.jobs)

    def describe(self, *, collectives: bool = False) -> Iterator[str]:
        """The plan in lines of text."""
        yield f"options: {', '.join(self.options) or 'no faults'}"
        yield _fields(self.network)
        yield _fields(self.protocol)
        for job in self.jobs:
            yield f"{job.name}: {_fields(job)}"
            if collectives:
                yield from (f"  collective {number}: {collective}" for number, collective in enumerate(job.collectives))
        yield from (f"fault: {fault}" for fault in self.faults)


def _fields(part: NetworkPlan | ProtocolPlan | JobPlan) -> str:
    results = ((name, getattr(part, name)) for name in part.__dataclass_fields__ if name != "name")
    return ", ".join(f"{name} {len(value) if isinstance(value, tuple) else value}" for name, value in results)
