"""The program `omnireduce` as a process: what it prints, how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from local_cluster import READY_S, ROOT, WAIT_S, Daemon, Lines, Process, complaints, configured, unique_job, workers
from transports import over

import omnireduce
from omnireduce.__main__ import main
from omnireduce.console.status import default_addresses

PROGRAM = [sys.executable, "-m", "omnireduce"]
NOWHERE = "127.0.0.1:9"  # discard: nobody offers that any more


def run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the program to its end: status, standard output, standard error."""
    with Process(*PROGRAM, *arguments, environ=environ) as process:
        assert process.popen.stdout is not None
        out = process.popen.stdout.read().decode()
        return process.wait(), out, process.log


def test_status_of_a_running_job(daemon: Daemon) -> None:
    job = unique_job("shown")
    with workers(daemon, 2, job=job, overrides=over("tcp")) as ranks:
        ranks[0].expect("round")
        status, out, log = run("status", *daemon.addresses)
        assert (status, log) == (0, "")
        assert all(f"{address}  " in out for address in daemon.addresses)
        [row] = [line.split() for line in out.splitlines() if line.startswith(job)]
        assert row[1:3] == ["2/2", "tcp"]
        addresses = json.dumps(daemon.addresses)
        status, out, _ = run("status", "--json", environ={"OMNIREDUCE_CLUSTER_AGGREGATORS": addresses})
        assert status == 0
        report = json.loads(out)
        assert [each["address"] for each in report] == daemon.addresses
        assert {each["pid"] for each in (entry["status"] for entry in report)} == set(daemon.shard_pids)
        [mine] = [each for each in report[0]["status"]["jobs"] if each["name"] == job]
        assert (mine["world_size"], mine["joined"], list(mine["carried"])) == (2, 2, ["tcp"])
        assert mine["traffic"]["collectives"] > 0


def test_the_exit_status_says_whether_all_answered(daemon: Daemon) -> None:
    status, out, _ = run("status", daemon.addresses[0], NOWHERE, "--once", "--timeout", "1")
    assert status == 1
    assert f"cannot reach aggregator {NOWHERE}" in out
    assert daemon.addresses[0] in out
    status, out, _ = run("status", NOWHERE, "--json")
    assert status == 1
    assert "Connection refused" in json.loads(out)[0]["error"]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:0", "127.0.0.1:70000"])
def test_an_address_that_is_none(address: str) -> None:
    status, out, log = run("status", address)
    assert (status, out) == (2, "")
    assert log.startswith(f'Error: HOST:PORT: cluster.aggregators: got "{address}"')
    assert log.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["end-job"], "end-job: expected the name of a JOB, or --team"),
        (["end-job", "a/b"], 'JOB: got "a/b", expected a string of 1 to 128 characters'),
        (["end-job", "--team", "a b"], '--team: got "a b", expected a string of up to '),
        (["end-job", "job", "--why", "x" * 201], '--why: got "xxx'),
        (["end-job", "job", "--why", "\x1b[2J\n"], '--why: got "\\u001b[2J\\n", expected up to 200 characters'),
        (["drain", "--timeout", "nan"], "Invalid value for '--timeout': nan is not a number in the range"),
    ],
)
def test_what_nobody_can_be_asked_is_wrong_use(words: list[str], message: str) -> None:
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Error: {message}" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: ")


def test_where_nobody_answers_no_job_is_said_to_have_ended() -> None:
    result = CliRunner().invoke(main, ["end-job", "job", NOWHERE])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"Error: cannot reach aggregator {NOWHERE}")


def test_without_addresses_it_asks_where_a_daemon_of_this_host_listens(daemon: Daemon) -> None:
    listen = {"OMNIREDUCE_AGGREGATOR_LISTEN": daemon.addresses[0], "OMNIREDUCE_CLUSTER_AGGREGATORS": "[]"}
    status, out, log = run("status", "--json", environ=listen)
    assert (status, log) == (0, "")
    assert [load["address"] for load in json.loads(out)] == daemon.addresses[:1]
    assert default_addresses(configured([], "aggregator.listen=[::1]:7400", "aggregator.shards=2")) == [
        "[::1]:7400",
        "[::1]:7401",
    ]


def test_watching_ends_with_ctrl_c(daemon: Daemon) -> None:
    with Process(*PROGRAM, "status", daemon.addresses[0], "--watch", "--every", "0.1") as process:
        seen = [process.line() for _ in range(9)]  # a table for each look
        assert sum(line.startswith("shard ") for line in seen) >= 2
        process.signal(signal.SIGINT)
        assert process.wait() == 0
        assert process.log == ""


def test_on_a_terminal_it_watches_in_place(daemon: Daemon) -> None:
    """The cursor goes back up for every look."""
    ours, theirs = pty.openpty()
    command = [*PROGRAM, "status", *daemon.addresses, "--every", "0.1"]
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, env=environ) as process:
        try:
            lines, seen = Lines(ours), ""
            while seen.count("shard ") < 3:
                line = lines.next(time.monotonic() + WAIT_S)
                assert line is not None, seen
                seen += f"{line}\n"
            assert "\x1b[1A" in seen
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            os.close(theirs)
            os.close(ours)


def test_help_names_the_commands() -> None:
    status, out, _ = run("--help")
    assert status == 0
    named = [line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()]
    others = ["density", "doctor", "drain", "end-job", "plan", "replay", "run", "slurm-script", "status", "trace"]
    first = ["aggregator", "allreduce-benchmark", "bench", "coconet", "compression", "config"]
    assert named == [*first, *others, "train", "tune", "warm"]


def flags(command: click.Command, path: str = "omnireduce") -> Iterator[tuple[str, click.Parameter]]:
    """The flags and arguments of a command, and of all below it, each with where it is."""
    for parameter in command.params:
        yield f"{path} {parameter.name}", parameter
    for name, part in getattr(command, "commands", {}).items():
        yield from flags(part, f"{path} {name}")


def test_no_number_of_a_flag_may_be_nan() -> None:
    wrong = [where for where, flag in flags(main) if type(flag.type) in (click.FloatRange, click.types.FloatParamType)]
    assert not wrong, f"{wrong}: expected NumberRange of omnireduce/support/cli.py"


def test_it_says_its_version() -> None:
    assert run("--version") == (0, f"omnireduce {omnireduce.__version__}\n", "")
    assert version("omnireduce") == omnireduce.__version__


def test_a_module_of_the_user_is_not_taken_for_ours(tmp_path: Path) -> None:
    for name in ("worker", "aggregator"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the code of the user')\n")
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [*PROGRAM, "config"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert "[cluster]" in result.stdout


def test_all_commands_are_in_one_program(tmp_path: Path) -> None:
    with Process(*PROGRAM, "aggregator", "--listen", "127.0.0.1:0") as process:
        address = process.line(READY_S).split()[1]
        at = ["--set", f'cluster.aggregators=["{address}"]']
        sizes = ["--set", "bench.elements=[4096]", "--set", "bench.rounds=1", "--set", "bench.density=[1.0]"]
        status, out, log = run("bench", "--rank", "0", "--size", "1", *at, *sizes)
        assert (status, complaints(log)) == (0, [])
        assert "1 worker, 1 shard" in out
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
