"""`python -m benchmarks replay`, without the hosts that need root: trainings, and what becomes of one that fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import Daemon, unique_job
from rich.console import Console
from transports import over

from benchmarks.harness.group import PeerError
from benchmarks.harness.testbed import Host
from benchmarks.parts.replays import URGENT, VARIANTS, _iteration_ms, _show
from omnireduce.worker.switchml.recording import Layer, write_layers

HERE = [Host("here", "127.0.0.1", ())] * 2


def options(daemon: Daemon, *more: str) -> list[str]:
    sets = (*over("tcp"), f"cluster.aggregators={','.join(daemon.addresses)}", f"cluster.job={unique_job('replays')}")
    return [*more, *(word for each in sets for word in ("--set", each))]


@pytest.mark.parametrize("name", ["none", URGENT])
def test_a_training_is_timed(daemon: Daemon, tmp_path: Path, name: str) -> None:
    write_layers([Layer(0, 1000, 1000, 1000), Layer(1, 300_000, 1000, 1000)], tmp_path / "model.csv")
    assert _iteration_ms(HERE, tmp_path, options(daemon, *VARIANTS[name])) > 0


def test_a_training_that_something_else_carried_is_an_error(daemon: Daemon, tmp_path: Path) -> None:
    """Here both ranks are on one host, and may exchange in memory."""
    write_layers([Layer(0, 1000, 1000, 1000)], tmp_path / "model.csv")
    more = ("--num-iters", "1", "--num-warmup-iters", "0", "--set", "transport.host_exchange=auto")
    with pytest.raises(PeerError, match="replay failed: memory carried the tensors, and not tcp"):
        _iteration_ms(HERE, tmp_path, [*options(daemon), *more])


def test_a_training_that_fails_is_an_error(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "model.csv").write_text("0, 1\n")
    with pytest.raises(PeerError, match=r"replay failed: Error: .*model\.csv:1: got 2 values, expected 4"):
        _iteration_ms(HERE, tmp_path, options(daemon))


@pytest.mark.parametrize(("backward", "is_met"), [(1.0, True), (1.9, False)])
def test_what_gains_too_little_misses_its_aim(backward: float, is_met: bool) -> None:
    results = {"none": [2.0, 2.2], "backward": [backward], "iterations": [1.0], URGENT: [1.0]}
    with Console(width=120).capture():
        assert _show(Console(width=120, quiet=True), "1gbit", results) is is_met
