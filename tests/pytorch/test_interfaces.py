"""At which address gloo of a rank is reached, on hosts that call themselves 127.0.1.1 or have only IPv6."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from local_cluster import READY_S, Daemon, Process
from separate_hosts import separate_hosts

from benchmarks.harness.testbed import Host
from omnireduce.runtime.rank.launcher_detection import this_host
from omnireduce.support.addresses import Address, is_ipv6, parse_address
from omnireduce.torch.backend.rendezvous import (
    CHOSEN_BY_USER,
    MAX_ADDRESSES,
    HostOfRank,
    address_for_gloo,
    addresses_of_others,
    host_message,
)

V4, V6 = "10.0.0.{}", "fd00::{}"
CODE = """
import os, sys
import torch, torch.distributed as dist
import omnireduce.torch
dist.init_process_group("omnireduce")
ranks = [torch.zeros(1) for _ in range(dist.get_world_size())]
dist.all_gather(ranks, torch.ones(1) * dist.get_rank())
total = torch.ones(1) * dist.get_rank()
dist.all_reduce(total)
dist.destroy_process_group()
os.write(1, f"{[int(each) for each in ranks]} {int(total)}\\n".encode())
"""


@pytest.fixture(scope="module", params=[False, True], ids=["ipv4", "ipv6"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with separate_hosts(2, tmp_path_factory.mktemp("hosts"), only_ipv6=request.param) as two_hosts:
        yield two_hosts


def test_ranks_of_two_hosts_reach_each_other(hosts: list[Host]) -> None:
    """They meet at the name of the first host, as Slurm gives it. On that host it means 127.0.1.1. Two ranks are
    there, of which one looks for the other by this name."""
    local, remote = hosts
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(1, "security.allow_no_secret=true", listen=":0", prefix=local.prefix))
        address = Address(local.address, parse_address(daemon.addresses[0]).port)
        processes = []
        for rank, host in enumerate((local, local, remote)):
            slurm = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "3", "SLURM_JOB_ID": str(address), "SLURM_STEP_ID": "0"}
            names = {"SLURM_STEP_NODELIST": f"{local.name},{remote.name}", "SLURM_LOCALID": str(rank % 2)}
            environ = {**slurm, **names, "OMNIREDUCE_CLUSTER_AGGREGATORS": str(address)}
            processes.append(stack.enter_context(Process(*host.prefix, sys.executable, "-c", CODE, environ=environ)))
        assert [process.line(READY_S) for process in processes] == ["[0, 1, 2] 3"] * 3
        assert [process.wait() for process in processes] == [0] * 3


def test_ranks_of_one_host_use_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHOSEN_BY_USER, raising=False)
    address = host_message(dist.HashStore())
    assert address_for_gloo([address, address]) in ("127.0.0.1", "::1")


def test_interfaces_that_the_user_names_are_those_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOSEN_BY_USER, "lo")
    assert address_for_gloo([host_message(dist.HashStore())]) == ""


def test_the_store_is_not_asked_for_more_than_its_host() -> None:
    """Behind prefixes, too; it says which of its addresses this host uses on the way there."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    identity, addresses = json.loads(host_message(dist.PrefixStore("a", dist.PrefixStore("b", store))))
    assert identity == this_host()
    assert "127.0.0.1" not in addresses
    assert len(addresses) <= MAX_ADDRESSES


def host(number: int, *forms: str) -> HostOfRank:
    return HostOfRank(str(number), [form.format(number) for form in forms])


@pytest.mark.parametrize(
    ("hosts", "ways"),
    [
        ([host(0, V4), host(0, V4)], None),
        ([host(0, V4), host(1, V4), host(1, V4)], ["10.0.0.1"]),
        ([host(0, V4, V6), host(1, V6), host(2, V4, V6)], ["fd00::1", "fd00::2"]),  # the store has both
        ([host(0, V6, V4), host(1, V6, V4)], ["fd00::1"]),
        ([host(0, V6, V4), host(1, V4)], ["10.0.0.1"]),
        ([host(0, V4), host(1, V6)], []),
        ([host(0), host(1)], []),
        ([host(0, V4), HostOfRank("1", ["a.name", "10.0.0.1"])], ["10.0.0.1"]),  # a name is not looked up
    ],
)
def test_ways_to_others_are_of_one_family(hosts: list[HostOfRank], ways: list[str] | None) -> None:
    assert addresses_of_others(hosts, "0") == ways


@given(st.lists(st.sampled_from([(V4,), (V6,), (V4, V6), (V6, V4), ()]), min_size=2, max_size=5))
def test_all_hosts_choose_the_same_family(forms: list[tuple[str, ...]]) -> None:
    all_hosts = [host(number, *each) for number, each in enumerate(forms)]
    ways = [addresses_of_others(all_hosts, each.identity) for each in all_hosts]
    assert len({is_ipv6(way) for found in ways for way in found or ()}) <= 1
