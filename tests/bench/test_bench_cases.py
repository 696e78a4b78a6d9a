"""The cases that a configuration gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omnireduce.console.bench.cases import SyntheticCase, recorded_cases, synthetic_cases
from omnireduce.errors import UsageError
from omnireduce.support.config import Config, load_config


def configuration(*overrides: str) -> Config:
    return load_config(overrides=overrides, environ={})


def test_one_case_from_single_values() -> None:
    config = configuration("bench.density=0.5", "protocol.block_size=512", "bench.seed=7")
    assert synthetic_cases(config) == [SyntheticCase(26_214_400, "float32", "sum", 512, "random", 0.5, 7)]


def test_a_sweep_is_the_product_of_the_lists() -> None:
    lists = {
        "elements": [10, 20],
        "dtype": ["float32", "int8"],
        "op": ["sum", "max"],
        "block_size": [0, 8],
        "overlap": ["full", "random"],
        "distribution": ["uniform", "zipf"],
        "density": [1.0, 0.5, 0.25],
    }
    results = synthetic_cases(configuration(*(f"bench.{key}={value}" for key, value in lists.items())))
    assert len(results) == len(set(results)) == 2**6 * 3
    assert [case.density for case in results[:4]] == [1.0, 0.5, 0.25, 1.0]
    assert {case.block_size for case in results} == {256, 8}
    assert results[-1] == SyntheticCase(20, "int8", "max", 8, "random", 0.25, 1, "zipf")
    assert {case.data for case in results} == {
        f"{overlap} overlap{more}" for overlap in ("full", "random") for more in ("", ", Zipf")
    }


def test_recorded_cases_are_every_array_with_each_op_and_block_size(tmp_path: Path) -> None:
    pattern = f"{tmp_path}/arrays-{{rank}}.npz"
    for rank in range(2):
        np.savez(pattern.format(rank=rank), weight=np.ones((2, 3), np.float32), count=np.ones(5, np.int8))
    config = configuration('bench.op=["sum", "mean"]', "bench.block_size=[0, 8]")
    results = recorded_cases(config, pattern, 2)
    assert [(case.op, case.block_size, case.array.name) for case in results] == [
        (op, size, name) for op in ("sum", "mean") for size in (256, 8) for name in ("weight", "count")
    ]
    weight, count = results[-2:]
    assert (weight.elements, weight.dtype, weight.data) == (6, "float32", "weight of arrays-{rank}.npz")
    assert str(weight) == "mean of weight of arrays-{rank}.npz"
    weight.check(2)
    with pytest.raises(UsageError, match="the mean of int8"):
        count.check(2)
