"""Findings of the doctor about real RDMA ports."""

from __future__ import annotations

import os

import pytest
from local_cluster import Daemon, configured
from test_guest import await_state, ip_link

from omnireduce.console.doctor import Finding, check_aggregators, check_rdma, find_ports

KIND = "transport.kind=verbs"


@pytest.fixture(autouse=True)
def _alone() -> None:
    if os.environ.get("GUEST_NODES") != "1":
        pytest.skip("the addresses are those of a guest that is alone")


def looked_at(*overrides: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check_rdma(configured(["a:1"], *overrides), *find_ports())}


def test_ports_that_are_well() -> None:
    result = looked_at(KIND)
    assert {finding.state for finding in result.values()} == {"ok"}
    for name, address in {"rxe0": "192.168.59.101", "rxe1": "192.168.60.1"}.items():
        text = result[f"RDMA port {name}/1"].text
        assert text.startswith("active, MTU 4096, GIDs ")
        assert f"RoCE v2 {address}" in text
    assert result["verbs"].text.startswith("available, by default rxe0 port 1, GID ")


def test_a_cable_that_is_out() -> None:
    try:
        ip_link("cable1", "down")
        await_state("rxe1", "DOWN")
        result = looked_at(KIND, "verbs.device=rxe1")
        assert result["RDMA port rxe1/1"].state == "warn"
        assert "ip link set IFACE up" in result["RDMA port rxe1/1"].advice
        assert result["verbs"].state == "fail"
        assert result["verbs"].advice
        assert looked_at("verbs.device=rxe1")["verbs"].state == "warn"
    finally:
        ip_link("cable1", "up")
    await_state("rxe1", "ACTIVE")


def test_an_aggregator_is_reached_on_the_way_that_blocks_would_take() -> None:
    with Daemon(1, KIND, "security.allow_no_secret=true", listen="192.168.59.101:0") as daemon:
        [result] = check_aggregators(configured(daemon.addresses, KIND))
        assert result.state == "ok"
        assert result.text.startswith("answers by tcp, from 192.168.59.101 after ")
