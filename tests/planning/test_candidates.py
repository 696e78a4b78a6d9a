"""Plans: the compared ones, the best one, and its text."""

from __future__ import annotations

import numpy as np
import pytest

from omnireduce.console.plan.candidates import MOST_LINKS, Candidate, Tensors, as_toml, best, plans, shard_counts, study
from omnireduce.console.plan.model import Hosts, Plan, Prediction
from omnireduce.console.plan.patterns import DrawnPatterns
from omnireduce.errors import UsageError
from omnireduce.support.config import load_config

HOSTS = Hosts(4, 8, 1.25e9, 5e-5)


def test_a_study_compares_all_plans() -> None:
    result = study([Tensors(DrawnPatterns(10_000, 0.01, "random", 8), 1024)], HOSTS, 2, [1, 4])
    assert [candidate.plan for candidate in result.candidates] == plans(2, [1, 4])
    assert len({candidate.plan for candidate in result.candidates}) == 8
    assert result.best in result.candidates
    assert result.density == pytest.approx(0.02, rel=0.1)  # two ranks of a host together
    assert result.ring_s == pytest.approx(2 * 3 / 4 * 10_000 * 1024 / 1.25e9)


def test_tensors_come_one_after_the_other() -> None:
    """Their predictions add up, as often as they come. A shard needs memory for one at a time."""
    small, large = DrawnPatterns(1000, 0.5, "random", 4), DrawnPatterns(20_000, 0.01, "full", 4)
    alone = [study([Tensors(*each)], HOSTS, 1, [1, 4]) for each in ((small, 512), (large, 1024))]
    result = study([Tensors(small, 512, 3), Tensors(large, 1024)], HOSTS, 1, [1, 4])
    for both, one, other in zip(result.candidates, alone[0].candidates, alone[1].candidates, strict=True):
        three, once, sums = one.prediction, other.prediction, both.prediction
        assert both.plan == one.plan == other.plan
        assert sums.seconds == pytest.approx(3 * three.seconds + once.seconds)
        assert sums.link_bytes == 3 * three.link_bytes + once.link_bytes
        assert sums.processor_s == pytest.approx(3 * three.processor_s + once.processor_s)
        assert sums.shard_bytes == max(three.shard_bytes, once.shard_bytes)
    assert result.ring_s == pytest.approx(3 * alone[0].ring_s + alone[1].ring_s)
    shares = 3 * 1000 * 512, 20_000 * 1024
    assert result.density == pytest.approx(np.average([each.density for each in alone], weights=shares))
    assert result.union_density == pytest.approx(np.average([each.union_density for each in alone], weights=shares))


def test_of_plans_that_are_as_good_the_one_that_needs_less_is_best() -> None:
    fast, nearly, slow = (Prediction(seconds, 0, 0.0, 0) for seconds in (1.0, 1.04, 1.2))
    own, many, few = Plan(1, False, 1, True), Plan(1, False, 4, False), Plan(1, False, 2, False)
    candidates = [Candidate(own, fast), Candidate(many, nearly), Candidate(few, nearly), Candidate(few, slow)]
    assert best(candidates).plan == few
    assert best(candidates[:1]).plan == own


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 100, 4096])
def test_few_numbers_of_shards_are_tried(hosts: int) -> None:
    counts = shard_counts(hosts, 1)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] == min(hosts, MOST_LINKS // hosts)
    assert len(counts) <= 7


@pytest.mark.parametrize(
    ("plan", "addresses", "each"),
    [
        (Plan(2, True, 2, False), ["node1:7400", "node2:7400"], 1),
        (Plan(2, False, 3, False), ["node1:7400", "node2:7400", "node1:7401"], 2),
        (Plan(1, False, 2, True), ["aggregator1:7400", "aggregator2:7400"], 1),
        (Plan(1, False, 20, True), [f"aggregator{number}:7400" for number in range(1, 21)], 1),
    ],
)
def test_the_configuration_of_a_plan_can_be_read(
    plan: Plan, addresses: list[str], each: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = as_toml(plan, 2, 128)
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(text)
    config = load_config(str(path), environ={})
    assert as_toml(plan, 2, None) == text.replace("\n[protocol]\nblock_size = 128\n", "")
    assert list(config.cluster.aggregators) == addresses
    assert config.protocol.block_size == 128
    assert config.transport.host_exchange == ("off" if plan.ranks > 1 and not plan.by_host else "auto")
    assert f"--shards {each}\n" in text


def test_what_cannot_be_planned_is_refused() -> None:
    patterns = DrawnPatterns(10, 0.5, "full", 2)
    with pytest.raises(UsageError, match="in memory"):
        study([Tensors(patterns, 1024)], HOSTS._replace(number=1), 2, [1])
    with pytest.raises(UsageError, match="links"):
        study([Tensors(patterns, 1024)], HOSTS, 2, [MOST_LINKS])


def test_saved_blocks_decide() -> None:
    """Blocks that no rank shares cost more than the same ones."""
    times = []
    for overlap in ("full", "none"):
        result = study([Tensors(DrawnPatterns(50_000, 0.2, overlap, 4), 1024)], HOSTS, 1, [4])
        times.append(result.best.prediction.seconds)
    assert times[1] > 1.5 * times[0]
    assert np.isfinite(times).all()
