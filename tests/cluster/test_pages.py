"""Access to the pages of metrics: a token, TLS, certificates of clients, and the warning if all may read."""

from __future__ import annotations

import base64
import contextlib
import signal
import socket
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from certificates import certificates, needs_openssl
from local_cluster import READY_S, WAIT_S, Daemon, Process, eventually
from test_metrics import LISTEN, base, get
from test_monitor import serving

from omnireduce.aggregator.http_monitor import CONNECTIONS
from omnireduce.aggregator.page_access import CHALLENGES, make_pages, warning_if_open
from omnireduce.errors import ConfigError
from omnireduce.support.addresses import parse_address
from omnireduce.support.config import Metrics

TOKEN, NEW = "a-token.of_the~scraper+1/2==", "f00d" * 16


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    result = tmp_path / "token"
    result.touch(0o600)
    result.write_text(f"{TOKEN}\n")
    return result


def ask(url: str, *headers: tuple[str, str], tls: ssl.SSLContext | None = None) -> tuple[int, str, str]:
    """Status, text and challenge of a page."""
    request = urllib.request.Request(url, headers=dict(headers))
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S, context=tls) as answer:
            return answer.status, answer.read().decode(), ""
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers.get("WWW-Authenticate", "")


def bearer(token: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {token}"


@pytest.mark.parametrize(
    ("header", "is_admitted"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer  {TOKEN} ", True),
        (f"Bearer {NEW}", True),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Bearer {TOKEN} {NEW}", False),
        (f"Basic {TOKEN}", False),
        (f"Bearer{TOKEN}", False),
        (TOKEN, False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
        ("Bearer é\udcff", False),
        (f"Basic {base64.b64encode(f'anybody:{TOKEN}'.encode()).decode()}", True),
        (f"Basic {base64.b64encode(f':{NEW}'.encode()).decode()}", True),
        (f"Basic {base64.b64encode(f'{TOKEN}:'.encode()).decode()}", False),
        (f"Basic {base64.b64encode(TOKEN.encode()).decode()}", False),
        ("Basic ?", False),
        ("Basic é", False),
        ("Bearer " + "x" * 60_000, False),
    ],
)
def test_which_header_will_do(token_file: Path, header: str, is_admitted: bool) -> None:
    token_file.write_text(f"{TOKEN}\n{NEW}\n")
    assert make_pages(Metrics(token_file=str(token_file))).admits(header) == is_admitted
    assert make_pages(Metrics()).admits(header)


def test_a_token_that_cannot_be_used_is_refused(token_file: Path) -> None:
    for content, expected in {
        "a token with spaces": "got a token with other characters, expected letters, digits and . _ ~ + / - alone",
        "short": "got a token of 5 bytes, expected 16 to 4096",
        f"{TOKEN}\n" * 5: "got 5 lines or more, expected 1 to 4, each a token",
    }.items():
        token_file.write_text(content)
        with pytest.raises(ConfigError) as caught:
            make_pages(Metrics(token_file=str(token_file)))
        assert expected in str(caught.value)
        assert content not in str(caught.value)
    token_file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"metrics\.token_file: .*: mode 0644 lets others than its owner use it"):
        make_pages(Metrics(token_file=str(token_file)))


def test_metrics_want_the_token_and_probes_do_not(token_file: Path) -> None:
    with Daemon(1, LISTEN, f"metrics.token_file={token_file}") as daemon:
        url = base(daemon)
        assert get(f"{url}/healthz") == (200, "alive\n")
        assert get(f"{url}/readyz") == (200, "ready\n")
        for wrong in ((), (bearer(NEW),), (("Authorization", f"Basic {TOKEN}"),)):
            status, text, challenge = ask(f"{url}/metrics", *wrong)
            assert (status, challenge) == (401, CHALLENGES[0])
            assert "Authorization: Bearer TOKEN" in text
            assert "omnireduce_" not in text
        assert eventually(lambda: "event=metrics_refused" in daemon.log)
        assert "peer=127.0.0.1" in daemon.log
        status, text, _ = ask(f"{url}/metrics", bearer(TOKEN))
        assert status == 200
        assert "omnireduce_shard_up" in text
        token_file.write_text(f"{NEW}\n{TOKEN}\n")
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: ask(f"{url}/metrics", bearer(NEW))[0] == 200)
        assert ask(f"{url}/metrics", bearer(TOKEN))[0] == 200
        token_file.write_text("short")
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: "event=reload_failed" in daemon.log)
        assert ask(f"{url}/metrics", bearer(NEW))[0] == 200
        assert TOKEN not in daemon.log
        assert NEW not in daemon.log


def https(daemon: Daemon) -> str:
    assert eventually(lambda: "event=metrics " in daemon.log)
    return daemon.log.split("metrics at ")[1].split("/metrics")[0]


def trusting(*holder: str) -> ssl.SSLContext:
    """TLS context of a scraper: it trusts the signer of the pages' certificate, and may have one of its own."""
    folder = certificates().folder
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    for name in holder:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def sealed(*more: str) -> list[str]:
    page_settings = [each.replace("security.", "metrics.") for each in (*certificates().holder("aggregator"), *more)]
    return [LISTEN, *page_settings]


@needs_openssl
def test_over_tls(token_file: Path) -> None:
    with Daemon(1, *sealed(), f"metrics.token_file={token_file}") as daemon:
        url = https(daemon)
        assert url.startswith("https://127.0.0.1:")
        assert ask(f"{url}/readyz", tls=trusting())[:2] == (200, "ready\n")
        assert ask(f"{url}/metrics", tls=trusting())[0] == 401
        assert ask(f"{url}/metrics", bearer(TOKEN), tls=trusting())[0] == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(f"{url}/healthz", tls=ssl.create_default_context())
        with contextlib.suppress(OSError):
            assert b"alive" not in answer_without_tls(url, b"GET /healthz HTTP/1.0\r\n\r\n")
        old = trusting()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(OSError, match=r"(?i)protocol|closed|alert|reset|EOF"):
            ask(f"{url}/healthz", tls=old)
        assert ask(f"{url}/healthz", tls=trusting())[0] == 200


def answer_without_tls(url: str, request: bytes) -> bytes:
    """Answer to a request without TLS."""
    with socket.create_connection(parse_address(url.partition("//")[2]), WAIT_S) as client:
        client.sendall(request)
        return client.recv(1000)


@needs_openssl
def test_a_scraper_that_must_have_a_certificate() -> None:
    with Daemon(1, *sealed(certificates().trust())) as daemon:
        url = https(daemon)
        assert ask(f"{url}/metrics", tls=trusting("worker"))[0] == 200
        for stranger in (trusting(), trusting("stranger")):
            with pytest.raises(OSError, match=r"(?i)alert|reset|closed|EOF"):
                ask(f"{url}/metrics", tls=stranger)
        assert ask(f"{url}/healthz", tls=trusting("worker"))[0] == 200


@needs_openssl
def test_a_new_certificate_is_taken_without_a_restart(tmp_path: Path) -> None:
    files = [tmp_path / "pages.pem", tmp_path / "pages.key"]

    def install(name: str) -> None:
        for file in files:
            file.write_bytes((certificates().folder / f"{name}{file.suffix}").read_bytes())
            file.chmod(0o600)

    def subject() -> object:
        address = parse_address(https(daemon).partition("//")[2])
        with (
            socket.create_connection(address, WAIT_S) as client,
            trusting().wrap_socket(client, server_hostname="127.0.0.1") as tls,
        ):
            return (tls.getpeercert() or {})["subject"]

    install("aggregator")
    with Daemon(1, LISTEN, f"metrics.tls_certificate={files[0]}", f"metrics.tls_key={files[1]}") as daemon:
        assert subject() == ((("commonName", "aggregator"),),)
        install("worker")
        daemon.signal(signal.SIGHUP)
        assert eventually(lambda: subject() == ((("commonName", "worker"),),))


@needs_openssl
def test_clients_that_do_not_shake_hands_keep_nobody_waiting() -> None:
    with Daemon(1, *sealed()) as daemon, contextlib.ExitStack() as stack:
        address = parse_address(https(daemon).partition("//")[2])
        silent = [stack.enter_context(socket.create_connection(address)) for _ in range(CONNECTIONS + 9)]
        silent[-2].sendall(b"\x16\x03\x01")
        silent[-3].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        for page in ("healthz", "readyz", "metrics"):
            assert ask(f"{https(daemon)}/{page}", tls=trusting())[0] == 200
        for client in (silent[0], silent[-1]):
            client.settimeout(WAIT_S)
            assert client.recv(1) == b""
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize(
    ("listen", "host", "is_answered"),
    [
        ("127.0.0.1:9464", "127.0.0.1:9464", True),
        ("127.0.0.1:9464", "127.0.0.1", True),
        ("127.0.0.1:9464", "localhost:9464", True),
        ("127.0.0.1:9464", "LOCALHOST.", True),
        ("127.0.0.1:9464", "127.9.9.9:1", True),
        ("127.0.0.1:9464", "[::1]:9464", True),
        ("[::1]:9464", "[::1]", True),
        ("[::1]:9464", "127.0.0.1:9464", True),
        ("localhost:9464", "localhost:9464", True),
        ("127.0.0.1:9464", "", True),
        ("127.0.0.1:9464", "rebound.example:9464", False),
        ("[::1]:9464", "rebound.example", False),
        ("localhost:9464", "localhost.rebound.example:9464", False),
        ("127.0.0.1:9464", "127.0.0.1.rebound.example", False),
        ("127.0.0.1:9464", "localhost@rebound.example", False),
        ("127.0.0.1:9464", "rebound.example@localhost:x", False),
        ("127.0.0.1:9464", "10.0.0.1:9464", False),
        ("127.0.0.1:9464", "localhost/rebound.example", False),
        ("127.0.0.1:9464", "[::1", False),
        ("127.0.0.1:9464", "é\udcff", False),
        ("0.0.0.0:9464", "node1:9464", True),
        ("", "node1:9464", True),
    ],
)
def test_pages_on_loopback_answer_for_names_of_loopback(listen: str, host: str, is_answered: bool) -> None:
    assert make_pages(Metrics(listen=listen)).answers_for(host) == is_answered


def test_pages_on_loopback_answer_for_the_name_at_which_they_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    pages = make_pages(Metrics(listen="Node1:9464"))
    assert pages.answers_for("node1:9464")
    assert not pages.answers_for("node2:9464")


def test_who_has_a_token_may_use_any_name(token_file: Path) -> None:
    metrics = Metrics(listen="127.0.0.1:9464", token_file=str(token_file))
    assert make_pages(metrics).answers_for("proxy.example")


def test_a_page_for_another_host_is_refused_in_one_line() -> None:
    with serving(60.0, "127.0.0.1:1") as pages:
        pages.monitor.access = make_pages(Metrics(listen="127.0.0.1:9464"))
        for page in ("", "metrics", "healthz", "readyz", "live.js", "nothing"):
            status, text, _ = ask(f"http://{pages.address}/{page}", ("Host", "rebound.example:9464"))
            assert status == 403
            assert "which is not called 'rebound.example:9464': ask for localhost, or give metrics.token_file" in text
        assert pages.monitor._answers_to_come is None
        assert pages.get("healthz")[0] == 200


def test_a_warning_where_other_hosts_can_read_them(token_file: Path) -> None:
    for listen, more, is_open in [
        ("0.0.0.0:9464", {}, True),
        ("[::]:9464", {}, True),
        ("no-such-host.invalid:9464", {}, True),
        ("0.0.0.0:9464", {"tls_certificate": "a", "tls_key": "b"}, True),
        ("0.0.0.0:9464", {"token_file": "a"}, False),
        ("0.0.0.0:9464", {"tls_ca": "a"}, False),
        ("127.0.0.1:9464", {}, False),
        ("", {}, False),
    ]:
        text = warning_if_open(Metrics(listen=listen, **more))
        assert bool(text) == is_open
        assert text.endswith("give metrics.token_file, or metrics.tls_ca") == is_open
    with Daemon(1, "metrics.listen=0.0.0.0:0") as daemon:
        assert eventually(lambda: "event=metrics_open" in daemon.log)
        assert "metrics.listen: 0.0.0.0:0 can be reached from other hosts, and all of them may read" in daemon.log
    with Daemon(1, "metrics.listen=0.0.0.0:0", f"metrics.token_file={token_file}") as daemon:
        assert eventually(lambda: "event=ready " in daemon.log)
        assert "event=metrics_open" not in daemon.log


def test_what_cannot_be_used_is_one_line_and_status_2(token_file: Path) -> None:
    token_file.chmod(0o604)
    for settings, expected in [
        ([f"metrics.token_file={token_file}"], "metrics.token_file: "),
        (["metrics.tls_ca=none"], "metrics.tls_certificate: an aggregator with TLS needs one, and metrics.tls_key"),
        (["metrics.tls_certificate=none"], "metrics.tls_certificate and metrics.tls_key go together"),
    ]:
        arguments = [word for setting in (LISTEN, *settings) for word in ("--set", setting)]
        with Process(sys.executable, "-m", "omnireduce.aggregator", "--listen", "127.0.0.1:0", *arguments) as process:
            assert process.wait(READY_S) == 2
            assert process.log.count("\n") == 1
            assert expected in process.log


def test_a_refusal_by_itself(token_file: Path) -> None:
    """Before anybody is asked for anything: a stranger costs the shards nothing."""
    with serving(60.0, "127.0.0.1:1") as pages:
        pages.monitor.access = make_pages(Metrics(token_file=str(token_file)))
        status, _, challenge = ask(f"http://{pages.address}/metrics")
        assert (status, challenge, pages.monitor._answers_to_come) == (401, CHALLENGES[0], None)
