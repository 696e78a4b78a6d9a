"""Daemons that drain, and jobs that somebody ends: real processes, and who may do that."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from cluster_checks import FAILURE_S, assert_aborted, assert_serves, expect_round
from free_ports import free_address
from local_cluster import WAIT_S, Daemon, Process, configured, eventually, unique_job, workers
from raw_peer import RawPeer, await_pending
from test_many_teams import GENERAL, SPEECH, VISION, Keys, joins, keys  # noqa: F401  a fixture
from test_metrics import LISTEN, base, get, scrape
from test_other_users import as_nobody, can_change
from transports import over

from omnireduce import AbortedError, Communicator, RefusedError
from omnireduce.aggregator.children import Child
from omnireduce.aggregator.drain_state import MIN_DRAIN_S, Draining
from omnireduce.core.admin_messages import Action, AdminRequest, Order
from omnireduce.core.status_messages import StatusRequest
from omnireduce.core.wire.control import PROTOCOL_VERSION
from omnireduce.protocol.joining.intake import DRAINING
from omnireduce.runtime.aggregator_client import ask, request
from omnireduce.support.secret import load_secret

NOT_YOURS = "only the operator may "


def tell(daemon: Daemon, action: Action, *settings: str, shard: int = 0, **details: str) -> int | str:
    """Ask one shard for something: how many jobs that concerned, or the refusal."""
    config = configured(daemon.addresses, *settings)
    admin_request = AdminRequest(PROTOCOL_VERSION, action, **details)
    try:
        return request(daemon.addresses[shard], config, WAIT_S, admin_request, load_secret(config.security))
    except RefusedError as error:
        return str(error)


def refusal(daemon: Daemon, *settings: str) -> str:
    """Let a new job join; return why it was refused, "" if it was not."""
    return joins(daemon, settings, unique_job("new"))


def is_draining(daemon: Daemon) -> list[bool]:
    return [ask(address, configured(daemon.addresses), WAIT_S).draining for address in daemon.addresses]


def program(command: str, daemon: Daemon, *arguments: str) -> Process:
    return Process(sys.executable, "-m", "omnireduce", command, *arguments, *daemon.addresses)


@pytest.fixture
def unsafe() -> Iterator[Daemon]:
    """A daemon that a test ends."""
    with Daemon(2, LISTEN) as daemon:
        yield daemon


def test_a_daemon_drains_as_one_and_ends_with_its_last_job(unsafe: Daemon) -> None:
    with workers(unsafe, 2, "--rounds", "9", "--hold", "1", "1") as (first, late):
        late.expect("held")
        with program("drain", unsafe) as command, RawPeer(unsafe.addresses[0]) as waiting:
            assert command.line().endswith("drains: 1 job is here")
            assert eventually(lambda: is_draining(unsafe) == [True, True])
            assert refusal(unsafe).endswith(DRAINING)
            assert eventually(lambda: "waiting for job 'test-" in command.log)
            expected = "".join(f"{address}: draining, takes no new jobs\n" for address in unsafe.addresses)
            assert get(f"{base(unsafe)}/readyz") == (503, expected)
            assert scrape(unsafe)["omnireduce_shard_draining"] == {(address,): 1.0 for address in unsafe.addresses}
            assert get(f"{base(unsafe)}/healthz")[0] == 200
            waiting.hello("new", 0, 2)
            assert DRAINING in str(waiting.control())
            assert "takes no new jobs" in status(unsafe)
            late.go_on()
            for worker in (first, late):
                worker.expect("left")
            assert unsafe.wait() == 0
            assert command.wait() == 0
        assert "event=drained" in unsafe.log
        assert "no job is left" in unsafe.log


def status(daemon: Daemon) -> str:
    with program("status", daemon, "--once") as process:
        assert process.wait() == 0
        lines = []
        with contextlib.suppress(AssertionError):
            while True:
                lines.append(process.line(0.0))
        return "\n".join(lines)


def test_one_shard_tells_the_others_and_an_idle_daemon_ends(unsafe: Daemon) -> None:
    assert tell(unsafe, "drain", shard=1) == 0
    assert unsafe.wait() == 0
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(unsafe.addresses[0].rpartition(":")[2])), WAIT_S)


def test_a_drain_is_taken_back(unsafe: Daemon) -> None:
    with workers(unsafe, 2) as (first, _), program("drain", unsafe, "--timeout", "0") as command:
        assert command.wait() == 0  # it does not wait
        assert refusal(unsafe).endswith(DRAINING)
        with program("drain", unsafe) as another:
            assert eventually(lambda: "waiting for" in another.log)
            assert tell(unsafe, "resume", shard=1) == 1
            assert another.wait() == 1
            assert "somebody has taken the drain back" in another.log
        assert eventually(lambda: is_draining(unsafe) == [False, False])
        assert_serves(unsafe)
        expect_round(first, "round", 3)


def test_a_drain_goes_on_after_ctrl_c_and_after_its_time(unsafe: Daemon) -> None:
    with workers(unsafe, 2), program("drain", unsafe) as command:
        assert eventually(lambda: "waiting for job" in command.log)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert "the aggregators go on draining; `omnireduce drain --undo` takes that back" in command.log
        with program("drain", unsafe, "--timeout", "0.1") as again:
            assert again.wait() == 1
            assert "still waiting for job 'test-" in again.log
        assert is_draining(unsafe) == [True, True]
        with program("drain", unsafe, "--undo") as undo:
            assert undo.wait() == 0


def test_those_who_gather_may_begin_their_job(unsafe: Daemon) -> None:
    job = unique_job()
    with RawPeer(unsafe.addresses[0]) as first, RawPeer(unsafe.addresses[0]) as second:
        first.hello(job, 0, 2)
        await_pending(first, [1])
        assert tell(unsafe, "drain") == 1
        second.hello(job, 1, 2)
        assert type(second.control()).__name__ == "Welcome"
    assert unsafe.wait() == 0


def test_a_shard_that_dies_while_it_drains(unsafe: Daemon) -> None:
    """The one that takes its place takes no jobs, either; the daemon still ends."""
    with workers(unsafe, 1, overrides=["protocol.whole_bytes=1000000"]) as [worker]:
        expect_round(worker, "round", 1)
        assert tell(unsafe, "drain") == 1
        os.kill(unsafe.shard_pids[-1], signal.SIGKILL)
        assert eventually(lambda: "event=shard_died" in unsafe.log)
        assert unsafe.wait() == 0


def test_sigterm_drains_for_as_long_as_the_configuration_says() -> None:
    with Daemon(2, "aggregator.drain_s=600") as daemon:
        with workers(daemon, 2, "--rounds", "9", "--hold", "1", "1") as (first, late):
            late.expect("held")
            daemon.signal(signal.SIGTERM)
            assert eventually(lambda: is_draining(daemon) == [True, True])
            assert "event=draining" in daemon.log
            assert refusal(daemon).endswith(DRAINING)
            assert "stops, which cannot be taken back" in str(tell(daemon, "resume"))
            late.go_on()
            for worker in (first, late):
                worker.expect("left")
        assert daemon.wait() == 0


@pytest.mark.parametrize("seconds", [0.2, 600])
def test_what_still_runs_after_that_or_at_a_second_signal_is_ended(seconds: float) -> None:
    with (
        Daemon(2, f"aggregator.drain_s={seconds}", "aggregator.finish_s=0.2") as daemon,
        workers(daemon, 2, "--hold", "1", "1") as (first, late),
    ):
        expect_round(first, "started", 1)
        late.expect("held")
        since = daemon.signal(signal.SIGTERM)
        assert eventually(lambda: "event=draining" in daemon.log)
        if seconds > 1:
            since = daemon.signal(signal.SIGTERM)
        culprits = [f"aggregator {address}" for address in daemon.addresses]
        [error] = assert_aborted([first], since, 0.4 + FAILURE_S, *culprits)
        assert "shutting down" in error["text"]
        assert daemon.wait() == 0


@pytest.mark.slow
def test_systemd_is_told_how_long_that_takes(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        environ = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with Daemon(1, "aggregator.drain_s=3000", environ=environ) as daemon, workers(daemon, 1):
            daemon.signal(signal.SIGTERM)
            messages: list[str] = []
            while not (messages and "draining: 1 jobs" in messages[-1]):
                messages.append(systemd.recv(4096).decode())
            assert f"EXTEND_TIMEOUT_USEC={(3000 + 10 + 10) * 10**6}" in messages
            daemon.signal(signal.SIGTERM)


# jobs that are ended


def end_of(comm: Communicator) -> str:
    """Go on until the job ends; return why."""
    try:
        while True:
            comm.allreduce(np.ones(9))
    except AbortedError as error:
        return str(error)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_ended_job_says_so_on_each_rank(daemon: Daemon, transport: str) -> None:
    job = unique_job("victim")
    with workers(daemon, 2) as (other, _), workers(daemon, 2, job=job, overrides=over(transport)) as ranks:
        expect_round(ranks[0], "round", 1)
        with program("end-job", daemon, "--why", "the rack is moved", job) as command:
            assert command.wait() == 0
            assert command.line() == "ended 1 job"
        errors = [rank.expect("error") for rank in ranks]
        for error in errors:
            assert error["type"] == "AbortedError"
            assert error["culprit"].startswith("the operator (")
            assert error["text"].endswith("ended this job with `omnireduce end-job`: the rack is moved")
        assert all(rank.wait() == 1 for rank in ranks)
        assert "cause=ended" in daemon.log
        expect_round(other, "round", 3)
        with program("end-job", daemon, job) as command:
            assert command.wait() == 1
            assert f"Error: no job '{job}' at " in command.log
            assert "; there are test-" in command.log
        with program("end-job", daemon, "--team", "vision") as command:  # no JOB: the first word is an address
            assert command.wait() == 1
            assert f"Error: no job of team 'vision' at {daemon.addresses[0]}" in command.log


def test_an_elastic_job_that_was_ended_is_not_formed_anew(daemon: Daemon) -> None:
    """If it is before the first shard hears of it, the new formation is ended, too. If its ranks have left the first
    shard, and are not back, when that one hears of it, they are refused."""
    job = unique_job("ended")
    config = configured(daemon.addresses, "elastic.enabled=true", "elastic.last_call_s=0.1")
    with Communicator(config, rank=0, size=1, job=job) as comm:
        comm.allreduce(np.ones(9))
        assert tell(daemon, "end", shard=1, job=job) == 1
        assert re.search(r"the operator \(.*\): ended this job with `omnireduce end-job`$", end_of(comm))
        with pytest.raises(RefusedError, match=r"refused: the operator \(.*\) ended this job"):
            go_on_for_ever(comm)


def go_on_for_ever(comm: Communicator) -> None:
    while True:
        comm.reform()
        end_of(comm)


def test_an_elastic_job_goes_on_after_the_daemon_was_replaced() -> None:
    """Neither a drain nor its end costs it anything: it waits for the next daemon."""
    address = free_address()
    with Daemon(1, "aggregator.drain_s=0.1", listen=address) as daemon:
        config = configured([address], "elastic.enabled=true", "elastic.last_call_s=0.1")
        with Communicator(config, rank=0, size=1, job=unique_job("elastic")) as comm:
            assert tell(daemon, "drain") == 1
            comm.allreduce(np.ones(9))
            daemon.signal(signal.SIGTERM)
            assert "shutting down" in end_of(comm)
            assert daemon.wait() == 0
            with Daemon(1, listen=address):
                comm.reform()
                assert comm.allreduce(np.ones(9)).tolist() == [1.0] * 9


# permission to drain


def test_without_a_secret_only_local_processes_of_root_and_of_its_user_may(daemon: Daemon) -> None:
    assert NOT_YOURS in str(tell(daemon, "drain", "transport.kind=tcp"))
    with RawPeer(daemon.addresses[0]) as stranger:
        stranger.say({"type": "AdminRequest", "version": PROTOCOL_VERSION, "action": "end", "job": "x"})
        assert NOT_YOURS in str(stranger.control())
        assert stranger.is_closed()
    assert tell(daemon, "end", job="nobody") == 0
    assert "a request to end jobs without a name" in str(tell(daemon, "end"))
    assert is_draining(daemon) == [False] * 3


@pytest.mark.skipif(not can_change(), reason="only root can be other users")
def test_another_user_may_not(daemon: Daemon) -> None:
    assert NOT_YOURS in str(as_nobody(lambda: tell(daemon, "drain")))
    assert NOT_YOURS in str(as_nobody(lambda: raw(daemon, AdminRequest(PROTOCOL_VERSION, "drain"))))
    assert is_draining(daemon) == [False] * 3


def raw(daemon: Daemon, message: object) -> object:
    with RawPeer(daemon.addresses[0], local=True) as peer:
        peer.say(message)
        return peer.control()


def test_teams_end_their_own_jobs_and_drain_nothing(keys: Keys) -> None:  # noqa: F811
    vision, speech, operator = keys.worker("vision", VISION), keys.worker("speech", SPEECH), keys.worker("", GENERAL)
    mine, tcp = unique_job("vision.train"), "transport.kind=tcp"
    with Daemon(2, *keys.aggregator) as daemon, workers(daemon, 1, job=mine, overrides=vision) as [worker]:
        for settings in (speech, vision):
            assert NOT_YOURS in str(tell(daemon, "drain", tcp, *settings))
        assert NOT_YOURS in str(tell(daemon, "end", tcp, *speech, team="vision"))
        assert tell(daemon, "end", tcp, *speech, job=mine) == 0
        expect_round(worker, "round", 2)
        assert tell(daemon, "end", tcp, *vision, team="vision", why="of age") == 1
        error = worker.expect("error")
        assert error["text"].startswith("team 'vision' (127.0.0.1:")
        with workers(daemon, 1, job=unique_job("vision.more"), overrides=vision) as [worker]:
            assert tell(daemon, "end", tcp, *operator, team="speech") == 0
            assert tell(daemon, "drain", tcp, *operator) == 1
            assert tell(daemon, "end", tcp, *operator, team="vision") == 1
            worker.expect("error")
        assert daemon.wait() == 0


def test_who_has_no_secret_may_not(keys: Keys) -> None:  # noqa: F811
    with Daemon(1, *keys.aggregator) as daemon:
        assert NOT_YOURS in str(tell(daemon, "drain", "transport.kind=tcp"))
        assert tell(daemon, "drain") == 0  # a process of its user may
        assert daemon.wait() == 0


def test_who_may_drain_without_the_secret_reads_what_it_waits_for(keys: Keys) -> None:  # noqa: F811
    job, vision = unique_job("vision.train"), keys.worker("vision", VISION)
    with Daemon(1, *keys.aggregator) as daemon, workers(daemon, 1, job=job, overrides=vision) as [worker]:
        worker.expect("round")
        assert job in status(daemon)
        with program("drain", daemon, "--timeout", "1") as command:
            assert command.wait() == 1
            assert f"Error: still waiting for job '{job}' after 1 s" in command.log
        assert "event=refused " not in daemon.log
        with pytest.raises(RefusedError, match="wants proof of a shared secret"):
            ask(daemon.addresses[0], configured(daemon.addresses, "transport.kind=tcp"), WAIT_S)


@pytest.mark.skipif(not can_change(), reason="only root can be other users")
def test_another_user_reads_no_status_without_the_secret(keys: Keys) -> None:  # noqa: F811
    with Daemon(1, *keys.aggregator, "security.local_users=any") as daemon:
        assert "wants proof of a shared secret" in str(as_nobody(lambda: raw(daemon, StatusRequest(PROTOCOL_VERSION))))


# the supervisor's view


def children(*names: str) -> list[Child]:
    return [Child("shard", name, None, None, None, None, None, -1) for name in names]  # type: ignore[arg-type]


def test_it_ends_when_all_shards_have_said_that_no_job_is_there() -> None:
    draining, shards, now = Draining(), children("a:1", "a:2"), time.monotonic()
    assert not draining.is_over(shards, now)
    draining.begin(Order("drain", "me"))
    draining.record_jobs(shards[0], 0)
    assert draining.without_report(shards) == shards[1:]
    later = now + MIN_DRAIN_S + 1
    assert not draining.is_over(shards, later)
    draining.record_jobs(shards[1], 2)
    assert not draining.is_over(shards, later)
    assert draining.jobs() == 2
    draining.record_jobs(shards[1], 0)
    assert not draining.is_over(shards, now)
    assert draining.is_over(shards, later)
    draining.forget(shards[0])
    assert not draining.is_over(shards, later)
    draining.resume()
    assert not draining.is_over(shards, later)


def test_a_stop_is_not_taken_back_and_keeps_its_time() -> None:
    draining, shards = Draining(), children("a:1")
    draining.begin(Order("drain", "me"))
    draining.record_jobs(shards[0], 1)
    draining.begin(Order("drain", "a signal", stops=True), 5.0)
    until = draining.until
    draining.begin(Order("drain", "me"))
    draining.resume()
    assert draining.stops
    assert draining.until == until < time.monotonic() + 6.0
    assert not draining.is_over(shards, until - 1)
    assert draining.is_over(shards, until)


def test_what_an_order_means() -> None:
    def means(job: str, team: str, *, of: Sequence[str] = ("train", "vision")) -> bool:
        return Order("end", "me", job, team or None).covers(*of)

    assert means("train", "")
    assert means("", "vision")
    assert means("train", "vision", of=("train+urgent", "vision"))
    assert not means("train", "speech")
    assert not means("trai", "")
