"""Checks that must hold inside a shard and a worker after every turn, whatever happens around them."""

from __future__ import annotations

from collections.abc import Iterator

from omnireduce.protocol.collective.effects import End
from omnireduce.protocol.collective.reduction import BLOCK_WORK, Budget
from omnireduce.protocol.joining.limits import Limits
from omnireduce.protocol.rank import RankMachine
from omnireduce.protocol.relay import RelayMachine
from omnireduce.protocol.shard import RANK_WORK, ROUND_WORK, ResultSlots, ShardMachine
from omnireduce.runtime.shard.connections import Connection
from omnireduce.runtime.shard.job import ShardJob
from omnireduce.runtime.shard.relay_admission import Relaying
from omnireduce.runtime.shard.server import ShardServer

from .links import SimLink

WORK_BYTES, RANK_BYTES = 1 << 20, 64 << 10  # work space of a job and of each rank, as in docs/security.md
MOST_WORDS = 64  # control messages that may wait for a peer: some a second while it joins, then ever fewer


def audit_server(server: ShardServer, limits: Limits) -> Iterator[str]:
    """Faults in the server's books, its jobs and their links."""
    admission = server._admission
    if isinstance(admission, Relaying):
        yield from _audit_relaying(server, admission, limits)
        return
    replacing = sum(pending_job.replaces in admission._running for pending_job in admission._pending_jobs.values())
    if len(admission._pending_jobs) + len(admission._running) - replacing > limits.max_jobs:
        yield f"{len(admission._pending_jobs)} jobs gather and {len(admission._running)} run, of {limits.max_jobs}"
    if server._jobs.keys() != admission._running.keys():
        yield f"generations {sorted(server._jobs)} are served, {sorted(admission._running)} are known to run"
    ranks = [(each.formation_key, rank) for each in admission._running.values() for rank in each.ranks]
    if len(set(ranks)) < len(ranks):
        yield f"a rank is in two generations of its job: {sorted(ranks)}"
    if any(not pending_job.waiting_ranks for pending_job in admission._pending_jobs.values()):
        yield "a job gathers of which nobody is there"
    waiting = {
        key for pending_job in admission._pending_jobs.values() for key, *_ in pending_job.waiting_ranks.values()
    }
    for connection in server._connections:
        yield from _audit_connection(server, connection, connection in waiting)
    yield from ["who waits is known wrongly"] * (waiting != admission._waiting.keys())
    for job in server._jobs.values():
        yield from _audit_job(job, limits)


def _audit_relaying(server: ShardServer, admission: Relaying, limits: Limits) -> Iterator[str]:
    if len(admission._pending_jobs) + len(admission._running) > limits.max_jobs + len(server._jobs):
        yield f"{len(admission._pending_jobs)} jobs gather and {len(admission._running)} run, of {limits.max_jobs}"
    if server._jobs.keys() != admission._running.keys():
        yield f"generations {sorted(server._jobs)} are served, {sorted(admission._running)} are known to run"
    gathered = {key for uplinks in admission._pending_jobs.values() for key in uplinks}
    yield from ["who waits is known wrongly"] * (gathered != admission._uplinks.keys())
    for connection in server._connections:
        yield from _audit_connection(server, connection, connection in gathered)
    for job in server._jobs.values():
        yield from _audit_job(job, limits)


def audit_turn(server: ShardServer, budget: Budget, merged: dict[int, int]) -> Iterator[str]:
    """Jobs that merged more blocks in the last turn than its budget allows. `merged` keeps totals between turns."""
    for job in server._jobs.values():
        machine, current = job.machine, job.machine._current
        total = machine.account.traffic.union_blocks
        total += current.sent_blocks + current.written if current is not None else 0
        ranks, senders = len(machine._inboxes), len(machine._senders.delegates or machine._inboxes)
        limit = 1 + max(0, budget.work - ROUND_WORK - ranks * RANK_WORK) // (senders * BLOCK_WORK)
        if total - merged.get(job.generation, 0) > limit:
            yield f"{job} merged {total - merged.get(job.generation, 0)} blocks in one turn, of {limit}"
        merged[job.generation] = total


def _audit_connection(server: ShardServer, connection: Connection, awaited: bool) -> Iterator[str]:
    peer, hello, job = connection.link.peer, connection.hello, connection.job
    if (hello is not None and not connection.leaving and job is None) != awaited:
        yield f"{peer} waits for a job that does not wait for it, or the other way round"
    stranger = hello is None and not connection.leaving
    unidentified, closing = server._connections.unidentified, server._connections.closing
    leaves = connection in closing or connection in server._connections.staying
    if (stranger, connection.leaving) != (connection in unidentified, leaves):
        yield f"the time limit of {peer}"
    is_whole = job is not None and job._upstream is None
    if job is not None and is_whole and hello and not hello.min_ranks and hello.world_size != len(job.links):
        yield f"{peer} said {hello.world_size} ranks and is in a job of {len(job.links)}"
    if job is not None:
        yield from _audit_end(job.machine.ended)
    if job is not None and isinstance(connection.link, SimLink):
        yield from _audit_output(connection.link)


def _audit_end(end: End | None) -> Iterator[str]:
    """Broken rules are counted as such, and nothing else is. What a rank says another shard saw is counted there."""
    if end is not None and end.cause is not None and end.kind not in ("relayed", "worker"):
        broken = end.cause.reason.startswith("protocol error: ")
        if broken != (end.kind == "violation"):
            yield f"counted as {end.kind}: {end.cause}"


def _audit_job(job: ShardJob, limits: Limits) -> Iterator[str]:
    slots = job._arena.slots.nbytes + job._results.slots.nbytes
    if slots > limits.max_job_bytes:
        yield f"{job} has {slots} bytes of slots, of {limits.max_job_bytes}"
    if job.machine.ended is not None:
        yield f"{job} is still served after its end"
        return
    yield from (f"{job}: {wrong}" for wrong in _audit_machine(job.machine))
    for rank, link in enumerate(job.links[: job._members]):
        held = {row - rank * job.machine._slot_count for row, _ in job.machine._inboxes[rank].messages}
        if job.machine._inboxes[rank].open_row >= 0:
            held.add(job.machine._inboxes[rank].open_row - rank * job.machine._slot_count)
        if isinstance(job.machine, RelayMachine):
            held |= job.machine.passing[rank]
        if not link.over and held != link._held:
            yield f"{job}: of rank {rank} the machine holds slots {held}, the link {link._held}"


def _audit_machine(machine: ShardMachine) -> Iterator[str]:
    unread, free = _unread(machine._slots), machine._slots.free
    filling = [machine._filling_slot] if machine._filling_slot >= 0 else []
    if sorted(free + unread + filling) != list(range(machine._slot_count)):
        yield f"result slots: {free} free, {unread} unread, {filling} being filled, of {machine._slot_count}"
    if machine._senders.reduction.work_bytes > WORK_BYTES + RANK_BYTES * len(machine._inboxes):
        yield f"{machine._senders.reduction.work_bytes} bytes of work space for {len(machine._inboxes)} ranks"
    if isinstance(machine, RelayMachine):
        yield from _audit_relay(machine)
    elif len(machine._departed) == len(machine._inboxes):
        yield "all ranks have left, and it goes on"


def _unread(slots: ResultSlots) -> list[int]:
    """The slots that some rank has not read."""
    return [slot for slot, readers in enumerate(slots._readers) if readers]


def _audit_relay(machine: RelayMachine) -> Iterator[str]:
    unread, free = _unread(machine._down_slots), machine._down_slots.free
    if sorted(free + unread) != list(range(machine._slot_count)):
        yield f"slots of results: {free} free, {unread} unread"
    if len(machine._confirmed) == len(machine._inboxes):
        yield "all ranks have left, and it goes on"


def audit_worker(machine: RankMachine, links: list[SimLink]) -> Iterator[str]:
    """Faults in a worker's credits."""
    for stream, link in zip(machine._streams, links, strict=True):
        if not link.over and sorted([*stream._free, *link._in_flight]) != list(range(len(link.send_slots))):
            yield f"send slots: {stream._free} free, {link._in_flight} in flight, of {len(link.send_slots)}"
        if not link.over and link._held:
            yield f"receive slots {link._held} are kept"
        yield from _audit_output(link)


def _audit_output(link: SimLink) -> Iterator[str]:
    """More output for a peer than the credits of both sides allow, even if the peer reads nothing."""
    if len(link._output) > len(link.send_slots) + len(link.receive_slots) + MOST_WORDS:
        yield f"{len(link._output)} events wait for {link.peer} to read"
