"""Ranks on this host, as real processes: their output, their ends, and that nothing is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launches import ENDS_WELL, FAMILY, RUN, SUM, are_gone, environ_of, launched, lines, python, run
from local_cluster import READY_S, ROOT, WAIT_S, children, eventually

from omnireduce.launch.output import LINE

TOLD = """
import json, os
from dataclasses import asdict
from omnireduce.runtime.rank.launcher_detection import detect_launch, launch_id
found = detect_launch()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK",
         "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "MASTER_ADDR")
shown = asdict(found) | {"id": launch_id(found.rank, found.size)} | {name: os.environ[name] for name in names}
os.write(1, (json.dumps(shown) + "\\n").encode())
"""
ENDS_BADLY = """
import os, signal
if os.environ["RANK"] == "1":
    raise SystemExit(7)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    signal.pause()
"""
WILL_NOT_END = """
import os, signal
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
os.write(1, f"{os.getpid()}\\n".encode())
while True:
    signal.pause()
"""


def test_ranks_sum() -> None:
    """Rank 0 starts the aggregator, as under mpirun."""
    result = run("-np", "3", *python(SUM))
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == [f"[{rank}]<stdout>:{rank}/3 6 {rank}/3" for rank in range(3)]


def test_a_job_may_have_its_own_aggregators() -> None:
    code = SUM + "    assert len(comm.config.cluster.aggregators) == 2 and os.environ['OMNIREDUCE_SECURITY_SECRET']"
    result = run("-np", "2", "--aggregators", "2", *python(code))
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == [f"[{rank}]<stdout>:{rank}/2 3 {rank}/2" for rank in range(2)]


@pytest.mark.parametrize("aggregators", ["1", "embedded"])
def test_the_command_line_overrides_configured_aggregators(aggregators: str) -> None:
    nobody = {"OMNIREDUCE_CLUSTER_AGGREGATORS": "127.0.0.1:1", "OMNIREDUCE_CLUSTER_JOIN_TIMEOUT_S": "20"}
    result = run("-np", "2", "--aggregators", aggregators, *python(SUM), **nobody)
    assert result.returncode == 0, result.stderr


def test_a_secret_of_the_user_counts(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    path.chmod(0o600)
    code = SUM + "    assert 'OMNIREDUCE_SECURITY_SECRET' not in os.environ"
    result = run("-np", "2", "--aggregators", "1", "--set", f"security.secret_file={path}", *python(code))
    assert result.returncode == 0, result.stderr


def test_what_ranks_are_told() -> None:
    import json

    result = run("-np", "2", *python(TOLD))
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line.partition(":")[2]) for line in lines(result.stdout)]
    jobs = {(report.pop("job"), report.pop("id")) for report in reports}
    assert len(jobs) == 1
    assert re.fullmatch(r"run-[0-9a-f]{16}", next(iter(jobs))[0])
    for rank, report in enumerate(reports):
        names = ("rank", "size", "local_rank", "local_size")
        assert [report[name] for name in names] == [rank, 2, rank, 2]
        assert (report["launcher"], report["MASTER_ADDR"]) == ("omnireduce run", "127.0.0.1")
        assert (report["RANK"], report["WORLD_SIZE"], report["LOCAL_RANK"], report["LOCAL_WORLD_SIZE"]) == (
            str(rank), "2", str(rank), "2",
        )  # fmt: skip
        horovod = [report[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        assert horovod == [str(rank), "2", str(rank), "2"]
        assert (report["HOROVOD_CROSS_RANK"], report["HOROVOD_CROSS_SIZE"]) == ("0", "1")


def test_another_launcher_around_is_not_believed() -> None:
    """As in a step of Slurm, or where mpirun starts this launcher once."""
    result = run(
        "-np", "2", *python(SUM), OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", PMI_RANK="0", PMI_SIZE="1"
    )
    assert result.returncode == 0, result.stderr
    assert len(lines(result.stdout)) == 2


def test_the_first_failure_ends_all() -> None:
    result = run("-np", "3", *python(ENDS_BADLY))
    assert result.returncode == 7
    assert "event=rank_failed" in result.stderr
    assert "rank 1 on localhost ended with status 7" in result.stderr


def test_a_signal_that_ends_a_rank_is_in_the_status() -> None:
    result = run("-np", "1", *python("import os; os.kill(os.getpid(), 9)"))
    assert result.returncode == 128 + signal.SIGKILL
    assert "was ended by signal 9" in result.stderr


def test_who_does_not_end_is_killed() -> None:
    code = "import os\nif os.environ['RANK'] == '1': os._exit(5)\n" + WILL_NOT_END
    result = run("-np", "2", "--grace-period", "0.1", *python(code))
    assert result.returncode == 5


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda each: each.name
)
def test_signals_go_to_all_ranks_and_their_children(number: signal.Signals) -> None:
    with launched("-np", "2", "--grace-period", "60", *python(FAMILY)) as launcher:
        pids = [pid for result in launcher.numbers(2).values() for pid in result]
        assert len(pids) == 4
        launcher.signal(number)
        assert launcher.wait() == 128 + number
        assert are_gone(pids)


def test_a_second_signal_does_not_wait() -> None:
    with launched("-np", "1", "--grace-period", "600", *python(WILL_NOT_END)) as launcher:
        [[pid]] = launcher.numbers(1).values()
        launcher.signal(signal.SIGINT)
        assert eventually(lambda: "event=interrupted" in launcher.log)
        launcher.signal(signal.SIGINT)
        assert launcher.wait() == 130
        assert are_gone([pid])


def test_a_signal_for_ranks_own_use_ends_nobody() -> None:
    code = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os._exit(os.write(1, b"1\\n") - 2))
os.write(1, b"0\\n")
while True:
    signal.pause()
"""
    with launched("-np", "1", *python(code)) as launcher:
        assert launcher.numbers(1) == {0: [0]}
        launcher.signal(signal.SIGUSR1)
        assert launcher.numbers(1) == {0: [1]}
        assert launcher.wait() == 0


@pytest.mark.parametrize("who", ["launcher", "supervisor"])
def test_nothing_is_left_when_one_of_them_is_killed(who: str) -> None:
    with launched("-np", "2", "--aggregators", "1", "--grace-period", "0.5", *python(FAMILY)) as launcher:
        numbers = launcher.numbers(2)
        [supervisor] = children(launcher.pid)
        pids = [pid for numbers_of_rank in numbers.values() for pid in numbers_of_rank]
        others = [pid for pid in children(supervisor) if pid not in pids]  # the aggregator
        assert len(others) == 1
        others += children(others[0])
        if who == "launcher":
            os.kill(launcher.pid, signal.SIGKILL)
            assert are_gone([*pids, *others, supervisor])
        else:
            os.kill(supervisor, signal.SIGKILL)
            assert launcher.wait() == 1
            assert "lost host localhost" in launcher.log
            assert are_gone([*pids, others[0]])


def test_a_rank_that_its_host_has_told_to_end_has_not_ended_well() -> None:
    """As where the host is shut down, which tells the supervisor."""
    with launched("-np", "1", *python(ENDS_WELL)) as launcher:
        launcher.numbers(1)
        [supervisor] = children(launcher.pid)
        os.kill(supervisor, signal.SIGTERM)
        assert launcher.wait() == 1
        assert "rank 0 on localhost ended with status 1, after its host had told it to end" in launcher.log


def test_a_launcher_that_is_killed_lets_ranks_end_in_order() -> None:
    """They have the grace period, as after a signal."""
    code = """
import os, signal, sys
def end(*_):
    open(sys.argv[1], "w").write("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, f"{os.getpid()}\\n".encode())
while True:
    signal.pause()
"""
    path = f"/tmp/omnireduce-test-{os.getpid()}"
    try:
        with launched("-np", "1", *python(code), path) as launcher:
            [[pid]] = launcher.numbers(1).values()
            os.kill(launcher.pid, signal.SIGKILL)
            assert are_gone([pid])
        assert Path(path).read_text() == "saved"
    finally:
        Path(path).unlink(missing_ok=True)


def test_what_ranks_leave_behind_ends_with_the_job() -> None:
    """Also what has a session of its own, and holds the pipes of its rank."""
    code = """
import os, signal
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            signal.pause()
    os._exit(0)
os.wait()
"""
    with launched("-np", "1", *python(code)) as launcher:
        [[pid]] = launcher.numbers(1).values()
        assert launcher.wait() == 0
        assert are_gone([pid])


def test_lines_are_whole_and_bounded() -> None:
    code = f"import os; [os.write(1, bytes([65 + int(os.environ['RANK'])]) * 1000) for _ in range({3 * LINE // 1000})]"
    result = run("-np", "3", *python(code))
    assert result.returncode == 0, result.stderr
    results: dict[str, str] = {}
    for line in result.stdout.splitlines():
        prefix, _, text = line.partition("<stdout>:")
        assert len(text) <= LINE
        results[prefix] = results.get(prefix, "") + text
    assert results == {f"[{rank}]": "ABC"[rank] * (3 * LINE // 1000 * 1000) for rank in range(3)}


def test_output_also_goes_to_files(tmp_path: Path) -> None:
    result = run("-np", "2", "--output-filename", "outs", "sh", "-c", "echo out; echo err >&2", cwd=tmp_path)
    assert result.returncode == 0
    assert lines(result.stdout) == ["[0]<stdout>:out", "[1]<stdout>:out"]
    assert lines(result.stderr) == ["[0]<stderr>:err", "[1]<stderr>:err"]
    for rank in range(2):
        assert (tmp_path / f"outs/rank.{rank}/stdout").read_text() == "out\n"
        assert (tmp_path / f"outs/rank.{rank}/stderr").read_text() == "err\n"


def test_a_reader_that_leaves_ends_the_job() -> None:
    with launched("-np", "2", "yes") as launcher:
        launcher.line()
        assert launcher.popen.stdout is not None
        launcher.popen.stdout.close()
        assert launcher.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_output_may_go_to_a_device(path: str, number: int) -> None:
    command = [*RUN, "-np", "1", "sh", "-c", f"echo hello >&{number}"]
    with open(path, "wb") as device:
        kept = {1: {"stdout": device, "stderr": subprocess.PIPE}, 2: {"stdout": subprocess.PIPE, "stderr": device}}
        result = subprocess.run(command, env=environ_of(), cwd=ROOT, check=False, timeout=2 * READY_S, **kept[number])
    assert result.returncode == 0, result.stderr
    assert ("event=output_lost" in str(result.stderr)) == (path == "/dev/full" and number == 1)


def test_ranks_read_nothing() -> None:
    result = run("-np", "2", *python("import sys; assert sys.stdin.read() == ''"))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("kind", ["pipe", "file", "nothing", "closed"])
def test_input_that_ranks_do_not_get_is_said_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_text("data\n" * 3)
    redirected = {"pipe": f"cat {path} |", "file": "", "nothing": "true |", "closed": ""}[kind]
    behind = {"pipe": "", "file": f"<{path}", "nothing": "", "closed": "<&-"}[kind]
    result = subprocess.run(
        ["sh", "-c", f'{redirected} "$@" {behind}', "-", *RUN, "-np", "2", "cat"],
        env=environ_of(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=READY_S,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.count("ranks read nothing from standard input") == (kind in ("pipe", "file"))


def test_a_variable_of_horovod_reaches_ranks() -> None:
    code = "import omnireduce, os; os.write(1, omnireduce.load_config().log.level.encode())"
    result = run("-np", "1", *python(code), HOROVOD_LOG_LEVEL="ERROR")
    assert result.stdout == "[0]<stdout>:error\n"


def test_ranks_of_torch_meet() -> None:
    pytest.importorskip("torch", reason="no torch here; `make torch` installs it")
    code = """
import os, torch, torch.distributed as dist, omnireduce.torch
dist.init_process_group("omnireduce")
total = torch.ones(5) * (dist.get_rank() + 1)
dist.all_reduce(total)
os.write(1, f"{total[0].item():g} {dist.get_world_size()}\\n".encode())
dist.destroy_process_group()
"""
    result = run("-np", "2", *python(code))
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == ["[0]<stdout>:3 2", "[1]<stdout>:3 2"]


def test_a_secret_is_on_no_command_line() -> None:
    code = "import os; os.write(1, os.environ['OMNIREDUCE_SECURITY_SECRET'].encode() + b'\\n'); os.read(0, 1)" + FAMILY
    with launched("-np", "1", "--aggregators", "1", *python(code)) as launcher:
        secret = launcher.line(2 * WAIT_S).partition(">:")[2]
        assert len(secret) == 64
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                assert secret.encode() not in path.read_bytes()
            except OSError:
                continue


def test_a_command_that_cannot_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tool"
    path.write_text("#!/no/such/interpreter\n")
    path.chmod(0o700)
    result = run("-np", "2", str(path))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("Error: localhost: ")


def test_python_of_the_user_is_not_taken_for_ours(tmp_path: Path) -> None:
    (tmp_path / "omnireduce.py").write_text("raise SystemExit('not this one')")
    (tmp_path / "signal.py").write_text("raise SystemExit('nor this one')")
    result = subprocess.run(
        [Path(sys.executable).with_name("omnireduce"), "run", "-np", "1", "true"],
        cwd=tmp_path, env=environ_of(), capture_output=True, text=True, check=False, timeout=WAIT_S,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
