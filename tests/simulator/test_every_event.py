"""One small cluster, and one fault between any two events of its life, from first connection to last goodbye."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .cluster import Cluster
from .plan import Fault, JobPlan, NetworkPlan, Plan, ProtocolPlan
from .workload import Collective

PROMPT, GATHERING = 1e-5, 1e-2  # seconds from wake-up to run of a process: the longer, the more events it finds at once
WORK = (
    Collective("allreduce", "sum", "float32", 500, 64, 0.7, 11),
    Collective("allreduce_rows", "sum", "int32", 160, 16, 0.5, 12),
)
STARTED, MOST_EVENTS = 10, 2000

FAULTS = [
    Fault("crash", rank=1),
    Fault("host death", rank=1, number=4.0),
    Fault("link loss", rank=1, number=0.5),
    Fault("shard crash", number=0.2),
    Fault("drain", number=0.2),
    Fault("worker stall", rank=1, number=1.5),
    Fault("shard stall", number=1.5),
    Fault("early leave", rank=1),
    Fault("garbage", rank=1),
]

RARER = [
    Fault("freeze", rank=1, number=21.0),
    Fault("shard freeze", number=21.0),
    Fault("clock jump", rank=1, number=3600.0),
    Fault("shard clock jump", number=3600.0),
    Fault("slow shard", number=0.01),
    Fault("tampering", rank=1, number=2),
    Fault("lying shard", rank=1, number=2),
    Fault("stranger", number=4),
]
SHAPES = [(1, PROMPT), (2, PROMPT), (2, GATHERING)]


def plan(ranks: int, latency_s: float) -> Plan:
    network = NetworkPlan(1e-4, spike=0.0, latency_s=latency_s, slow=0.0, pipe_bytes=1 << 16, shared_memory=0.5)
    protocol = ProtocolPlan(shards=2, slots=2, stripe_blocks=3, scan_span=4)
    job = JobPlan("job0", ranks, start_s=0.0, collectives=WORK, window=2, think_s=0.0, attempts=2)
    return Plan(ranks, network, protocol, (job,))


@pytest.mark.parametrize(
    ("fault", "ranks", "latency_s"),
    [(fault, *shape) for fault in FAULTS for shape in SHAPES] + [(fault, 2, GATHERING) for fault in RARER],
    ids=lambda value: value.kind if isinstance(value, Fault) else str(value),
)
def test_fault_at_every_event(fault: Fault, ranks: int, latency_s: float) -> None:
    base = plan(ranks, latency_s)
    for event in range(1, MOST_EVENTS):
        cluster = Cluster(replace(base, faults=(replace(fault, rank=fault.rank % ranks, at_event=event),)))
        result = cluster.run()
        assert not result, [f"{fault.kind} at event {event}", *result, *cluster.world.trace]
        if not cluster.struck and event > STARTED:
            return  # the cluster was done before
    raise AssertionError("no end")
