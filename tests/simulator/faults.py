"""Faults of a run, and the culprits that its victims may then name."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from omnireduce.core.wire.control import PROTOCOL_VERSION
from omnireduce.support.secret import Secret
from omnireduce.transport.base import Received

from .plan import OF_A_SHARD, Fault
from .stranger import FOREIGN, ForeignSurvivor, Stranger
from .tamper import LIES, RULES, TWICE, UNHEARD, UNSEEN, break_rule
from .workload import refusal

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Worker

FROM_THE_START = (  # not events
    "late", "duplicate", "world size", "misconfigured", "mismatch", "refusal", "slow reader", "other secret",
    "second launch",
)  # fmt: skip
OF_RUNNING = ("tampering", "lying shard", "freeze", "early leave")  # faults of a rank that has joined
OF_ONE = ("crash", "host death", "link loss")  # an elastic job goes on without this rank
SOONER_OR_LATER = 30.0  # seconds until a rule is broken that few messages can break, and that is heard of
OTHER_SECRET = Secret(b"another secret than that of the shards")
NONSENSE: tuple[dict[str, Any], ...] = (  # in a hello: refused whoever says it
    {"version": PROTOCOL_VERSION + 1},
    {"host": "\x1b[2J"},
    {"timeout_s": 0.0},
    {"shards": 0},
    {"slots": 1},
    {"slot_bytes": 65537},
    {"world_size": 9},
    {"world_size": 8, "slots": 64, "slot_bytes": 1 << 20},
)
DISAGREEMENT: tuple[dict[str, int], ...] = ({"slots": 1}, {"stripe_blocks": 1}, {"slot_bytes": 4096})  # so much more


def strike(cluster: Cluster, fault: Fault) -> None:
    """Let `fault` happen now if its victim is there, or as soon as it comes."""
    if fault.kind in OF_A_SHARD:
        if cluster.shards[fault.shard].alive:
            cluster.note(fault)
            _strike_shard(cluster, fault)
        return
    worker = cluster.ranks[fault.job][fault.rank]
    if worker is None or (worker.alive and not worker.running and fault.kind in OF_RUNNING):
        cluster.world.at_event(cluster.world.events + 1, partial(strike, cluster, fault))
    elif worker.alive:
        cluster.note(fault)
        _strike_worker(cluster, fault, worker)


def _strike_shard(cluster: Cluster, fault: Fault) -> None:
    shard = cluster.shards[fault.shard]
    if fault.kind == "stranger":
        cluster.strangers.append(Stranger(cluster, fault.shard, int(fault.number)))
    elif fault.kind == "foreign survivor":
        job = cluster.plan.jobs[fault.job]
        cluster.strangers.append(ForeignSurvivor(cluster, job, int(fault.number)))
        cluster.blame(job.name, FOREIGN)  # it may be admitted, as anybody who is told of the job
    elif fault.kind == "shard stall":
        shard.stall(fault.number)
    elif fault.kind == "slow shard":
        shard.read_slowly(fault.number)
    elif fault.kind == "shard clock jump":
        shard.jump(fault.number)
    else:
        for job in cluster.plan.jobs:
            cluster.blame(job.name, shard.address)
        _end_shard(cluster, fault)


def _end_shard(cluster: Cluster, fault: Fault) -> None:
    shard = cluster.shards[fault.shard]
    running = [worker for worker in cluster.workers if worker.running and _passes(cluster, worker, fault.shard)]
    if fault.kind == "shard freeze":
        for worker in running:
            cluster.expect_end([worker], worker.patience_s, fault)
        shard.stall(fault.number)
    elif fault.kind == "drain":
        shard.drain(fault.number)
    else:
        cluster.expect_end(running, 0.0, fault)
        shard.kill(fault.number, supervised=fault.at_event % 2 == 0)


def _passes(cluster: Cluster, worker: Worker, shard: int) -> bool:
    """Whether the worker's job uses this shard. Of a relay those shards do that a rank comes through."""
    relay = shard // cluster.protocol.shards - 1
    return relay < 0 or any(relay in cluster.protocol.way(peer.rank) for peer in worker.peers)


def _strike_worker(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    kind, name = fault.kind, worker.job.name
    if kind == "worker stall":
        worker.stall(fault.number)
        return
    if kind == "clock jump":
        worker.jump(fault.number)
        return
    if kind == "lying shard":
        _lie(cluster, fault, worker)
        return
    cluster.blame(name, worker.culprit)
    if kind == "freeze":
        for mate in worker.peers if worker.protocol.relays and worker.job.hosts > 1 else ():
            if mate.rank % worker.job.hosts == worker.rank % worker.job.hosts:
                cluster.blame(name, mate.culprit)  # a rank behind relays may see no more than the right host
        _expect_end_of_job(cluster, fault, worker, worker.patience_s)
        worker.stall(fault.number)
    elif kind == "early leave":
        _expect_end_of_job(cluster, fault, worker, worker.job.idle_s)
        worker.leave_early()
    elif kind in ("garbage", "tampering"):
        if fault.shard < len(worker.links):
            (_send_garbage if kind == "garbage" else _tamper)(cluster, fault, worker)
    else:
        _end_worker(cluster, fault, worker)


def _end_worker(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    if fault.kind != "link loss" or fault.shard < len(worker.links):
        _expect_end_of_job(cluster, fault, worker, fault.number)
    if fault.kind == "crash":
        worker.kill()
    elif fault.kind == "host death":
        worker.kill(silent_s=fault.number)
    elif fault.shard < len(worker.links):
        cluster.blame(worker.job.name, worker.links[fault.shard].peer)
        worker.links[fault.shard].sever(0.0, fault.number)


def _expect_end_of_job(cluster: Cluster, fault: Fault, worker: Worker, notice_s: float) -> None:
    if worker.running:
        cluster.expect_end(worker.peers, notice_s + _unheard_s(cluster, worker), fault)
        if fault.kind in OF_ONE and worker.job.min_ranks == 1:  # else those who are done already may be missing
            cluster.expect_going_on(worker.peers, fault)


def _unheard_s(cluster: Cluster, worker: Worker) -> float:
    """For how many seconds no shard hears what becomes of the worker, because all of its connections are broken."""
    if not all(link._severed for link in worker.links):
        return 0.0
    return max((fault.number for fault in cluster.plan.faults if fault.kind == "link loss"), default=0.0)


def _send_garbage(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    """A control message that is none, a message for a slot that is not there, or a header of noise."""
    link = worker.links[fault.shard]
    cluster.blame(worker.job.name, link.peer)  # it may hang up without a word
    if fault.number == 0 or link.send_slots.size == 0:
        link.send_control(b"\xc1 garbage")
    elif fault.number == 1:
        link.other_end.deliver(Received(999, 64))
    else:
        for slot in link._in_flight:
            link.send_slots[slot, :64] = 0xFF


def _tamper(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    rule, link = RULES[int(fault.number)], worker.links[fault.shard]
    if rule in UNHEARD:
        cluster.blame(worker.job.name, link.peer)  # it hangs up without a word
    if rule is UNSEEN and worker.ranks == 1:
        worker.misled = f"aggregator {link.peer}: protocol error: a result out of order"

    def broken() -> None:
        _expect_end_of_job(cluster, fault, worker, worker.job.window * worker.job.idle_s + SOONER_OR_LATER)
        if rule == TWICE and link.shares_memory:  # the second one shows what the slot has by then
            cluster.garbled.add(worker.job.name)
        if rule != TWICE and worker.running:
            cluster.expect_failure(worker.peers, fault)  # the collective cannot complete without this message

    break_rule(link, rule, broken)


def _lie(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    if worker.links[fault.shard].other_end.over:
        return
    link, rule = worker.links[fault.shard].other_end, LIES[int(fault.number)]
    lie = fault.shard, worker.job.name, rule
    if lie in cluster.lies:  # links may share the memory of a result, and two that change it back tell the truth
        return
    cluster.lies.add(lie)
    for shard in cluster.shards[cluster.protocol.shards :]:  # a relay passes on what its members then find
        cluster.blame(worker.job.name, shard.address)
    cluster.blame(worker.job.name, link.other_end.peer)
    if not callable(rule):
        cluster.blame(worker.job.name, worker.culprit)  # it hangs up, and the liar alone can tell the others

    def broken() -> None:
        _expect_end_of_job(cluster, fault, worker, SOONER_OR_LATER)
        if worker.running:
            cluster.expect_failure([worker], fault)

    break_rule(link, rule, broken)


def handicap(cluster: Cluster, job: int, worker: Worker) -> float:
    """Give a rank's first worker the faults that it starts with; return how many seconds late it starts."""
    late_s = 0.0
    for fault in cluster.plan.faults:
        if (fault.job, fault.rank) == (job, worker.rank) and fault.kind in FROM_THE_START:
            cluster.note(fault)
            if fault.kind not in ("slow reader", "second launch"):
                cluster.blame(worker.job.name, worker.culprit)
            late_s = max(late_s, fault.number if fault.kind == "late" else 0.0)
            _hamper(cluster, fault, worker)
    return late_s


def _hamper(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    job = worker.job
    if fault.kind == "world size":
        worker.ranks += int(fault.number) if worker.rank < worker.ranks + fault.number else 1
    elif fault.kind == "misconfigured":
        _misconfigure(worker, int(fault.number))
    elif fault.kind == "slow reader":
        worker.read_slowly(fault.number)
    elif fault.kind == "other secret":
        worker.secret = OTHER_SECRET if worker.secret is None or fault.number else None
    elif fault.kind == "second launch":
        cluster.expect(job.start_s + fault.number, partial(cluster.launch_again, fault.job))
    elif fault.kind == "duplicate":
        cluster.expect(job.start_s + fault.number, partial(cluster.intrude, fault.job, worker.rank))
    elif fault.kind == "mismatch" and worker.program and job.ranks > 1:
        _mismatch(worker, int(fault.number))
        cluster.blame(job.name, "ranks ")
        if any(collective.kind == "refusal" for collective in job.collectives):
            cluster.blame(job.name, "rank ")  # the others may refuse what it calls
    elif fault.kind == "refusal" and worker.program:
        program = list(worker.program)
        program[int(fault.number)] = refusal(int(fault.number))
        worker.program = program


def _misconfigure(worker: Worker, number: int) -> None:
    """Let the worker say something that nobody may, or something else than its peers."""
    if number < len(NONSENSE):
        worker.nonsense = NONSENSE[number]
    elif number < len(NONSENSE) + len(DISAGREEMENT):
        changes = DISAGREEMENT[number - len(NONSENSE)]
        results = {name: getattr(worker.protocol, name) + more for name, more in changes.items()}
        worker.protocol = replace(worker.protocol, **results)
    elif not worker.protocol.relays:  # each shard of a relay passes on what is for any shard above
        worker.shard_order.reverse()


def _mismatch(worker: Worker, at: int) -> None:
    """Let the worker submit another collective, sometimes one that differs in nothing but its shape."""
    program = list(worker.program)
    what = program[at]
    if what.seed % 2 and what.kind != "allreduce_rows":
        program[at] = replace(what, folded=True)
    else:
        program[at] = replace(what, seed=what.seed + 1 + worker.rank)
    worker.program = program
