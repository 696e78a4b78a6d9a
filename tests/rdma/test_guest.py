"""A guest of tools/guests.py is as promised: the RDMA tests build on this."""

from __future__ import annotations

import ipaddress
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ADDRESSES = {"rxe0": "192.168.59.101", "rxe1": "192.168.60.1", "rxe2": "192.168.60.2"}
BOUND_S = 10


@pytest.fixture(autouse=True)
def _alone() -> None:
    if os.environ.get("GUEST_NODES") != "1":
        pytest.skip("these are promises of a guest that is alone")


@pytest.fixture(params=ADDRESSES)
def device(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any]]:
    """Name and open context of each device."""
    from pyverbs.device import Context

    with Context(name=request.param) as context:
        yield request.param, context


def ip_link(interface: str, state: str) -> None:
    subprocess.run(["ip", "link", "set", interface, state], check=True, timeout=BOUND_S)


def await_state(name: str, expected: str) -> None:
    port = f"until grep -q {expected} /sys/class/infiniband/{name}/ports/1/state; do sleep 0.1; done"
    subprocess.run(["sh", "-c", port], check=True, timeout=BOUND_S)


def test_there_are_three_devices() -> None:
    from pyverbs.device import get_device_list

    assert {device.name.decode() for device in get_device_list()} == set(ADDRESSES)


def test_port_is_active(device: tuple[str, Any]) -> None:
    from pyverbs import enums

    name, context = device
    port = context.query_port(1)
    assert port.state == enums.IBV_PORT_ACTIVE, name
    assert port.link_layer == enums.IBV_LINK_LAYER_ETHERNET
    assert port.active_mtu == enums.IBV_MTU_4096, "the interfaces have jumbo frames"


def test_one_gid_is_the_ipv4_address_by_roce_v2(device: tuple[str, Any]) -> None:
    from pyverbs import enums

    name, context = device
    table = {entry.gid_index: ipaddress.IPv6Address(entry.gid_str()) for entry in context.query_gid_table(16)}
    mapped = {index: str(gid.ipv4_mapped) for index, gid in table.items() if gid.ipv4_mapped}
    assert list(mapped.values()) == [ADDRESSES[name]]
    assert context.query_gid_type(1, *mapped) == enums.IBV_GID_TYPE_SYSFS_ROCE_V2


def test_a_large_buffer_can_be_registered(device: tuple[str, Any]) -> None:
    import numpy as np
    from pyverbs import enums
    from pyverbs.mr import MR
    from pyverbs.pd import PD

    buffer = np.zeros(64 << 20, np.uint8)
    with PD(device[1]) as pd, MR(pd, buffer.nbytes, enums.IBV_ACCESS_LOCAL_WRITE, address=buffer.ctypes.data) as mr:
        assert mr.buf == buffer.ctypes.data


def test_memory_may_be_locked_without_limit() -> None:
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_the_cable_can_be_pulled() -> None:
    try:
        ip_link("cable1", "down")
        for name in ("rxe1", "rxe2"):
            await_state(name, "DOWN")
    finally:
        ip_link("cable1", "up")
    for name in ("rxe1", "rxe2"):
        await_state(name, "ACTIVE")


def test_packets_go_over_the_cable() -> None:
    def received() -> int:
        return int(Path("/sys/class/net/cable2/statistics/rx_packets").read_text())

    before = received()
    ping = ["ping", "-q", "-c", "3", "-i", "0.2", "-w", str(BOUND_S), "-I", "cable1", "192.168.60.2"]
    subprocess.run(ping, check=True, capture_output=True, timeout=2 * BOUND_S)
    assert received() >= before + 3


def test_compiled_kernels_are_kept() -> None:
    from omnireduce.kernels.merge_indices import plan_union
    from omnireduce.kernels.warm import warm_up_aggregator

    warm_up_aggregator()
    statistics: Any = plan_union
    assert sum(statistics.stats.cache_hits.values()) > 0, "compiled in the guest: run `guests.py prepare` first"
    assert not statistics.stats.cache_misses
