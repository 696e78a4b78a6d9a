"""The plan of a seed. Each seed switches whole kinds of fault on or off, so that rare mixtures come up often."""

from __future__ import annotations

import random
from dataclasses import replace

from .plan import DRAWN_APART, KINDS, OF_A_SHARD, OF_JOINING, Fault, JobPlan, NetworkPlan, Plan, ProtocolPlan
from .tamper import LIES, RULES
from .workload import PROGRAMS, STATE_BYTES, draw_collective, refusal

FIRST_OF_HOSTS = 10**12  # from this seed on, the ranks of most jobs share a host; older seeds stay as they are
FIRST_OF_SEVERAL = 2 * 10**12  # from this seed on, most jobs have several hosts
FIRST_OF_RELAYS = 3 * 10**12  # from this seed on, there are relays
FIRST_OF_PROGRAMS = 4 * 10**12  # from this seed on, most jobs have programs
FIRST_OF_REFUSALS = 5 * 10**12  # from this seed on, ranks refuse calls
OFTEN = {"tampering": 6, "lying shard": 6}  # there are many ways to break a rule


def draw_plan(seed: int) -> Plan:
    """The cluster, the workload and the faults of one seed."""
    rng = random.Random(f"{seed}/plan")
    jobs = tuple(_draw_job(rng, f"job{i}") for i in range(rng.choice([1, 1, 2, 3])))
    network, protocol = _draw_network(rng), _draw_protocol(rng, len(jobs))
    protocol = replace(protocol, whole_bytes=random.Random(f"{seed}/whole").choice([0, 0, 1 << 10]))
    joining = random.Random(f"{seed}/joining")
    protocol = replace(protocol, secret=joining.random() < 0.3)
    jobs = tuple(_draw_elastic(joining, job) for job in jobs)
    if seed >= FIRST_OF_HOSTS:
        hosts = random.Random(f"{seed}/hosts")
        several = [2, 2, 2, 3] if seed >= FIRST_OF_SEVERAL else [1]
        share = 0.4 if seed >= FIRST_OF_RELAYS else 0.8
        jobs = tuple(replace(job, hosts=hosts.choice(several) if hosts.random() < share else 0) for job in jobs)
    if seed >= FIRST_OF_RELAYS:
        relays = random.Random(f"{seed}/relays")
        above = relays.choice([(-1,), (-1, -1), (-1, -1), (-1, 0), (-1, 0, 1), (-1, 0, 0)])
        protocol = replace(protocol, relays=above, direct=relays.random() < 0.4)
    if seed >= FIRST_OF_PROGRAMS:
        programs = random.Random(f"{seed}/programs")
        share = 0.2 if seed >= FIRST_OF_REFUSALS else 0.8
        jobs = tuple(_draw_programs(programs, job) if programs.random() < share else job for job in jobs)
    refusals = random.Random(f"{seed}/refusals")
    if seed >= FIRST_OF_REFUSALS:
        jobs = tuple(_draw_refusals(refusals, job) for job in jobs)
    options: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    if rng.random() < 0.85:
        options = tuple(kind for kind in KINDS if kind not in DRAWN_APART and rng.random() < 0.25)
        count = rng.choice([1, 1, 2, 4]) if options else 0
        often = [OFTEN.get(kind, 1) for kind in options]
        kinds = rng.choices(options, often, k=count) if options else []
        faults = tuple(_draw_fault(rng, kind, jobs, protocol) for kind in kinds)
        if rng.random() < 0.3:  # all at once
            faults = tuple(replace(fault, at_event=faults[0].at_event + rng.randrange(5)) for fault in faults)
        if joining.random() < 0.2:
            options += (joining.choice(OF_JOINING),)
            faults += (_draw_fault(joining, options[-1], jobs, protocol),)
    if seed >= FIRST_OF_REFUSALS and refusals.random() < 0.4:
        options += ("refusal",)
        faults += (_draw_fault(refusals, "refusal", jobs, protocol),)
    if seed >= FIRST_OF_RELAYS:
        faults = tuple(_anywhere(relays, fault, protocol) for fault in faults)
    return Plan(seed, network, protocol, jobs, faults, options)


def _anywhere(rng: random.Random, fault: Fault, protocol: ProtocolPlan) -> Fault:
    """Move a fault of a shard to any shard, even to one of a relay."""
    shard = rng.randrange(protocol.shards * (1 + len(protocol.relays)))
    return replace(fault, shard=shard) if fault.kind in OF_A_SHARD else fault


def _draw_programs(rng: random.Random, job: JobPlan) -> JobPlan:
    """Let sums of a job go through programs."""
    results = []
    for each in job.collectives:
        if each.kind == "allreduce" and rng.random() < 0.8:
            name = rng.choice(list(PROGRAMS))
            each = replace(each, op="sum", dtype="float32", codec="", program=name)
        results.append(each)
    return replace(job, collectives=tuple(results), state_bytes=STATE_BYTES)


def _draw_refusals(rng: random.Random, job: JobPlan) -> JobPlan:
    """Let all ranks refuse some calls."""
    refuse = [rng.random() < 0.25 for _ in job.collectives]
    results = [
        refusal(collective.seed) if at else collective for at, collective in zip(refuse, job.collectives, strict=True)
    ]
    return replace(job, collectives=tuple(results))


def _draw_elastic(rng: random.Random, job: JobPlan) -> JobPlan:
    """One job in four is elastic."""
    min_ranks, last_call_s = rng.randint(1, job.ranks), rng.choice([0.2, 2.0])
    return replace(job, min_ranks=min_ranks, last_call_s=last_call_s) if rng.random() < 0.25 else job


def fault_at(plan: Plan, kind: str, event: int) -> Plan:
    """The plan with one fault of `kind` instead of its own, at event `event`; whom it hits follows from the seed."""
    fault = _draw_fault(random.Random(f"{plan.seed}/{kind}"), kind, plan.jobs, plan.protocol)
    return replace(plan, options=(kind,), faults=(replace(fault, at_event=event),))


def _draw_network(rng: random.Random) -> NetworkPlan:
    return NetworkPlan(
        delay_s=rng.choice([1e-5, 1e-3, 0.02]),
        spike=rng.choice([0.0, 0.0, 0.05]),
        latency_s=rng.choice([1e-6, 1e-4, 5e-3]),
        slow=rng.choice([0.0, 0.0, 0.3]),
        pipe_bytes=rng.choice([1 << 12, 1 << 16, 1 << 20]),
        shared_memory=rng.choice([0.0, 0.5, 1.0]),
        clocks_apart=rng.random() < 0.5,
    )


def _draw_protocol(rng: random.Random, jobs: int) -> ProtocolPlan:
    return ProtocolPlan(
        shards=rng.choice([1, 1, 2, 3]),
        slots=rng.choice([2, 3, 4]),
        stripe_blocks=rng.choice([1, 3, 16]),
        scan_span=rng.choice([1, 4, 32, 8192]),
        message_bytes=rng.choice([512, 1 << 12, 1 << 18, 1 << 18]),
        aggregator_join_timeout_s=rng.choice([12.0, 25.0]),
        max_jobs=rng.choice([3 * jobs, 3 * jobs, 3 * jobs, max(1, jobs - 1)]),
    )


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
        pause_s=rng.choice([0.0, 0.0, 0.0, 30.0]),  # longer than a collective may take
    )


def _draw_fault(rng: random.Random, kind: str, jobs: tuple[JobPlan, ...], protocol: ProtocolPlan) -> Fault:
    job = rng.randrange(len(jobs))
    collectives = max(1, len(jobs[job].collectives))
    numbers: dict[str, tuple[float, ...]] = {
        "host death": (0.0, 4.0),
        "link loss": (0.0, 4.0, 16.0),  # the last one for longer than a worker may take to join
        "shard crash": (0.0, 0.5, 5.0, 12.0),
        "drain": (0.0, 0.5, 10.0),
        "worker stall": (0.1, 1.5, 6.0),
        "shard stall": (0.1, 1.5, 6.0, 11.0),  # the last one for longer than a stranger may take to say hello
        "freeze": (protocol.timeout_s + 1, protocol.timeout_s + 30),
        "shard freeze": (protocol.timeout_s + 1, protocol.timeout_s + 30),
        "late": (0.1, 3.0, protocol.join_timeout_s + 5),
        "duplicate": (0.0, 0.01, 1.0),
        "world size": (1, -1),
        "misconfigured": (*range(12), *range(8, 12)),  # the last ones only disagree
        "mismatch": tuple(range(collectives)),
        "refusal": tuple(range(collectives)),
        "garbage": tuple(range(3)),
        "tampering": tuple(range(len(RULES))),
        "lying shard": tuple(range(len(LIES))),
        "stranger": tuple(range(5)),
        "other secret": (0, 1),
        "foreign survivor": (0, 1, 2),
        "second launch": (0.0, 0.001, 0.1),
        "slow reader": (0.005, 0.02),
        "slow shard": (0.005, 0.02),
        "clock jump": (0.5, 5.0, 30.0, 3600.0),
        "shard clock jump": (0.5, 5.0, 30.0, 3600.0),
    }
    number = rng.choice(numbers.get(kind, (0.0,)))
    shard = rng.randrange(protocol.shards)
    return Fault(kind, job, rng.randrange(jobs[job].ranks), shard, int(10 ** rng.uniform(0.5, 3.0)), number)
