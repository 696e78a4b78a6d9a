"""Metrics and health over HTTP, from a real daemon: right numbers, the truth about dead shards, nothing that blocks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import OPENSSL, certificates
from cluster_checks import FAILURE_S, assert_serves, expect_round
from local_cluster import (
    READY_S,
    WAIT_S,
    Daemon,
    Process,
    children,
    configured,
    eventually,
    gone_within,
    unique_job,
    workers,
)
from prometheus_client.parser import text_string_to_metric_families
from transports import BY_SHARDS

from omnireduce.aggregator.http_monitor import CONNECTIONS
from omnireduce.protocol.collective.effects import ABORT_KINDS
from omnireduce.runtime.aggregator_client import ask
from omnireduce.support.addresses import parse_address

LISTEN = "metrics.listen=127.0.0.1:0"
Samples = dict[str, dict[tuple[str, ...], float]]


def base(daemon: Process) -> str:
    assert eventually(lambda: "event=metrics" in daemon.log)
    match = re.search(r"http://\S+:\d+", daemon.log)
    assert match is not None
    return match[0]


def get(url: str) -> tuple[int, str]:
    """Status and text of a page. Every page comes within a bounded time."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(daemon: Daemon) -> Samples:
    """All samples: by name, then by the values of their labels in the order of the labels' names."""
    status, text = get(f"{base(daemon)}/metrics")
    assert status == 200
    results: Samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            key = tuple(value for _, value in sorted(sample.labels.items()) if value)  # an empty label is none
            assert key not in results.setdefault(sample.name, {}), f"{sample.name} {key} twice"
            results[sample.name][key] = sample.value
    return results


def aborts(found: Samples, cause: str) -> float:
    return sum(value for key, value in found["omnireduce_aborts_total"].items() if key[0] == cause)


def shard_pid(daemon: Daemon, shard: int) -> int:
    return ask(daemon.addresses[shard], configured(daemon.addresses), WAIT_S).pid


@pytest.fixture(scope="module")
def watched() -> Iterator[Daemon]:
    with Daemon(2, LISTEN) as daemon:
        yield daemon


def test_a_scrape_says_what_the_shards_say(watched: Daemon) -> None:
    job = unique_job("scraped")
    with workers(watched, 2, "--hold", "1", "3", job=job, overrides=[BY_SHARDS]) as (first, late):
        late.expect("held")
        expect_round(first, "started", 3)
        assert eventually(lambda: ("1",) in {key[1:2] for key in scrape(watched)["omnireduce_job_waiting_seconds"]})
        metrics = scrape(watched)
        for shard in watched.addresses:
            status = ask(shard, configured([shard]), WAIT_S)
            [row] = [each for each in status.jobs if each.name == job]
            traffic, key = row.traffic, (job, shard)
            assert (metrics["omnireduce_shard_up"][(shard,)], traffic.collectives) == (1, 3)
            assert metrics["omnireduce_collectives_total"][(shard,)] == status.traffic.collectives
            assert metrics["omnireduce_job_collectives_total"][key] == 3
            assert metrics["omnireduce_job_received_bytes_total"][key] == traffic.received_bytes
            assert metrics["omnireduce_job_sent_bytes_total"][key] == traffic.sent_bytes
            assert metrics["omnireduce_job_own_blocks_total"][key] == traffic.own_blocks
            assert metrics["omnireduce_job_density"][key] == traffic.density == 1
            assert metrics["omnireduce_job_union_density"][key] == traffic.union_density == 1
            assert (metrics["omnireduce_job_ranks"][key], metrics["omnireduce_job_slots"][key]) == (2, 6)
            assert metrics["omnireduce_job_slots_in_use"][key] == row.slots_in_use == 1
            assert metrics["omnireduce_shard_running_jobs"][(shard,)] == 1
            assert metrics["omnireduce_shard_uptime_seconds"][(shard,)] <= status.uptime_s
            assert metrics["omnireduce_job_waiting_seconds"][(job, "1", shard)] > 0
            assert {cause for cause, name in metrics["omnireduce_aborts_total"] if name == shard} == set(ABORT_KINDS)
        late.go_on()
        expect_round(late, "round", 3)
        assert any(key[:2] == (job, "1") for key in scrape(watched)["omnireduce_job_late_seconds_total"])


def test_counters_outlive_their_jobs_and_job_metrics_do_not(watched: Daemon) -> None:
    assert eventually(lambda: not scrape(watched).get("omnireduce_job_ranks"))  # the job of the test before
    before, job = scrape(watched), unique_job("brief")
    with workers(watched, 2, "--rounds", "7", job=job, overrides=[BY_SHARDS]) as ranks:
        for worker in ranks:
            worker.expect("left")
    assert eventually(lambda: not any(job in key for key in scrape(watched).get("omnireduce_job_ranks", {})))
    after = scrape(watched)
    for name in ("omnireduce_collectives_total", "omnireduce_jobs_ended_total", "omnireduce_received_bytes_total"):
        for shard in watched.addresses:
            gained = after[name][(shard,)] - before[name][(shard,)]
            assert gained == {"omnireduce_collectives_total": 7, "omnireduce_jobs_ended_total": 1}.get(name, gained)
            assert gained > 0
    with workers(watched, 2, job=job) as ranks:
        ranks[0].signal(signal.SIGKILL)
        ranks[1].expect("error")
    causes = {cause for cause in ABORT_KINDS if aborts(scrape(watched), cause) > aborts(after, cause)}
    assert "lost" in causes
    assert causes <= {"lost", "relayed"}  # the second shard may hear of it from the other rank first


def test_other_pages(watched: Daemon) -> None:
    assert get(f"{base(watched)}/healthz") == (200, "alive\n")
    assert get(f"{base(watched)}/readyz") == (200, "ready\n")
    assert get(f"{base(watched)}/nowhere") == (404, "try /, /metrics, /healthz or /readyz\n")


def test_a_stopped_shard_is_not_ready_and_the_others_still_report(watched: Daemon) -> None:
    pid = shard_pid(watched, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        status, text = get(f"{base(watched)}/readyz")
        assert time.monotonic() - began < 1.0 + FAILURE_S
        assert status == 503
        assert text.startswith(f"{watched.addresses[1]}: aggregator {watched.addresses[1]} takes the connection, but ")
        assert text.count("\n") == 1
        up = scrape(watched)["omnireduce_shard_up"]
        assert [up[(shard,)] for shard in watched.addresses] == [1, 0]
        assert get(f"{base(watched)}/healthz") == (200, "alive\n")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert eventually(lambda: get(f"{base(watched)}/readyz") == (200, "ready\n"))


def test_a_dead_shard_is_not_ready_until_it_is_back(watched: Daemon) -> None:
    """Its supervisor is stopped meanwhile, for it would have it back within milliseconds."""
    watched.signal(signal.SIGSTOP)
    try:
        os.kill(shard_pid(watched, 0), signal.SIGKILL)
        status, text = get(f"{base(watched)}/readyz")
        assert (status, text.split(": ")[0]) == (503, watched.addresses[0])
    finally:
        watched.signal(signal.SIGCONT)
    assert eventually(lambda: get(f"{base(watched)}/readyz") == (200, "ready\n"))
    assert scrape(watched)["omnireduce_collectives_total"][(watched.addresses[0],)] == 0  # a new process
    assert_serves(watched)


def test_a_monitor_that_dies_is_started_again(watched: Daemon) -> None:
    [monitor] = set(children(watched.pid)) - {shard_pid(watched, shard) for shard in range(2)}
    os.kill(monitor, signal.SIGKILL)
    assert eventually(lambda: "event=monitor_died" in watched.log)

    def is_back() -> bool:
        with contextlib.suppress(OSError):
            return get(f"{base(watched)}/readyz")[0] == 200
        return False

    assert eventually(is_back)
    assert "event=shard_died" not in watched.log.split("event=monitor_died")[1]


def test_silent_clients_keep_nobody_waiting(watched: Daemon) -> None:
    address = parse_address(base(watched).removeprefix("http://"))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(CONNECTIONS + 9)]
        for page in ("healthz", "readyz", "metrics"):
            assert get(f"{base(watched)}/{page}")[0] == 200
        for client in (silent[0], silent[-1]):  # one too many, and silent for too long
            client.settimeout(WAIT_S)
            assert client.recv(1) == b""


def test_noise_does_no_harm(watched: Daemon) -> None:
    address = parse_address(base(watched).removeprefix("http://"))
    for noise in (b"\x00" * 70_000, b"GET", b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * 1000, b"\r\n\r\n"):
        with socket.create_connection(address) as client, contextlib.suppress(OSError):
            client.sendall(noise)
    assert get(f"{base(watched)}/readyz") == (200, "ready\n")
    assert "Traceback" not in watched.log


def test_without_an_address_there_is_no_monitor(daemon: Daemon) -> None:
    assert len(children(daemon.pid)) == len(daemon.addresses)
    assert "event=metrics" not in daemon.log


def test_a_daemon_that_listens_everywhere() -> None:
    with Daemon(1, "metrics.listen=0.0.0.0:0", "security.allow_no_secret=true", listen="0.0.0.0:0") as daemon:
        port = base(daemon).rpartition(":")[2]
        assert get(f"http://127.0.0.1:{port}/readyz") == (200, "ready\n")
        _, text = get(f"http://127.0.0.1:{port}/metrics")
        name = f"{socket.gethostname()}:{daemon.addresses[0].rpartition(':')[2]}"
        assert f'omnireduce_shard_up{{shard="{name}"}} 1.0' in text


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_whatever_workers_must_do_the_monitor_gets_its_answers(tmp_path: Path, kind: str) -> None:
    """A secret, and for TCP a certificate for a name that the monitor does not use, and no authority."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("correct horse battery staple")
    sealed = certificates().holder("aggregator") if OPENSSL and kind == "tcp" else []
    settings = [f"security.secret_file={secret}", f"transport.kind={kind}", *sealed]
    with Daemon(2, LISTEN, *settings, listen="127.0.0.2:0") as daemon:
        assert get(f"{base(daemon)}/readyz") == (200, "ready\n")
        assert list(scrape(daemon)["omnireduce_shard_up"].values()) == [1, 1]
        assert str(secret.read_text()) not in daemon.log
        secret.unlink()  # the daemon uses the secret that it read at its start
        assert get(f"{base(daemon)}/readyz") == (200, "ready\n")


def test_while_it_drains_it_is_alive_but_not_ready() -> None:
    with Daemon(1, LISTEN, "aggregator.finish_s=60") as daemon, workers(daemon, 2, "--hold", "1", "1") as (first, late):
        expect_round(first, "started", 1)
        late.expect("held")
        daemon.signal(signal.SIGTERM)
        assert eventually(lambda: "stopping" in daemon.log)
        assert eventually(lambda: get(f"{base(daemon)}/readyz")[0] == 503)
        assert get(f"{base(daemon)}/healthz") == (200, "alive\n")
        late.go_on()
        assert daemon.wait() == 0
        with pytest.raises(OSError, match="refused"):
            get(f"{base(daemon)}/healthz")


def test_nothing_is_left_when_the_supervisor_is_killed() -> None:
    with Daemon(1, LISTEN) as daemon:
        daemon.expected_status = -signal.SIGKILL
        family = children(daemon.pid)
        assert len(family) == 2
        daemon.signal(signal.SIGKILL)
        assert all(gone_within(pid, FAILURE_S) for pid in family)


def test_it_is_not_ready_before_the_shards_are() -> None:
    """A first start compiles kernels for a while."""
    program = """
import os, signal, urllib.error, urllib.request
from omnireduce.aggregator import cli, daemon, http_monitor
opened, really = [], http_monitor.open_http
http_monitor.open_http = lambda address: opened.append(really(address)) or opened[0]
def compiling(progress):
    for page in ("healthz", "readyz"):
        try:
            print(urllib.request.urlopen(f"http://{opened[0][1]}/{page}", timeout=60).status, flush=True)
        except urllib.error.HTTPError as error:
            print(error.code, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
daemon.warm_up_aggregator = compiling
cli.main()
"""
    options = ["--listen", "127.0.0.1:0", "--set", LISTEN, "--set", "metrics.timeout_s=0.2"]
    with Process(sys.executable, "-c", program, *options) as process:
        assert [process.line(READY_S), process.line()] == ["200", "503"]
        assert process.wait() == 0


@pytest.mark.parametrize(
    ("value", "status", "expected"),
    [
        ("nowhere", 2, '--set: metrics.listen: got "nowhere", expected "HOST:PORT"'),
        ("192.0.2.1:9464", 1, "metrics.listen: cannot listen on 192.0.2.1:9464: 192.0.2.1 is no address of this host"),
    ],
)
def test_an_address_that_cannot_be(value: str, status: int, expected: str) -> None:
    command = [
        sys.executable,
        "-m",
        "omnireduce.aggregator",
        "--listen",
        "127.0.0.1:0",
        "--set",
        f"metrics.listen={value}",
    ]
    with Process(*command) as process:
        assert process.wait(READY_S) == status
        assert expected in process.log
        assert process.log.count("\n") == 1


@pytest.mark.slow
def test_systemd_is_told() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        path = f"{folder}/notify"
        systemd.bind(path)
        systemd.settimeout(WAIT_S)
        with Daemon(1, environ={"NOTIFY_SOCKET": path}) as daemon:
            assert systemd.recv(4096).decode() == f"READY=1\nSTATUS=serving at {daemon.addresses[0]}"
            daemon.signal(signal.SIGTERM)
            assert systemd.recv(4096).startswith(b"STOPPING=1\n")
            assert daemon.wait() == 0
    with Daemon(1, environ={"NOTIFY_SOCKET": json.dumps(path)}) as daemon:  # that nobody listens does no harm
        assert_serves(daemon)
