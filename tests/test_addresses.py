"""Addresses: how they are written, looked up, listened at, connected to, and which one others are told."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import ROOT, WAIT_S
from separate_hosts import separate_hosts

from benchmarks.harness.testbed import Host
from omnireduce.errors import ConfigError
from omnireduce.support import addresses
from omnireduce.support.addresses import (
    ANYWHERE,
    Address,
    address_from_this_host,
    addresses_of_interface,
    connect,
    host_of,
    is_loopback,
    is_own_address,
    is_wildcard,
    listen,
    look_up,
    normalize_address,
    own_addresses,
    parse_address,
    parse_listen,
)

HAS_IPV6 = Path("/proc/net/if_inet6").exists() and bool(Path("/proc/net/if_inet6").read_text())
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7400", ("127.0.0.1", 7400)),
        ("node_1.rack-2.example:1", ("node_1.rack-2.example", 1)),
        ("a.example.:1", ("a.example.", 1)),
        (f"{'x' * 63}.{'y' * 63}:1", (f"{'x' * 63}.{'y' * 63}", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:7400", ("fe80::1%eth0", 7400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_parse_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            ":",
            "host",
            "host:",
            ":7400",
            "host:65536",
            "host:-1",
            "host:+1",
            "host:1_0",
            "host: 1",
            "host:1\n",
        ],
        *[
            "::1:7400",
            "[::1]",
            "[::1]7400",
            "[host]:1",
            "[]:1",
            "ho st:1",
            "-host:1",
            "host-:1",
            "tcp://host:1",
        ],
        *["a..b:1", ".a:1", "a.-b:1", "a-.b:1", f"{'x' * 64}:1", f"a.{'x' * 64}.b:1"],
        *[f"[fe80::1%{scope}]:1" for scope in ("", "a b", "a,b", "a\n", "a]b", "a/b", "a;b", "\0", "é", "x" * 16)],
        *["1.2.3:1", "256.0.0.1:1", "1234:1", "host:\N{ARABIC-INDIC DIGIT ONE}", "h\N{DIAERESIS}st:1"],
    ],
)
def test_parse_address_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r'^got ".*", expected "HOST:PORT"') as caught:
        parse_address(text)
    assert str(caught.value).isprintable()


def test_a_host_name_is_no_longer_than_names_can_be() -> None:
    assert parse_address(f"{'a.' * 126}b:1") == (f"{'a.' * 126}b", 1)
    with pytest.raises(ConfigError, match='expected "HOST:PORT"'):
        parse_address(f"{'a.' * 127}b:1")


@given(
    st.one_of(st.ip_addresses().map(str), st.sampled_from(["node1", "a.example.", "fe80::1%eth0"])),
    st.integers(0, 65535),
)
def test_what_is_printed_is_what_is_parsed(host: str, port: int) -> None:
    assert parse_address(str(Address(host, port))) == (host, port)


def test_where_a_program_listens_a_port_alone_is_every_address() -> None:
    assert parse_listen(":7400") == (ANYWHERE, 7400)
    assert parse_listen("[fd00::1]:1") == ("fd00::1", 1)
    for wrong in (":", ":65536", ":x", "::"):
        with pytest.raises(ConfigError, match=re.escape(f'got "{wrong}"')):
            parse_listen(wrong)


def test_one_address_may_be_written_in_several_ways() -> None:
    assert (
        normalize_address(Address("FD00:0:0::0001", 1))
        == normalize_address(Address("fd00::1", 1))
        != normalize_address(Address("fd00::1", 2))
    )
    assert normalize_address(Address("Node1", 1)) == normalize_address(Address("node1", 1))


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("localhost", True, False), ("LocalHost.", True, False), ("a.localhost", True, False), ("::1", True, False),
        ("127.1.2.3", True, False), ("::ffff:127.0.0.1", True, False), ("ip6-loopback", True, False),
        ("0.0.0.0", False, True), ("::", False, True), ("0::0", False, True), ("::ffff:0.0.0.0", False, True),
        ("node1", False, False), ("10.0.0.1", False, False), ("fe80::1%eth0", False, False), ("", False, False),
    ],
)  # fmt: skip
def test_some_hosts_are_this_one_or_all(host: str, loopback: bool, wildcard: bool) -> None:
    assert (is_loopback(host), is_wildcard(host)) == (loopback, wildcard)


def test_what_listens_everywhere_is_reached_on_loopback() -> None:
    assert address_from_this_host(Address("0.0.0.0", 1)) == ("127.0.0.1", 1)
    assert address_from_this_host(Address("::", 1)) == ("localhost", 1)
    assert address_from_this_host(Address("node1", 1)) == ("node1", 1)


def test_an_address_of_the_system_is_shown_as_users_write_it() -> None:
    assert host_of(("10.0.0.1", 1)) == host_of(("::ffff:10.0.0.1", 1, 0, 0)) == "10.0.0.1"
    assert host_of(("fe80::1", 1, 0, socket.if_nametoindex("lo"))) == "fe80::1%lo"
    assert host_of(("fe80::1", 1, 0, 1 << 30)) == f"fe80::1%{1 << 30}"  # its interface is gone
    assert host_of(("fe80::1%lo", 1, 0, 1)) == "fe80::1%lo"


def test_localhost_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An /etc/hosts without it, or with 127.0.0.1 alone, is no obstacle."""
    assert [each.host for each in look_up("localhost")] == ["127.0.0.1", "::1"]
    with pytest.raises(OSError, match="not known"):
        look_up("x" * 64 + ".example")


@contextmanager
def nobody_accepts(family: socket.AddressFamily, host: str) -> Iterator[int]:
    """A port whose listener has no room for one more: who connects gets no answer."""
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server((host, 0), family=family, backlog=0))
        for _ in range(2):
            guest = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            guest.setblocking(False)
            guest.connect_ex(full.getsockname())
        yield int(full.getsockname()[1])


@pytest.mark.integration
@needs_ipv6
def test_the_addresses_of_a_name_are_tried_in_turn() -> None:
    """The first one may refuse, or not answer: its share of the time leaves some for the others."""
    with listen("::1", 0, 1) as listener, connect("localhost", listener.getsockname()[1], WAIT_S) as connection:
        assert host_of(connection.getpeername()) == "::1"
    with nobody_accepts(socket.AF_INET, "127.0.0.1") as port, listen("::1", port, 1):
        with connect("localhost", port, 0.4) as connection:
            assert host_of(connection.getpeername()) == "::1"
        with pytest.raises(TimeoutError):
            connect("127.0.0.1", port, 0.1)


@pytest.mark.integration
@needs_ipv6
def test_the_address_that_answered_last_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_last_answers", {})
    with listen("::1", 0, 4) as listener:
        port = listener.getsockname()[1]
        connect("localhost", port, WAIT_S).close()
        with listen("127.0.0.1", port, 4), connect("localhost", port, WAIT_S) as connection:
            assert host_of(connection.getpeername()) == "::1"


@pytest.mark.integration
@needs_ipv6
def test_an_error_says_what_was_wrong_at_each_address() -> None:
    with listen(ANYWHERE, 0, 1) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionRefusedError, match=r"Connection refused \((127\.0\.0\.1, ::1|::1, 127\.0\.0\.1)\)"):
        connect("localhost", port, WAIT_S)


@pytest.mark.integration
@needs_ipv6
def test_who_listens_everywhere_serves_both_families() -> None:
    with listen(ANYWHERE, 0, 4) as listener:
        for host in ("127.0.0.1", "::1"):
            with connect(host, listener.getsockname()[1], WAIT_S) as connection:
                assert host_of(connection.getpeername()) == host


def test_a_name_is_listened_at_where_this_host_has_it() -> None:
    with listen("localhost", 0, 1) as listener, pytest.raises(OSError, match="in use"):
        listen("localhost", listener.getsockname()[1], 1)  # not at its second address


def test_own_addresses_are_those_that_others_reach() -> None:
    result = own_addresses()
    assert all(map(is_own_address, result))
    assert not any(map(is_loopback, result))
    assert not any(is_own_address(text) for text in ("127.0.0.1", "localhost", "192.0.2.254", "2001:db8::ffff"))
    assert addresses_of_interface("lo")[0] == "127.0.0.1"
    with pytest.raises(OSError, match="No such device"):
        addresses_of_interface("nowhere0")


# on hosts of several kinds

PROBE = """
import sys
from omnireduce.support.addresses import *
print(loopback(), reachable_address(sys.argv[1:]), reachable_address(), own_addresses()[0], sep="\\n")
print(source_towards("localhost"))
"""


@pytest.fixture(scope="module", params=[False, True], ids=["ipv4", "ipv6"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with separate_hosts(2, tmp_path_factory.mktemp("hosts"), only_ipv6=request.param) as two_hosts:
        yield two_hosts


def on(host: Host, code: str, *words: str) -> list[str]:
    command = [*host.prefix, sys.executable, "-c", code, *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")[:-1]


@pytest.mark.integration
def test_others_are_told_an_address_that_they_reach(hosts: list[Host]) -> None:
    """The host's own name means 127.0.1.1 there."""
    local, remote = hosts
    loopback = "127.0.0.1" if "." in local.address else "::1"
    assert on(local, PROBE, remote.name) == [loopback, *[local.address] * 3, loopback]
    assert on(local, PROBE, "nowhere.invalid", local.name) == [loopback, *[local.address] * 3, loopback]
