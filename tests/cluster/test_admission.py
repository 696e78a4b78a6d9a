"""Admission to jobs: which workers may join, and what the others are told."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from cluster_checks import FAILURE_S, assert_serves
from local_cluster import WAIT_S, Daemon, Ranks, configured, run_job, unique_job
from raw_peer import DEFAULTS, RawPeer, await_pending
from transports import TRANSPORTS, over

from omnireduce import AbortedError, Communicator, Config, RefusedError, TransportError
from omnireduce.core.descriptor import Descriptor
from omnireduce.core.wire.control import PROTOCOL_VERSION, Pending, Refused, Waiting, Welcome
from omnireduce.protocol import wait_notices


def join(config: Config, rank: int, size: int, job: str) -> str:
    """Join and leave; return why that was refused."""
    try:
        with Communicator(config, rank=rank, size=size, job=job):
            return ""
    except RefusedError as error:
        return str(error)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_missing_ranks_are_named(daemon: Daemon, transport: str) -> None:
    config = configured(daemon.addresses[:1], "cluster.join_timeout_s=0.3", *over(transport))
    job = unique_job()
    with RawPeer(daemon.addresses[0]) as other:
        other.hello(job, 2, 5)
        await_pending(other, [0, 1, 3, 4])
        text = join(config, 0, 5, job)
        assert f"still waiting for rank 1, 3, 4 of job '{job}' at aggregator {daemon.addresses[0]} after" in text
        assert "after cluster.join_timeout_s = 0.3; were all workers started, with the same world size" in text


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_launch_ends_at_once_when_one_of_its_ranks_is_refused(daemon: Daemon, transport: str) -> None:
    """The time to join is 60 s, which no test has."""
    job = unique_job()
    changes = *over(transport), f"cluster.launch={job}", "cluster.join_timeout_s=60"
    config, other = (configured(daemon.addresses[:1], *changes, *more) for more in ((), ("protocol.slots=5",)))
    texts = Ranks(3, lambda rank: join(other if rank == 1 else config, rank, 3, job)).results(WAIT_S)
    assert all("slots 5 differs from" in text or "differs from 5" in text for text in texts)
    assert sum(f"job '{job}' cannot start: " in text for text in texts) == 2


def test_a_worker_says_for_whom_it_waits(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wait_notices, "FIRST_S", 0.05)
    join(configured(daemon.addresses[:1], "cluster.join_timeout_s=0.6"), 0, 2, "alone")
    messages = [record.getMessage() for record in caplog.records if record.name == "omnireduce"]
    assert len(messages) >= 2
    text = f"waiting for rank 1 of job 'alone' at aggregator {daemon.addresses[0]}"
    assert set(messages) <= {f"{text} since {seconds} s" for seconds in (0, 1)}


def test_many_missing_ranks_are_not_all_listed(daemon: Daemon) -> None:
    config = configured(daemon.addresses, "cluster.join_timeout_s=0.2")
    assert "still waiting for rank 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 … of job" in join(
        config, 0, 100, unique_job()
    )


def test_an_incomplete_job_is_given_up_by_the_daemon() -> None:
    """A worker may be patient; the daemon's own limit ends its wait, and the name is free again."""
    with Daemon(1, "aggregator.join_timeout_s=0.3") as daemon:
        config = configured(daemon.addresses, "cluster.join_timeout_s=20")
        assert "job 'early' was still waiting for rank 0, 2 after 0.3 s" in join(config, 1, 3, "early")
        assert_serves(daemon, job="early")


def test_a_rank_that_gives_up_is_replaced(daemon: Daemon) -> None:
    """The others go on waiting; its place is free for the next process."""
    job = unique_job()
    with RawPeer(daemon.addresses[0]) as first, RawPeer(daemon.addresses[0]) as second:
        first.hello(job, 0, 3)
        await_pending(first, [1, 2])
        second.hello(job, 1, 3)
        await_pending(first, [2])
        second.close()
        await_pending(first, [1, 2])
    assert_serves(daemon, job=job)


def assert_taken(text: str, job: str) -> None:
    assert " refused: rank 0 (host " in text
    assert f"is already in job '{job}'; choose another cluster.job" in text


def test_a_second_process_of_a_rank_while_the_job_gathers(daemon: Daemon) -> None:
    address, job = daemon.addresses[0], unique_job()
    with RawPeer(address) as first:
        first.hello(job, 0, 2)
        await_pending(first, [1])
        assert_taken(join(configured([address]), 0, 2, job), job)
        with RawPeer(address) as second:
            second.hello(job, 1, 2)
            while not isinstance(first.control(), Welcome):
                pass


def test_a_second_process_of_a_rank_while_the_job_runs(daemon: Daemon) -> None:
    """The job itself takes no harm."""
    config, job = configured(daemon.addresses), unique_job()
    tried = threading.Event()

    def run(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            assert_taken(join(config, 0, 2, job), job)
            tried.set()
        assert tried.wait(WAIT_S)
        return comm.allreduce(np.ones(2)).tolist()

    assert run_job(config, 2, run, job) == [[2.0, 2.0]] * 2


MISMATCHES: dict[str, tuple[list[str], int, str]] = {
    "world size": ([], 3, "world_size 3 differs from 2 of rank 0 (host "),
    "slots": (["protocol.slots=9"], 2, "slots 9 differs from "),
    "slot bytes": (["protocol.slot_bytes=131072"], 2, "slot_bytes 131072 differs from "),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_workers_that_are_configured_differently(daemon: Daemon, what: str) -> None:
    overrides, size, expected = MISMATCHES[what]
    job = unique_job()
    with RawPeer(daemon.addresses[0]) as first:
        first.hello(job, 0, 2, shards=3)
        await_pending(first, [1])
        refused = join(configured(daemon.addresses, *overrides), 1, size, job)
        assert expected in refused
        assert f" of rank 0 (host test, pid 1) in job '{job}'" in refused


def test_a_rank_that_waits_in_vain_learns_who_was_refused(daemon: Daemon) -> None:
    job = unique_job()
    with RawPeer(daemon.addresses[0]) as first:
        first.hello(job, 0, 2, shards=3)
        await_pending(first, [1])
        assert "world_size 3 differs from 2" in join(configured(daemon.addresses), 1, 3, job)
        answer = first.control()
        assert isinstance(answer, Pending)
        assert answer.note.startswith("rank 1 (host ")
        assert "was refused: world_size 3 differs from 2 of rank 0 (host test, pid 1)" in answer.note


@pytest.mark.parametrize(
    ("order", "expected"),
    [([0, 1], "shards 2 differs from 3 of rank 0"), ([1, 0, 2], "shard 1 differs from 0 of rank 0")],
)
def test_workers_that_list_other_aggregators(daemon: Daemon, order: list[int], expected: str) -> None:
    job = unique_job()
    with RawPeer(daemon.addresses[0]) as first:
        first.hello(job, 0, 2, shards=3)
        await_pending(first, [1])
        config = configured([daemon.addresses[i] for i in order], "cluster.join_timeout_s=20")
        refused = join(config, 1, 2, job)
        assert expected in refused
        assert "list cluster.aggregators in the same order on every worker" in refused


def test_limits_of_the_daemon() -> None:
    limits = ["aggregator.max_world_size=3", "aggregator.max_jobs=2", "aggregator.max_job_bytes=16777216"]
    with Daemon(1, *limits) as daemon:
        config = configured(daemon.addresses, "cluster.join_timeout_s=20")
        assert "world size 4; aggregator.max_world_size is 3" in join(config, 0, 4, "wide")
        large = configured(daemon.addresses, "protocol.slots=64")
        needed = 3 * 64 * config.protocol.slot_bytes
        expected = f"the job needs {needed} bytes of slots and state; aggregator.max_job_bytes is 16777216"
        assert expected in join(large, 0, 2, "large")
        with RawPeer(daemon.addresses[0]) as gathering, Communicator(config, rank=0, size=1, job="running"):
            gathering.hello("gathering", 0, 2)
            await_pending(gathering, [1])
            assert "2 jobs are here already, and aggregator.max_jobs is 2" in join(config, 0, 1, "third")
        assert_serves(daemon, job="gathering", size=2)


def test_limits_of_all_jobs_together() -> None:
    """They hold for jobs that gather; what a job that is over held is free as soon as its ranks have gone."""
    job_bytes = 3 * 3 * DEFAULTS.slot_bytes
    limits = [
        "aggregator.max_ranks=5",
        f"aggregator.max_bytes={2 * job_bytes}",
        f"aggregator.max_job_bytes={job_bytes}",
    ]
    with Daemon(1, *limits) as daemon:
        config = configured(daemon.addresses, "cluster.join_timeout_s=20")
        with RawPeer(daemon.addresses[0]) as one, RawPeer(daemon.addresses[0]) as two:
            one.hello("one", 0, 2)
            two.hello("two", 0, 2)
            await_pending(one, [1])
            await_pending(two, [1])
            assert "4 ranks of other jobs and 2 of this one are more than aggregator.max_ranks, 5" in join(
                config, 0, 2, "three"
            )
            text = join(config, 0, 1, "three")
            assert (
                f"{2 * job_bytes} bytes of slots and state of other jobs and {job_bytes * 2 // 3} of this one are more"
                in text
            )
            assert f"than aggregator.max_bytes, {2 * job_bytes}: raise it, or wait" in text
        for _ in range(5):
            assert run_job(config, 2, lambda comm: comm.size, unique_job()) == [2, 2]


def test_a_connection_that_does_not_say_hello_is_refused_in_time() -> None:
    with Daemon(1, "aggregator.hello_timeout_s=0.2") as daemon, RawPeer(daemon.addresses[0]) as peer:
        answer = peer.control()
        assert answer == Refused("no Hello within 0.2 s", temporary=True)
        assert peer.is_closed()


@pytest.mark.slow
def test_more_ranks_than_descriptors() -> None:
    """A rank for which no descriptor is left gets the reason."""

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with Daemon(1, preexec_fn=few) as daemon, contextlib.ExitStack() as stack:
        for rank in range(48):
            peer = stack.enter_context(RawPeer(daemon.addresses[0]))
            peer.hello("many", rank, 100)
            assert isinstance(peer.control(), Pending)
        with RawPeer(daemon.addresses[0]) as late:
            answer = late.control()
            assert isinstance(answer, Refused)
            assert answer.reason == "too many connections; raise ulimit -n of the aggregator, or wait"


@pytest.mark.parametrize("fields", [{}, {"rank": "first", "shards": None, "more": []}], ids=["alike", "different"])
def test_another_protocol_version(daemon: Daemon, fields: dict[str, Any]) -> None:
    """Both versions are named, also when the hello of the other one cannot be read."""
    with RawPeer(daemon.addresses[0]) as peer:
        peer.hello(**({"job": unique_job(), "rank": 0, "world_size": 1, "version": PROTOCOL_VERSION + 1} | fields))
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert answer.reason.startswith(f"protocol version {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}")
        assert peer.is_closed()


def endpoint(**fields: object) -> dict[str, object]:
    proper = {"gid": "::1", "lid": 0, "queue": 1, "sequence": 0, "key": 1, "address": 0, "mtu": 1024}
    return proper | fields


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"rank": -1}, "rank -1 of 2 does not exist"),
    ({"rank": 2}, "rank 2 of 2 does not exist"),
    ({"world_size": 0}, "rank 0 of 0 does not exist"),
    ({"world_size": 2**31 - 1}, f"world size {2**31 - 1}; aggregator.max_world_size is 1024"),
    ({"world_size": 2**62}, "malformed control message"),
    ({"world_size": 2**62, "min_ranks": 1, "survived": 1}, "malformed control message"),
    ({"world_size": 2**30, "min_ranks": 1, "survived": 1}, "aggregator.max_world_size is 1024"),
    ({"survived": 1}, "a survivor of formation 1 in a job that is not elastic"),
    ({"launch": "l" * 129}, "expected nothing, or a string of 1 to 128 characters"),
    ({"launch": "\n"}, "expected nothing, or a string of 1 to 128 characters"),
    ({"pid": 2**63}, "malformed control message"),
    ({"shard": 1}, "shard 1 of 1 does not exist"),
    ({"shards": 4097, "shard": 4096}, "4097 shards; expected at most 4096"),
    ({"shards": 2**63}, "malformed control message"),
    ({"verbs": endpoint(address=2**64 - 1)}, f"slots from address {2**64 - 1} on; expected an end below 2**64"),
    ({"slots": 1}, "1 slots; expected 2 to 64"),
    ({"slots": 10**9}, "1000000000 slots; expected 2 to 64"),
    ({"slot_bytes": 65537}, "slots of 65537 bytes; expected a multiple of 4096"),
    ({"slot_bytes": 2**30}, "bytes; expected a multiple of 4096"),
    ({"slot_bytes": 2**40}, "malformed control message"),
    ({"job": ""}, "expected a string of 1 to 128 characters"),
    ({"job": "j" * 3000}, "expected a string of 1 to 128 characters"),
    ({"stripe_blocks": 0}, "stripes of 0 blocks; expected 1 to 1048576"),
    ({"whole_bytes": -1}, "whole tensors of up to -1 bytes; expected 0 to 1073741824"),
    ({"stripe_blocks": 2**30}, "stripes of 1073741824 blocks; expected 1 to 1048576"),
    ({"verbs": endpoint(gid="zz:1")}, "malformed control message"),
    ({"verbs": endpoint(gid="fe80::1%eth0")}, "malformed control message"),
    ({"verbs": endpoint(mtu=1500)}, "malformed control message"),
    ({"host": "h" * 3000}, "expected at most 255 characters"),
    ({"timeout_s": -1.0}, "a time-out of -1 s; expected 0.1 to 86400"),
    ({"timeout_s": float("nan")}, "a time-out of nan s; expected 0.1 to 86400"),
    ({"last_call_s": 3601.0}, "a job that settles after 3601 s; expected 0 to 3600"),
    ({"last_call_s": float("inf")}, "a job that settles after inf s; expected 0 to 3600"),
    ({"rank": "zero"}, "malformed control message"),
    ({"version": None}, "malformed control message"),
]


@pytest.mark.parametrize(
    ("fields", "expected"), IMPOSSIBLE, ids=[str(sorted(f)) + str(i) for i, (f, _) in enumerate(IMPOSSIBLE)]
)
def test_impossible_hellos(daemon: Daemon, fields: dict[str, Any], expected: str) -> None:
    with RawPeer(daemon.addresses[0]) as peer:
        peer.hello(**({"job": unique_job(), "rank": 0, "world_size": 2} | fields))
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert expected in answer.reason


def test_a_rank_that_fails_while_another_still_joins(daemon: Daemon) -> None:
    """The first shard has admitted both, the second waits for the one that dies: its name is what the other learns."""
    job = unique_job()
    config = configured(daemon.addresses[:2], "cluster.join_timeout_s=20")
    with RawPeer(daemon.addresses[0]) as peer:
        peer.hello(job, 1, 2, shards=2)
        ranks = Ranks(1, lambda rank: Communicator(config, rank=0, size=2, job=job))
        while not isinstance(peer.control(), Welcome):
            pass
        began = time.monotonic()
        peer.close()
        [error] = ranks.outcomes()
        assert isinstance(error, AbortedError)
        assert error.culprit == "rank 1 (host test, pid 1)"
        assert time.monotonic() - began < FAILURE_S


def test_a_rank_that_begins_while_another_still_joins(daemon: Daemon) -> None:
    """The first shard tells the one that still joins that others wait for it; that is no error."""
    job = unique_job()
    config = configured(daemon.addresses[:2], "cluster.join_timeout_s=20")
    with RawPeer(daemon.addresses[0]) as first, RawPeer(daemon.addresses[1]) as second:
        first.hello(job, 1, 2, shards=2, timeout_s=0.2)
        ranks = Ranks(1, lambda rank: Communicator(config, rank=0, size=2, job=job))
        while not isinstance(first.control(), Welcome):
            pass
        first.collective(Descriptor("barrier", "", "uint8", (0,), item_bytes=1))
        while not isinstance(first.control(), Waiting):
            pass
        second.hello(job, 1, 2, shard=1, shards=2)
        [comm] = ranks.results()
        comm.shutdown()


def test_a_rank_is_there_while_another_aggregator_is_not_up_yet(daemon: Daemon) -> None:
    """A rank says hello to each aggregator as soon as it is connected: a connection without hello would be dropped, and
    the next aggregator may come up late."""
    job = unique_job()
    with socket.socket() as silent, RawPeer(daemon.addresses[0]) as peer:
        silent.bind(("127.0.0.1", 0))  # it does not listen
        addresses = [daemon.addresses[0], f"127.0.0.1:{silent.getsockname()[1]}"]
        config = configured(addresses, "transport.kind=tcp", "cluster.join_timeout_s=2")
        peer.hello(job, 1, 2, shards=2)
        ranks = Ranks(1, lambda rank: Communicator(config, rank=0, size=2, job=job))
        while not isinstance(peer.control(), Welcome):
            pass
        [error] = ranks.outcomes()
    assert isinstance(error, TransportError)
    assert f"cannot reach aggregator {addresses[1]}" in str(error)


@pytest.mark.parametrize("known_after", [3, 10**9], ids=["soon", "never"])
def test_a_name_that_nobody_knows_yet(daemon: Daemon, monkeypatch: pytest.MonkeyPatch, known_after: int) -> None:
    """As where an aggregator's host gets its name after the workers have started."""
    look_up, hosts = socket.getaddrinfo, list[str]()

    def late(host: str, *rest: Any, **options: Any) -> Any:
        if host != "soon.invalid":
            return look_up(host, *rest, **options)
        hosts.append(host)
        if len(hosts) <= known_after:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up("127.0.0.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    address = "soon.invalid:" + daemon.addresses[0].rpartition(":")[2]
    config = configured([address], "transport.kind=tcp", f"cluster.join_timeout_s={20 if known_after == 3 else 0.5}")
    if known_after == 3:
        assert run_job(config, 1, lambda comm: comm.allreduce(np.ones(2)).tolist()) == [[1.0, 1.0]]
        assert len(hosts) == 4
    else:
        with pytest.raises(TransportError, match=f"cannot reach aggregator {address} by tcp: Name or service not kn"):
            Communicator(config, rank=0, size=1)
        assert len(hosts) > 1


def test_jobs_of_many_sizes_gather_at_once(daemon: Daemon) -> None:
    """Ranks of different jobs arrive interleaved."""
    config = configured(daemon.addresses)

    def job(number: int) -> list[int]:
        return run_job(config, number + 1, lambda comm: comm.size)

    assert Ranks(4, job).results() == [[n + 1] * (n + 1) for n in range(4)]
