"""Processes of other users on the same host. Needs root, to be another user."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
from free_ports import free_ports
from local_cluster import READY_S, WAIT_S, Daemon, Process, Ranks, Worker, configured, eventually, unique_job
from raw_peer import RawPeer
from test_metrics import LISTEN, base, get, scrape
from users import set_user

from omnireduce import Communicator, RefusedError, TransportError
from omnireduce.runtime.aggregator_client import ask
from omnireduce.transport.unix_sockets import listen_local

NOBODY = 65534
IMPOSTOR = f"process {os.getpid()} of user {NOBODY}"

_T = TypeVar("_T")


def can_change() -> bool:
    return os.geteuid() == 0 and Ranks(1, lambda _: set_user(NOBODY) and os.geteuid() == NOBODY).results() == [True]


pytestmark = pytest.mark.skipif(not can_change(), reason="only root can be other users")


def as_nobody(function: Callable[[], _T]) -> _T:
    def run(_: int) -> _T:
        assert set_user(NOBODY)
        return function()

    [result] = Ranks(1, run).results()
    return result


def outcome(daemon: Daemon, *overrides: str) -> str:
    """Let a worker of another user run a job alone; return its transport, or the error."""
    config, job = configured(daemon.addresses, "cluster.join_timeout_s=20", *overrides), unique_job()

    def run() -> str:
        try:
            with Communicator(config, rank=0, size=1, job=job) as comm:
                assert comm.allreduce(np.ones(9)).tolist() == [1.0] * 9
                return comm.transport
        except RefusedError as error:
            return str(error)

    return as_nobody(run)


@pytest.mark.refuses_transport
def test_another_users_worker_gets_no_memory(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """The aggregator is root's. The worker could trust it, but it does not trust the worker. By tcp the job goes on."""
    assert outcome(daemon) == "tcp"
    text = f"the aggregator {daemon.addresses[0]} is of user 0, this worker of user {NOBODY}: for shared memory set "
    assert f"going on by tcp: {text}security.local_users = 'any' on both" in caplog.text
    assert caplog.text.count("going on by tcp") == len(daemon.addresses)
    assert outcome(daemon, "transport.kind=tcp") == "tcp"
    text = outcome(daemon, "transport.kind=shm")
    assert f"refused: user {NOBODY} may not share memory with an aggregator of user 0: " in text
    assert "set security.local_users = 'any' on both, or transport.kind = 'tcp' on the client" in text


def test_another_users_question_goes_by_tcp(daemon: Daemon) -> None:
    config = configured(daemon.addresses)
    answer = as_nobody(lambda: ask(daemon.addresses[0], config, WAIT_S))
    assert answer.connections >= 1  # its own, and perhaps that of a rank of an earlier test, which is leaving


def test_another_users_worker_that_is_welcome() -> None:
    with Daemon(1, "security.local_users=any") as daemon:
        assert outcome(daemon, "security.local_users=any") == "shm"
        assert outcome(daemon, "transport.kind=shm") == "shm"
        assert outcome(daemon) == "tcp"  # it cannot know


def test_real_processes_of_two_users(daemon: Daemon) -> None:
    """One rank of each: root's shares memory, the other one goes by tcp, and the sums are the same."""
    job, size = unique_job(), 2
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(size):
            who = ["--as-user", str(NOBODY)] if rank else []
            ranks.append(stack.enter_context(Worker(daemon, job, rank, size, "--rounds", "3", *who)))
        joined = [rank.expect("joined") for rank in ranks]
        assert [each["transport"] for each in joined] == ["shm", "tcp"]
        for rank in ranks:
            rank.expect("left")


@contextlib.contextmanager
def impostor(port: int) -> Iterator[socket.socket]:
    """Another user's process has taken the name under which an aggregator offers shared memory."""
    with as_nobody(lambda: listen_local("127.0.0.1", port)) as listener:
        yield listener


def test_another_users_process_does_not_hide_an_aggregator_that_listens_everywhere() -> None:
    """It has taken the name for one address; the aggregator has the one for all."""
    with Daemon(1, "security.allow_no_secret=true", listen="0.0.0.0:0") as daemon:
        port = int(daemon.addresses[0].rpartition(":")[2])
        config = configured([f"127.0.0.1:{port}"], "transport.kind=shm", "cluster.join_timeout_s=20")
        with impostor(port), Communicator(config, rank=0, size=1, job=unique_job()) as comm:
            assert comm.transport == "shm"


def test_a_name_for_shared_memory_that_another_user_has_taken() -> None:
    """The daemon goes on by TCP, and says why; so do workers. Where it may offer nothing else, it does not start."""
    port = free_ports()
    address = f"127.0.0.1:{port}"
    with impostor(port):
        what = f"the Unix socket @omnireduce/{address}, for workers of this host, belongs to {IMPOSTOR}"
        with Daemon(1, LISTEN, listen=address) as daemon:
            assert eventually(lambda: f"{what}: they go by TCP" in daemon.log)
            config = configured([address], "cluster.join_timeout_s=20")
            with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
                assert comm.transport == "tcp"
            assert get(f"{base(daemon)}/readyz")[0] == 200  # the monitor has a socket that nobody can guess
        only = ["--listen", address, "--set", "transport.kind=shm"]
        with Process(sys.executable, "-m", "omnireduce.aggregator", *only) as process:
            assert process.wait(READY_S) == 1
            assert f"Error: aggregator.listen: cannot listen on {address}: {what}" in process.log


def test_the_log_and_the_metrics_say_which_user_was_refused() -> None:
    with Daemon(1, LISTEN) as daemon:
        assert "may not share memory" in outcome(daemon, "transport.kind=shm")
        assert f'peer="{IMPOSTOR}" user={NOBODY}' in daemon.log
        with RawPeer(daemon.addresses[0]) as stranger:
            stranger.hello("a b", 0, 1)
            assert stranger.is_closed()
        counts = scrape(daemon)["omnireduce_refused_total"]
        assert counts == {(daemon.addresses[0],): 1.0, (daemon.addresses[0], str(NOBODY)): 1.0}


def test_another_users_aggregator_is_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """The worker goes on by tcp if its configuration allows tcp."""
    with Daemon(1, "transport.kind=tcp") as daemon, impostor(int(daemon.addresses[0].rpartition(":")[2])) as listener:
        config = configured(daemon.addresses, "cluster.join_timeout_s=20")
        with Communicator(config, rank=0, size=1, job=unique_job()) as comm:
            assert comm.transport == "tcp"
        offer = f"the process that offers shared memory for {daemon.addresses[0]}"
        belongs = f"{offer} belongs to {IMPOSTOR}, this worker to user 0"
        assert f"going on by tcp: {belongs}" in caplog.text
        with pytest.raises(TransportError, match=belongs):
            Communicator(configured(daemon.addresses, "transport.kind=shm"), rank=0, size=1)
        caplog.clear()
        for _ in range(2):
            assert ask(daemon.addresses[0], config, WAIT_S).running == 0
        assert caplog.text.count("going on by tcp") == 1  # it asks every second
        listener.setblocking(True)
        for _ in range(4):
            with listener.accept()[0] as sock:
                assert sock.recv(1) == b""  # nothing was said to it
