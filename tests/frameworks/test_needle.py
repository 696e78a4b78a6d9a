"""Trainings with Needle under mpirun, under the variables of torchrun, and of one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_cluster import ROOT, Daemon, Process
from needle_here import needle_folder
from ranks_of import needs_mpirun, run_ranks, told

WORKER = str(ROOT / "tests/frameworks/needle_worker.py")
TRAINED = "as in the tutorial", "with uneven batches"
SIZE = 3
pytestmark = needs_mpirun


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
    """Sums of float32 in another order: they differ in their last bits. Adam divides small sums by small ones."""
    assert len({each["digest"] for each in ranks[way]}) == 1
    assert len(ranks[way]) == SIZE
    assert len(alone[way]) == 1
    with np.load(folder / f"{way}-{SIZE}-0.npz") as mine, np.load(folder / f"{way}-1-0.npz") as reference:
        assert len(mine.files) == 4
        for name in mine.files:
            np.testing.assert_allclose(mine[name], reference[name], rtol=1e-4, atol=1e-5)


def test_a_broadcast_takes_parameters_buffers_and_state_from_its_root(ranks: dict[str, list[dict[str, Any]]]) -> None:
    found = ranks["from another root"]
    for name in ("digest", "state"):
        assert len({each[name] for each in found}) == 1
    assert [each["mean"] for each in found] == [2.0] * SIZE
    assert [(each["t"], each["lr"]) for each in found] == [(1, 0.25)] * SIZE
    assert all(each["states"] == 2 * each["parameters"] > 0 for each in found)


def test_of_an_embedding_only_rows_travel(ranks: dict[str, list[dict[str, Any]]]) -> None:
    for each in ranks["sparse"]:
        assert each["rows"] == [0, 1, 2, 100, 101, 102, 3000]
        assert each["shared"] == -SIZE
        assert each["share"] < 0.01


def test_parameters_may_share_a_gradient(ranks: dict[str, list[dict[str, Any]]]) -> None:
    assert [each["means"] for each in ranks["shared gradients"]] == [[2.0, 2.0]] * SIZE


def test_wrong_input_is_told_on_all_ranks(ranks: dict[str, list[dict[str, Any]]]) -> None:
    expected = [
        "omnireduce is initialised already; call omnireduce.shutdown() first",
        "batch_size is 2 for 3 ranks: expected 3 or more, since it is that of all ranks",
        "the dataset is empty: expected samples",
        "the model, a ReLU, has no parameters: expected one or more",
        "root_rank is 3: expected a rank of the job, 0 to 2",
        "'parameters()[0]' differs between ranks: rank 0 has float32[2, 3], rank 1 has float32[2, 4]; "
        "expected the same on all ranks",
        "opt is a Sequential, which has no step(): expected an optimizer",
    ]
    for each in ranks["wrong"]:
        assert each["errors"] == expected


def test_the_variables_of_torchrun_say_who_is_who(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    """Two ranks: the batches of twelve can be divided among them, too."""
    environ = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": tmp_path.name,
        "PYTHONPATH": f"{ROOT}:{needle_folder()}", "OMNIREDUCE_CLUSTER_AGGREGATORS": ",".join(daemon.addresses),
    }  # fmt: skip
    command = [sys.executable, WORKER, str(folder)]
    with (
        Process(*command, environ=environ | {"RANK": "0", "LOCAL_RANK": "0"}) as first,
        Process(*command, environ=environ | {"RANK": "1", "LOCAL_RANK": "1"}) as second,
    ):
        lines = [process.line() for process in (first, second)]
        assert [each["rank"] for each in told("\n".join(lines))["as in the tutorial"]] == [0, 1]
        assert [process.wait() for process in (first, second)] == [0, 0]


def test_the_example_learns(daemon: Daemon) -> None:
    text = run_ranks(daemon, SIZE, str(ROOT / "examples/needle_resnet.py"), "--samples", "1000", "--epochs", "3")
    last = text.splitlines()[-1]
    assert last.startswith("epoch 3/3: ")
    assert last.endswith(" of 334 pictures read right on rank 0")
    assert float(last.split()[2].rstrip("%")) > 60
