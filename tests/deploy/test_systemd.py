"""The unit of systemd: what systemd says of it, and that the service behind it runs as the unit expects."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from deployment import (
    BIN,
    DEPLOY,
    HERE,
    JOB_BYTES,
    KIB,
    MIB,
    OLD,
    RANK_BYTES,
    TLS_BYTES,
    aggregator,
    as_here,
    check_rotation,
    memory_bytes,
    page,
    systemd_socket,
)
from local_cluster import READY_S, ROOT, WAIT_S, Daemon, Process, configured, eventually, run_job, start_job
from pod_here import need_pods, pod_command, pod_with
from transports import over

from omnireduce.errors import OmniReduceError
from omnireduce.support.config import Aggregator, load_config
from omnireduce.transport.framing import READ_BYTES, SMALL_LIMIT

UNIT = DEPLOY / "systemd" / "omnireduce-aggregator.service"
SETTINGS = DEPLOY / "systemd" / "aggregator.toml"


def settings_of(key: str) -> list[str]:
    """The values that the unit gives to a key, in their order: some keys come more than once."""
    lines = UNIT.read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.partition("=")[0] == key]


def setting(key: str) -> str:
    [result] = settings_of(key)
    return result


def test_the_unit_is_one_to_systemd(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    text = UNIT.read_text()
    assert text.count("/opt/omnireduce/bin/") == 2
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace("/opt/omnireduce/bin/", f"{BIN}/"))
    result = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    unit.write_text(text.replace("/opt/omnireduce/bin/", f"{BIN}/").replace("KillMode=mixed", "KillMode=mixd"))
    result = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert "Failed to parse kill mode" in result.stderr  # the check sees a mistake


def reload(process: Process) -> None:
    """Run the command of `systemctl reload`."""
    program, *arguments = shlex.split(setting("ExecReload"))
    arguments[arguments.index("$MAINPID")] = str(process.pid)
    assert subprocess.run([program, *arguments], timeout=WAIT_S, check=False).returncode == 0


def test_the_service_runs_as_the_unit_says(tmp_path: Path) -> None:
    """Type=notify: ready when it says so, and it ends by itself on SIGTERM. A reload takes a new secret."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(OLD)
    program, command_name, *options = shlex.split(setting("ExecStart"))
    assert options == ["--config", "/etc/omnireduce/aggregator.toml"]
    command = as_here([program, command_name, "--config", str(SETTINGS)])
    with systemd_socket() as (path, systemd):
        environ = {"NOTIFY_SOCKET": path, "OMNIREDUCE_SECURITY_SECRET_FILE": str(secret), **HERE}
        with aggregator(command, environ, {}) as (process, addresses):
            assert systemd.recv(4096).startswith(b"READY=1\n")
            assert len(addresses) == load_config(SETTINGS, environ={}).aggregator.shards
            assert process.log.startswith("{")
            check_rotation(process, addresses, secret, tmp_path / "own", lambda: reload(process))
        assert systemd.recv(4096).startswith(b"STOPPING=1\n")


def test_the_services_own_user_reads_each_new_secret(tmp_path: Path) -> None:
    """The unit's command as it is, as a user of no rights: the secret is root's, and the user is in its group."""
    need_pods()
    user, group = 64_123, 64_124  # as DynamicUser= would pick one; the group of SupplementaryGroups=
    folder, scratch = tmp_path / "etc", tmp_path / "pod"
    folder.mkdir(0o755)
    scratch.mkdir()
    shutil.copy(SETTINGS, folder)
    secret = Path(folder, Path(load_config(SETTINGS, environ={}).security.secret_file).name)
    secret.write_text(OLD)
    os.chown(secret, 0, group)
    secret.chmod(0o440)
    service = pod_with(folder, "/etc/omnireduce", user, group, HERE)
    command = pod_command(scratch, service, {}, as_here(shlex.split(setting("ExecStart"))))
    with aggregator(command, {}, {}) as (process, addresses):
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert [line.split()[1:] for line in status.splitlines() if line.startswith(("Uid:", "Groups:"))] == [
            [str(user)] * 4,
            [str(group)],
        ]
        check_rotation(process, addresses, secret, tmp_path / "own", lambda: reload(process))


def test_the_unit_gives_the_service_the_group_that_reads_the_secret() -> None:
    """A credential would be a copy that no reload changes."""
    assert settings_of("LoadCredential") == []
    group, text = setting("SupplementaryGroups"), UNIT.read_text()
    file = load_config(SETTINGS, environ={}).security.secret_file
    assert f"#   groupadd --system {group} " in text
    assert f"#   chgrp {group} {file} && chmod 440 {file}\n" in text
    assert group != UNIT.stem  # DynamicUser= makes a user and a group of that name


def test_without_its_secret_the_service_says_what_is_missing(tmp_path: Path) -> None:
    """It listens beyond loopback, as the unit has it."""
    for file, message in (
        (str(tmp_path / "none"), f"security.secret_file: {tmp_path}/none cannot be read: No such file"),
        ("", "without a secret all of them may join: give security.secret_file"),
    ):
        environ = {"OMNIREDUCE_SECURITY_SECRET_FILE": file}
        with Process(*as_here(["omnireduce", "aggregator", "--config", str(SETTINGS)]), environ=environ) as process:
            assert process.wait(READY_S) == 2
            assert message in process.log


def test_limits_and_times_fit_the_configuration() -> None:
    settings = load_config(SETTINGS, environ={}).aggregator
    assert setting("Type") == "notify"
    assert float(setting("WatchdogSec")) > 2 * settings.watchdog_s > 0
    assert setting("LimitMEMLOCK") == "infinity"
    assert int(setting("TimeoutStopSec")) > settings.finish_s + 5
    assert int(setting("LimitNOFILE")) * 3 // 4 > settings.max_ranks
    memory = int(setting("MemoryMax").removesuffix("G")) << 30
    assert memory_bytes(settings) <= memory < 2 * memory_bytes(settings)


def test_memory_is_counted_as_the_document_says() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    [row] = [line for line in text.splitlines() if line.startswith("| memory of slots and state ")]
    assert f"Work space adds {JOB_BYTES // MIB} MiB and for each rank {RANK_BYTES // KIB} KiB" in row
    connection = f"a connection {READ_BYTES // KIB} KiB, with TLS {TLS_BYTES // KIB} KiB more"
    assert f"{connection}, a peer that does not read {SMALL_LIMIT // MIB} MiB" in row
    one, job, rank = (memory_bytes(Aggregator(max_jobs=n, max_ranks=m)) for n, m in ((1, 1), (2, 1), (1, 2)))
    assert job - one == JOB_BYTES
    assert rank - one == RANK_BYTES + READ_BYTES + TLS_BYTES + SMALL_LIMIT


CONFINED = {
    **dict.fromkeys(("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictNamespaces"), "yes"),
    **dict.fromkeys(("ProtectKernelModules", "ProtectKernelTunables", "ProtectControlGroups"), "yes"),
    **dict.fromkeys(("LockPersonality", "RestrictSUIDSGID", "RestrictRealtime", "ProtectClock"), "yes"),
    "CapabilityBoundingSet": "",
    "AmbientCapabilities": "",
    "ProtectSystem": "strict",
    "UMask": "0077",
    "DevicePolicy": "closed",
    "DeviceAllow": "char-infiniband_verbs rw",
    "SystemCallArchitectures": "native",
}


def test_the_service_may_do_little() -> None:
    assert {key: setting(key) for key in CONFINED} == CONFINED


def test_systemd_finds_the_service_well_confined() -> None:
    """Its own measure, from 0 for nothing that the service can harm to 10; 9.6 without any confinement."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    rate = [analyze, "security", "--offline=true", "--no-pager", "--threshold"]
    for threshold, status in (("25", 0), ("10", 1)):  # in tenths; the second shows that the check can fail
        result = subprocess.run([*rate, threshold, UNIT], capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert result.returncode == status, result.stdout + result.stderr


def calls_of(analyze: str, name: str) -> set[str]:
    """The system calls of a set, as this host's systemd knows it, or of a name that is one."""
    if not name.startswith("@"):
        return {name}
    result = subprocess.run(
        [analyze, "syscall-filter", name], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    words = [
        line.strip() for line in result.stdout.splitlines()[1:] if line.strip() and not line.strip().startswith("#")
    ]
    return set().union(*(calls_of(analyze, word) for word in words))


@pytest.fixture(scope="module")
def allowed() -> set[str]:
    """The system calls that the unit lets the service make."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here, which knows what is in the sets of system calls")
    try:
        ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("no libseccomp here, which makes the filter")
    results: set[str] = set()
    for line in settings_of("SystemCallFilter"):
        names = set().union(*(calls_of(analyze, word) for word in line.removeprefix("~").split()))
        results = results - names if line.startswith("~") else results | names
    return results


def behind(folder: Path, calls: set[str], families: list[int]) -> list[str]:
    """The prefix of a command that runs it behind a filter."""
    file = folder / "filter.json"
    file.write_text(json.dumps({"calls": sorted(calls), "families": families}))
    return [sys.executable, str(ROOT / "tests" / "deploy" / "filtered.py"), str(file)]


def unit_families() -> list[int]:
    return [int(getattr(socket, name)) for name in setting("RestrictAddressFamilies").split()]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for kernels that is still empty."""
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_an_aggregator_needs_no_call_beyond_the_filter(
    tmp_path: Path, kernels: Path, allowed: set[str], kind: str
) -> None:
    """A call beyond it would end it. Kernels are compiled, jobs run, a shard dies, pages are served."""
    prefix = behind(tmp_path, allowed, unit_families())
    environ = {"OMNIREDUCE_CACHE": str(kernels), "OMNIREDUCE_METRICS_LISTEN": "127.0.0.1:0"}
    large = np.arange(1_000_000, dtype=np.float32)
    with Daemon(2, prefix=prefix, environ=environ) as daemon:
        for pid in (daemon.pid, *daemon.shard_pids):
            assert "\nSeccomp:\t2\n" in Path(f"/proc/{pid}/status").read_text()
        config = configured(daemon.addresses, *over(kind))
        for _ in range(2):
            for result in run_job(config, 3, lambda comm: comm.allreduce(large.copy())):
                assert np.array_equal(result, 3 * large)
            assert page(daemon, "/metrics").count("omnireduce_shard_up{") == 2
            if "event=shard_died" not in daemon.log:
                os.kill(daemon.shard_pids[-1], signal.SIGKILL)  # the first is the monitor
                assert eventually(lambda: "event=shard_died" in daemon.log), daemon.log
        assert daemon.log.count("_died") == 1, daemon.log


def test_a_call_beyond_the_filter_would_be_seen(tmp_path: Path, allowed: set[str]) -> None:
    """The filter of the test above ends who calls what it does not allow."""
    start = as_here(["omnireduce", "aggregator", "--listen", "127.0.0.1:0"])
    with Process(*behind(tmp_path, allowed, [int(socket.AF_UNIX)]), *start) as process:
        assert process.wait(READY_S) == -signal.SIGSYS, process.log
    with Daemon(1, prefix=behind(tmp_path, allowed - {"memfd_create"}, unit_families())) as daemon:
        config = configured(daemon.addresses, "transport.kind=shm", "cluster.join_timeout_s=5")
        ranks = start_job(config, 2, lambda comm: comm.allreduce(np.ones(10)))
        assert all(isinstance(outcome, OmniReduceError) for outcome in ranks.outcomes())
        assert eventually(lambda: "event=shard_died" in daemon.log), daemon.log
