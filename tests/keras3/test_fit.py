"""Real training of two ranks, on each backend of Keras that is there: the bits of one process, and of all ranks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from launched import needs_mpirun, output_of_ranks, reports_in
from local_cluster import ROOT, Daemon

BACKENDS = ("torch", "jax", *(("tensorflow",) if find_spec("tensorflow") else ()))  # CI has no TensorFlow
AS_ONE_PROCESS = (
    *("averaged", "clipped", "summed", "predivided", "grouped", "in_lists", "averaged_passes", "summed_passes"),
    *("eager", "loaded", "embedded"),
)
ALIKE_IN_ITS_OWN_WAY = ("scaled", "local", "broadcast", "warmed_up")
SAME_BITS = (*AS_ONE_PROCESS, *ALIKE_IN_ITS_OWN_WAY, "halved", "adasum", "dropped_out")
BY_BACKEND: dict[str, dict[str, list[dict[str, Any]]]] = {}


@pytest.fixture(params=BACKENDS)
def trained(request: pytest.FixtureRequest, daemon: Daemon) -> dict[str, list[dict[str, Any]]]:
    """Reports of two ranks for each way to train; each backend is started once."""
    backend = request.param
    if backend not in BY_BACKEND:
        BY_BACKEND[backend] = reports_in(output_of_ranks(daemon, backend, str(ROOT / "tests/keras3/fit_worker.py")))
    return BY_BACKEND[backend]


pytestmark = needs_mpirun


@pytest.mark.parametrize("way", SAME_BITS)
def test_all_ranks_have_the_same_bits(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    first, second = trained[way]
    assert first["bits"] == second["bits"]


@pytest.mark.parametrize("way", AS_ONE_PROCESS)
def test_two_ranks_train_as_one_process_with_both_batches(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    """The numbers are such that all sums are exact."""
    assert [each["alike"] for each in trained[way]] == [True, True]


@pytest.mark.parametrize("way", ALIKE_IN_ITS_OWN_WAY)
def test_what_a_way_promises(trained: dict[str, list[dict[str, Any]]], way: str) -> None:
    assert [each["alike"] for each in trained[way]] == [True, True], trained[way]


def test_a_tape_gives_the_gradients_of_all_ranks(trained: dict[str, list[dict[str, Any]]]) -> None:
    if "taped" not in trained:
        pytest.skip("only TensorFlow has a tape")
    assert [each["alike"] for each in trained["taped"]] == [True, True], trained["taped"]


def test_what_is_saved_is_a_plain_optimizer(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert trained["loaded"][0]["plain"]


def test_half_precision_is_no_other_training(trained: dict[str, list[dict[str, Any]]]) -> None:
    """Only rounded: two of the ways differ in their last bits, but differ."""
    assert trained["halved"][0]["bits"] != trained["averaged"][0]["bits"]


def test_collectives_of_tensors_variables_arrays_and_numbers(trained: dict[str, list[dict[str, Any]]]) -> None:
    first, second = trained["values"]
    expected = {
        "mean": [[1.5] * 3] * 2,
        "sum": [[3.0] * 3] * 2,
        "scaled": [[3.0] * 3] * 2,
        "max": [1, 1],
        "number": 0.75,
        "gathered": [0, 0, 1],
        "from 1": [[2.0] * 3] * 2,
        "scattered": [[3.0] * 3],
        "object": {"rank": 1},
    }
    assert first["values"] == expected
    assert second["values"] == {**expected, "alone": True}
    for each in (first, second):
        assert each["kinds"] == [True, True, True, False, False]
        assert each["variable"] == [1, 1]


def test_what_one_rank_refuses_is_an_error_on_all(trained: dict[str, list[dict[str, Any]]]) -> None:
    first, second = (each["told"] for each in trained["refused"])
    assert list(first) == list(second) == ["allreduce", "allgather", "reducescatter", "broadcast", "broadcast_object"]
    for name, error in first.items():
        assert error.startswith("rank 1 refused '"), name
        assert error.endswith(second[name]), name


def test_metrics_are_averaged_and_must_be_the_same(trained: dict[str, list[dict[str, Any]]]) -> None:
    for metric in trained["averaged_metrics"]:
        assert metric["logs"] == {"loss": 1.5, "accuracy": 0.125}
        assert metric["error"] == (
            'metrics differ: rank 0 has ["loss", "mine 0"], rank 1 has ["loss", "mine 1"]; expected the same'
        )


def test_rank_0_alone_saves_what_is_better(trained: dict[str, list[dict[str, Any]]]) -> None:
    assert [each["epochs"] for each in trained["best_saved"]] == [[True, False, True], [False, False, False]]


def test_ranks_with_different_models_are_told_both_sides(trained: dict[str, list[dict[str, Any]]]) -> None:
    for each in trained["different"]:
        assert (
            "'DistributedSGD: gradient 0 of 1' differs between ranks: rank 0 has allreduce mean float32[4, 2], "
            "rank 1 has allreduce mean float32[4, 3]"
        ) in each["error"]
