"""`omnireduce doctor`: on this host as it is, on it with narrower limits, and against aggregators of all kinds."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import sys
from pathlib import Path

import pytest
from certificates import certificates, needs_openssl
from local_cluster import READY_S, Daemon, Process, configured

from omnireduce.console.doctor import (
    Finding,
    check_aggregators,
    check_descriptors,
    check_launch,
    check_locked_memory,
    check_processor,
    check_rdma,
    find_ports,
    may_lock_any_memory,
)

NOWHERE = "127.0.0.1:9"
PROGRAM = [sys.executable, "-m", "omnireduce", "doctor"]
UNLIMITED = resource.RLIM_INFINITY
LINE = re.compile(r"(ok|info|warn|fail) +([^:]+|aggregator \S+): ")


def examine(
    aggregators: list[str], *overrides: str, limit: str = "", environ: dict[str, str] | None = None
) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Run the program: its status, (state, line) by what was looked at, and its last line."""
    settings = [f"cluster.aggregators={json.dumps(aggregators)}", *overrides]
    command = [*PROGRAM, *(word for setting in settings for word in ("--set", setting))]
    if limit:
        command = ["sh", "-c", f"{limit} && exec {shlex.join(command)}"]
    with Process(*command, environ=environ) as process:
        assert process.popen.stdout is not None
        *lines, last = process.popen.stdout.read().decode().splitlines()
        status = process.wait(READY_S)
        assert process.log == ""
    results = {}
    for line in lines:
        match = LINE.match(line)
        assert match is not None, line
        results[match[2]] = match[1], line
    return status, results, last


def test_a_host_and_aggregators_that_are_well(daemon: Daemon) -> None:
    status, result, _ = examine(daemon.addresses)
    assert status == 0, result
    for name in ("versions", "processor", "kernels", "descriptors", "locked memory", "shm", "tcp"):
        assert result[name][0] in ("ok", "warn"), result[name]
    assert {"numpy", "numba", "omnireduce"} <= set(result["versions"][1].split())
    assert f"of {os.cpu_count()} cores" in result["processor"][1]
    assert "kept in " in result["kernels"][1]
    for address in daemon.addresses:
        state, line = result[f"aggregator {address}"]
        assert state == "ok"
        assert re.search(r"answers by shm after [\d.]+ ms; version \S+, 0 jobs$", line)


def test_where_it_is_and_whom_it_asks(daemon: Daemon) -> None:
    launcher = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "here@1"}
    with Process(*PROGRAM, daemon.addresses[0], environ=launcher) as process:
        assert process.popen.stdout is not None
        results = process.popen.stdout.read().decode().splitlines()
        assert process.wait(READY_S) == 0, results
    assert "by Open MPI; rank 1 of 4, job 'here@1'" in next(line for line in results if "launch:" in line)
    assert [line.split()[2] for line in results if line.split()[1] == "aggregator"] == [f"{daemon.addresses[0]}:"]


def test_a_launcher_that_makes_no_sense() -> None:
    [finding] = check_launch(configured([NOWHERE]), {"OMPI_COMM_WORLD_RANK": "four", "OMPI_COMM_WORLD_SIZE": "4"})
    assert finding.state == "fail"


def test_where_no_aggregator_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    [finding] = check_aggregators(configured([]))
    assert finding.state == "info"
    assert "rank 0 of a job whose ranks are all on this host starts one for it" in finding.text
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    [finding] = check_aggregators(configured([]))
    assert finding.state == "fail"
    assert "only 4 of the 8 workers are on this host: start `omnireduce aggregator" in finding.text


def test_the_transport_that_a_worker_would_take(daemon: Daemon) -> None:
    _, result, _ = examine(daemon.addresses[:1], "transport.kind=tcp")
    assert "answers by tcp, from 127.0.0.1 after " in result[f"aggregator {daemon.addresses[0]}"][1]


def test_what_is_configured_and_cannot_work(daemon: Daemon) -> None:
    """Each failing line says what to do."""
    status, result, last = examine([daemon.addresses[0], NOWHERE, "no-such-host.invalid:7400"])
    assert status == 1
    assert result[f"aggregator {daemon.addresses[0]}"][0] == "ok"
    state, line = result[f"aggregator {NOWHERE}"]
    assert state == "fail"
    assert "Connection refused; is `omnireduce aggregator` running there, and is its port open to this host?" in line
    assert result["aggregator no-such-host.invalid:7400"][0] == "fail"
    assert last == "2 of these cannot work as configured"


def test_rdma_that_is_asked_for_and_not_here(daemon: Daemon) -> None:
    ports, _ = find_ports()
    if any(port.active for port in ports):
        pytest.skip("RDMA works here")
    status, result, _ = examine(daemon.addresses[:1], "transport.kind=verbs")
    assert status == 1
    state, line = result["verbs"]
    assert state == "fail"
    assert "not available: " in line
    assert "choose another transport.kind; docs/rdma.md" in line
    assert examine(daemon.addresses[:1])[0] == 0


def test_the_secret_of_both_ends(tmp_path: Path) -> None:
    """Each failing line says what to do."""
    files = [tmp_path / "right", tmp_path / "wrong", tmp_path / "open"]
    for number, file in enumerate(files):
        file.touch(0o600)
        file.write_text(f"secret number {number} of this test")
    right, wrong, readable = (f"security.secret_file={file}" for file in files)
    files[2].chmod(0o644)
    with Daemon(1, right) as daemon:
        aggregator = f"aggregator {daemon.addresses[0]}"
        status, result, _ = examine(daemon.addresses, right)
        assert status == 0
        assert result["secret"][1].endswith(f"from {files[0]}")
        assert ", both proved the secret; version " in result[aggregator][1]
        status, result, _ = examine(daemon.addresses, wrong)
        assert (status, result["secret"][0], result[aggregator][0]) == (1, "ok", "fail")
        assert (
            "has another secret than the aggregator: give both the same security.secret_file" in result[aggregator][1]
        )
        status, result, _ = examine(daemon.addresses)
        assert (status, result["secret"][0], result[aggregator][0]) == (1, "info", "fail")
        assert "wants proof of a shared secret: give the client the same" in result[aggregator][1]
        status, result, _ = examine(daemon.addresses, readable)
        assert (status, result["secret"][0], result[aggregator][0]) == (1, "fail", "fail")
        assert "run chmod 600" in result["secret"][1]


@needs_openssl
def test_aggregators_with_tls() -> None:
    with Daemon(1, *certificates().holder("aggregator")) as daemon:
        aggregator = f"aggregator {daemon.addresses[0]}"
        _, result, _ = examine(daemon.addresses, "transport.kind=tcp", certificates().trust())
        assert "answers by tcp with TLS, from 127.0.0.1 after " in result[aggregator][1]
        _, result, _ = examine(daemon.addresses, "transport.kind=tcp")
        assert result[aggregator][0] == "fail"
        assert "before it answered; does its transport.kind allow tcp, and does it want TLS (" in result[aggregator][1]


def test_a_stopped_aggregator() -> None:
    with Daemon(1) as daemon:
        shard = daemon.shard_pids[0]
        os.kill(shard, signal.SIGSTOP)
        try:
            [result] = check_aggregators(configured(daemon.addresses))
        finally:
            os.kill(shard, signal.SIGCONT)
    assert result.state == "fail"
    assert "takes the connection, but does not answer within 2 s; is it stopped or overloaded, or" in result.text


def test_too_few_descriptors(daemon: Daemon) -> None:
    status, result, _ = examine(daemon.addresses, limit="ulimit -n 70")
    assert status == 1
    assert result["descriptors"][0] == "fail"
    assert result["descriptors"][1].endswith("a worker needs 76; ulimit -n 76")


def test_plain_python_kernels_are_told_of(daemon: Daemon) -> None:
    _, result, last = examine(daemon.addresses[:1], environ={"NUMBA_DISABLE_JIT": "1"})
    assert result["kernels"][0] == "warn"
    assert result["kernels"][1].endswith("unset NUMBA_DISABLE_JIT")
    assert last.startswith("all can work, ")


def test_a_wrong_configuration_is_one_line_and_status_2() -> None:
    with Process(*PROGRAM, "--set", "transport.kind=pigeon") as process:
        assert process.wait(READY_S) == 2
        assert process.log.count("\n") == 1


X86 = "processor : 0\nmodel name : Xeon\nflags : fpu sse4_2 avx {}\n\nprocessor : 1\nmodel name : Xeon\nflags : fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve\n"


@pytest.mark.parametrize(
    ("cpuinfo", "state", "expected"),
    [
        (X86.format("avx2 avx512f"), "ok", "; sse4_2 avx avx2 avx512f"),
        (X86.format(""), "warn", "; sse4_2 avx"),
        (ARM, "ok", "; asimd sve"),
        ("", "ok", "; no vector instructions"),
    ],
    ids=["AVX2", "old", "ARM", "nothing"],
)
def test_processors(cpuinfo: str, state: str, expected: str) -> None:
    [result] = check_processor(cpuinfo)
    assert result.state == state
    assert result.text.endswith(expected)
    assert bool(result.advice) == (state == "warn")


def states(findings: list[Finding]) -> list[str]:
    return [finding.state for finding in findings]


@pytest.mark.parametrize(
    ("kind", "limit", "exempt", "has_devices", "expected"),
    [
        ("auto", 8 << 20, False, False, "ok"),
        ("auto", 8 << 20, False, True, "warn"),
        ("verbs", 8 << 20, False, True, "fail"),
        ("verbs", 8 << 20, True, True, "ok"),
        ("verbs", 18 << 20, False, True, "ok"),
        ("verbs", (18 << 20) - 1, False, True, "fail"),
        ("verbs", UNLIMITED, False, True, "ok"),
    ],
)
def test_locked_memory(kind: str, limit: int, exempt: bool, has_devices: bool, expected: str) -> None:
    """Two shards with 3 + 3 slots of 1.5 MiB each: 18 MiB."""
    config = configured(["a:1", "b:1"], f"transport.kind={kind}")
    [result] = check_locked_memory(config, limit, exempt=exempt, has_devices=has_devices)
    assert result.state == expected
    assert ("LimitMEMLOCK=infinity" in result.advice) == (expected != "ok")


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(1024, 4096, "ok"), (1024, UNLIMITED, "ok"), (1024, 1366, "ok"), (1024, 1024, "warn"), (67, 4096, "fail")],
)
def test_descriptors(soft: int, hard: int, expected: str) -> None:
    assert states(list(check_descriptors(configured(["a:1"]), soft, hard))) == [expected]


def test_who_may_lock_what_it_likes() -> None:
    assert may_lock_any_memory("CapEff:\t0000000000004000\n")
    assert not may_lock_any_memory("CapEff:\t00000000a80425fb\n")


def test_no_device_is_no_failure_unless_asked_for() -> None:
    assert states(list(check_rdma(configured(["a:1"]), [], "none here"))) == ["info"]
    [result] = check_rdma(configured(["a:1"], "transport.kind=verbs"), [], "none here")
    assert (result.state, result.text) == ("fail", "not available: none here")
