"""Status of aggregators: right numbers, the right culprit, page by page, and to strangers too."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import certificates, needs_openssl
from cluster_checks import FAILURE_S, SLOWNESS, assert_serves, expect_round, name_of
from free_ports import free_address
from local_cluster import WAIT_S, Daemon, configured, eventually, run_job, start_job, unique_job, workers
from raw_peer import RawPeer, await_pending
from transports import KINDS, MEMORY, TRANSPORTS, over

from omnireduce import Communicator, ConfigError, OmniReduceError, RefusedError, TransportError
from omnireduce.core.status_messages import JobStatus, Status, StatusRequest, Traffic
from omnireduce.core.wire.control import PROTOCOL_VERSION, Refused
from omnireduce.protocol.collective.effects import ABORT_KINDS
from omnireduce.runtime.aggregator_client import ask, ask_all
from omnireduce.support.secret import load_secret

BLOCK, BLOCKS = 256, 1000
FRAMING = 10_000  # bytes that control messages take
MOST_S = 30.0


def statuses(daemon: Daemon) -> list[Status]:
    results: list[Status] = []
    for each in ask_all(daemon.addresses, configured(daemon.addresses), MOST_S):
        assert isinstance(each, Status), each
        results.append(each)
    return results


def jobs(daemon: Daemon, name: str) -> list[JobStatus]:
    """Status of one job, from each shard."""
    return [job for status in statuses(daemon) for job in status.jobs if job.name == name]


def blocks_of(rank: int) -> np.ndarray:
    """Rank 0 has the first 300 blocks, rank 1 blocks 200 to 599, of 1000; the last block is short."""
    x = np.zeros(BLOCKS * BLOCK - 7, np.float32)
    x[(0, 200 * BLOCK)[rank] : (300 * BLOCK, 600 * BLOCK)[rank]] = 1.0
    return x


@pytest.mark.parametrize("transport", KINDS)
def test_a_job_is_counted_exactly(daemon: Daemon, transport: str) -> None:
    """Collectives, blocks and bytes of all shards together; a barrier counts as collective only."""
    job, seen, done = unique_job("counted"), threading.Event(), threading.Event()
    before = statuses(daemon)

    def run(comm: Communicator) -> tuple[int, int]:
        for _ in range(4):
            comm.allreduce(blocks_of(comm.rank))
        comm.barrier()
        comm._engine.exclusively(comm._engine._driver.flush)  # the last credits would wait for the next collective
        result = comm.statistics()
        if comm.rank == 0:
            seen.set()
        assert done.wait(WAIT_S)
        return result.sent_bytes, result.received_bytes

    running = start_job(configured(daemon.addresses, *over(transport)), 2, run, job)
    assert seen.wait(WAIT_S)
    assert eventually(lambda: all(each.results_in_use == 0 for each in jobs(daemon, job)))  # the last credits are back
    results = jobs(daemon, job)
    done.set()
    totals = running.results()
    counts = [5, 4, 4]  # the barrier is the first shard's
    assert [result.traffic.collectives for result in results] == counts
    traffic = Traffic()
    for each in results:
        traffic.add(each.traffic)
        assert (each.world_size, each.joined, list(each.carried)) == (2, 2, [transport])
        assert (each.slots, each.slots_in_use, each.results, each.missing) == (6, 0, 3, [])
        assert each.waiting is None
    assert (traffic.blocks, traffic.rank_blocks) == (4 * BLOCKS, 8 * BLOCKS)
    assert (traffic.own_blocks, traffic.union_blocks) == (4 * 700, 4 * 600)
    assert (traffic.density, traffic.union_density) == (0.35, 0.6)
    left_out = 200 + 300 if transport == "tcp" else 0  # blocks that only one rank contributes
    payload_up, payload_down = 4 * 700 * BLOCK * 4, 4 * (2 * 600 - left_out) * BLOCK * 4
    assert payload_up <= traffic.received_bytes == sum(sent for sent, _ in totals)
    assert payload_down <= traffic.sent_bytes == sum(received for _, received in totals)
    assert eventually(lambda: jobs(daemon, job) == [])
    for old, new, count in zip(before, statuses(daemon), counts, strict=True):
        assert new.traffic.collectives == old.traffic.collectives + count
        assert (new.jobs_started, new.jobs_ended) == (old.jobs_started + 1, old.jobs_ended + 1)
        assert (new.aborts, new.pid, new.running) == (old.aborts, old.pid, 0)
        assert new.uptime_s > old.uptime_s
    gained = sum(status.traffic.own_blocks for status in statuses(daemon)) - sum(
        each.traffic.own_blocks for each in before
    )
    assert gained == 4 * 700


def test_a_job_whose_ranks_share_memory_is_counted_exactly(daemon: Daemon) -> None:
    """By its end; until then the counts may be those of a second before."""
    before = statuses(daemon)

    def run(comm: Communicator) -> tuple[int, int]:
        for _ in range(4):
            comm.allreduce(blocks_of(comm.rank))
        comm.barrier()
        result = comm._machine.host
        assert result is not None
        return result.sent_bytes, result.received_bytes

    totals = run_job(configured(daemon.addresses, *over(MEMORY)), 2, run)
    assert eventually(lambda: statuses(daemon)[0].jobs_ended == before[0].jobs_ended + 1)
    after = statuses(daemon)
    old, new = before[0].traffic, after[0].traffic  # the ranks report to the first shard
    assert new.collectives == old.collectives + 5
    assert (new.blocks, new.rank_blocks) == (old.blocks + 4 * BLOCKS, old.rank_blocks + 8 * BLOCKS)
    assert (new.own_blocks, new.union_blocks) == (old.own_blocks + 4 * 700, old.union_blocks + 4 * 600)
    staged, taken = (sum(each) for each in zip(*totals, strict=True))
    assert staged <= new.received_bytes - old.received_bytes <= staged + FRAMING
    assert taken <= new.sent_bytes - old.sent_bytes <= taken + FRAMING
    assert [each.traffic.collectives for each in after[1:]] == [each.traffic.collectives for each in before[1:]]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_last_credits_wait_for_the_next_collective(daemon: Daemon, transport: str) -> None:
    """They need not wake a shard on their own."""
    job, step = unique_job("credits"), threading.Barrier(3)

    def run(comm: Communicator) -> None:
        for _ in range(2):
            comm.allreduce(np.ones(8, np.float32))  # one message to the first shard, and one from it
            step.wait(WAIT_S)
            step.wait(WAIT_S)

    running = start_job(configured(daemon.addresses, *over(transport)), 2, run, job)
    for _ in range(2):
        step.wait(WAIT_S)
        assert [each.results_in_use for each in jobs(daemon, job)] == [1, 0, 0]
        step.wait(WAIT_S)
    running.results()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_rank_is_the_one_that_is_waited_for(daemon: Daemon, transport: str) -> None:
    job, patient = unique_job("straggler"), ["cluster.timeout_s=60", *over(transport)]
    with workers(
        daemon, 3, "--elements", "1000000", job=job, overrides=[*patient, "transport.dead_peer_s=60"]
    ) as ranks:
        for worker in ranks:
            expect_round(worker, "round", 1)
        stopped = ranks[1].signal(signal.SIGSTOP)

        def waits() -> list[Any]:
            return [each.waiting for each in jobs(daemon, job) if each.waiting is not None]

        assert eventually(lambda: any(wait.seconds >= 0.5 for wait in waits()))
        longest = max(waits(), key=lambda wait: wait.seconds)
        assert (longest.ranks, longest.total, longest.who) == ([1], 1, name_of(ranks[1], 1))
        assert "(allreduce 'gradient' of float32 (1000000,)" in longest.what
        assert longest.seconds <= time.monotonic() - stopped + FAILURE_S
        ranks[1].signal(signal.SIGCONT)
        ranks[1].expect("round")
        assert eventually(lambda: not any(wait.seconds >= 0.5 for wait in waits()))
    assert eventually(lambda: jobs(daemon, job) == [])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_stays_on_the_account(daemon: Daemon, transport: str) -> None:
    """On all shards. Those whose ranks share memory tell the first one, once they have waited for a second."""
    job = unique_job("late")

    def accounts() -> list[JobStatus]:
        return jobs(daemon, job)[: 1 if transport == MEMORY else None]

    with workers(daemon, 2, "--hold", "1", "1", job=job, overrides=over(transport)) as (first, late):
        late.expect("held")
        expect_round(first, "started", 1)
        assert eventually(lambda: all(account.waiting and account.waiting.seconds > 0.3 for account in accounts()))
        late.go_on()
        expect_round(late, "round", 2)

        def stays() -> bool:
            for worker in (first, late):  # they go on: the ranks report after a collective
                worker.expect("round")
            return all(account.late and account.late[0].seconds > 0.3 for account in accounts())

        assert eventually(stays)
        assert all(account.late[0].rank == 1 for account in accounts())


def test_a_job_that_gathers_says_who_is_missing(daemon: Daemon) -> None:
    job = unique_job("gathering")
    with RawPeer(daemon.addresses[0]) as first:
        first.hello(job, 1, 40)
        await_pending(first, [0, *range(2, 17)])
        [result] = jobs(daemon, job)
        assert (result.generation, result.world_size, result.joined) == (0, 40, 1)
        assert result.missing == [0, *range(2, 17)]
        assert statuses(daemon)[0].gathering == 1
    assert eventually(lambda: jobs(daemon, job) == [])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_aborts_are_counted_by_cause_and_refusals_too(transport: str) -> None:
    with Daemon(1) as daemon:
        with workers(daemon, 2, overrides=over(transport)) as ranks:
            ranks[1].signal(signal.SIGKILL)
            ranks[0].expect("error")
        timeout = f"cluster.timeout_s={0.5 * SLOWNESS}"
        with workers(daemon, 2, "--hold", "1", "1", overrides=[timeout, *over(transport)]) as ranks:
            ranks[0].expect("error")
        per_rank = [("--name", "a"), ("--name", "b")]
        with workers(daemon, 2, per_rank=per_rank, overrides=over(transport)) as ranks:
            ranks[0].expect("error")
        with RawPeer(daemon.addresses[0]) as peer:
            peer.hello("x", 5, 2)
            assert isinstance(peer.control(), Refused)
        [result] = statuses(daemon)
        assert set(result.aborts) == set(ABORT_KINDS)
        assert {cause: count for cause, count in result.aborts.items() if count} == {
            "lost": 1, "timeout": 1, "mismatch": 1,
        }  # fmt: skip
        assert (result.jobs_started, result.jobs_ended, result.refused) == (3, 3, 1)


def test_many_jobs_come_in_pages() -> None:
    """Long names, so that they need several control messages; each job is listed once."""
    names = [f"{number:03}{'x' * 125}" for number in range(400)]
    with Daemon(1, "aggregator.max_jobs=400") as daemon, contextlib.ExitStack() as stack:
        for name in reversed(names):
            peer = stack.enter_context(RawPeer(daemon.addresses[0]))
            peer.hello(name, 0, 2, slots=2, slot_bytes=65536)  # little memory, of which all jobs together have a limit
            await_pending(peer, [1])
        for kind in ("auto", "tcp"):
            status = ask(daemon.addresses[0], configured(daemon.addresses, f"transport.kind={kind}"), MOST_S)
            assert [job.name for job in status.jobs] == names
            assert (status.gathering, status.running) == (400, 0)
            assert status.connections == 401
        with RawPeer(daemon.addresses[0]) as peer:
            peer.say(StatusRequest(PROTOCOL_VERSION))
            first = peer.control()
            assert isinstance(first, Status)
            assert first.more
            assert [job.name for job in first.jobs] == names[: len(first.jobs)]


def test_a_connection_that_asks_may_join_afterwards(daemon: Daemon) -> None:
    job = unique_job("curious")
    with RawPeer(daemon.addresses[0]) as peer:
        for _ in range(3):
            peer.say(StatusRequest(PROTOCOL_VERSION))
            assert isinstance(peer.control(), Status)
        peer.hello(job, 0, 2)
        await_pending(peer, [1])
        peer.say(StatusRequest(PROTOCOL_VERSION))  # but not after its Hello
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert "expected one Hello, got StatusRequest" in answer.reason
        assert peer.is_closed()


def test_a_flood_of_requests_is_refused(busy: Daemon) -> None:
    """The jobs that run go on; one request is answered at a time."""
    with RawPeer(busy.addresses[0]) as peer:
        for _ in range(5000):
            peer.say(StatusRequest(PROTOCOL_VERSION))
        assert isinstance(peer.control(), Status | Refused)
        assert peer.is_closed()
    assert_serves(busy)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (StatusRequest(PROTOCOL_VERSION + 1), f"protocol version {PROTOCOL_VERSION + 1}, expected {PROTOCOL_VERSION}"),
        ({"type": "StatusRequest", "version": PROTOCOL_VERSION, "after": ["x"]}, "malformed control message"),
        ({"type": "StatusRequest"}, "malformed control message"),
    ],
    ids=["version", "after", "no version"],
)
def test_requests_that_are_refused(daemon: Daemon, request_: object, reason: str) -> None:
    with RawPeer(daemon.addresses[0]) as peer:
        peer.say(request_)
        answer = peer.control()
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        assert peer.is_closed()


@pytest.fixture
def secrets(tmp_path: Path) -> Sequence[str]:
    """Two settings of which each names another secret."""
    results = []
    for number in range(2):
        file = tmp_path / f"secret{number}"
        file.touch(0o600)
        file.write_text(f"secret number {number} of this test")
        results.append(f"security.secret_file={file}")
    return results


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_who_does_not_know_the_secret_learns_nothing(secrets: Sequence[str], kind: str) -> None:
    right, wrong = secrets
    with Daemon(1, right) as daemon:
        [address] = daemon.addresses
        config = configured([address], right, f"transport.kind={kind}")
        assert ask(address, config, MOST_S, secret=load_secret(config.security)).running == 0
        for settings, expected in (
            ([wrong], "has another secret than the aggregator"),
            (["transport.kind=tcp"], "wants proof of a shared"),  # by shm this user may ask
        ):
            config = configured([address], f"transport.kind={kind}", *settings)
            [result] = ask_all([address], config, MOST_S, secret=load_secret(config.security))
            assert isinstance(result, RefusedError)
            assert expected in str(result)
        with RawPeer(address) as peer:
            peer.say(StatusRequest(PROTOCOL_VERSION))
            answer = peer.control()
            assert isinstance(answer, Refused)
            assert peer.is_closed()


@needs_openssl
def test_over_tls() -> None:
    with Daemon(1, *certificates().holder("aggregator")) as daemon:
        [address] = daemon.addresses
        config = configured([address], certificates().trust(), "transport.kind=tcp")
        assert ask(address, config, MOST_S).running == 0
        [result] = ask_all([address], configured([address], "transport.kind=tcp"), 5.0)
        assert isinstance(result, TransportError)


@needs_openssl
def test_on_its_own_host_the_configuration_of_an_aggregator_will_do() -> None:
    """A health check has it: a certificate to show, and no authority to check one with."""
    settings = certificates().holder("aggregator")
    with Daemon(1, *settings) as daemon:
        [address] = daemon.addresses
        assert ask(address, configured([address], *settings), MOST_S).running == 0
        with pytest.raises(ConfigError, match=r"security\.tls_ca: a worker with TLS needs it"):
            ask(address, configured([address], *settings, "transport.kind=tcp"), MOST_S)


def outcome(address: str, timeout_s: float) -> Status | OmniReduceError:
    [result] = ask_all([address], configured([address]), timeout_s)
    return result


def test_nobody_listens() -> None:
    address = free_address()
    result = outcome(address, 1.0)
    assert isinstance(result, TransportError)
    assert f"cannot reach aggregator {address}: Connection refused; is `omnireduce aggregator`" in str(result)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # connecting takes a part of 0.3 s
        (b"", r"does not answer within 0\.\d+ s; is it stopped or overloaded, or"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"not a frame of this protocol: it looks like HTTP\Z"),
    ],
    ids=["silence", "another server"],
)
def test_something_else_listens(answer: bytes, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept: list[socket.socket] = []

        def serve() -> None:
            kept.append(server.accept()[0])
            kept[0].sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        result = outcome(f"127.0.0.1:{server.getsockname()[1]}", 0.3)
        thread.join(WAIT_S)
        kept[0].close()
    assert isinstance(result, TransportError)
    assert re.search(expected, str(result))


def test_a_daemon_that_shuts_down_ends_the_conversation() -> None:
    with Daemon(1, "aggregator.finish_s=30") as daemon, workers(daemon, 2, "--hold", "1", "1") as (first, late):
        expect_round(first, "started", 1)
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: "stopping" in daemon.log)
        assert eventually(lambda: isinstance(outcome(daemon.addresses[0], MOST_S), TransportError | RefusedError))
        late.go_on()
        assert daemon.wait() == 0
