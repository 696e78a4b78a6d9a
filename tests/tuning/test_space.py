"""Tuned settings, and the search by itself: with a function in place of a measurement, so that its verdict is
exact."""

from __future__ import annotations

import math

import pytest

from omnireduce.console.tune.search import PARAMETERS, Circumstances, Point, Space, read_holds
from omnireduce.console.tune.workload import synthetic_sizes
from omnireduce.errors import ConfigError
from omnireduce.support.config import Config, override_config
from omnireduce.support.config.validation import KEYS

EVERYTHING = Circumstances(shards=4, in_memory=False, in_order=False)


def test_every_value_is_allowed() -> None:
    for parameter in PARAMETERS:
        for value in (*parameter.values, *parameter.grid):
            assert KEYS[parameter.key].read(value) == value
        assert list(parameter.values) == sorted(set(parameter.values))
        assert set(parameter.grid) <= set(parameter.values)


def test_the_default_is_a_point_of_the_space_and_of_the_grid() -> None:
    space = Space(Config(), [], EVERYTHING)
    assert set(space.free) == {parameter.key for parameter in PARAMETERS}
    assert space.config(space.start) == Config()
    assert space.start in list(space.grid())
    odd = override_config(Config(), {"protocol.block_size": 24}, source="test")
    assert 24 in Space(odd, [], EVERYTHING).free["protocol.block_size"]


@pytest.mark.parametrize(
    ("circumstances", "free"),
    [
        (Circumstances(4, True, True), {"protocol.block_size", "queue.fusion_bytes"}),
        (Circumstances(4, True, False), {"protocol.block_size", "queue.fusion_bytes", "queue.cycle_s"}),
        (
            Circumstances(1, False, True),
            {
                "protocol.block_size",
                "protocol.scan_span",
                "protocol.slots",
                "protocol.slot_bytes",
                "queue.fusion_bytes",
            },
        ),
    ],
)
def test_what_has_no_effect_is_held(circumstances: Circumstances, free: set[str]) -> None:
    space = Space(Config(), ["queue.fusion_bytes"], circumstances)
    assert set(space.free) == free - {"queue.fusion_bytes"}
    assert space.held["queue.fusion_bytes"] == "held"
    assert all(space.held.values())


def test_values_that_do_not_go_together_are_no_configuration() -> None:
    wide = override_config(Config(), {"protocol.block_size": 65536}, source="test")
    space = Space(wide, [], EVERYTHING)
    assert space.config(space.start | {"protocol.slot_bytes": 256 << 10}) is None


def test_holds() -> None:
    assert read_holds(["protocol.slots", "queue.cycle_s=0.01"]) == (
        ["protocol.slots", "queue.cycle_s"],
        ["queue.cycle_s=0.01"],
    )
    with pytest.raises(ConfigError, match=r"--hold: got 'slots', expected section\.key"):
        read_holds(["slots"])


@pytest.mark.parametrize(("elements", "arrays"), [(24, 24), (1000, 1), (4_000_000, 24), (10**9, 3)])
def test_sizes_of_arrays(elements: int, arrays: int) -> None:
    sizes = synthetic_sizes(elements, arrays)
    assert (len(sizes), sum(sizes)) == (arrays, elements)
    assert min(sizes) >= 1
    assert sizes == sorted(sizes) or elements == 4_000_000  # rounded


def speed(point: Point) -> float:
    """A ratio with one best point: larger blocks and more fusion than the default, and fewer slots."""
    best = {"protocol.block_size": 1024, "queue.fusion_bytes": 1 << 24, "protocol.slot_bytes": 1 << 21}
    away = [abs(math.log2((point[key] + 1) / (value + 1))) for key, value in best.items()]
    return 2.0 / (1 + 0.02 * sum(away)) - 0.01 * point["protocol.slots"]


@pytest.mark.parametrize("seed", range(3))
def test_the_search_comes_near_the_best_of_the_grid(seed: int) -> None:
    pytest.importorskip("optuna", reason="no optuna here; the extra `tune` brings it")
    from omnireduce.console.tune.search import Search

    space = Space(Config(), [], Circumstances(1, False, True))
    search, points = Search(space, samples=40, seed=seed), []
    for _ in range(40):
        point = search.ask()
        assert point is not None
        points.append(point)
        pruned = not all(search.goes_on(speed(point), stage) for stage in range(3))
        search.tell(point, None if pruned else speed(point))
    assert points[0] == space.start
    assert len({tuple(each.values()) for each in points}) == 40  # nothing is measured twice
    best = search.best(3)
    assert [speed(each) for each in best] == sorted((speed(each) for each in best), reverse=True)
    assert speed(best[0]) >= 0.95 * max(map(speed, space.grid()))


def test_a_search_ends_when_every_point_was_measured() -> None:
    pytest.importorskip("optuna", reason="no optuna here; the extra `tune` brings it")
    from omnireduce.console.tune.search import Search

    held = [parameter.key for parameter in PARAMETERS if parameter.key != "protocol.slots"]
    search, points = Search(Space(Config(), held, EVERYTHING), samples=100, seed=1), []
    while (point := search.ask()) is not None:
        points.append(point["protocol.slots"])
        search.tell(point, None if point["protocol.slots"] == 8 else 1.0)
    assert set(points) <= {2, 3, 4, 6, 8}
    assert len(points) == len(set(points))
    assert 8 not in {each["protocol.slots"] for each in search.best(9)}
