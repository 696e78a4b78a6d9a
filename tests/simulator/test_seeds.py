"""Many small clusters, each a function of its seed."""

from __future__ import annotations

import pytest

from .__main__ import report
from .cluster import Cluster
from .plan import KINDS, draw_plan

SEEDS = 400
CHUNKS = 8


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_never_wrong_and_never_stuck(chunk: int) -> None:
    reports = []
    for seed in range(chunk, SEEDS, CHUNKS):
        plan = draw_plan(seed)
        found = Cluster(plan).run()
        if found:
            reports.append(report(plan, found))
    assert not reports, "\n".join(reports)


def test_a_seed_is_a_run() -> None:
    traces = []
    for _ in range(2):
        cluster = Cluster(draw_plan(4))
        cluster.run()
        traces.append((cluster.world.now(), cluster.world.events, list(cluster.world.trace)))
    assert traces[0] == traces[1]


def test_the_seeds_draw_every_kind_of_fault() -> None:
    drawn = {fault.kind for seed in range(SEEDS) for fault in draw_plan(seed).faults}
    assert drawn == set(KINDS)
