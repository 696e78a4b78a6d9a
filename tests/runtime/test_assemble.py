"""A worker that cannot begin although all ranks are there: it says so to all, and keeps nothing."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import WAIT_S, Daemon, Process, configured, run_job, start_job, unique_job
from transports import MEMORY, TRANSPORTS, over

from omnireduce import AbortedError, Communicator, TransportError
from omnireduce.core.dtypes import Array
from omnireduce.runtime.rank import joining
from omnireduce.transport.host_rendezvous import HostRendezvous, RankGoneError

SCRIPT = """
import json, os, resource, sys
from local_cluster import configured, open_files
from omnireduce import Communicator, TransportError

address, job, *settings = sys.argv[1:]
enter = Communicator._begin_generation

def without_descriptors(self, *arguments):
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        enter(self, *arguments)
    finally:
        for each in held:
            os.close(each)

Communicator._begin_generation = without_descriptors
kept = None
try:
    Communicator(configured([address], *settings), rank=1, size=2, job=job)
except TransportError as error:
    kept = error  # with all that its traceback refers to
with open("/proc/self/maps") as maps:
    mapped = maps.read().count("/memfd:omnireduce")
sockets = sum("socket" in each for each in open_files(os.getpid()))
print(json.dumps({"error": str(kept), "mapped": mapped, "sockets": sockets}), flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_without_descriptors_tells_the_others_at_once(daemon: Daemon, transport: str) -> None:
    job, config = unique_job(), configured(daemon.addresses[:1], *over(transport), "cluster.timeout_s=120")
    paths = os.pathsep.join(str(Path(__file__).parent.parent / part) for part in ("..", "."))
    arguments = (daemon.addresses[0], job, *over(transport))
    with Process(sys.executable, "-c", SCRIPT, *arguments, environ={"PYTHONPATH": paths}) as process:
        try:
            with Communicator(config, rank=0, size=2, job=job) as comm, pytest.raises(AbortedError) as caught:
                comm.allreduce(np.ones(10))
            error = caught.value
        except AbortedError as early:  # it may hear of that before it has joined
            error = early
        report = json.loads(process.line())
        assert error.culprit == f"rank 1 (host {socket.gethostname()}, pid {process.pid})"
        assert error.reason == "could not begin: no descriptors left (Too many open files); raise ulimit -n"
        assert report["error"] == f"rank 1 of job '{job}' {error.reason}"
        assert report["mapped"] == 0
        assert report["sockets"] == 0
    assert run_job(config, 2, lambda comm: float(comm.allreduce(np.ones(3))[0]), job) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        (MemoryError(), TransportError, "could not begin: no memory left"),
        (OSError(errno.EIO, "Input/output error"), TransportError, "could not begin: Input/output error"),
        (ZeroDivisionError("a bug"), ZeroDivisionError, "left because of ZeroDivisionError: a bug"),
        (KeyboardInterrupt(), KeyboardInterrupt, "left because of KeyboardInterrupt"),
    ],
    ids=["memory", "input", "bug", "Ctrl-C"],
)
def test_whatever_fails_the_others_hear_of_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, raised: BaseException, expected: type[BaseException], words: str
) -> None:
    """Shards are told one by one, links are closed."""
    job, make, links = unique_job(), joining._assemble, []

    def failing(config: object, job: str, arrival: joining.JoinedWorker, me: str) -> joining.AssembledRank:
        if arrival.joined.rank == 0:
            return make(config, job, arrival, me)  # type: ignore[arg-type]
        links.extend(arrival.links)
        raise raised

    monkeypatch.setattr(joining, "_assemble", failing)
    config = configured(daemon.addresses)
    first, second = start_job(config, 2, lambda comm: comm.allreduce(np.ones(10)), job).outcomes(WAIT_S)
    assert isinstance(second, expected)
    assert isinstance(first, AbortedError)
    assert first.culprit.startswith("rank 1 (host ")
    assert first.reason == words
    assert len(links) == 3
    assert all(link.over and not link.send_slots.size for link in links)


@pytest.mark.parametrize("victim", [0, 1])
def test_who_leaves_while_the_ranks_of_a_host_meet_is_named_by_the_aggregator(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """The others see that a rank is gone, long before an aggregator tells which one, and why."""
    turn, connect, is_seen = HostRendezvous.turn, HostRendezvous._connect, threading.Event()

    def leave(meeting: HostRendezvous) -> None:
        for each in meeting._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        assert is_seen.wait(WAIT_S)
        raise ZeroDivisionError("a bug")

    def connecting(self: HostRendezvous) -> None:
        connect(self)
        if self._own_index == victim and self._sockets:  # no rank has said yet that it has everything
            leave(self)

    def looking(self: HostRendezvous) -> bool:
        if self._own_index == victim and self._unserved:
            leave(self)
        try:
            return turn(self)
        except RankGoneError:
            is_seen.set()
            raise

    monkeypatch.setattr(HostRendezvous, "_connect", connecting)
    monkeypatch.setattr(HostRendezvous, "turn", looking)
    job, config = unique_job(), configured(daemon.addresses, *over(MEMORY))
    ranks = start_job(config, 3, lambda comm: comm.allreduce(np.ones(10)), job).outcomes(WAIT_S)
    assert isinstance(ranks.pop(victim), ZeroDivisionError)
    for rank in ranks:
        assert isinstance(rank, AbortedError)
        assert rank.culprit.startswith(f"rank {victim} (host ")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (TransportError("aggregator a:1 offers no RDMA"), "aggregator a:1 offers no RDMA"),
        (MemoryError(), "no memory left"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
    ],
    ids=["refused", "memory", "input"],
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_cannot_make_its_slots_tells_the_others(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, raised: Exception, words: str, transport: str
) -> None:
    """On all shards, also those where it has its slots already."""
    job, attach, links = unique_job(), joining._attach, []

    def failing(link: Any, *arguments: Any) -> Any:
        if arguments[0].place == 0:  # of rank 0
            return attach(link, *arguments)
        links.append(link)
        if len(links) == 3:
            raise raised
        return attach(link, *arguments)

    monkeypatch.setattr(joining, "_attach", failing)
    config = configured(daemon.addresses, *over(transport))
    first, second = start_job(config, 2, lambda comm: comm.allreduce(np.ones(10)), job).outcomes(WAIT_S)
    assert isinstance(second, TransportError)
    assert words in str(second)
    assert isinstance(first, AbortedError)
    assert first.culprit.startswith("rank 1 (host ")
    assert first.reason == f"could not begin: {words}"
    assert len(links) == 3
    assert all(link.over for link in links)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_touches_the_slots_that_it_is_going_to_use(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    touched: list[Array] = []
    monkeypatch.setattr(joining, "touch", touched.append)
    run_job(configured(daemon.addresses, *over(transport)), 2, lambda comm: comm.barrier())
    both_ways_of_all_links = 2 * 2 * len(daemon.addresses)
    assert len(touched) == (0 if transport == MEMORY else both_ways_of_all_links)
    assert all(slots.size for slots in touched)
