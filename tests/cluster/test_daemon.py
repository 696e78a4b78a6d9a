"""The aggregator program: how it starts, how it ends, and that nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cluster_checks import FAILURE_S, assert_aborted, assert_serves, expect_round
from free_ports import free_ports
from local_cluster import (
    READY_S,
    Daemon,
    Process,
    Ranks,
    configured,
    eventually,
    gone_within,
    open_files,
    run_job,
    unique_job,
    workers,
)
from raw_peer import RawPeer, await_pending
from transports import MEMORY, called, over

from omnireduce import Communicator, RefusedError, TransportError
from omnireduce.aggregator.shard import _run_as_batch
from omnireduce.support.addresses import Address, listen_error_text
from omnireduce.transport.tcp import listen_tcp
from omnireduce.transport.unix_sockets import listen_local

either = pytest.mark.parametrize("transport", ["shm", MEMORY])


def abstract_sockets(daemon: Daemon) -> list[str]:
    """The daemon's names among the abstract Unix sockets of this machine that listen."""
    lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if " 00010000 " in line]
    return [line for line in lines if any(f"@omnireduce/{address}" in line for address in daemon.addresses)]


def run_aggregator(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the program to its end: status, standard output, standard error."""
    with Process(sys.executable, "-m", "omnireduce.aggregator", *arguments, environ=environ) as process:
        status = process.wait(READY_S)
        assert process.popen.stdout is not None
        return status, process.popen.stdout.read().decode(), process.log


def test_an_address_in_use_is_one_line_and_status_1(daemon: Daemon) -> None:
    status, out, log = run_aggregator("--listen", daemon.addresses[0])
    assert (status, out) == (1, "")
    assert log.count("\n") == 1
    what = f"cannot listen on {daemon.addresses[0]}: another program listens there, perhaps another aggregator"
    assert log.startswith(f"Error: aggregator.listen: {what}")


def run_with(patch: str, *arguments: str) -> tuple[int, str, str]:
    """Run the program, changed by `patch`, as `run_aggregator` does."""
    program = f"import logging, os, signal\nfrom omnireduce.aggregator import cli, daemon, shard\n{patch}\ncli.main()"
    with Process(sys.executable, "-c", program, "--listen", "127.0.0.1:0", *arguments) as process:
        status = process.wait(READY_S)
        assert process.popen.stdout is not None
        return status, process.popen.stdout.read().decode(), process.log


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_while_kernels_are_compiled(number: str) -> None:
    patch = f"daemon.warm_up_aggregator = lambda progress: os.kill(os.getpid(), signal.{number})"
    status, out, log = run_with(patch)
    assert (status, out) == (0, "")
    assert "stopped before the start" in log
    assert "compiling" not in log


def test_the_supervisor_tells_what_its_log_left_out_though_nothing_happens() -> None:
    patch = """
looks = []
def look(self):
    looks.append(0)
    for _ in range(50 if len(looks) == 1 else 0):
        daemon.log.warning("many", extra=daemon.tagged("many"))
    if len(looks) == 4:
        os.write(2, b"the end\\n")
        os.kill(os.getpid(), signal.SIGTERM)
daemon.Daemon._check_heartbeats = look"""
    status, _, log = run_with(patch)
    assert status == 0
    assert "event=left_out" in log[: log.index("the end")]


def test_a_first_start_says_what_takes_so_long() -> None:
    patch = "daemon.warm_up_aggregator = lambda progress: progress(3, 20) or os.kill(os.getpid(), signal.SIGTERM)"
    status, _, log = run_with(patch)
    assert status == 0
    assert "compiling kernels (at the first start only): 15 % done" in log


def test_a_sandbox_that_forbids_batch_tasks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with caplog.at_level("INFO"):
        _run_as_batch()
    assert "not a batch task: Operation not permitted" in caplog.text


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_an_address_is_taken_by_either_transport(kind: str) -> None:
    """Two daemons cannot share an address, whatever transport each was told to offer."""
    with Daemon(1, f"transport.kind={kind}") as daemon:
        for other in ("auto", "shm", "tcp"):
            status, _, log = run_aggregator("--listen", daemon.addresses[0], "--set", f"transport.kind={other}")
            assert status == 1
            assert f"cannot listen on {daemon.addresses[0]}: another program listens there" in log
        assert_serves(daemon)


def test_an_address_that_is_not_here_is_one_line_and_status_1() -> None:
    status, _, log = run_aggregator("--listen", "192.0.2.1:7400", "--set", "security.allow_no_secret=true")
    assert status == 1
    assert log.count("\n") == 1
    assert "cannot listen on 192.0.2.1:7400" in log
    assert "192.0.2.1 is no address of this host" in log


@pytest.mark.parametrize("key", ["aggregator.listen", "metrics.listen"])
def test_a_name_that_nobody_knows_is_one_line_and_status_1(key: str) -> None:
    status, _, log = run_aggregator("--set", f"{key}=no-such-host.invalid:0", "--set", "security.allow_no_secret=true")
    assert status == 1
    why = "no host called no-such-host.invalid is known here; give the name or an address of this host"
    assert log.splitlines()[-1] == f"Error: {key}: cannot listen on no-such-host.invalid:0: {why}"


@pytest.mark.parametrize(
    ("number", "port", "expected"),
    [
        (
            errno.EACCES,
            80,
            "ports below 1024 are for root and for programs with CAP_NET_BIND_SERVICE; choose a higher port",
        ),
        (errno.EACCES, 7400, "Permission denied"),
        (errno.EMFILE, 80, "Too many open files"),
    ],
)
def test_why_nobody_can_listen(monkeypatch: pytest.MonkeyPatch, number: int, port: int, expected: str) -> None:
    monkeypatch.setattr("omnireduce.support.addresses._first_free_port", lambda: 1024)
    assert listen_error_text(OSError(number, "?"), Address("10.0.0.1", port)) == expected


@pytest.mark.parametrize("name", ["auto", "shm"])
def test_a_name_for_shared_memory_that_this_user_has_taken(name: str) -> None:
    """Workers would take that process for the aggregator: it does not start."""
    with listen_tcp("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
    with listen_local("127.0.0.1", port):
        status, _, log = run_aggregator("--listen", f"127.0.0.1:{port}", "--set", f"transport.kind={name}")
    assert status == 1
    holder = f"process {os.getpid()} of user {os.geteuid()}; end it"
    what = f"the Unix socket @omnireduce/127.0.0.1:{port}, for workers of this host, belongs to {holder}"
    assert f"aggregator.listen: cannot listen on 127.0.0.1:{port}: {what}" in log


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--set", "aggregator.shard=2"], {}, "--set: aggregator.shard: unknown key, expected one of listen"),
        (["--set", "aggregator.max_jobs=0"], {}, "--set: aggregator.max_jobs: got 0, expected"),
        (["--shards", "65"], {}, "--shards: aggregator.shards: got 65, expected"),
        (["--listen", "localhost"], {}, "--listen: aggregator.listen: got"),
        (["--config", "none.toml"], {}, "none.toml: no such file, expected a TOML file"),
        ([], {"OMNIREDUCE_AGGREGATOR_FINISH_S": "soon"}, "OMNIREDUCE_AGGREGATOR_FINISH_S: aggregator.finish_s: got"),
        (["--set", "aggregator.listen=[::1"], {}, "--set: aggregator.listen: got"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(
    arguments: list[str], environ: dict[str, str], expected: str
) -> None:
    status, out, log = run_aggregator(*arguments, environ=environ)
    assert (status, out) == (2, "")
    assert log.count("\n") == 1
    assert expected in log


def test_a_device_that_is_not_there() -> None:
    settings = ("--set", "transport.kind=verbs", "--set", "verbs.device=no-such-device")
    status, _, log = run_aggregator(*settings, "--listen", "127.0.0.1:0")
    assert status == 1
    assert log.count("\n") == 1
    assert "RDMA" in log


def test_shard_i_listens_on_port_plus_i() -> None:
    port = free_ports(3)
    with Daemon(3, listen=f"127.0.0.1:{port}") as daemon:
        assert daemon.addresses == [f"127.0.0.1:{port + i}" for i in range(3)]
        assert_serves(daemon)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "localhost:0", "[::1]:0"])
def test_other_ways_to_name_the_address(listen: str) -> None:
    if listen.startswith("[") and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    with Daemon(1, "security.allow_no_secret=true", listen=listen) as daemon:
        [address] = daemon.addresses
        host, _, port = address.rpartition(":")
        assert host == listen.rpartition(":")[0]
        reachable = {"0.0.0.0": "127.0.0.1"}.get(host, host)
        for transport in ("shm", "tcp", MEMORY):
            config = configured([f"{reachable}:{port}"], *over(transport))
            results = run_job(config, 2, lambda comm: (comm.transport, float(comm.allreduce(np.ones(9))[0])))
            assert results == [(called(transport), 2.0)] * 2


def test_a_daemon_of_one_transport_only() -> None:
    with Daemon(1, "transport.kind=tcp") as daemon:
        assert abstract_sockets(daemon) == []
        assert run_job(configured(daemon.addresses), 1, lambda comm: comm.transport) == ["tcp"]
        with pytest.raises(TransportError, match=r"cannot reach aggregator .* by shm"):
            Communicator(
                configured(daemon.addresses, "transport.kind=shm", "cluster.join_timeout_s=0.2"), rank=0, size=1
            )
    with Daemon(1, "transport.kind=shm") as daemon:
        assert run_job(configured(daemon.addresses), 1, lambda comm: comm.transport) == ["shm"]


def ours_in_shm() -> set[Path]:
    """Files of memory that processes share by name; what MPICH makes there for other tests is not ours."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("mpich_shm")}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_daemon_and_nothing_is_left(number: int) -> None:
    before = ours_in_shm()
    with Daemon(2) as daemon:
        assert_serves(daemon)
        assert len(abstract_sockets(daemon)) == 2
        with workers(daemon, 2, "--hold", "1", "1") as (first, second):
            second.expect("held")
            expect_round(first, "started", 1)
            assert ours_in_shm() == before
            assert any("memfd:omnireduce" in name for name in open_files(daemon.shard_pids[0]))
        shards = daemon.shard_pids
        signalled = daemon.signal(number)
        assert daemon.wait() == 0
        assert time.monotonic() - signalled < FAILURE_S
        assert all(gone_within(pid, 0) for pid in shards)
        assert abstract_sockets(daemon) == []
        assert ours_in_shm() == before
        for address in daemon.addresses:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))


def test_sigterm_before_ready() -> None:
    """It may come while kernels compile; the daemon ends all the same."""
    command = [sys.executable, "-m", "omnireduce.aggregator", "--listen", "127.0.0.1:0"]
    with Process(*command) as process:
        assert eventually(lambda: catches(process.pid, signal.SIGTERM))
        process.signal(signal.SIGTERM)
        assert process.wait(READY_S) == 0


WITH_A_SIGNAL_AT_ONCE = """
import os, signal
watch = signal.signal

def watch_and_send(number, handler):
    watch(number, handler)
    if number == signal.SIGTERM and callable(handler):
        os.kill(os.getpid(), signal.SIGTERM)

signal.signal = watch_and_send
from omnireduce.aggregator.cli import main
main(["--listen", "127.0.0.1:0"])
"""


def test_sigterm_at_the_moment_in_which_it_begins_to_be_caught() -> None:
    with Process(sys.executable, "-c", WITH_A_SIGNAL_AT_ONCE, from_scratch=True) as process:
        assert process.wait(READY_S) == 0


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal."""
    mask = int(Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0], 16)
    return bool(mask >> (number - 1) & 1)


@either
def test_sigterm_lets_a_running_collective_finish(transport: str) -> None:
    """Rank 1 comes late, after the signal; then the job is over, and only then the daemon."""
    with Daemon(2, "aggregator.finish_s=30") as daemon:
        with workers(daemon, 2, "--hold", "1", "1", overrides=over(transport)) as (first, late):
            expect_round(first, "started", 1)
            late.expect("held")
            daemon.signal(signal.SIGTERM)
            assert eventually(lambda: "stopping" in daemon.log)
            late.go_on()
            for worker in (first, late):
                expect_round(worker, "round", 1)
            culprits = [f"aggregator {address}" for address in daemon.addresses]
            errors = assert_aborted([first, late], time.monotonic(), FAILURE_S, *culprits)
            assert all("shutting down" in error["text"] for error in errors)
        assert daemon.wait() == 0


@either
def test_sigterm_waits_no_longer_than_finish_s(transport: str) -> None:
    with (
        Daemon(2, "aggregator.finish_s=0.5") as daemon,
        workers(daemon, 2, "--hold", "1", "1", overrides=over(transport)) as (first, late),
    ):
        expect_round(first, "started", 1)
        late.expect("held")
        signalled = daemon.signal(signal.SIGTERM)
        culprits = [f"aggregator {address}" for address in daemon.addresses]
        [error] = assert_aborted([first], signalled, 0.5 + FAILURE_S, *culprits)
        assert "shutting down; collectives did not finish within 0.5 s" in error["text"]
        assert daemon.wait() == 0
        assert time.monotonic() - signalled < 0.5 + FAILURE_S


@either
def test_sigterm_with_a_stopped_worker(transport: str) -> None:
    """Not even its goodbye is waited for."""
    with (
        Daemon(1, "aggregator.finish_s=0.5") as daemon,
        workers(daemon, 2, "--elements", "8000000", overrides=over(transport)) as ranks,
    ):
        expect_round(ranks[0], "round", 1)
        ranks[1].signal(signal.SIGSTOP)
        signalled = daemon.signal(signal.SIGTERM)
        assert_aborted(ranks[:1], signalled, 0.5 + FAILURE_S, f"aggregator {daemon.addresses[0]}")
        assert daemon.wait() == 0
        ranks[1].signal(signal.SIGCONT)
        assert_aborted(ranks[1:], time.monotonic(), FAILURE_S, f"aggregator {daemon.addresses[0]}")


def test_sigterm_refuses_who_is_still_joining() -> None:
    with Daemon(1) as daemon, RawPeer(daemon.addresses[0]) as first:
        config, job = configured(daemon.addresses), unique_job()
        first.hello(job, 0, 3)
        await_pending(first, [1, 2])
        waiting = Ranks(1, lambda _: Communicator(config, rank=1, size=3, job=job))
        await_pending(first, [2])
        daemon.signal(signal.SIGTERM)
        [error] = waiting.outcomes()
        assert isinstance(error, RefusedError)
        assert "the aggregator is shutting down" in str(error)
        assert daemon.wait() == 0


def test_a_second_sigterm_does_no_harm() -> None:
    with Daemon(1, "aggregator.finish_s=0.5") as daemon, workers(daemon, 2, "--hold", "1", "1") as (first, late):
        expect_round(first, "started", 1)
        late.expect("held")
        for _ in range(5):
            daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_end_of_the_process(number: int) -> None:
    """The last ones find an interpreter that is about to end: no traceback, and the same status."""
    with Daemon(1) as daemon:
        while daemon.popen.poll() is None:
            daemon.signal(number)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_before_the_daemon_takes_them(number: int) -> None:
    command = [sys.executable, "-m", "omnireduce.aggregator", "--listen", "127.0.0.1:0"]
    with Process(*command, from_scratch=True) as process:
        loaded = "multiarray"  # a module of NumPy: once it is loaded, the program imports its own modules
        assert eventually(lambda: loaded in Path(f"/proc/{process.pid}/maps").read_text())
        while process.popen.poll() is None:
            process.signal(number)
        assert process.wait() in (0, -number)
        assert "Traceback" not in process.log


def test_ctrl_c_in_the_terminal_of_a_daemon() -> None:
    """The terminal signals the whole group of processes; the shards leave the answer to their supervisor."""
    with Daemon(2, "aggregator.finish_s=30", start_new_session=True) as daemon:
        with workers(daemon, 2, "--hold", "1", "1") as (first, late):
            expect_round(first, "started", 1)
            late.expect("held")
            os.killpg(daemon.pid, signal.SIGINT)
            assert eventually(lambda: "stopping" in daemon.log)
            late.go_on()
            for worker in (first, late):
                expect_round(worker, "round", 1)
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log
