"""Warnings of a daemon: settings that have no effect, that let nobody in, or that need a restart."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from local_cluster import READY_S, Daemon, Process, configured, eventually, start_job

from omnireduce import Communicator, ConfigError
from omnireduce.aggregator.access import make_access
from omnireduce.aggregator.advice import advice, changed_settings, refuse_itself_as_upstream
from omnireduce.support.config import load_config


def advice_for(*settings: str) -> list[tuple[str, str]]:
    config = load_config(overrides=settings, environ={})
    return list(advice(config, make_access(config)))


def test_a_folder_without_teams_lets_nobody_in(tmp_path: Path) -> None:
    folder = tmp_path / "teams"
    folder.mkdir(0o700)
    text = f"security.teams_folder: {folder} has no team, and there is no other secret: nobody can join"
    assert advice_for(f"security.teams_folder={folder}") == [("nobody_may_join", text)]
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("the operator's own secret")
    assert advice_for(f"security.teams_folder={folder}", f"security.secret_file={secret}") == []
    secret.rename(folder / "vision")
    assert advice_for(f"security.teams_folder={folder}") == []


def test_what_has_no_effect_is_said() -> None:
    text = "metrics.token_file has no effect: metrics.listen is not set, so there are no pages"
    assert advice_for("metrics.token_file=token") == [("no_effect", text)]
    assert advice_for("metrics.token_file=token", "metrics.listen=127.0.0.1:9464") == []
    text = "security.team has no effect on an aggregator, which admits more than team vision"
    assert advice_for("security.team=vision") == [("no_effect", text)]
    assert advice_for() == []


@pytest.mark.parametrize(
    ("upstream", "address", "is_itself"),
    [
        ("127.0.0.1:7400", "127.0.0.1:7400", True),
        ("localhost:7400", "127.0.0.1:7400", True),
        ("127.0.0.1:7401", "0.0.0.0:7401", True),
        ("[::1]:7400", "[::]:7400", True),
        ("127.0.0.1:7400", "127.0.0.1:7401", False),
        ("192.0.2.1:7400", "0.0.0.0:7400", False),
        ("127.0.0.1:7400", "127.0.0.2:7400", False),
        ("no-such-host.invalid:7400", "0.0.0.0:7400", False),
    ],
)
def test_a_relay_is_not_its_own_upstream(upstream: str, address: str, is_itself: bool) -> None:
    if not is_itself:
        refuse_itself_as_upstream([upstream], ["127.0.0.1:1", address])
        return
    with pytest.raises(ConfigError, match="is this aggregator itself, expected the one above it"):
        refuse_itself_as_upstream(["192.0.2.1:7400", upstream], ["127.0.0.1:1", address])


def test_a_daemon_that_is_its_own_upstream_does_not_start() -> None:
    with Daemon(1) as daemon:
        address = daemon.addresses[0]
    settings = ["--listen", address, "--set", f"aggregator.upstream={address}"]
    with Process(sys.executable, "-m", "omnireduce.aggregator", *settings) as process:
        assert process.wait(READY_S) == 2
        assert (
            process.log
            == f"Error: aggregator.upstream: {address} is this aggregator itself, expected the one above it\n"
        )


def test_what_changed_in_the_configuration_and_does_not_count_is_named(tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    file.write_text("[aggregator]\nmax_jobs = 3\n[train]\nsteps = 5\n")
    with Daemon(1, environ={"OMNIREDUCE_CONFIG": str(file)}) as daemon:
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: daemon.log.count("event=reloaded") == 2)
        assert "restart_needed" not in daemon.log
        file.write_text("[aggregator]\nmax_jobs = 9\n[train]\nsteps = 6\n[log]\nlevel = 'debug'\n")
        daemon.signal(signal.SIGHUP)
        what = (
            "changed, but takes effect only after a restart:"
            " aggregator.max_jobs (3, now 9), log.level ('info', now 'debug')"
        )
        assert eventually(lambda: what in daemon.log.replace('\\"', "'")), daemon.log
        file.write_text("[aggregator]\nmax_jobs = 'many'\n")
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: f"the next start would fail: {file}: aggregator.max_jobs: got" in daemon.log)


def test_keys_that_only_workers_read_do_not_count() -> None:
    before, after = (load_config(overrides=[f"cluster.job={job}"], environ={}) for job in ("a", "b"))
    assert changed_settings(before, after) == []
    assert changed_settings(before, load_config(overrides=["transport.kind=tcp"], environ={})) == [
        'transport.kind ("auto", now "tcp")'
    ]


def test_a_worker_that_lists_a_part_of_the_shards_is_warned(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Communicator) -> float:
        return float(comm.allreduce(np.ones(9))[0])

    assert start_job(configured(daemon.addresses), 2, work).results() == [2.0, 2.0]
    assert "idle_shards" not in [getattr(record, "event", "") for record in caplog.records]
    assert start_job(configured(daemon.addresses[:2], "protocol.urgent_bytes=100"), 2, work).results() == [2.0, 2.0]
    text = (
        f"aggregator {daemon.addresses[0]} has 3 shards, and cluster.aggregators lists 2: the others have nothing to do"
    )
    assert caplog.text.count(text) == 1
