"""What goes wrong in a run, and whom its victims may then name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from omnireduce.transport.base import Received

from .plan import Fault

if TYPE_CHECKING:
    from .cluster import Cluster
    from .worker import Worker

FROM_THE_START = ("late", "duplicate", "world size", "mismatch")  # properties of a rank, not events


def strike(cluster: Cluster, fault: Fault) -> None:
    """Let `fault` happen now, if its victim is there."""
    shard = cluster.shards[fault.shard]
    if fault.kind in ("shard crash", "shard stall", "shard freeze", "drain"):
        if shard.alive:
            cluster.note(fault)
            _strike_shard(cluster, fault)
        return
    worker = cluster.ranks[fault.job][fault.rank]
    if worker is not None and worker.alive:
        cluster.note(fault)
        _strike_worker(cluster, fault, worker)


def _strike_shard(cluster: Cluster, fault: Fault) -> None:
    shard = cluster.shards[fault.shard]
    if fault.kind == "shard stall":
        shard.stall(fault.number)
        return
    for job in cluster.plan.jobs:
        cluster.blame(job.name, shard.address)
    if fault.kind == "shard freeze":
        shard.stall(fault.number)
    elif fault.kind == "drain":
        shard.drain(fault.number)
    else:
        cluster.expect_end([worker for worker in cluster.workers if worker.running], 0.0, fault)
        shard.kill(fault.number, supervised=fault.at_event % 2 == 0)


def _strike_worker(cluster: Cluster, fault: Fault, worker: Worker) -> None:
    kind, name = fault.kind, worker.job.name
    if kind == "worker stall":
        worker.stall(fault.number)
        return
    cluster.blame(name, worker.culprit)
    if kind == "freeze":
        worker.stall(fault.number)
    elif kind == "early leave":
        if worker.running:
            peers = [each for each in cluster.workers if each.job is worker.job and each.running]
            cluster.expect_end(peers, worker.job.think_s, fault)
        worker.leave_early()
    elif kind == "garbage":
        cluster.blame(name, cluster.shards[fault.shard].address)  # it hangs up on a rank that breaks the rules
        _send_garbage(fault, worker)
    else:
        if worker.running:
            peers = [each for each in cluster.workers if each.job is worker.job and each.running]
            cluster.expect_end(peers, fault.number, fault)
        if kind == "crash":
            worker.kill()
        elif kind == "host death":
            worker.kill(silent_s=fault.number)
        elif kind == "link loss" and fault.shard < len(worker.links):
            cluster.blame(name, cluster.shards[fault.shard].address)
            worker.links[fault.shard].sever(0.0, fault.number)


def _send_garbage(fault: Fault, worker: Worker) -> None:
    """A control message that is none, a message for a slot that is not there, or a header of noise."""
    if fault.shard >= len(worker.links):
        return
    link = worker.links[fault.shard]
    if fault.at_event % 3 == 0 or link.send_slots.size == 0:
        link.send_control(b"\xc1 garbage")
    elif fault.at_event % 3 == 1:
        link.other.deliver(Received(999, 64))
    else:
        for slot in link._under_way:
            link.send_slots[slot, :64] = 0xFF


def handicap(cluster: Cluster, job: int, worker: Worker) -> float:
    """Give a rank's first worker the faults that it starts with; return how many seconds late it starts."""
    late_s = 0.0
    for fault in cluster.plan.faults:
        if (fault.job, fault.rank) != (job, worker.rank) or fault.kind not in FROM_THE_START:
            continue
        name = worker.job.name
        cluster.note(fault)
        cluster.blame(name, worker.culprit)
        if fault.kind == "late":
            late_s = max(late_s, fault.number)
        elif fault.kind == "world size":
            worker.ranks += 1
        elif fault.kind == "mismatch" and worker.program and worker.job.ranks > 1:
            program, at = list(worker.program), int(fault.number)
            program[at] = replace(worker.job.collectives[at], seed=worker.job.collectives[at].seed + 1 + worker.rank)
            worker.program = program
            cluster.blame(name, "ranks ")
        elif fault.kind == "duplicate":
            cluster.world.at(worker.job.start_s + fault.number, lambda: cluster.intrude(job, worker.rank))
    return late_s
