"""The plan of a seed: one job, its workload, and one fault."""

from __future__ import annotations

import random
from dataclasses import dataclass

from transports import MEMORY

SHARDS = 2  # shards of the daemon; a job uses the first, or both
# Ranks wait so long for a rank that died while they joined. The next list of missing ranks comes earlier.
JOIN_S = 1.5
FAULTS = {  # relative frequency of each kind
    "kill worker": 10,
    "stop worker": 5,
    "pause worker": 3,
    "kill shard": 4,
    "stop shard": 3,
    "pause shard": 3,
}
LARGE = (50_000, 500_000, 2_000_000)  # elements of which every shard has some
WORKLOADS = ("in place", "out of place", "asynchronous", "rows")


@dataclass(frozen=True)
class Plan:
    """One round. `victims` are ranks, or for a fault of a shard its number. The fault comes `after_s`, counted from
    the moment when all ranks had joined or, if it is to hit them `joining`, when they were told to join."""

    seed: int
    fault: str
    victims: tuple[int, ...]
    transports: tuple[str, ...]  # by rank
    shards: int
    joining: bool
    after_s: float
    pause_s: float  # duration of the pause of a victim
    timeout_s: float
    workload: str
    elements: int
    density: float

    @property
    def ranks(self) -> int:
        return len(self.transports)

    @property
    def action(self) -> str:
        """kill, stop or pause."""
        return self.fault.split()[0]

    @property
    def kind(self) -> str:
        """The fault, and whether it hits a job that begins."""
        return f"{self.fault} while joining" if self.joining else self.fault

    @property
    def hits_shard(self) -> bool:
        return self.fault.endswith("shard")

    def __str__(self) -> str:
        numbers = "+".join(map(str, self.victims))
        whom = f"shard {numbers}" if self.hits_shard else f"rank {numbers} of {self.ranks}"
        when = f"{1000 * self.after_s:.0f} ms after all {'began to join' if self.joining else 'had joined'}"
        what = f"{self.elements} elements {self.workload}, density {self.density:g}"
        where = f"{'+'.join(self.transports)}, {self.shards} shard{'s'[: self.shards - 1]}"
        return f"{self.action} {whom}, {when}: {what}, {where}"


def draw_plan(seed: int) -> Plan:
    """The round of this seed."""
    draw = random.Random(seed)
    [fault] = draw.choices(list(FAULTS), list(FAULTS.values()))
    action, _, whom = fault.partition(" ")
    ranks, shards = draw.randint(2, 4), draw.randint(1, SHARDS)
    shards_only = fault == "stop shard"  # ranks that share memory would not mind
    uniform = draw.choice(("shm", "tcp", "") if shards_only else ("shm", "tcp", MEMORY, ""))
    joining = action == "kill" and draw.random() < 0.2
    return Plan(
        seed=seed,
        fault=fault,
        victims=_victims(draw, ranks) if whom == "worker" else (draw.randrange(shards),),
        transports=tuple(uniform or draw.choice(("shm", "tcp")) for _ in range(ranks)),
        shards=shards,
        joining=joining,
        after_s=draw.uniform(0, 0.02 if joining else 0.1),
        pause_s=draw.uniform(0.05, 0.3),
        timeout_s=draw.choice((0.6, 1.0)) if action == "stop" else 30.0,
        workload=draw.choice(WORKLOADS),
        elements=draw.choice(LARGE if fault == "stop shard" else (1, 1000, *LARGE)),
        density=draw.choice((1.0, 0.1, 0.01)),
    )


def _victims(draw: random.Random, ranks: int) -> tuple[int, ...]:
    """Mostly one rank; sometimes all but one."""
    count = ranks - 1 if draw.random() < 0.2 else 1
    return tuple(sorted(draw.sample(range(ranks), count)))
