"""Predictions: no faster than links and processors allow, and as fast as they allow where only one of them counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.console.plan.model import (
    Costs,
    Hosts,
    Messages,
    Plan,
    Prediction,
    link_time_s,
    predict,
    union_density,
    windows_for,
)
from omnireduce.console.plan.patterns import DrawnPatterns, Load, SummedPatterns, load_of
from omnireduce.core.blocks_and_stripes import Layout
from omnireduce.protocol.collective.index_lists import MessageSizing
from omnireduce.protocol.sharding import CHUNK_BYTES

BLOCK_BYTES, BLOCKS = 1024, 20_000
FREE = Costs(*[0.0] * len(Costs._fields))
GIGABIT = 125e6


def load_for(plan: Plan, hosts: int, density: float, blocks: int = BLOCKS) -> Load:
    patterns = DrawnPatterns(blocks, density, "random", hosts * plan.ranks)
    windows = windows_for(blocks, density, BLOCK_BYTES, plan.shards, Messages())
    layout = Layout(blocks, 1, plan.shards, 64)
    return load_of(SummedPatterns(patterns, plan.ranks // plan.senders), hosts * plan.senders, layout, windows)


def predicted(plan: Plan, hosts: Hosts, density: float, costs: Costs | None = None) -> Prediction:
    return predict(load_for(plan, hosts.number, density), BLOCK_BYTES, hosts, plan, costs=costs)


def beside(ranks: int, shards: int, by_host: bool = True) -> Plan:
    return Plan(ranks, by_host, shards, dedicated=False)


@pytest.mark.parametrize("dedicated", [False, True])
@pytest.mark.parametrize("hosts", [2, 4])
def test_a_dense_tensor_takes_as_long_as_its_bytes(hosts: int, dedicated: bool) -> None:
    """As many shards as hosts: then every link carries as much as in a ring, or each way the whole tensor."""
    result = predicted(Plan(1, True, hosts, dedicated), Hosts(hosts, 8, GIGABIT, 0.0), 1.0, FREE)
    nbytes = BLOCKS * BLOCK_BYTES * (1 if dedicated else 2 * (hosts - 1) / hosts)
    assert result.link_bytes == pytest.approx(nbytes, rel=0.01)
    assert result.seconds == pytest.approx(
        nbytes / GIGABIT, rel=0.06
    )  # the first window reaches one link after another


@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("hosts", [2, 4])
def test_where_processors_cost_nothing_the_bound_of_a_link_is_what_remains(hosts: int, density: float) -> None:
    """The bound of `omnireduce density`. Blocks that a rank alone has may be left out of what comes down to it."""
    seconds = predicted(Plan(1, True, hosts, dedicated=True), Hosts(hosts, 8, GIGABIT, 0.0), density, FREE).seconds
    up, down = (BLOCKS * BLOCK_BYTES * share for share in (density, union_density(density, hosts)))
    assert 0.98 * link_time_s(up, up, GIGABIT) <= seconds <= 1.08 * link_time_s(up, down, GIGABIT)


def test_ranks_that_are_one_sender_send_what_they_have_together() -> None:
    hosts = Hosts(2, 8, GIGABIT, 0.0)
    together, alone = (predicted(beside(4, 2, way), hosts, 0.05, FREE).link_bytes for way in (True, False))
    assert alone > 2 * together
    assert together == pytest.approx(BLOCKS * BLOCK_BYTES * (1 - 0.95**4), rel=0.1)  # half up, and half down


@given(speed=st.floats(0.1, 10), density=st.sampled_from([0.01, 0.3, 1.0]))
def test_slower_processors_work_longer(speed: float, density: float) -> None:
    own, other = (
        predicted(Plan(1, False, 4, dedicated=False), Hosts(4, 1, GIGABIT, 1e-4), density, Costs().at(each))
        for each in (1.0, speed)
    )
    assert other.processor_s * speed == pytest.approx(own.processor_s)
    assert (other.seconds >= own.seconds) == (speed <= 1) or other.seconds == own.seconds
    assert other.link_bytes == own.link_bytes


@given(
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]), hosts=st.integers(2, 5), ranks=st.integers(1, 3),
    shards=st.integers(1, 6), dedicated=st.booleans(), by_host=st.booleans(), cores=st.sampled_from([0.5, 1, 8]),
)  # fmt: skip
def test_no_prediction_beats_links_and_processors(
    density: float, hosts: int, ranks: int, shards: int, dedicated: bool, by_host: bool, cores: float
) -> None:
    plan = Plan(ranks, by_host, shards, dedicated)
    load = load_for(plan, hosts, density, 2000)
    slow, fast = (predict(load, BLOCK_BYTES, Hosts(hosts, cores, rate, 1e-4), plan) for rate in (GIGABIT, 10 * GIGABIT))
    nodes = hosts + (shards if dedicated else 0)
    for prediction, rate in ((slow, GIGABIT), (fast, 10 * GIGABIT)):
        assert prediction.seconds >= prediction.link_bytes / rate
        assert prediction.seconds * cores * nodes >= prediction.processor_s * 0.999
    assert slow.seconds >= fast.seconds > 2e-4  # up and down
    assert slow.link_bytes == fast.link_bytes


def test_a_burst_passes_at_once() -> None:
    plan, nbytes = beside(1, 2), 1 << 20
    plain, shaped = (predicted(plan, Hosts(2, 8, GIGABIT, 0.0, burst), 1.0, FREE).seconds for burst in (0, nbytes))
    assert plain - shaped == pytest.approx(nbytes / GIGABIT, rel=0.5)


def test_windows_are_what_makes_a_message() -> None:
    messages = Messages(MessageSizing(1 << 18, 1 << 20), span=1 << 14)
    assert windows_for(102_400, 1.0, 1024, 2, messages) == 64  # each a part of what goes to a shard
    assert windows_for(10_240, 1.0, 1024, 2, messages) == 20  # as short as messages are
    assert windows_for(102_400, 0.0, 1024, 2, messages) == 7
    assert windows_for(3, 1.0, 1024, 2, messages) == 1
    assert windows_for(0, 0.0, 1024, 2, messages) == 1


def test_an_empty_tensor_takes_messages_only() -> None:
    plan = beside(1, 2)
    load = load_of(DrawnPatterns(0, 0.0, "random", 2), 2, Layout(0, 1, 2, 64), 1)
    prediction = predict(load, BLOCK_BYTES, Hosts(2, 8, GIGABIT, 1e-3), plan)
    assert np.isfinite(prediction.seconds)
    assert prediction.seconds > 2e-3


def test_a_shard_that_has_no_block_costs_nothing() -> None:
    hosts, times = Hosts(8, 8, GIGABIT, 1e-4), []
    for shards in (1, 8):
        plan = beside(1, shards)
        load = load_of(DrawnPatterns(1, 1.0, "full", 8), 8, Layout(1, 1, shards, 64), 1)
        times.append(predict(load, BLOCK_BYTES, hosts, plan).seconds)
    assert times[0] == times[1]


def test_hosts_of_one_machine_share_its_processors() -> None:
    """If only processors count, two hosts of one machine take twice as long as two machines."""
    load = load_of(DrawnPatterns(BLOCKS, 1.0, "full", 2), 2, Layout(BLOCKS, 1, 2, 64), 32)
    hosts = Hosts(2, 0.01, 1e15, 0.0)
    apart, together = (
        predict(load, BLOCK_BYTES, hosts._replace(one_machine=shared), beside(1, 2)) for shared in (False, True)
    )
    assert apart.processor_s == together.processor_s
    assert together.seconds == pytest.approx(2 * apart.seconds, rel=0.01)
    assert together.seconds == pytest.approx(together.processor_s / 0.01, rel=0.01)


def test_a_host_works_for_each_of_its_ranks() -> None:
    """They scan, and add chunk by chunk, what the host then sends once."""
    seconds = []
    for ranks in (2, 4):
        plan = Plan(ranks, by_host=True, shards=2, dedicated=False)
        load = load_of(DrawnPatterns(BLOCKS, 0.0, "full", 2), 2, Layout(BLOCKS, 1, 2, 64), 4)
        seconds.append(predict(load, BLOCK_BYTES, Hosts(2, 8, GIGABIT, 0.0), plan).processor_s)
    nbytes = BLOCKS * BLOCK_BYTES
    more = 2 * 2 * (Costs().scan * nbytes + Costs().chunk * nbytes / CHUNK_BYTES)
    assert seconds[1] - seconds[0] == pytest.approx(more, rel=0.01)
