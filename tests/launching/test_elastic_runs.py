"""Jobs whose ranks come and go: killed ranks are started again, and the training ends with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launches import ENDS_WELL, are_gone, launched, python, run
from local_cluster import READY_S, SETTLE, WAIT_S

from omnireduce.launch.command import parse_command_line
from omnireduce.launch.elastic_job import ElasticJob
from omnireduce.launch.launched_rank import LaunchedRank
from omnireduce.launch.output import PrefixedOutput

GATE = """
import os, sys
if os.path.exists(sys.argv[1]):  # for ranks that start again
    open(sys.argv[1]).close()  # until the test opens it, too
"""
TRAINING = f"""{GATE}
from pathlib import Path
import numpy as np
import omnireduce as omni

comm = omni.connect()
state = omni.ElasticState(comm, {{"sums": np.zeros(100), "steps": np.zeros(1)}})
hold = Path(sys.argv[2])

def train(source):
    while not comm.allreduce(np.array([float(hold.exists())]))[0]:  # all end after the same step
        sums = comm.allreduce(np.ones(100))
        state.arrays["sums"][:] += sums
        state.step += 1
        state.commit()
        if state.step == 50 or (state.step % 50 == 0 and comm.size != seen[-1]):
            seen.append(comm.size)
            os.write(1, f"{{os.getpid()}} {{comm.size}}\\n".encode())
    return state.step

seen = [0]
omni.run_elastic(comm, state, train)
os.write(1, b"0 0\\n")
comm.shutdown()
"""
PLACES = f"""{GATE}
from omnireduce import elastic
from omnireduce.data_parallel import session

@elastic.run
def train(state):
    local, variable = session.session_of().local, os.environ["LOCAL_RANK"]
    line = f"{{os.getpid()}} {{session.size()}} {{variable}} {{local.local_rank}} {{local.local_size}}\\n"
    os.write(1, line.encode())
    while True:
        state.commit()

session.init()
train(elastic.ObjectState())
"""
FAILS = "import os\nos.write(1, b'0\\n')\nraise SystemExit(6)"


def test_a_rank_that_is_killed_comes_back(tmp_path: Path) -> None:
    """The others go on without it, and take it in."""
    gate, go = tmp_path / "gate", tmp_path / "go"
    words = ["-np", "3", "--min-np", "2", "--set", SETTLE, *python(TRAINING), str(gate), str(go)]
    with launched(*words) as launcher:
        result = launcher.numbers(3)
        assert {size for _, size in result.values()} == {3}
        os.mkfifo(gate)
        os.kill(result[1][0], signal.SIGKILL)
        assert {rank: size for rank, (_, size) in launcher.numbers(2).items()} == {0: 2, 2: 2}
        gate.write_bytes(b"")
        again = launcher.numbers(3)  # all three, one of them new, have taken steps together
        assert {rank: size for rank, (_, size) in again.items()} == {0: 3, 1: 3, 2: 3}
        go.touch()
        assert launcher.wait(READY_S) == 0
        assert "event=rank_restarted" in launcher.log
        assert are_gone([pid for pid, _ in again.values()])


def test_a_rank_that_comes_back_takes_no_place_of_a_survivor(tmp_path: Path) -> None:
    """Survivors have chosen their devices by their local ranks. How many a host has now, all know."""
    gate = tmp_path / "gate"
    words = ["-np", "3", "--min-np", "2", "--set", SETTLE, *python(PLACES), str(gate)]
    with launched(*words) as launcher:
        result = launcher.numbers(3)
        assert {rank: places for rank, (_, *places) in result.items()} == {
            rank: [3, rank, rank, 3] for rank in range(3)
        }
        os.mkfifo(gate)
        os.kill(result[0][0], signal.SIGKILL)
        assert sorted(places for _, *places in launcher.numbers(2).values()) == [[2, 1, 1, 2], [2, 2, 2, 2]]
        gate.write_bytes(b"")
        again = launcher.numbers(3)
        assert sorted(places for _, *places in again.values()) == [[3, rank, rank, 3] for rank in range(3)]
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) == 128 + signal.SIGTERM
        assert are_gone([pid for pid, *_ in again.values()])


def test_a_limit_of_restarts() -> None:
    result = run("--min-np", "1", "-np", "1", "--reset-limit", "0", *python(FAILS))
    assert result.returncode == 6
    assert "--reset-limit 0 is reached" in result.stderr


def test_a_job_without_ranks_ends() -> None:
    result = run("--min-np", "1", "-np", "2", *python(FAILS))
    assert result.returncode == 6
    assert "no rank is left" in result.stderr


def test_hosts_come_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o700)
    code = "import os; os.write(1, (os.environ['OMNIREDUCE_ELASTIC_ENABLED'] + os.environ['OMNIRUN_SIZE']).encode())"
    result = run("--min-np", "1", "--max-np", "5", "--host-discovery-script", str(script), *python(code))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0]<stdout>:true2", "[1]<stdout>:true2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 3", "it ended with status 3"),
        ("echo what is this", "what it printed, line 1: got"),
        ("printf localhost:; head -c 5000 /dev/zero | tr '\\0' 9", "line 1: got 'localhost:9999"),
        ("yes localhost | head -c 1048577", "it printed more than 1048576 bytes"),
    ],
)
def test_a_script_that_fails_is_said(tmp_path: Path, text: str, message: str) -> None:
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    words = ["--min-np", "2", "--host-discovery-script", str(script), "--elastic-timeout", "1"]
    result = run(*words, "true")
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.splitlines()[-1] == "Error: --min-np 2: the hosts have 0 slots: give more"


def test_a_host_that_leaves_loses_its_ranks(tmp_path: Path) -> None:
    """And they start on another one: here, the same host by another name. Who does not end at once is killed."""
    listed = tmp_path / "listed"
    listed.write_text("localhost:1\n127.0.0.1:1\n")
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o700)
    code = """
import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"0\\n"))
os.write(1, f"{os.getpid()}\\n".encode())
while True:
    signal.pause()
"""
    words = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script), "--grace-period", "1"]
    with launched(*words, *python(code)) as launcher:
        before = launcher.numbers(2)
        listed.write_text("127.0.0.1:2\n")
        assert launcher.numbers(1) == {0: [0]}
        [(rank, [pid])] = launcher.numbers(1).items()
        assert rank == 0
        assert are_gone(before[0])
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) == 128 + signal.SIGTERM
        assert are_gone([pid, *before[1]])


def test_an_end_that_somebody_asked_for_is_not_that_of_the_training(tmp_path: Path) -> None:
    """Rank 1 ends with status 0 because its host is gone, and comes back elsewhere."""
    listed = tmp_path / "listed"
    listed.write_text("localhost:1\n127.0.0.1:1\n")
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o700)
    words = ["--min-np", "1", "--max-np", "2", "--host-discovery-script", str(script), "--grace-period", "1"]
    with launched(*words, *python(ENDS_WELL)) as launcher:
        assert launcher.numbers(2).keys() == {0, 1}
        listed.write_text("localhost:2\n")
        assert launcher.numbers(1).keys() == {1}
        assert "rank 1 on 127.0.0.1 ended because its host is no longer there; it is started again" in launcher.log
        launcher.signal(signal.SIGTERM)
        assert launcher.wait(WAIT_S) == 128 + signal.SIGTERM


def test_which_end_is_that_of_the_training() -> None:
    request = parse_command_line(["--min-np", "1", "-np", "3", "true"])
    connection: Any = SimpleNamespace(host="localhost", send=lambda _: None)
    with ElasticJob(request, PrefixedOutput({}), []) as job:
        job.ranks = {number: LaunchedRank(number, connection) for number in range(3)}
        for number, was_asked in ((0, True), (1, True), (2, False)):
            assert not job._is_finishing
            job.ranks[number].status, job.ranks[number].was_asked = 0, was_asked
            job._rank_ended(job.ranks[number])
        assert job._is_finishing
        assert job.status() == 0


def test_of_ranks_that_fail_after_one_has_ended_well_the_first_counts() -> None:
    request = parse_command_line(["--min-np", "1", "-np", "4", "true"])
    connection: Any = SimpleNamespace(host="localhost")
    with ElasticJob(request, PrefixedOutput({}), []) as job:
        job.ranks = {number: LaunchedRank(number, connection) for number in range(4)}
        for number, status, expected in ((0, 0, 0), (1, 3, 3), (2, -9, 3), (3, 4, 3)):
            job.ranks[number].status = status
            job._rank_ended(job.ranks[number])
            assert job.status() == expected
        assert not job._missing
