"""The unit of systemd: what systemd says of it, and that the service behind it runs as the unit expects."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deployment import BIN, DEPLOY, aggregator, as_here, page, systemd_socket
from local_cluster import READY_S, WAIT_S, Process

from omnireduce.config import load_config

UNIT = DEPLOY / "systemd" / "omnireduce-aggregator.service"
SETTINGS = DEPLOY / "systemd" / "aggregator.toml"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    return parser["Service"]


def test_the_unit_is_one_to_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    text = UNIT.read_text()
    assert text.count("/opt/omnireduce/bin/") == 2
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/opt/omnireduce/bin/", f"{BIN}/"))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(text.replace("/opt/omnireduce/bin/", f"{BIN}/").replace("KillMode=mixed", "KillMode=mixd"))
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "Failed to parse kill mode" in done.stderr  # the check sees a mistake


def test_the_service_runs_as_the_unit_says() -> None:
    """Type=notify: ready when it says so, and it ends by itself on SIGTERM."""
    program, *options = shlex.split(service()["ExecStart"])
    assert options == ["--config", "/etc/omnireduce/aggregator.toml"]
    command = as_here([program, "--config", str(SETTINGS)])
    with systemd_socket() as (path, systemd):
        environ = {
            "NOTIFY_SOCKET": path,
            "OMNIREDUCE_AGGREGATOR_LISTEN": "127.0.0.1:0",
            "OMNIREDUCE_METRICS_LISTEN": "127.0.0.1:0",
        }
        with aggregator(command, environ) as (process, addresses):
            assert systemd.recv(4096).startswith(b"READY=1\n")
            assert len(addresses) == load_config(SETTINGS, environ={}).aggregator.shards
            assert page(process, "/readyz") == "ready\n"
            assert process.log.startswith("{")
        assert systemd.recv(4096).startswith(b"STOPPING=1\n")


def test_without_its_secret_the_service_says_what_is_missing() -> None:
    """It listens beyond loopback, as the unit has it."""
    assert service()["EnvironmentFile"] == "/etc/omnireduce/secret.env"
    assert "OMNIREDUCE_SECURITY_SECRET=$(openssl rand -hex 32)" in UNIT.read_text()
    with Process(*as_here(["omnireduce-aggregator", "--config", str(SETTINGS)])) as process:
        assert process.wait(READY_S) == 2
        assert "without a secret all of them may join: give security.secret_file" in process.log


def test_limits_and_times_fit_the_configuration() -> None:
    found, settings = service(), load_config(SETTINGS, environ={})
    assert found["Type"] == "notify"
    assert float(found["WatchdogSec"]) > 2 * settings.aggregator.watchdog_s > 0
    assert found["LimitMEMLOCK"] == "infinity"
    assert int(found["TimeoutStopSec"]) > settings.aggregator.drain_s + 5
    assert int(found["LimitNOFILE"]) * 3 // 4 > settings.aggregator.max_world_size
