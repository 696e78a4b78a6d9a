"""Trainings with Needle under mpirun, under the variables of torchrun, and of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import ROOT, Daemon
from ranks_of import SIZE, Told, assert_trained_alike, needs_mpirun, reports_in, run_ranks, two_ranks

WORKER = str(ROOT / "tests/frameworks/needle_worker.py")
TRAINED = "as in the tutorial", "with uneven batches"
pytestmark = needs_mpirun


@pytest.mark.parametrize("way", TRAINED)
def test_ranks_have_the_same_bits_and_nearly_those_of_one_process(
    ranks: Told, alone: Told, folder: Path, way: str
) -> None:
    """Adam divides small sums by small ones."""
    assert_trained_alike(ranks, alone, folder, way, rtol=1e-4, atol=1e-5)


def test_a_broadcast_takes_parameters_buffers_and_state_from_its_root(ranks: Told) -> None:
    results = ranks["from another root"]
    for name in ("digest", "state"):
        assert len({result[name] for result in results}) == 1
    assert [result["mean"] for result in results] == [2.0] * SIZE
    assert [(result["t"], result["lr"]) for result in results] == [(1, 0.25)] * SIZE
    assert all(result["states"] == 2 * result["parameters"] > 0 for result in results)


def test_of_an_embedding_only_rows_travel(ranks: Told) -> None:
    for each in ranks["sparse"]:
        assert each["rows"] == [0, 1, 2, 100, 101, 102, 3000]
        assert each["shared"] == -SIZE
        assert each["share"] < 0.01


def test_parameters_may_share_a_gradient(ranks: Told) -> None:
    assert [each["means"] for each in ranks["shared gradients"]] == [[2.0, 2.0]] * SIZE


def test_wrong_input_is_told_on_all_ranks(ranks: Told) -> None:
    expected = [
        "omnireduce is initialised already; call omnireduce.shutdown() first",
        "batch_size is 2 for 3 ranks: expected 3 or more, since it is that of all ranks",
        "the dataset is empty: expected samples",
        "the model, a ReLU, has no parameters: expected one or more",
        "root_rank 3: expected 0 to 2",
        "'parameters()[0]' differs between ranks: rank 0 has float32[2, 3], rank 1 has float32[2, 4]; "
        "expected the same on all ranks",
        "opt is a Sequential, which has no step(): expected an optimizer",
    ]
    for each in ranks["wrong"]:
        assert each["errors"] == expected


def test_the_variables_of_torchrun_say_who_is_who(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    """Two ranks: the batches of twelve can be divided among them, too."""
    with two_ranks(daemon, tmp_path.name, WORKER, str(folder)) as processes:
        lines = [process.line() for process in processes]
        assert [each["rank"] for each in reports_in("\n".join(lines))["as in the tutorial"]] == [0, 1]
        assert [process.wait() for process in processes] == [0, 0]


def test_the_example_learns(daemon: Daemon) -> None:
    text = run_ranks(daemon, SIZE, str(ROOT / "examples/needle_resnet.py"), "--samples", "1000", "--epochs", "3")
    last = text.splitlines()[-1]
    assert last.startswith("epoch 3/3: ")
    assert last.endswith(" of 334 pictures read right on rank 0")
    assert float(last.split()[2].rstrip("%")) > 60
