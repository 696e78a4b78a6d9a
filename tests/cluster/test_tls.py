"""TLS between real processes: who must prove to be whom, and what becomes of those who do not."""

from __future__ import annotations

import re
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from certificates import OPENSSL, certificates, needs_openssl
from cluster_checks import assert_serves
from local_cluster import READY_S, WAIT_S, Daemon, Process, Ranks, configured, eventually, run_job, unique_job
from raw_peer import NOISE, RawPeer
from tls_client import TlsClient, needs_libssl
from transports import over

from omnireduce import Communicator, ConfigError, OmniReduceError, TransportError
from omnireduce.support.config import load_config
from omnireduce.transport.tls import aggregator_context

pytestmark = needs_openssl
TCP = over("tcp")


@pytest.fixture(scope="module")
def sealed() -> Iterator[Daemon]:
    """An aggregator with a certificate."""
    with Daemon(2, *certificates().holder("aggregator")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def mutual() -> Iterator[Daemon]:
    """An aggregator with a certificate that wants one of its workers, too."""
    with Daemon(1, *certificates().holder("aggregator"), certificates().trust()) as daemon:
        yield daemon


def failure(daemon: Daemon, *overrides: str) -> str:
    config = configured(daemon.addresses, *TCP, "cluster.join_timeout_s=20", *overrides)
    with pytest.raises(OmniReduceError) as caught:
        Communicator(config, rank=0, size=1, job=unique_job())
    assert type(caught.value) is TransportError
    return str(caught.value)


@pytest.mark.parametrize("elements", [0, 1, 1000, 3_000_000])
def test_results_are_right(sealed: Daemon, elements: int) -> None:
    config = configured(sealed.addresses, *TCP, certificates().trust())
    x = np.arange(elements, dtype=np.float32) % 1024

    def run(comm: Communicator) -> bool:
        results = [comm.allreduce(x, out=np.empty_like(x)) for _ in range(3)]
        return comm.transport == "tcp" and all(np.array_equal(result, 3 * x) for result in results)

    assert run_job(config, 3, run) == [True] * 3


class Tap:
    """Passes one connection on to an aggregator, and keeps what went by."""

    def __init__(self, daemon: Daemon) -> None:
        host, _, port = daemon.addresses[0].rpartition(":")
        self._to = host, int(port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.seen = b""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._server.settimeout(WAIT_S)
        with self._server, self._server.accept()[0] as near, socket.create_connection(self._to, WAIT_S) as far:
            other = {near: far, far: near}
            while True:
                for sock in select.select([near, far], [], [], WAIT_S)[0]:
                    data = sock.recv(65536)
                    if not data:
                        return
                    self.seen += data
                    other[sock].sendall(data)

    def all_seen(self) -> bytes:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return self.seen


def test_what_is_seen_on_the_way(daemon: Daemon, sealed: Daemon) -> None:
    """Blocks and control messages: all of it without TLS, none of it with TLS."""
    pattern = b"a gradient that nobody else is to see ...".ljust(64)
    x = np.frombuffer(pattern * 1000, np.uint8).copy()
    for through, own in ((daemon, []), (sealed, [certificates().trust()])):
        tap, job = Tap(through), unique_job("hidden")
        config = configured([tap.address], *TCP, *own)
        with Communicator(config, rank=0, size=1, job=job) as comm:
            assert np.array_equal(comm.allreduce(x.copy(), op="max"), x)  # a sum would not come back
        seen = tap.all_seen()
        assert len(seen) > 2 * x.nbytes
        assert (pattern in seen, job.encode() in seen) == (not own, not own)


def test_shared_memory_needs_none(sealed: Daemon) -> None:
    assert run_job(configured(sealed.addresses), 2, lambda comm: comm.transport) == ["memory+shm"] * 2


def test_a_name_instead_of_an_address(sealed: Daemon) -> None:
    addresses = [address.replace("127.0.0.1", "localhost") for address in sealed.addresses]
    assert run_job(configured(addresses, *TCP, certificates().trust()), 2, lambda comm: comm.size) == [2, 2]


def test_a_worker_without_tls_is_told(sealed: Daemon) -> None:
    text = failure(sealed)
    assert "before this worker was admitted; does its transport.kind allow tcp, and does it want TLS (" in text


def test_an_aggregator_of_somebody_else_is_not_trusted(sealed: Daemon) -> None:
    text = failure(sealed, certificates().trust("stranger"))
    assert "certificate verify failed" in text
    assert "for this name, and signed by security.tls_ca" in text


def test_a_certificate_for_another_name_is_not_trusted() -> None:
    with Daemon(1, *certificates().holder("aggregator"), listen="127.0.0.2:0") as daemon:
        assert "IP address mismatch, certificate is not valid for '127.0.0.2'" in failure(
            daemon, certificates().trust()
        )


def test_an_aggregator_without_tls_is_not_trusted(daemon: Daemon) -> None:
    text = failure(daemon, certificates().trust())
    assert f"aggregator {daemon.addresses[0]}: no TLS: " in text
    assert "does it have a certificate (security.tls_certificate)" in text


def test_a_worker_that_must_have_a_certificate(mutual: Daemon) -> None:
    trust, own = certificates().trust(), certificates().holder("worker")
    assert run_job(configured(mutual.addresses, *TCP, trust, *own), 2, lambda comm: comm.size) == [2, 2]
    rejected = "before this worker was admitted|no TLS: "  # depends on how soon the aggregator hangs up
    assert re.search(rejected, failure(mutual, trust))
    stranger = certificates().holder("stranger")
    assert re.search(rejected, failure(mutual, trust, *stranger))
    assert eventually(lambda: "no TLS: [SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]" in mutual.log)
    assert eventually(lambda: "no TLS: [SSL: CERTIFICATE_VERIFY_FAILED]" in mutual.log)
    assert_serves(mutual, *TCP, trust, *own)


def test_strangers(sealed: Daemon) -> None:
    """Bytes that are no TLS, a handshake that stops half way: the daemon goes on."""
    staying = [RawPeer(sealed.addresses[0]) for _ in range(20)]
    half = hello_of_a_client()
    for peer, data in zip(
        staying, [b"", b"\x16", half[:50], half, half + NOISE, NOISE, bytes(10_000)] * 3, strict=False
    ):
        peer.send(data)
    with RawPeer(sealed.addresses[0]) as peer:
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.is_closed()
    assert_serves(sealed, *TCP, certificates().trust())
    for peer in staying:
        peer.close()


@needs_libssl
def test_a_stream_of_new_keys_freezes_nobody(sealed: Daemon) -> None:
    """A stranger needs no secret for it, nor a certificate. It is hung up on, again and again, and a job goes on."""
    over, hung_up = threading.Event(), threading.Semaphore(0)

    def flood(_: int) -> int:
        floods = 0
        while not over.is_set():
            client = TlsClient()
            with RawPeer(sealed.addresses[0]) as peer:
                client.shake_hands(peer.sock)
                peer.send(client.key_updates(2000))
                assert peer.is_closed()
            client.close()
            hung_up.release()
            floods += 1
        return floods

    strangers = Ranks(2, flood)
    try:
        for _ in range(3):
            assert hung_up.acquire(timeout=WAIT_S)
            assert_serves(sealed, *TCP, certificates().trust())
    finally:
        over.set()
    floods = sum(strangers.results())
    assert eventually(lambda: sealed.log.count(" TLS records in a row without data") >= min(floods, 3))
    assert "no Hello within" not in sealed.log


def hello_of_a_client() -> bytes:
    """The first bytes that a TLS client sends."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def test_an_old_version_of_tls_is_refused(sealed: Daemon) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certificates().folder / "ca.pem")
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, _, port = sealed.addresses[0].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock, server_hostname=host)


def with_passphrase(folder: Path) -> Path:
    result = folder / "locked.key"
    key = certificates().folder / "aggregator.key"
    command = [str(OPENSSL), "pkey", "-in", key, "-aes128", "-passout", "pass:secret", "-out", result]
    subprocess.run(command, check=True, timeout=WAIT_S)
    result.chmod(0o600)
    return result


def test_what_cannot_be_used_is_one_line_and_status_2(tmp_path: Path) -> None:
    certificate, key = certificates().holder("aggregator")
    open_key = tmp_path / "open.key"
    open_key.write_bytes((certificates().folder / "aggregator.key").read_bytes())
    open_key.chmod(0o644)
    (tmp_path / "junk").write_text("no PEM")
    (tmp_path / "junk").chmod(0o600)
    junk = f"{tmp_path}/junk"
    folder, none = certificates().folder, f"{tmp_path}/none"
    for settings, expected in [
        ([certificate], "security.tls_certificate and security.tls_key go together"),
        ([certificates().trust()], "security.tls_certificate: an aggregator with TLS needs one"),
        ([certificate, f"security.tls_key={open_key}"], "security.tls_key: "),
        (
            [certificate, f"security.tls_key={folder}/worker.key"],
            f"security.tls_key: {folder}/worker.key is not the key of the certificate {folder}/aggregator.pem",
        ),
        ([certificate, key, f"security.tls_ca={none}"], f"tls_ca: {none} cannot be read: No such file or directory"),
        ([certificate, key, f"security.tls_ca={tmp_path}"], f"tls_ca: {tmp_path} cannot be read: Is a directory"),
        (
            [certificate, key, f"security.tls_ca={junk}"],
            f"tls_ca: {junk} has no certificate that can be read, expected",
        ),
        ([f"security.tls_certificate={junk}", key], f"tls_certificate: {junk} has no certificate that can be read"),
        (
            [certificate, f"security.tls_key={junk}"],
            f"tls_key: {junk} has no private key that can be read, expected PEM",
        ),
        ([certificate, f"security.tls_key={none}"], f"tls_key: {none} cannot be read: No such file or directory"),
        (
            [certificate, f"security.tls_key={with_passphrase(tmp_path)}"],
            "locked.key has a passphrase, expected a key without one: openssl pkey -in locked.key",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            aggregator_context(load_config(overrides=settings, environ={}).security)
        assert expected in str(caught.value)
    arguments = [word for setting in settings for word in ("--set", setting)]
    with Process(sys.executable, "-m", "omnireduce.aggregator", "--listen", "127.0.0.1:0", *arguments) as process:
        assert process.wait(READY_S) == 2
        assert process.log.count("\n") == 1
        assert expected in process.log


def test_a_worker_with_a_certificate_must_know_whom_to_trust(daemon: Daemon) -> None:
    config = configured(daemon.addresses, *certificates().holder("worker"))
    with pytest.raises(ConfigError, match=r"security\.tls_ca: a worker with TLS needs it"):
        Communicator(config, rank=0, size=1)
