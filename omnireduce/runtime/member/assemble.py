"""Assembly of a rank's engine from its links to all shards. When that fails, the peers are told why."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import NamedTuple

from omnireduce.config import Config, Protocol
from omnireduce.dtypes import Array
from omnireduce.errors import TransportError, left_because
from omnireduce.logs import BoundLog
from omnireduce.protocol.collective.messages import MessageSizing
from omnireduce.protocol.collective.rank import WorkerMachine
from omnireduce.protocol.host.groups import LocalRanks
from omnireduce.protocol.joining.pending_job import worker_name
from omnireduce.protocol.joining.rank import Joined
from omnireduce.runtime.driver import say_last_words
from omnireduce.runtime.member.engine import GOODBYE_S, Engine
from omnireduce.runtime.member.rendezvous import Arrival
from omnireduce.runtime.member.threads import threads_for
from omnireduce.runtime.member.traced import Parts, traced
from omnireduce.runtime.reserve import shortage
from omnireduce.runtime.tracing.trace import trace_folder, with_folder
from omnireduce.transport.base import NO_SLOTS, Link
from omnireduce.transport.host_meeting import HostGroup
from omnireduce.transport.memory import touch
from omnireduce.wire.control import Cause, Leave, encode_control


class Assembled(NamedTuple):
    """What a rank works with."""

    links: list[Link]
    machine: WorkerMachine
    engine: Engine


def assemble(config: Config, job: str, arrival: Arrival) -> Assembled:
    """Make the engine of a rank that has joined.

    Raises TransportError when there are no descriptors or no memory for it. The other ranks are then told, and
    everything is given back.
    """
    joined = arrival.joined
    me = worker_name(joined.rank, socket.gethostname(), os.getpid())
    try:
        return _assemble(config, job, arrival, me)
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is None:  # an error of a signal handler, not of the system
            _give_up(arrival, Cause(me, left_because(error)))
            raise
        wrong = shortage(error)
    except BaseException as error:
        _give_up(arrival, Cause(me, left_because(error)))
        raise
    # Not within `except`: the error would keep the memory that is to be given back.
    _give_up(arrival, Cause(me, f"could not begin: {wrong}"))
    raise TransportError(f"rank {joined.rank} of job '{job}' could not begin: {wrong}")


def _assemble(config: Config, job: str, arrival: Arrival, me: str) -> Assembled:
    joined, parts = arrival.joined, Parts(arrival.links)
    is_traced = bool(trace_folder(config.trace))
    if is_traced:
        parts = traced(with_folder(config.trace), job, joined.rank, joined.size, parts.links)
    links = parts.links
    host = None if arrival.group is None else parts.exchange(*_host(config, joined, arrival.group))
    used = links if host is None or joined.neighbours.hosts > 1 else []  # those that blocks go by
    for link in used:
        touch(link.send_slots)
        touch(link.receive_slots)
    wanted = 1 if is_traced else config.transport.threads  # a trace shows one line of work
    threads = threads_for(wanted, used, len(joined.neighbours.ranks))
    machine = parts.machine(
        [(link.send_slots, link.receive_slots) for link in links],
        [link.peer for link in links],
        me,
        rank=joined.rank,
        scan_span=config.protocol.scan_span,
        timeout_s=config.cluster.timeout_s,
        sizing=[_sizing(config.protocol, link) for link in links],
        host=host,
        neighbours=joined.neighbours,
        threads=threads,
    )
    machine.newcomers = arrival.newcomers
    log = BoundLog(logging.getLogger("omnireduce"), job=job, rank=joined.rank)
    eventfds = () if arrival.group is None else arrival.group.eventfds
    try:
        return Assembled(links, machine, parts.engine(machine, links, config.transport.spin_us / 1e6, log, eventfds))
    except BaseException:
        if threads is not None:
            threads.close()
        raise


def _sizing(protocol: Protocol, link: Link) -> MessageSizing:
    if link.kind == "tcp":
        return MessageSizing.up_to(protocol.tcp_message_bytes)
    return MessageSizing(protocol.slot_bytes, protocol.slot_bytes)


def _host(config: Config, joined: Joined, group: HostGroup) -> tuple[Array, int, list[str], int, int, LocalRanks]:
    """What a host exchange is made of."""
    neighbours, protocol = joined.neighbours, config.protocol
    pids = zip(neighbours.ranks, group.pids, strict=True)
    names = [worker_name(number, socket.gethostname(), pid) for number, pid in pids]
    me = neighbours.ranks.index(joined.rank)
    return group.regions, me, names, protocol.slots, protocol.slot_bytes, neighbours


def _give_up(arrival: Arrival, cause: Cause) -> None:
    """Tell all shards, then close the links and let go of all memory."""
    links = arrival.links
    if arrival.group is not None:
        arrival.group.close()
    deadline = time.monotonic() + GOODBYE_S
    for link in links:
        link.send_control(encode_control(Leave(cause)))
    for link in links:
        say_last_words(link, deadline)
        link.close()
        link.attach(NO_SLOTS, NO_SLOTS)
