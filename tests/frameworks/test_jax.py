"""Collectives and trainings with JAX under mpirun, and of one process."""

from __future__ import annotations

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import ROOT, WAIT_S, Daemon, Process
from ranks_of import needs_mpirun, run_ranks, told

WORKER = str(ROOT / "tests/frameworks/jax_worker.py")
TRAINED = "compiled", "direct", "transformed"
SIZE = 3
pytestmark = [
    needs_mpirun,
    pytest.mark.skipif(find_spec("jax") is None, reason="no jax here; `make keras` installs it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("values")


@pytest.fixture(scope="module")
def ranks(daemon: Daemon, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What three ranks have told, by way."""
    return told(run_ranks(daemon, SIZE, WORKER, str(folder)))


@pytest.fixture(scope="module")
def alone(daemon: Daemon, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What one process has told, with the batches of all ranks."""
    return told(run_ranks(daemon, 0, WORKER, str(folder)))


@pytest.mark.parametrize("way", TRAINED)
def test_ranks_have_the_same_bits_and_nearly_those_of_one_process(
    ranks: dict[str, list[dict[str, Any]]], alone: dict[str, list[dict[str, Any]]], folder: Path, way: str
) -> None:
    """Sums of float32 in another order: they differ in their last bits."""
    assert [each["bits"] for each in ranks[way]] == [ranks[way][0]["bits"]] * SIZE
    assert len(alone[way]) == 1
    with np.load(folder / f"{way}-{SIZE}-0.npz") as mine, np.load(folder / f"{way}-1-0.npz") as reference:
        for name in ("w", "v"):
            np.testing.assert_allclose(mine[name], reference[name], rtol=1e-5, atol=1e-6)


def test_sums_of_trees(ranks: dict[str, list[dict[str, Any]]]) -> None:
    """Of 0.5, 1.5 and 2.5; of 1, 2 and 3; and so on."""
    leaves = [
        ["bfloat16", [2, 3], [4.5], True],
        ["float32", [400_000], [6.0], True],
        ["int32", [3], [3.0, 6.0, 9.0], True],
        ["float32", [], [3.0], True],
    ]
    for rank, each in enumerate(ranks["summed"]):
        assert each["direct"] == each["compiled"] == leaves
        assert each["largest"] == [["int32", [2], [0.0, 2.0], True]]
        assert each["of_numpy"] == [["float64", [2], [2.0], False], ["float64", [], [1.5], False]]
        assert each["kept"] == [rank + 1.0] * 2
        assert each["empty"] == {"nothing": None}


def test_compiled_and_direct_calls_come_in_one_order(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert [each["alike"] for each in ranks["in order"]] == [True] * SIZE


def test_a_broadcast_has_the_bits_of_its_root(ranks: dict[str, list[dict[str, Any]]]) -> None:
    bits = np.array([SIZE - 1, np.nan, -0.0], np.float32).tobytes().hex()
    assert [(each["bits"], each["t"], each["compiled"]) for each in ranks["from a root"]] == [
        (bits, [2], [1, 1])
    ] * SIZE


def test_the_loss_is_averaged_with_its_gradients(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert [(each["value"], each["gradient"]) for each in ranks["loss"]] == [(4.0, 2.0)] * SIZE


def test_errors_of_callbacks_reach_the_caller(ranks: dict[str, list[dict[str, Any]]]) -> None:
    for each in ranks["wrong"]:
        direct, compiled, root, *differs, of_jax, name = each["errors"]
        assert direct == compiled
        assert "mean" in direct
        assert root == "root is 3: expected a rank of the job, 0 to 2"
        said = "differs between ranks: rank 0 has float32[2], rank 1 has float32[3]; expected the same on all ranks"
        assert differs == [f"'tree['w']' {said}", f"'tree' {said}"]
        assert of_jax == "JaxRuntimeError: True"
        assert name == "name 'y_that_is_not_there' is not defined"


def test_a_rank_that_dies_ends_a_compiled_step_of_the_others(daemon: Daemon, tmp_path: Path) -> None:
    environ = {
        "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses), "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": tmp_path.name, "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, WORKER, str(tmp_path), "dies"]
    with (
        Process(*command, environ=environ | {"RANK": "0"}) as first,
        Process(*command, environ=environ | {"RANK": "1"}) as second,
    ):
        assert told(first.line())["died"] == [{"rank": 0, "way": "died", "step": 3, "culprit": ["rank", "1"]}]
        assert [first.wait(WAIT_S), second.wait(WAIT_S)] == [0, -signal.SIGKILL]
