"""Collectives and trainings with JAX under mpirun, and of one process."""

from __future__ import annotations

import re
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from local_cluster import ROOT, WAIT_S, Daemon
from ranks_of import SIZE, Told, assert_trained_alike, needs_mpirun, reports_in, run_ranks, two_ranks

WORKER = str(ROOT / "tests/frameworks/jax_worker.py")
TRAINED = "compiled", "direct", "transformed", "uneven", "uneven, transformed"
pytestmark = [
    needs_mpirun,
    pytest.mark.skipif(find_spec("jax") is None, reason="no jax here; `make keras` installs it"),
]


@pytest.mark.parametrize("way", TRAINED)
def test_ranks_have_the_same_bits_and_nearly_those_of_one_process(
    ranks: Told, alone: Told, folder: Path, way: str
) -> None:
    assert_trained_alike(ranks, alone, folder, way, rtol=1e-5, atol=1e-6)


def test_sums_of_trees(ranks: Told) -> None:
    """Each leaf is the sum over three ranks: 0.5 + 1.5 + 2.5, 1 + 2 + 3, and so on."""
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


def test_compiled_and_direct_calls_come_in_one_order(ranks: Told) -> None:
    assert [each["alike"] for each in ranks["in order"]] == [True] * SIZE


def test_a_broadcast_has_the_bits_of_its_root(ranks: Told) -> None:
    bits = np.array([SIZE - 1, np.nan, -0.0], np.float32).tobytes().hex()
    assert [(each["bits"], each["t"], each["compiled"]) for each in ranks["from a root"]] == [
        (bits, [2], [1, 1])
    ] * SIZE


def test_the_loss_is_averaged_with_its_gradients(ranks: Told) -> None:
    assert [(each["value"], each["gradient"]) for each in ranks["loss"]] == [(4.0, 2.0)] * SIZE
    assert [(each["by_rank"], each["halves"]) for each in ranks["loss"]] == [([5.0, 2.5], [2.0, 2.0])] * SIZE


def test_a_dataset_may_have_arrays_of_jax(ranks: Told) -> None:
    for rank, dataset in enumerate(ranks["datasets"]):
        own = [rank, rank + 3]
        assert dataset["found"] == [[own], [own, own], [own]]


def test_errors_of_callbacks_reach_the_caller(ranks: Told) -> None:
    for each in ranks["wrong"]:
        assert each["errors"][:4] == [
            "weights with op 'sum': expected op='mean'",
            "the weight of rank 1 is -1.5: expected one number of 0 or more",
            "the weight of rank 2 is nan: expected one number of 0 or more",
            "the weights of all ranks are 0: expected more on one of them",
        ]
        direct, compiled, root, *differs, key, compiled_key, dataset, of_jax, name = each["errors"][4:]
        assert direct == compiled
        assert "mean" in direct
        assert root == "root 3: expected 0 to 2"
        message = "differs between ranks: rank 0 has float32[2], rank 1 has float32[3]; expected the same on all ranks"
        assert differs == [f"'tree['w']' {message}", f"'tree' {message}"]
        assert key == compiled_key
        assert key.startswith(
            "a leaf is a key of jax.random, which is no array of numbers; expected its jax.random.key"
        )
        assert dataset.startswith("the dataset is a tuple with a list: expected arrays of NumPy")
        assert of_jax == "JaxRuntimeError: True"
        assert name == "name 'y_that_is_not_there' is not defined"


def test_what_one_rank_refuses_reaches_the_others(ranks: Told) -> None:
    assert [each["kind"] for each in ranks["refused"]] == ["AbortedError", "UsageError", "AbortedError"]
    assert all("a leaf is a key of jax.random" in each["error"] for each in ranks["refused"])


def test_a_rank_that_dies_ends_a_compiled_step_of_the_others(daemon: Daemon, tmp_path: Path) -> None:
    with two_ranks(daemon, tmp_path.name, WORKER, str(tmp_path), "dies") as (first, second):
        assert reports_in(first.line())["died"] == [{"rank": 0, "way": "died", "step": 3, "culprit": ["rank", "1"]}]
        assert [first.wait(WAIT_S), second.wait(WAIT_S)] == [0, -signal.SIGKILL]


@pytest.mark.parametrize("size", [SIZE, 0])
def test_the_example_learns(daemon: Daemon, size: int) -> None:
    text = run_ranks(daemon, size, str(ROOT / "examples/jax_data_parallel.py"), "--samples", "541")
    first, last = re.findall(r"^(\d) ranks?, epoch (\d+): mean squared error ([\d.]+)$", text, re.MULTILINE)
    assert [first[:2], last[:2]] == [(str(size or 1), "1"), (str(size or 1), "20")]
    assert float(last[2]) < float(first[2]) / 2
