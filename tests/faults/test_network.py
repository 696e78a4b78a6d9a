"""Hosts whose link is cut, or that vanish without a word: both sides notice as soon as `transport.dead_peer_s` says.

Hosts are network namespaces, so this needs root. The daemon and the workers are processes in them.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import pytest
from cluster_checks import DEATH_S
from local_cluster import Daemon, Ranks, eventually, open_files, unique_job
from raw_peer import RawPeer, await_pending

from benchmarks.harness.testbed import Host
from omnireduce.runtime.shard.connections import LINGER_S

from .crew import WorkerProcess, complete
from .site import held
from .worker import Order, enter_network

DEAD_PEER_S, HELLO_S = 1.0, 1.0
PROBE_S = 1.0  # from one probe of an idle connection to the next: they count in whole seconds
NOTICED_S = DEAD_PEER_S + PROBE_S + DEATH_S
LIMITS = (
    f"transport.dead_peer_s={DEAD_PEER_S}", f"aggregator.hello_timeout_s={HELLO_S}", "security.allow_no_secret=true",
    "cluster.join_timeout_s=20", "cluster.timeout_s=60",
)  # fmt: skip
T = TypeVar("T")


@pytest.fixture(scope="module")
def remote(hosts: list[Host]) -> Iterator[Daemon]:
    """A daemon on the first host; at the end of each test it holds no more descriptors than before."""
    with Daemon(1, *LIMITS, listen=f"{hosts[0].address}:7400", prefix=hosts[0].prefix) as result:
        assert_serves(result, hosts[1:3])  # by now it has opened what it keeps
        [shard] = result.shard_pids
        assert eventually(lambda: not any("memfd" in name for name in open_files(shard)))
        yield result


@pytest.fixture
def daemon(remote: Daemon) -> Iterator[Daemon]:
    [shard] = remote.shard_pids
    files = held(shard).files
    yield remote
    assert remote.shard_pids == [shard]
    assert eventually(lambda: held(shard).files <= files), remote.log
    assert "internal error" not in remote.log


def set_link(host: Host, state: str) -> None:
    command = ("ip", "-n", host.name, "link", "set", "eth0", state)
    subprocess.run(command, check=True, capture_output=True, timeout=10)


@contextmanager
def cut(host: Host) -> Iterator[float]:
    """The host's link is down; yields since when."""
    since = time.monotonic()
    set_link(host, "down")
    try:
        yield since
    finally:
        set_link(host, "up")


def on(host: Host, function: Callable[[], T]) -> T:
    """Call a function on this host; return its result."""

    def run(_: int) -> T:
        enter_network(host.name)
        return function()

    [result] = Ranks(1, run).results()
    return result


class Job:
    """A job with a rank on each of these hosts. Rank 0 idles between rounds if told so, as if it computed; the others
    then wait for it in a collective."""

    def __init__(self, daemon: Daemon, hosts: Sequence[Host], stack: ExitStack, *, elements: int, idle: bool) -> None:
        self._name, self._daemon = unique_job("apart"), daemon
        self.members = [stack.enter_context(WorkerProcess(host.name)) for host in hosts]
        for rank, member in enumerate(self.members):
            member.tell(self.order(rank, elements=elements, idle_s=60.0 if idle and rank == 0 else 0.0))
        for member in self.members:
            member.hear("joined")
            member.expect_progress()

    def order(self, rank: int, **details: object) -> Order:
        return Order(self._name, rank, len(self.members), tuple(self._daemon.addresses), LIMITS, **details)  # type: ignore[arg-type]

    def raises(self, rank: int, since: float, culprit: str) -> str:
        """The rank raises in time after `since` and names the culprit; return the error's text."""
        report = self.members[rank].hear("error", "wrong", "left")
        assert (report.event, report.kind, report.culprit) == ("error", "AbortedError", culprit)
        assert report.at - since <= NOTICED_S, report
        return report.text

    def wake_up(self) -> float:
        """Rank 0 goes on; returns since when. What it sends into a dead link starts the limit of silence anew."""
        now = time.monotonic()
        self.members[0].tell("wake up")
        return now

    def name(self, rank: int) -> str:
        return self.members[rank].name(rank)


@pytest.fixture
def jobs(daemon: Daemon, hosts: list[Host]) -> Iterator[list[Job]]:
    """On the second and third host: one in full flow, one whose rank 0 computes."""
    with ExitStack() as stack:
        yield [
            Job(daemon, hosts[1:3], stack, elements=elements, idle=idle)
            for elements, idle in ((2_000_000, False), (1000, True))
        ]


def assert_serves(daemon: Daemon, hosts: Sequence[Host]) -> None:
    with ExitStack() as stack:
        members = [stack.enter_context(WorkerProcess(host.name)) for host in hosts]
        job, size = unique_job("next"), len(hosts)
        complete(members, [Order(job, rank, size, tuple(daemon.addresses), LIMITS, rounds=3) for rank in range(size)])


def test_a_workers_link_is_cut(daemon: Daemon, hosts: list[Host], jobs: list[Job]) -> None:
    """The other rank is told; the rank itself sees the aggregator go."""
    with cut(hosts[1]) as since:
        for job in jobs:
            assert "connection broken" in job.raises(1, since, job.name(0))
        flowing, idle = jobs
        woken = idle.wake_up()
        for job, begin in ((flowing, since), (idle, woken)):
            assert "connection broken" in job.raises(0, begin, f"aggregator {daemon.addresses[0]}")
    assert_serves(daemon, hosts[1:3])


def test_the_aggregators_link_is_cut(daemon: Daemon, hosts: list[Host], jobs: list[Job]) -> None:
    """All ranks see it go; it is the same process that serves again when the link is back."""
    with cut(hosts[0]) as since:
        for job in jobs:
            assert "connection broken" in job.raises(1, since, f"aggregator {daemon.addresses[0]}")
        flowing, idle = jobs
        woken = idle.wake_up()
        for job, begin in ((flowing, since), (idle, woken)):
            assert "connection broken" in job.raises(0, begin, f"aggregator {daemon.addresses[0]}")
    assert_serves(daemon, hosts[1:3])


def vanish(host: Host, members: Sequence[WorkerProcess]) -> float:
    """The host is gone, with its processes and without a packet; returns since when."""
    since = time.monotonic()
    set_link(host, "down")
    for member in members:
        member.close()
    return since


@pytest.mark.parametrize("comes_back", [False, True], ids=["for good", "and comes back"])
def test_a_workers_host_vanishes(daemon: Daemon, hosts: list[Host], jobs: list[Job], comes_back: bool) -> None:
    """The connection is half open: only the aggregator's end is left. A host that comes back knows nothing of it."""
    since = vanish(hosts[1], [job.members[0] for job in jobs])
    if comes_back:
        set_link(hosts[1], "up")
    try:
        for job in jobs:
            assert "connection" in job.raises(1, since, job.name(0))
        assert_serves(daemon, hosts[2:4])
    finally:
        set_link(hosts[1], "up")


def test_a_host_connects_says_nothing_and_vanishes(daemon: Daemon, hosts: list[Host]) -> None:
    [shard] = daemon.shard_pids
    files = held(shard).files
    peers = [on(hosts[4], lambda: RawPeer(daemon.addresses[0])) for _ in range(5)]
    assert eventually(lambda: held(shard).files == files + len(peers))
    with cut(hosts[4]):
        assert eventually(lambda: held(shard).files == files, HELLO_S + LINGER_S + DEATH_S)
        for peer in peers:
            peer.close()


def test_a_host_says_hello_and_vanishes(daemon: Daemon, hosts: list[Host]) -> None:
    """Its place in the job is free once its death is noticed; until then nobody else can have it."""
    [shard] = daemon.shard_pids
    job, files = unique_job("hello"), held(shard).files
    orders = [Order(job, rank, 2, tuple(daemon.addresses), LIMITS, rounds=3) for rank in range(2)]
    peer = on(hosts[4], lambda: RawPeer(daemon.addresses[0]))
    with peer, WorkerProcess(hosts[1].name) as heir, WorkerProcess(hosts[2].name) as other:
        peer.hello(job, 0, 2)
        await_pending(peer, [1])
        with cut(hosts[4]):
            heir.tell(orders[0])
            assert "is already in job" in heir.hear("error").text
            assert eventually(lambda: held(shard).files == files, NOTICED_S)
            complete([heir, other], orders)


def test_the_aggregators_host_vanishes_from_a_rank_that_joins(daemon: Daemon, hosts: list[Host]) -> None:
    [shard] = daemon.shard_pids
    files, address = held(shard).files, daemon.addresses[0]
    with WorkerProcess(hosts[1].name) as member:
        member.tell(Order(unique_job("early"), 0, 2, (address,), LIMITS))
        assert eventually(lambda: held(shard).files == files + 1)
        with cut(hosts[0]) as since:
            report = member.hear("error")
            assert report.kind == "TransportError"
            assert f"aggregator {address}: connection broken" in report.text
            assert report.at - since <= NOTICED_S


@pytest.mark.parametrize("victim", [0, 1], ids=["a delegate", "another rank"])
def test_a_rank_of_a_shared_host_dies(daemon: Daemon, hosts: list[Host], victim: int) -> None:
    """Each of two hosts sends the sum of its two ranks."""
    with ExitStack() as stack:
        job = Job(daemon, [host for host in hosts[1:3] for _ in range(2)], stack, elements=200_000, idle=False)
        since = job.members[victim].signal(signal.SIGKILL)
        for rank in {*range(4)} - {victim}:
            assert "connection" in job.raises(rank, since, job.name(victim))  # closed, or broken with data unread
    assert_serves(daemon, hosts[1:3])


def test_the_link_of_a_shared_host_is_cut(daemon: Daemon, hosts: list[Host]) -> None:
    with ExitStack() as stack:
        job = Job(daemon, [host for host in hosts[1:3] for _ in range(2)], stack, elements=200_000, idle=False)
        with cut(hosts[1]) as since:
            ends = [job.members[rank].hear("error", "wrong", "left") for rank in (2, 3)]
            assert all(end.kind == "AbortedError" and end.at - since <= NOTICED_S for end in ends), ends
            assert {end.culprit for end in ends} <= {job.name(0), job.name(1)}, ends
            for rank in (0, 1):
                end = job.members[rank].hear("error", "wrong", "left")
                assert (end.kind, end.culprit) == ("AbortedError", f"aggregator {daemon.addresses[0]}"), end
    assert_serves(daemon, hosts[1:3])
