"""`omnireduce.run`: functions on ranks, what they return and raise."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launches import are_gone, environ_of
from local_cluster import ROOT, WAIT_S, children, eventually

import omnireduce as omni
from omnireduce import ConfigError, RankFailedError, UsageError
from omnireduce.launch.functions import read_keywords

pytest.importorskip("cloudpickle", reason="no cloudpickle here; the extra `launch` brings it")


def call(func: object, *args: object, **options: object) -> tuple[list[object], str, str]:
    """Call `run`; return its result, and the standard output and error of the ranks."""
    out, err = io.StringIO(), io.StringIO()
    result = omni.run(func, args, stdout=out, stderr=err, **options)  # type: ignore[arg-type]
    return result, out.getvalue(), err.getvalue()


def test_results_come_in_the_order_of_ranks() -> None:
    factor = 2.0

    def work(size: int, *, plus: float) -> tuple[int, float]:
        import omnireduce as omni

        with omni.init() as comm:
            total = omni.allreduce(np.full(size, comm.rank * factor + plus))
            sys.stdout.write(f"rank {comm.rank}\n")
            return comm.rank, float(total[-1])

    out = io.StringIO()
    result = omni.run(work, (1000,), {"plus": 1.0}, np=3, stdout=out)
    assert result == [(rank, 9.0) for rank in range(3)]
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}]<stdout>:rank {rank}" for rank in range(3)]


def test_what_a_rank_raises_is_raised_here() -> None:
    def fail() -> None:
        import omnireduce as omni

        omni.init()
        if omni.rank() == 1:
            raise LookupError("no such word")
        omni.allreduce(np.ones(3))

    with pytest.raises(RankFailedError, match=r"rank 1 raised an exception:\nTraceback") as caught:
        call(fail, np=2)
    assert caught.value.rank == 1
    assert "LookupError: no such word" in caught.value.text
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_rank_that_dies_is_named() -> None:
    def die() -> None:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(RankFailedError, match="rank 0 was ended by signal 9") as caught:
        call(die, np=2)
    assert (caught.value.rank, caught.value.text) == (0, "")


def test_a_rank_that_leaves_by_itself() -> None:
    assert call(lambda: sys.exit(), np=1)[0] == [None]
    with pytest.raises(RankFailedError, match="SystemExit: 4"):
        call(lambda: sys.exit(4), np=1)
    with pytest.raises(RankFailedError, match="rank 0 ended before it returned"):
        call(lambda: os._exit(0), np=1)


def test_an_exception_that_cannot_travel_leaves_its_traceback() -> None:
    def fail() -> None:
        class OddError(Exception):
            def __reduce__(self) -> str:
                raise TypeError("I stay")

        raise OddError("strange")

    with pytest.raises(RankFailedError, match="OddError: strange") as caught:
        call(fail, np=1)
    assert caught.value.__cause__ is None


def test_much_can_be_sent_and_returned() -> None:
    array = np.arange(3_000_000)
    result, _, _ = call(lambda x: x + int(os.environ["RANK"]), array, np=2)
    for rank, each in enumerate(result):
        np.testing.assert_array_equal(each, array + rank)


def test_what_cannot_be_sent_is_said() -> None:
    with pytest.raises(UsageError, match="cannot be sent to ranks"):
        call(lambda x: x, (each for each in ()), np=1)
    with pytest.raises(UsageError, match=r"-np.*: 0 is not in the range"):
        call(lambda: None, np=0)
    with pytest.raises(ConfigError, match="-H: got 'a:b'"):
        call(lambda: None, hosts="a:b")


def test_options_are_those_of_the_command(tmp_path: Path) -> None:
    """And those of Horovod, of which some ask for nothing."""
    folder = tmp_path / "logs"
    result, _, _ = call(
        lambda: (os.environ["HOROVOD_CYCLE_TIME"], sys.stdout.write("here\n"))[0],
        num_proc=2, cycle_time_ms=2.5, use_gloo=True,
        use_mpi=False, verbose=None, network_interfaces=["lo"], output_filename=str(folder), start_timeout=60,
    )  # fmt: skip
    assert result == ["2.5", "2.5"]
    assert [(folder / f"rank.{rank}" / "stdout").read_text() for rank in range(2)] == ["here\n"] * 2


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        ({}, 1), ({"np": None, "num_proc": None}, 1), ({"H": "localhost:2"}, 2), ({"hosts": "localhost:2"}, 2),
        ({"config_file": "two.yaml"}, 2), ({"num_proc": 3}, 3), ({"hostfile": None, "verbose": 0}, 1),
    ],
)  # fmt: skip
def test_how_many_ranks(options: dict[str, Any], ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.yaml").write_text("np: 2\n")
    monkeypatch.chdir(tmp_path)
    assert read_keywords(options).ranks == ranks


def test_keywords_have_values_of_python() -> None:
    result = read_keywords({"x": {"A": 1}, "ssh": ["ssh", "-F", "my config"], "verbose": 2, "prefix_timestamp": 0})
    assert (result.environ["A"], result.ssh, result.verbose, result.timestamps) == (
        "1",
        "ssh -F 'my config'",
        True,
        False,
    )
    assert read_keywords({"x": "A=b=1"}).environ["A"] == "b=1"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"verbose": "false"}, UsageError, "verbose: got 'false', expected True or False"),
        ({"np": 2, "num_proc": 3}, UsageError, "np and num_proc: expected one of them"),
        ({"no_such": 1}, UsageError, "no_such: not an option of omnireduce.run"),
        ({"command": "x"}, UsageError, "command: not an option of omnireduce.run"),
        ({"version": True}, UsageError, "version: not an option of omnireduce.run"),
        ({"check_build": True}, UsageError, "check_build: not an option of omnireduce.run"),
        ({"use_mpi": True}, UsageError, "launcher mpirun: omnireduce.run starts ranks itself; expected local or ssh"),
        ({"min_np": 1}, UsageError, "min_np: ranks of a function do not come and go"),
        ({"start_timeout": "soon"}, UsageError, "--start-timeout.*'soon' is not a valid float"),
        ({"hosts": "a", "hostfile": "b"}, ConfigError, "--hosts and --hostfile: expected one of them"),
        ({"disable_cache": True}, ConfigError, "--disable-cache: nothing of other hosts is cached; leave it out"),
    ],
)
def test_what_is_no_option_of_a_function_is_said(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(lambda: None, **options)


def test_ranks_get_variables() -> None:
    assert call(lambda: os.environ["WORD"] + os.environ["RANK"], np=2, env={"WORD": "w"})[0] == ["w0", "w1"]


def test_nothing_is_left_when_the_caller_is_interrupted() -> None:
    code = (
        "import omnireduce as omni, os, signal\n"
        "def wait():\n"
        "    os.write(1, f'{os.getpid()}\\n'.encode())\n"
        "    signal.pause()\n"
        "omni.run(wait, np=1, grace_period=0.5)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-u", "-c", code], cwd=ROOT, env=environ_of(), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ) as caller:  # fmt: skip
        assert caller.stdout is not None
        pid = int(caller.stdout.readline().partition(">:")[2])
        assert eventually(lambda: bool(children(caller.pid)))
        caller.send_signal(signal.SIGINT)
        assert caller.wait(WAIT_S) == -signal.SIGINT
        assert are_gone([pid])
