"""The testbed of the benchmarks: hosts that are apart, links as slow as promised, and nothing left of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from local_cluster import Process

from benchmarks.__main__ import main
from benchmarks.harness.group import write_agent
from benchmarks.harness.testbed import Host, TestbedError, goodput
from benchmarks.harness.testbed import testbed as new_testbed  # or pytest takes it for a test

BOUND_S = 30
RATE = "200mbit"
LINK_BYTES_PER_S = 25e6
ATTEMPTS = 5  # a busy machine disturbs one figure or another, a wrong rate all of them
PROBE = """
import errno, socket, sys
for address in sys.argv[1:]:
    try:
        socket.create_connection((address, 9), 10)
    except OSError as error:
        print(errno.errorcode.get(error.errno, error))
"""
ABANDON = """
import os, signal
from benchmarks.harness.testbed import testbed
abandoned = testbed(2, "1gbit")
abandoned.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=BOUND_S).stdout


def namespaces_of(pid: int) -> list[str]:
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line.startswith(f"omni{pid}")]


def outside() -> tuple[set[str], str]:
    """Names of the interfaces outside all testbeds, and their addresses."""
    links = {line.split(":")[1] for line in run("ip", "-oneline", "link").splitlines()}
    return links, run("ip", "-oneline", "-4", "address")


@pytest.fixture(scope="module")
def able() -> None:
    """Skip where a testbed cannot be made: no root, no programs, or a kernel or container that forbids it."""
    if os.geteuid() != 0:
        pytest.skip("only root may make network namespaces")
    missing = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no programs {missing}")
    shape = "unshare --net tc qdisc add dev lo root tbf rate 1mbit burst 10000 latency 50ms"
    tried = subprocess.run(shape.split(), capture_output=True, text=True, check=False, timeout=BOUND_S)
    if tried.returncode:
        pytest.skip(f"no shaped links here: {tried.stderr.strip()}")


def answers(host: Host, *addresses: str) -> list[str]:
    """Results of connecting from a host to a port on which nothing listens, one for each address."""
    return run(*host.prefix, sys.executable, "-c", PROBE, *addresses).split()


@pytest.mark.usefixtures("able")
def test_hosts_reach_each_other_and_nothing_else() -> None:
    before, _ = outside()
    with new_testbed(3, RATE) as hosts:
        assert len({host.name for host in hosts}) == len({host.address for host in hosts}) == 3
        for host in hosts:
            result = answers(host, *(other.address for other in hosts), "192.0.2.1")
            assert result == ["ECONNREFUSED"] * 3 + ["ENETUNREACH"], host
        links, addresses = outside()
        assert links == before
        assert not any(f" {host.address}/" in addresses for host in hosts)


def together(*pairs: tuple[Host, Host]) -> list[float]:
    """Measure all pairs at once; the figures as shares of a link's rate."""
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(goodput, *pair, seconds=0.5) for pair in pairs]
        return [each.result(BOUND_S) / LINK_BYTES_PER_S for each in running]


@pytest.mark.usefixtures("able")
def test_a_link_carries_its_rate_each_way_at_once() -> None:
    results = []
    with new_testbed(2, RATE) as (a, b):
        for _ in range(ATTEMPTS):
            results.append(together((a, b), (b, a)))
            if all(0.8 < share <= 1 for share in results[-1]):
                return
    raise AssertionError(results)


@pytest.mark.usefixtures("able")
def test_senders_to_one_host_share_its_link() -> None:
    results = []
    with new_testbed(3, RATE) as (sink, *sources):
        for _ in range(ATTEMPTS):
            results.append(sum(together(*((source, sink) for source in sources))))
            if 0.8 < results[-1] < 1.2:  # the windows of the two do not begin at quite the same time
                return
    raise AssertionError(results)


@pytest.mark.usefixtures("able")
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_in_the_body_leaves_nothing(failure: type[BaseException]) -> None:
    inside: list[str] = []

    def fail() -> None:
        with new_testbed(2, RATE):
            inside.extend(namespaces_of(os.getpid()))
            raise failure

    with pytest.raises(failure):
        fail()
    assert len(inside) == 3
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("able")
def test_a_process_that_still_runs_on_a_host_is_killed() -> None:
    with new_testbed(2, RATE) as (host, _):
        process = subprocess.Popen([*host.prefix, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout is not None
        process.stdout.read(1)  # by now it is on the host
    with process:
        assert process.wait(BOUND_S) == -signal.SIGKILL


@pytest.mark.usefixtures("able")
def test_leftovers_of_a_dead_process_are_removed() -> None:
    with Process(sys.executable, "-c", ABANDON) as process:
        assert process.wait(BOUND_S) == -signal.SIGKILL, process.log
    assert len(namespaces_of(process.pid)) == 3
    with new_testbed(2, RATE):
        assert namespaces_of(process.pid) == []


@pytest.mark.usefixtures("able")
def test_the_program_prints_its_hosts_and_removes_them_when_terminated() -> None:
    with Process(sys.executable, "-m", "benchmarks.harness.testbed", "--rate", RATE, "--hosts", "2") as process:
        results = [process.line(BOUND_S) for _ in range(2)]
        assert results == [f"omni{process.pid}h{index} 10.77.0.{index + 1}" for index in range(2)]
        process.signal(signal.SIGTERM)
        assert process.wait(BOUND_S) == 128 + signal.SIGTERM, process.log
    assert namespaces_of(process.pid) == []


@pytest.mark.usefixtures("able")
def test_the_program_prints_four_figures() -> None:
    with Process(sys.executable, "-m", "benchmarks.harness.testbed", "--rate", RATE, "--seconds", "0.1") as process:
        lines = [process.line(BOUND_S) for _ in range(3 + 4)]
        assert process.wait(BOUND_S) == 0, process.log
    assert all(line.endswith(" MB/s") for line in lines[3:]), lines
    assert namespaces_of(process.pid) == []


@pytest.mark.usefixtures("able")
def test_a_rate_that_tc_refuses_is_explained_and_leaves_nothing() -> None:
    with pytest.raises(TestbedError, match=r"rate.*written like 1gbit.*tbf"), new_testbed(2, "brisk"):
        pass
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("able")
def test_a_second_testbed_is_refused_and_spares_the_first() -> None:
    with new_testbed(2, RATE) as (a, b):
        with pytest.raises(TestbedError, match="leave this process's testbed"), new_testbed(2, RATE):
            pass
        assert answers(a, b.address) == ["ECONNREFUSED"]


@pytest.mark.usefixtures("able")
def test_goodput_between_hosts_that_are_gone_is_an_error() -> None:
    with new_testbed(2, RATE) as (a, b):
        pass
    with pytest.raises(TestbedError, match=f"no goodput to {b.name}.*still exists"):
        goodput(a, b)


@pytest.mark.usefixtures("able")
def test_the_service_on_shaped_links_has_rows_and_verdicts(tmp_path: Path) -> None:
    options = ["--rate", "10gbit", "--rounds", "1", "--layout", "dedicated", "--ranks", "2"]
    result = CliRunner().invoke(main, ["shaped", *options, "--results", str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows, summary = (json.loads((tmp_path / name).read_text()) for name in ("testbed.json", "summary.json"))
    names = [f"dedicated 10gbit, 2 ranks, 100 MiB, density {density:g}, random overlap" for density in (1, 0.1, 0.01)]
    assert [row["case"] for row in rows] == [line["case"] for line in summary] == names
    for row, line in zip(rows, summary, strict=True):
        assert row["wrong"] == 0
        assert (line["peer"], line["peer_value"], line["value"]) == ("union bound", row["bound_ms"], row["ms"])
        assert row["share"] == line["ratio"]
        assert (row["least_ms"] < row["bound_ms"]) == (row["density"] < 1)
    assert namespaces_of(os.getpid()) == []


@pytest.mark.usefixtures("able")
def test_the_agent_of_open_mpi_starts_a_command_on_a_host_with_a_name_of_its_own(tmp_path: Path) -> None:
    with new_testbed(2, RATE) as hosts:
        agent = write_agent(hosts, str(tmp_path))
        for host in hosts:
            name, address = run(
                str(agent), host.address, "hostname;", "ip -brief -4 address show dev eth0"
            ).splitlines()
            assert (name, address.split()[-1].partition("/")[0]) == (host.name, host.address)
    assert socket.gethostname() not in {host.name for host in hosts}


def test_without_root_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedError, match="run this as root"), new_testbed(2, RATE):
        pass


def test_without_the_programs_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TestbedError, match=r"'ip'.*install iproute2"), new_testbed(2, RATE):
        pass


@pytest.mark.parametrize("hosts", [-1, 0, 1, 251])
def test_a_number_of_hosts_out_of_range_is_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match="2 to 250 hosts"), new_testbed(hosts, RATE):
        pass
