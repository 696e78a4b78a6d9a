"""Teams on one daemon, and secrets and certificates that change while it runs: real processes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from certificates import Certificates, certificates, needs_openssl
from cluster_checks import expect_round
from local_cluster import WAIT_S, Daemon, configured, eventually, run_job, unique_job, workers
from raw_peer import RawPeer, await_pending
from test_metrics import LISTEN, base, get, scrape
from transports import over

from omnireduce import Communicator, OmniReduceError, RefusedError, TransportError
from omnireduce.aggregator.children import ChannelEnd, Children, Deaths
from omnireduce.aggregator.daemon import Daemon as Supervisor
from omnireduce.aggregator.reload_on_hangup import reload_on_hangup
from omnireduce.runtime.aggregator_client import ask
from omnireduce.support.secret import Secret, load_secret

VISION, SPEECH, GENERAL = "what vision knows ....", "what speech knows ....", "what the operator knows"
NEW = "what vision will know .."


class Keys:
    """The files of an aggregator with teams, and those of their workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "teams").mkdir(0o700)
        self.write("general", GENERAL)
        self.write("teams/vision", VISION)
        self.write("teams/speech", SPEECH)
        self.write("teams/speech.toml", 'jobs = ["speech.*", "shared"]\nmax_jobs = 1\n')
        self.aggregator = [f"security.secret_file={folder}/general", f"security.teams_folder={folder}/teams"]

    def write(self, name: str, content: str) -> None:
        """Replace a file at once, as an operator should."""
        new = self.folder / "new"
        new.touch(0o600)
        new.write_text(content)
        new.rename(self.folder / name)

    def worker(self, team: str, secret: str) -> list[str]:
        """The settings of a worker with its own copy of a secret."""
        name = f"of-a-worker-{team}-{abs(hash(secret))}"
        self.write(name, secret)
        return [f"security.secret_file={self.folder / name}", f"security.team={team}"]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def joins(daemon: Daemon, settings: Sequence[str], job: str = "", *more: str) -> str:
    """Let a worker join that is alone in its job; return why it was refused, "" if it was not."""
    config = configured(daemon.addresses, "cluster.join_timeout_s=20", *settings, *more)
    try:
        with Communicator(config, rank=0, size=1, job=job or None) as comm:
            assert comm.allreduce(np.ones(9)).tolist() == [1.0] * 9
    except RefusedError as error:
        return str(error)
    return ""


def names(daemon: Daemon, settings: Sequence[str]) -> dict[str, str]:
    """The jobs of which a status tells who has this secret, each with its team."""
    config = configured(daemon.addresses, *settings)
    status = ask(daemon.addresses[0], config, WAIT_S, secret=load_secret(config.security))
    return {job.name: job.team for job in status.jobs}


def reload(daemon: Daemon, event: str = "event=reloaded") -> None:
    """Let the daemon read its files again, and wait until it says how that went."""
    count = daemon.log.count(event)
    daemon.signal(signal.SIGHUP)
    assert eventually(lambda: daemon.log.count(event) > count), daemon.log


def test_teams_have_jobs_of_their_own_and_see_no_others(keys: Keys) -> None:
    vision, speech, operator = keys.worker("vision", VISION), keys.worker("speech", SPEECH), keys.worker("", GENERAL)
    mine, theirs = unique_job("vision.train"), unique_job("speech.train")
    with (
        Daemon(2, *keys.aggregator, LISTEN) as daemon,
        workers(daemon, 2, job=mine, overrides=vision) as first,
        workers(daemon, 2, job=theirs, overrides=speech) as second,
        contextlib.ExitStack() as stack,
    ):
        for worker in (*first, *second):
            expect_round(worker, "round", 2)
        waiting = stack.enter_context(RawPeer(daemon.addresses[0]))
        waiting.prove(Secret(GENERAL.encode()))
        waiting.hello("waits", 0, 2)
        await_pending(waiting, [1])
        assert names(daemon, vision) == {mine: "vision"}
        assert names(daemon, speech) == {theirs: "speech"}
        assert names(daemon, operator) == {mine: "vision", theirs: "speech", "waits": ""}
        ranks = scrape(daemon)["omnireduce_job_ranks"]
        assert {(mine, shard, "vision") for shard in daemon.addresses} <= ranks.keys()
        assert {(theirs, shard, "speech") for shard in daemon.addresses} <= ranks.keys()
        assert f"job={mine} generation=1 team=vision" in daemon.log
        refusal = f"job '{theirs}' does not belong to team 'vision': set cluster.job to 'vision', 'vision.*'"
        assert refusal in joins(daemon, vision, theirs)
        assert eventually(lambda: "event=refused" in daemon.log)
        [line, *_] = [line for line in daemon.log.splitlines() if "event=refused" in line]
        assert " team=vision " in line
        assert " peer=" in line
        expected = (
            "1 jobs of team 'speech' are here already, and max_jobs is 1, in speech.toml on the aggregator: raise it"
        )
        assert expected in joins(daemon, speech, "speech.more")
        assert joins(daemon, vision) == joins(daemon, operator, unique_job()) == ""  # by a name of its own making
        for reason in (joins(daemon, keys.worker("vision", SPEECH)), joins(daemon, keys.worker("none", SPEECH))):
            assert "the client has another secret than the aggregator of team " in reason
            assert ", or there is no such team: give both the same security.secret_file" in reason
        assert all(each not in daemon.log for each in (VISION, SPEECH, GENERAL))


def test_teams_alone_may_join(keys: Keys) -> None:
    """Beyond loopback no further word is needed then, and the monitor has its own way in."""
    [_, folder] = keys.aggregator
    with Daemon(1, folder, LISTEN, listen="0.0.0.0:0") as daemon:
        daemon.addresses = [daemon.addresses[0].replace("0.0.0.0", "127.0.0.1")]
        assert joins(daemon, keys.worker("vision", VISION)) == ""
        assert "the secret of a team wants security.team on the client" in joins(daemon, keys.worker("", VISION))
        assert "wants proof of a shared secret" in joins(daemon, [])
        assert get(f"{base(daemon)}/readyz") == (200, "ready\n")


def test_a_secret_changes_while_jobs_run(keys: Keys) -> None:
    """The steps that an operator goes: both, then the new one with the workers, then the new one alone."""
    old, new, job = keys.worker("vision", VISION), keys.worker("vision", NEW), unique_job("vision.run")
    with Daemon(2, *keys.aggregator, LISTEN) as daemon, workers(daemon, 2, job=job, overrides=old) as running:
        assert "has another secret than the aggregator" in joins(daemon, new)
        keys.write("teams/vision", f"{NEW}\n{VISION}\n")
        reload(daemon)
        assert eventually(lambda: joins(daemon, new) == "")
        assert joins(daemon, old) == ""
        assert names(daemon, new) == {job: "vision"}
        keys.write("teams/vision", NEW)
        reload(daemon)
        assert eventually(lambda: joins(daemon, old) != "")
        assert "has another secret than the aggregator of team 'vision', or there" in joins(daemon, old)
        assert joins(daemon, new) == ""
        (keys.folder / "teams" / "speech.toml").unlink()
        (keys.folder / "teams" / "speech").unlink()
        keys.write("teams/text", SPEECH)
        reload(daemon)
        assert eventually(lambda: joins(daemon, keys.worker("text", SPEECH)) == "")
        assert "or there is no such team" in joins(daemon, keys.worker("speech", SPEECH))
        before = max(worker.expect("round")["round"] for worker in running)
        for worker in running:
            expect_round(worker, "round", before + 2)  # they have proved a secret that is valid no longer
        assert get(f"{base(daemon)}/readyz") == (200, "ready\n")
        assert all(each not in daemon.log for each in (VISION, NEW, SPEECH, GENERAL))


def test_files_that_cannot_be_used_change_nothing(keys: Keys) -> None:
    worker = keys.worker("vision", VISION)
    with Daemon(1, *keys.aggregator) as daemon:
        keys.write("teams/vision", "short")
        keys.write("teams/text", "what a new team knows")
        reload(daemon, "event=reload_failed")
        assert "files could not be read again; the old rules stay in force: " in daemon.log
        assert "vision: got a secret of 5 bytes, expected 16 to 4096" in daemon.log
        assert joins(daemon, worker) == ""
        os.kill(daemon.shard_pids[0], signal.SIGKILL)  # the next one does not read them either
        assert eventually(lambda: "event=shard_died" in daemon.log)
        assert joins(daemon, worker) == ""
        assert "or there is no such team" in joins(daemon, keys.worker("text", "what a new team knows"))


def test_a_shard_that_is_started_again_admits_whom_the_others_do(keys: Keys) -> None:
    """Though that changed after the daemon was started."""
    new = keys.worker("vision", NEW)
    with Daemon(1, *keys.aggregator) as daemon:
        keys.write("teams/vision", NEW)
        reload(daemon)
        os.kill(daemon.shard_pids[0], signal.SIGKILL)
        assert eventually(lambda: "event=shard_died" in daemon.log)
        assert joins(daemon, new) == ""


def test_many_signals_are_no_harm(keys: Keys) -> None:
    """Also while it starts, and while a shard is started again."""
    worker = keys.worker("vision", VISION)
    with Daemon(2, *keys.aggregator) as daemon:
        for _ in range(300):
            daemon.signal(signal.SIGHUP)
        os.kill(daemon.shard_pids[0], signal.SIGKILL)
        for _ in range(300):
            daemon.signal(signal.SIGHUP)
        assert eventually(lambda: "event=shard_died" in daemon.log)
        reload(daemon)
        assert joins(daemon, worker) == ""
        assert daemon.log.count("event=shard_died") == 1


def test_an_error_while_files_are_read_again_ends_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(configured(["127.0.0.1:1"]))
    before = supervisor._access

    def fail(*arguments: object) -> None:
        raise OSError("the folder hangs")

    monkeypatch.setattr("omnireduce.aggregator.daemon.make_access", fail)
    supervisor._reload()
    assert supervisor._access is before
    supervisor._signals.close()
    supervisor._signals_writer.close()


def test_the_key_of_tickets_is_of_one_daemon_and_outlives_a_reload(keys: Keys) -> None:
    """A shard that is started again afterwards knows the survivors of its jobs."""
    supervisors = [Supervisor(configured(["127.0.0.1:1"], *keys.aggregator)) for _ in range(2)]
    before = [each._access for each in supervisors]
    assert [len(each.ticket_key) for each in before] == [32, 32]
    assert before[0].ticket_key != before[1].ticket_key
    for supervisor, access in zip(supervisors, before, strict=True):
        supervisor._reload()
        assert supervisor._access is not access
        assert supervisor._access.ticket_key == access.ticket_key
        supervisor._signals.close()
        supervisor._signals_writer.close()


def test_a_child_hears_a_signal_that_came_before_it_listened() -> None:
    """It is blocked from its birth, so it neither ends the child nor is lost."""
    read_end, write_end = os.pipe()

    def run(line: ChannelEnd) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        reload_on_hangup(lambda: bool(os.write(write_end, b"!")))
        select.select([line], [], [])

    family = Children()
    family.start("shard", "a:1", run, Deaths())
    os.close(write_end)
    assert os.read(read_end, 1) == b"!"
    family.send_hangup()
    assert os.read(read_end, 1) == b"!"
    assert family.stop(family.members, WAIT_S) == []
    assert family.members[0].process.exitcode == 0
    assert os.read(read_end, 1) == b""
    os.close(read_end)


@pytest.fixture
def another() -> Iterator[Certificates]:
    """Certificates that another authority has signed."""
    with contextlib.closing(Certificates()) as found:
        yield found


@needs_openssl
def test_a_certificate_changes_while_jobs_run(tmp_path: Path, another: Certificates) -> None:
    """New connections get the new one; a file that is none leaves the old one."""
    first, second, tcp = certificates(), another, over("tcp")
    ours = tmp_path / "aggregator"
    settings = [f"security.tls_certificate={ours}.pem", f"security.tls_key={ours}.key"]

    def install(source: Certificates) -> None:
        for suffix in (".pem", ".key"):
            shutil.copy(source.folder / f"aggregator{suffix}", f"{ours}{suffix}")

    def fails(source: Certificates) -> bool:
        with contextlib.suppress(TransportError):
            return bool(joins(daemon, [*tcp, source.trust()], unique_job()))
        return True

    install(first)
    with Daemon(1, *settings) as daemon, workers(daemon, 2, overrides=[*tcp, first.trust()]) as running:
        assert (fails(first), fails(second)) == (False, True)
        install(second)
        reload(daemon)
        assert eventually(lambda: not fails(second))
        assert fails(first)
        Path(f"{ours}.pem").write_text("no certificate")
        reload(daemon, "event=reload_failed")
        assert f"security.tls_certificate: {ours}.pem has no certificate that can be read" in daemon.log
        assert not fails(second)
        before = max(worker.expect("round")["round"] for worker in running)
        for worker in running:
            expect_round(worker, "round", before + 2)


@contextlib.contextmanager
def on_a_terminal() -> Iterator[tuple[Daemon, int]]:
    """A daemon whose terminal this is; closing the descriptor closes the terminal."""
    ours, theirs = os.openpty()
    script = (
        "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(int(sys.argv[1]), termios.TIOCSCTTY, 0); "
    )
    script += "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # nohup may have started the tests
    script += "os.execv(sys.argv[2], sys.argv[2:])"
    with Daemon(1, prefix=[sys.executable, "-c", script, str(theirs)], pass_fds=[theirs]) as daemon:
        os.close(theirs)
        yield daemon, ours


def test_without_its_terminal_a_daemon_ends() -> None:
    """SIGHUP says that as well. While the terminal is there, it means to read files again."""
    with on_a_terminal() as (daemon, terminal):
        reload(daemon)
        os.close(terminal)
        assert daemon.wait() == 0
        assert "event=stopped" in daemon.log


def test_a_worker_that_was_refused_may_try_again(keys: Keys) -> None:
    with Daemon(1, *keys.aggregator) as daemon:
        config = configured(daemon.addresses, *keys.worker("vision", VISION))
        with pytest.raises(OmniReduceError, match="does not belong to team 'vision'"):
            Communicator(config, rank=0, size=1, job="speech.x")
        assert run_job(config, 2, lambda comm: comm.size, job="vision") == [2, 2]
