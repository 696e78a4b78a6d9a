"""Ranks on other hosts, by a real ssh to a real sshd on loopback: 127.0.0.2 and 127.0.0.3 are the other hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launches import FAMILY, SUM, Launched, are_gone, launched, lines, python, run
from local_cluster import READY_S
from ssh_daemons import Sshd, needs_sshd, ssh_daemons

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with ssh_daemons(tmp_path_factory.mktemp("sshd"), {"127.0.0.2": (), "127.0.0.3": ()}) as found:
        yield found


def test_ranks_of_two_hosts_sum(sshd: Sshd) -> None:
    """This host has the aggregator, because it is the first one. The other one gets its address and secret."""
    result = run("-H", "localhost:1,127.0.0.2:2", *sshd.options(), *python(SUM))
    assert result.returncode == 0, result.stderr
    assert lines(result.stdout) == [
        "[0]<stdout>:0/3 6 0/1", "[1]<stdout>:1/3 6 0/2", "[2]<stdout>:2/3 6 1/2",
    ]  # fmt: skip


def test_the_first_host_has_the_aggregator(sshd: Sshd, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    code = SUM + "    os.write(1, (' '.join(comm.config.cluster.aggregators) + '\\n').encode())"
    result = run("-np", "2", "--hostfile", str(path), *sshd.options(), *python(code))
    assert result.returncode == 0, result.stderr
    addresses = {
        line.partition(">:")[2].partition(":")[0] for line in result.stdout.splitlines() if "/" not in line[12:]
    }
    assert addresses == {"127.0.0.2"}


def test_ssh_may_be_wanted_for_this_host_too(sshd: Sshd) -> None:
    result = run("-H", "127.0.0.2:2", "--launcher", "ssh", *sshd.options(), *python(SUM))
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_a_rank_elsewhere_that_fails_ends_all(sshd: Sshd) -> None:
    code = "import os, signal\nif os.environ['RANK'] == '1': os._exit(9)\nsignal.pause()"
    result = run("-H", "localhost:1,127.0.0.2:1", *sshd.options(), *python(code))
    assert result.returncode == 9
    assert "rank 1 on 127.0.0.2 ended with status 9" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_is_left_elsewhere(sshd: Sshd, number: signal.Signals) -> None:
    words = ["-H", "127.0.0.2:1,127.0.0.3:1", "--grace-period", "1", *sshd.options(), *python(FAMILY)]
    with launched(*words) as launcher:
        pids = [pid for numbers in launcher.numbers(2).values() for pid in numbers]
        os.kill(launcher.pid, number)
        if number == signal.SIGTERM:
            assert launcher.wait() == 128 + number
        assert are_gone(pids)


def ssh_clients(launcher: Launched) -> list[int]:
    pids = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == "ssh"]


def test_a_connection_that_breaks_ends_the_job(sshd: Sshd) -> None:
    with launched("-H", "localhost:1,127.0.0.2:1", "--grace-period", "1", *sshd.options(), *python(FAMILY)) as launcher:
        pids = [pid for numbers in launcher.numbers(2).values() for pid in numbers]
        [client] = ssh_clients(launcher)
        os.kill(client, signal.SIGKILL)
        assert launcher.wait() == 1
        assert "lost host 127.0.0.2" in launcher.log
        assert are_gone(pids)


def test_a_host_that_cannot_be_reached_is_named(sshd: Sshd) -> None:
    result = run("-H", "localhost:1,127.0.0.2:1", *sshd.options(), "-p", "1", "true")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("Error: host 127.0.0.2: ssh: ")
    assert "Connection refused" in result.stderr


def test_a_host_without_the_command_is_named(sshd: Sshd) -> None:
    result = run("-H", "127.0.0.2:1", *sshd.options(), "no-such-command")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == "Error: 127.0.0.2: no-such-command: No such file or directory"


def test_a_secret_is_not_on_the_command_line_of_ssh(sshd: Sshd) -> None:
    code = "import os; os.write(1, os.environ['OMNIREDUCE_SECURITY_SECRET'].encode() + b'\\n')" + FAMILY
    with launched("-H", "localhost:1,127.0.0.2:1", "--grace-period", "1", *sshd.options(), *python(code)) as launcher:
        secrets = {launcher.line(READY_S).partition(">:")[2] for _ in range(4)} - {""}
        secrets = {secret for secret in secrets if len(secret) == 64}
        assert len(secrets) == 1
        for client in ssh_clients(launcher):
            assert secrets.pop().encode() not in Path(f"/proc/{client}/cmdline").read_bytes()


def test_an_elastic_job_goes_on_without_a_host(sshd: Sshd) -> None:
    """Its rank starts again on a host that has a slot."""
    code = "import os, signal\nos.write(1, f'{os.getpid()}\\n'.encode())\nwhile True: signal.pause()"
    hosts = ["-H", "localhost:1,127.0.0.2:1,127.0.0.3:1", "--grace-period", "1"]
    with launched("-np", "2", "--min-np", "1", *hosts, *sshd.options(), *python(code)) as launcher:
        before = launcher.numbers(2)
        [client] = ssh_clients(launcher)
        os.kill(client, signal.SIGKILL)
        assert are_gone(before[1])
        [(rank, pids)] = launcher.numbers(1).items()
        assert rank == 1
        assert "host 127.0.0.2 gets no ranks for 60 s" in launcher.log
        launcher.signal(signal.SIGTERM)
        assert launcher.wait() == 128 + signal.SIGTERM
        assert are_gone([*pids, *before[0]])
