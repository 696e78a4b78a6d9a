"""Predictions with relays: what a rack's link carries is what counts, and nothing beats links and processors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce.console.plan.candidates import Tensors, as_toml, plans, predict_plan, study
from omnireduce.console.plan.model import Costs, Hosts, Plan, Prediction
from omnireduce.console.plan.patterns import DrawnPatterns
from omnireduce.support.config import load_config

BLOCK_BYTES, BLOCKS = 1024, 20_000
FREE = Costs(*[0.0] * len(Costs._fields))
GIGABIT = 125e6
RACKED = Hosts(4, 8, 10 * GIGABIT, 0.0, racks=2, rack_bytes_per_s=GIGABIT)
FLAT, RELAYS = Plan(1, False, 1, True), Plan(1, False, 1, True, relays=True)


def predicted(plan: Plan, hosts: Hosts, density: float, costs: Costs | None = None) -> Prediction:
    patterns = DrawnPatterns(BLOCKS, density, "random", hosts.number * plan.ranks)
    return predict_plan(patterns, BLOCK_BYTES, hosts, plan, costs=costs)


def test_a_rack_sends_a_dense_tensor_once_for_each_rank_or_once() -> None:
    once_s = BLOCKS * BLOCK_BYTES / GIGABIT
    assert predicted(FLAT, RACKED, 1.0, FREE).seconds == pytest.approx(2 * once_s, rel=0.06)
    assert predicted(RELAYS, RACKED, 1.0, FREE).seconds == pytest.approx(once_s, rel=0.12)


def test_shards_beside_ranks_send_across_racks_what_is_for_others() -> None:
    """Two hosts in two racks, a shard on each: half of the tensor up, and half down."""
    hosts = RACKED._replace(number=2)
    result = predicted(Plan(1, False, 2, False), hosts, 1.0, FREE)
    assert result.seconds == pytest.approx(BLOCKS * BLOCK_BYTES / GIGABIT, rel=0.06)


@given(
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]), racks=st.integers(1, 3), hosts=st.integers(1, 3),
    ranks=st.integers(1, 2), shards=st.integers(1, 3), by_host=st.booleans(), cores=st.sampled_from([0.5, 8]),
)  # fmt: skip
def test_no_prediction_beats_links_and_processors(
    density: float, racks: int, hosts: int, ranks: int, shards: int, by_host: bool, cores: float
) -> None:
    layout = Hosts(racks * hosts, cores, GIGABIT, 1e-5, racks=racks, rack_bytes_per_s=GIGABIT / 4)
    result = predicted(Plan(ranks, by_host, shards, True, relays=True), layout, density)
    nodes = layout.number + racks + shards
    assert result.seconds >= result.link_bytes / (layout.bytes_per_s * 1.0001)
    assert result.seconds >= result.processor_s / (nodes * cores) * 0.9999
    patterns = DrawnPatterns(BLOCKS, density, "random", layout.number * ranks)
    union = sum(patterns.of(rank).astype(int) for rank in range(layout.number * ranks)) > 0
    assert result.seconds >= union.sum() * BLOCK_BYTES / layout.rack_bytes_per_s * 0.9999


def test_a_study_of_racks_has_relays_and_their_configuration() -> None:
    patterns = DrawnPatterns(BLOCKS, 1.0, "random", 4)
    result = study([Tensors(patterns, BLOCK_BYTES)], RACKED, 1, [1, 2])
    assert [candidate.plan for candidate in result.candidates] == plans(1, [1, 2], racks=2)
    assert result.best.plan.relays
    assert result.ring_s == pytest.approx(2 * 3 / 4 * BLOCKS * BLOCK_BYTES / GIGABIT)


def test_the_workers_name_the_relay_of_their_rack(tmp_path_factory: pytest.TempPathFactory) -> None:
    text = as_toml(Plan(1, False, 2, True, relays=True), 4, 256)
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(text)
    assert list(load_config(str(path), environ={}).cluster.aggregators) == ["relay:7400", "relay:7401"]
    assert "aggregator.upstream" in text
    assert '"aggregator1:7400", "aggregator2:7400"' in text
