"""Jobs without a configured aggregator: rank 0 starts one, the others find it, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import (
    MPIRUN,
    READY_S,
    ROOT,
    WAIT_S,
    Process,
    Ranks,
    children,
    configured,
    eventually,
    gone_within,
    unique_job,
)
from users import set_user

from omnireduce import AbortedError, ClosedError, Communicator, ConfigError, RefusedError, TransportError, connect
from omnireduce.runtime.rank.embedded_aggregator import identify, socket_name
from omnireduce.runtime.rank.launcher_detection import Launch
from omnireduce.support.config import Config

NOBODY = 65534
SCRIPT = str(ROOT / "tests" / "cluster" / "looping_worker.py")
needs_mpirun = pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
SUM = """
import os, sys
import numpy as np
import omnireduce as omni
for number in range(3):
    with omni.init() as comm:
        value = omni.allreduce(np.full(1000, float(os.environ["SHARE"])))[0]
        rows, sums = omni.allreduce_rows(np.array([comm.rank]), np.ones((1, 4)), n_rows=comm.size)
        assert rows.tolist() == list(range(comm.size)) and (sums == 1).all()
        sys.stdout.write(f"{comm.rank} {value:g} {number}\\n")
"""
FORKS = """
import os, sys
import omnireduce as omni
with omni.connect(job=sys.argv[1], rank=0, size=2):
    child = os.fork()
    if not child:
        sys.stdin.read()
        os._exit(0)
    sys.stdout.write(f"{os.getpid()} {child}\\n")
    sys.stdout.flush()
    sys.stdin.read()
"""

FORKS_EARLY = """
import os, sys, threading
import omnireduce as omni
threading.Thread(target=omni.connect, kwargs={"job": sys.argv[1], "rank": 0, "size": 2}, daemon=True).start()
sys.stdin.readline()
child = os.fork()
if not child:
    sys.stdin.read()
    os._exit(0)
sys.stdout.write(f"{child}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def plain(*overrides: str) -> Config:
    return configured([], *overrides)


def names_in_use() -> set[str]:
    """The abstract Unix sockets at which launches meet now."""
    words = Path("/proc/net/unix").read_text().split()
    return {word for word in words if word.startswith("@omnireduce-launch/")}


class Rank(Process):
    """A rank that was started by hand."""

    def __init__(self, job: str, rank: int, size: int, *arguments: str) -> None:
        super().__init__(sys.executable, SCRIPT, "--job", job, "--rank", str(rank), "--size", str(size), *arguments)

    def expect(self, event: str) -> dict[str, Any]:
        while (report := json.loads(self.line(READY_S)))["event"] != event:
            pass
        return dict(report)


@contextlib.contextmanager
def job_of(size: int, *arguments: str) -> Iterator[tuple[list[Rank], int]]:
    """Ranks that have joined, and the process of their aggregator."""
    job = unique_job()
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(Rank(job, rank, size, *arguments)) for rank in range(size)]
        for rank in ranks:
            rank.expect("joined")
        [aggregator] = children(ranks[0].pid)
        yield ranks, aggregator
    assert gone_within(aggregator, WAIT_S)


def launched(share: int) -> tuple[int, list[str], str]:
    result = subprocess.run(
        [str(MPIRUN), "-n", "3", sys.executable, "-c", SUM], cwd=ROOT, env=os.environ | {"SHARE": str(share)},
        capture_output=True, text=True, timeout=READY_S + WAIT_S, check=False,
    )  # fmt: skip
    return result.returncode, sorted(result.stdout.splitlines()), result.stderr


@pytest.mark.slow
@needs_mpirun
def test_two_launches_at_once_do_not_mix() -> None:
    """Each three times in a row: a rank that is ahead waits for rank 0 in its next job."""
    for share, (status, lines, log) in zip(
        (1, 10), Ranks(2, lambda number: launched(10**number)).results(), strict=True
    ):
        assert status == 0, log
        assert lines == sorted(f"{rank} {3 * share} {number}" for rank in range(3) for number in range(3))
        assert [line for line in log.splitlines() if "waiting" not in line and "compiling" not in line] == []


@pytest.mark.slow
@needs_mpirun
def test_ctrl_c_of_the_launcher_leaves_nothing() -> None:
    with Process(str(MPIRUN), "-n", "2", sys.executable, SCRIPT) as launch:
        joined: dict[int, int] = {}
        while len(joined) < 2:
            event = json.loads(launch.line(READY_S))
            if event["event"] == "joined":
                joined[event["rank"]] = event["pid"]
        [aggregator] = children(joined[0])
        launch.signal(signal.SIGINT)
        assert launch.popen.stdout is not None
        launch.popen.stdout.read()
        assert launch.wait() != 0
        assert all(gone_within(pid, WAIT_S) for pid in (aggregator, *joined.values()))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_is_killed(victim: int) -> None:
    with job_of(3) as (ranks, _):
        ranks[victim].signal(signal.SIGKILL)
        for rank in ranks:
            if rank is not ranks[victim]:
                error = rank.expect("error")
                assert error["culprit"].startswith(f"rank {victim} (host ")
                assert f"pid {ranks[victim].pid})" in error["culprit"]


def test_the_aggregator_is_killed() -> None:
    with job_of(2) as (ranks, aggregator):
        os.kill(aggregator, signal.SIGKILL)
        for rank in ranks:
            error = rank.expect("error")
            assert (error["type"], error["culprit"][:21]) == ("AbortedError", "aggregator 127.0.0.1:")
            assert rank.wait() == 1


def test_a_signal_for_all_is_not_for_the_aggregator() -> None:
    """A batch system sends SIGTERM to all processes. What a rank does then may need the others."""
    with job_of(2, "--hold", "1", "1") as (ranks, aggregator):
        ranks[1].expect("held")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(aggregator, number)
        assert ranks[1].popen.stdin is not None
        ranks[1].popen.stdin.write(b"\n")
        ranks[1].popen.stdin.flush()
        for _ in range(2):
            ranks[0].expect("round")


def test_a_process_that_rank_0_has_forked_keeps_nothing_alive() -> None:
    job = unique_job()
    with Process(sys.executable, "-c", FORKS, job) as zero, Rank(job, 1, 2, "--hold", "1", "0") as other:
        pid, child = map(int, zero.line(READY_S).split())
        [aggregator] = [each for each in children(pid) if each != child]
        other.expect("held")
        zero.signal(signal.SIGKILL)
        assert gone_within(aggregator, WAIT_S)
        assert not gone_within(child, 0.0)


def test_a_process_that_is_forked_while_ranks_meet_keeps_no_place() -> None:
    job = unique_job()
    address = socket_name("", job).replace("\0", "@")
    with Process(sys.executable, "-c", FORKS_EARLY, job) as zero:
        assert eventually(lambda: address in names_in_use(), READY_S)
        assert zero.popen.stdin is not None
        zero.popen.stdin.write(b"\n")
        zero.popen.stdin.flush()
        child = int(zero.line(READY_S))
        zero.signal(signal.SIGKILL)
        assert eventually(lambda: address not in names_in_use())
        assert not gone_within(child, 0.0)


def test_what_ends_a_rank_is_read_by_the_others() -> None:
    class MishapError(Exception):
        pass

    job = unique_job()

    def run(rank: int) -> None:
        with Communicator(plain(), rank=rank, size=3, job=job) as comm:
            if rank == 0:
                raise MishapError("the input is damaged")
            comm.barrier()

    first, *others = Ranks(3, run).outcomes(READY_S)
    assert isinstance(first, MishapError)
    for other in others:
        assert isinstance(other, AbortedError)
        assert other.culprit.startswith("rank 0 (")
        assert "MishapError: the input is damaged" in other.reason


def test_rank_0_may_leave_first() -> None:
    job = unique_job()

    def run(rank: int) -> str:
        comm = Communicator(plain(), rank=rank, size=2, job=job)
        comm.barrier()
        if rank == 0:
            comm.shutdown()
            return ""
        zero.results()
        with pytest.raises(AbortedError) as caught:
            comm.barrier()
        comm.shutdown()
        return str(caught.value)

    zero = Ranks(1, run)
    [error] = Ranks(1, lambda _: run(1)).results(READY_S)
    assert re.match(r"rank 0 \(.*\): had shut down when collective \d+ \(barrier\) began", error)


def test_a_worker_alone() -> None:
    for _ in range(2):
        with connect(plain()) as comm:
            assert comm.allreduce(np.ones(9)).tolist() == [1.0] * 9
            [aggregator] = [child for child in children(os.getpid()) if is_aggregator(child)]
        assert gone_within(aggregator, WAIT_S)


def test_a_handler_that_shuts_down_on_top_of_a_collective_leaves_nothing() -> None:
    job, hook = unique_job(), sys.excepthook
    other = Ranks(1, lambda _: Communicator(plain(), rank=1, size=2, job=job))
    comm = Communicator(plain(), rank=0, size=2, job=job)
    [aggregator] = [child for child in children(os.getpid()) if is_aggregator(child)]
    before = signal.signal(signal.SIGALRM, lambda *_: comm.shutdown())
    try:
        Ranks(1, lambda _: eventually(lambda: comm._engine._waiters) and os.kill(os.getpid(), signal.SIGALRM))
        with pytest.raises(ClosedError):
            comm.barrier()
    finally:
        signal.signal(signal.SIGALRM, before)
    other.results()[0].shutdown()
    assert gone_within(aggregator, WAIT_S)
    assert sys.excepthook is hook


def is_aggregator(pid: int) -> bool:
    return b"aggregator.embedded" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_users_own_module_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "aggregator.py").write_text("raise SystemExit('not this one')\n")
    result = subprocess.run(
        [sys.executable, "-c", SUM], cwd=tmp_path, env=os.environ | {"SHARE": "1"},
        capture_output=True, text=True, timeout=READY_S, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout.splitlines()) == (0, ["0 1 0", "0 1 1", "0 1 2"]), result.stderr


def test_nobody_listens_once_all_have_met() -> None:
    job = unique_job()
    address = socket_name("", job).replace("\0", "@")
    alone = Ranks(1, lambda _: Communicator(plain(), rank=0, size=2, job=job))

    def late(_: int) -> Communicator:
        assert eventually(lambda: address in names_in_use())
        return Communicator(plain(), rank=1, size=2, job=job)

    comms = [Ranks(1, late).results(READY_S)[0], alone.results(READY_S)[0]]
    assert address not in names_in_use()
    for comm in comms:
        comm.shutdown()


@pytest.mark.parametrize(
    ("overrides", "size", "local_size", "message"),
    [
        ((), 4, 2, r"only 2 of the 4 workers are on this host: start `omnireduce aggregator .*HOST:7400"),
        ((), 2, None, r"nothing tells this launch of 2 workers from another one: set another"),
        (("elastic.enabled=true", "cluster.job=x"), 2, 2, r"elastic\.enabled needs an aggregator that outlives rank 0"),
    ],
)
def test_where_rank_0_cannot_start_one(
    overrides: tuple[str, ...], size: int, local_size: int | None, message: str
) -> None:
    for rank in range(2):
        with pytest.raises(ConfigError, match=message):
            Communicator(plain(*overrides), rank=rank, size=size, local_size=local_size)


def test_who_says_that_no_other_launch_can_be_there_is_believed() -> None:
    """As beside a daemon."""
    assert identify(plain('cluster.launch=""'), Launch(0, 2, None, None, "arguments", 2), is_named=False) == ""


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (3, 4)])
def test_a_launcher_around_several_launches(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches in a shell that mpirun has started, or of ranks that a program counts itself."""
    for name, value in {"RANK": str(rank), "SIZE": str(size)}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-host-42@1")
    with pytest.raises(ConfigError, match="nothing tells this launch of 2 workers from another one: set another"):
        connect(plain("cluster.join_timeout_s=0.1"), rank=1, size=2)


def test_a_launcher_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a program hands on rank and size itself."""
    environ = {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    for name, value in environ.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for who in ({}, {"rank": 1, "size": 4}):
        with pytest.raises(ConfigError, match="only 2 of the 4 workers are on this host"):
            connect(plain(), **who)


@pytest.mark.slow
def test_ranks_that_do_not_come() -> None:
    config, job = plain("cluster.join_timeout_s=0.5"), unique_job()
    with pytest.raises(
        TransportError, match=r"rank 0 of job .* is not on this host, or has stopped, after .* = 0\.5; .* several hosts"
    ):
        Communicator(config, rank=1, size=2, job=job)
    config = plain("cluster.join_timeout_s=5")
    zero = Ranks(1, lambda _: Communicator(config, rank=0, size=12, job=job))
    one = Ranks(1, lambda _: Communicator(config, rank=1, size=12, job=job))
    [error] = zero.outcomes(READY_S)
    assert isinstance(error, RefusedError)
    assert "still waiting for rank 2, 3, 4, 5, 6, 7, 8, 9 … of job" in str(error)
    assert one.outcomes(READY_S)[0]


def test_ranks_with_different_world_sizes() -> None:
    job = unique_job()
    outcomes = Ranks(2, lambda rank: Communicator(plain(), rank=rank, size=2 + rank, job=job)).outcomes(READY_S)
    assert isinstance(outcomes[0], RefusedError)
    assert isinstance(outcomes[1], TransportError)
    for error in outcomes:
        assert "rank 1 was started as one of 3 workers, and rank 0 as one of 2" in str(error)


def test_two_rank_0_of_one_job() -> None:
    job = unique_job()
    first = Ranks(1, lambda _: Communicator(plain("cluster.join_timeout_s=5"), rank=0, size=2, job=job))
    second = Ranks(1, lambda _: Communicator(plain("cluster.join_timeout_s=5"), rank=0, size=2, job=job))
    results = {type(outcome) for outcome in (*first.outcomes(READY_S), *second.outcomes(READY_S))}
    assert results == {RefusedError, TransportError}


def test_another_users_process_is_not_believed() -> None:
    """It has taken the place where the ranks meet."""
    job = unique_job()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as impostor:

        def take(_: int) -> bool:
            if not set_user(NOBODY):
                return False
            impostor.bind(address)
            impostor.listen()
            return True

        address = socket_name("", job)
        if Ranks(1, take).results() != [True]:
            pytest.skip("only root can be other users")
        with pytest.raises(TransportError, match=r"process \d+ of user 65534, which is another user, is where the"):
            Communicator(plain(), rank=1, size=2, job=job)
        with pytest.raises(TransportError, match=rf"process \d+ of user {NOBODY} starts one on this host just now"):
            Communicator(plain(), rank=0, size=2, job=job)


@pytest.mark.parametrize(
    ("program", "message"),
    [("/bin/false", "cannot serve: its process has ended"), ("/nowhere", "No such file or directory")],
)
def test_an_aggregator_that_does_not_start(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(TransportError, match=message):
        Communicator(plain(), rank=0, size=1)
