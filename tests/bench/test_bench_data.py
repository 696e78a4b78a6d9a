"""The benchmark's data against plain NumPy: what is filled, and what the oracle accepts and refuses."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnireduce.console.bench.data import Dataset
from omnireduce.core.dtypes import ELEMENT_TYPES, Array
from omnireduce.errors import UsageError

FLOATS = [name for name, kind in ELEMENT_TYPES.items() if kind.is_float]
UFUNCS = {"sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def make(
    elements: int = 1000,
    dtype: str = "float32",
    block_size: int = 16,
    density: float = 0.5,
    overlap: Any = "random",
    op: Any = "sum",
    world_size: int = 3,
    seed: int = 1,
    distribution: Any = "uniform",
) -> Dataset:
    return Dataset(
        elements, dtype=dtype, block_size=block_size, density=density, overlap=overlap, op=op,
        world_size=world_size, seed=seed, distribution=distribution,
    )  # fmt: skip


def filled(data: Dataset, elements: int, world_size: int, round_number: int = 0) -> list[Array]:
    tensors = []
    for rank in range(world_size):
        tensor = np.full(elements, 3, data.dtype)  # its old contents must not matter
        data.fill(rank, round_number, tensor)
        tensors.append(tensor)
    return tensors


def reduced(tensors: list[Array], op: str) -> Array:
    """Reduce tensors as the service promises, in the most obvious way."""
    dtype = tensors[0].dtype
    wide = np.float32 if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    total = tensors[0].astype(wide)
    with np.errstate(over="ignore"):
        for tensor in tensors[1:]:
            total = UFUNCS[op](total, tensor.astype(wide))
        if op == "mean":
            total = total / np.asarray(len(tensors), wide)
        return total.astype(dtype)


def block_flags(tensor: Array, block_size: int) -> Array:
    """Flags of blocks that hold a non-zero element. A short last block counts."""
    starts = range(0, tensor.size, block_size)
    return np.array([bool(np.any(tensor[at : at + block_size] != 0)) for at in starts], np.bool_)


@settings(max_examples=300, deadline=None)
@given(
    elements=st.integers(0, 700),
    dtype=st.sampled_from(list(ELEMENT_TYPES)),
    block_size=st.sampled_from([8, 16, 24, 64]),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, 1.0]),
    overlap=st.sampled_from(["random", "full", "none"]),
    op=st.sampled_from(list(UFUNCS)),
    world_size=st.integers(1, 7),
    seed=st.integers(0, 2**63 - 1),
    distribution=st.sampled_from(["uniform", "zipf"]),
)
def test_matches_numpy(
    elements: int,
    dtype: str,
    block_size: int,
    density: float,
    overlap: str,
    op: str,
    world_size: int,
    seed: int,
    distribution: str,
) -> None:
    assume(op != "mean" or dtype in FLOATS)
    assume(overlap != "none" or density * world_size <= 1)
    data = make(elements, dtype, block_size, density, overlap, op, world_size, seed, distribution)
    for round_number in (0, 1):
        tensors = filled(data, elements, world_size, round_number)
        result = reduced(tensors, op)
        assert data.wrong(round_number, result) == 0
        backwards = reduced(tensors[::-1], op)
        assert np.array_equal(result, backwards), "the order of the ranks must not matter"

        flags = [block_flags(tensor, block_size) for tensor in tensors]
        blocks = flags[0].size
        chosen = round(density * blocks)
        if overlap == "none":
            chosen = min(chosen, blocks // world_size)
        assert [int(flag.sum()) for flag in flags] == [chosen] * world_size
        assert data.density == (chosen / blocks if blocks else 0)
        assert data.union_density == (np.logical_or.reduce(flags).sum() / blocks if blocks else 0)
        needed = [np.logical_or.reduce([*flags[:rank], *flags[rank + 1 :]]).sum() for rank in range(world_size)]
        assert data.others_density == pytest.approx(np.mean(needed) / blocks if blocks else 0)
        if overlap == "full":
            assert all(np.array_equal(flags[0], flag) for flag in flags)
        if overlap == "none":
            assert sum(flag.astype(int) for flag in flags).max(initial=0) <= 1


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_exact(dtype: str) -> None:
    """No rounding takes place: the sum in the dtype itself is the sum in float64."""
    data = make(dtype=dtype, density=1.0, world_size=4)
    tensors = filled(data, 1000, 4)
    narrow = tensors[0].copy()
    for tensor in tensors[1:]:
        narrow = (narrow + tensor).astype(data.dtype)
    assert np.array_equal(narrow.astype(np.float64), sum(each.astype(np.float64) for each in tensors))


@pytest.mark.parametrize("dtype", list(ELEMENT_TYPES))
@pytest.mark.parametrize("world_size", [100, 300])
def test_many_ranks(dtype: str, world_size: int) -> None:
    data = make(40, dtype, 16, 0.7, world_size=world_size)
    assert data.wrong(0, reduced(filled(data, 40, world_size), "sum")) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_products_of_many_halves_leave_their_range_only_at_the_end(dtype: str) -> None:
    data = make(4000, dtype, 16, 1.0, "full", "prod", 100)
    result = reduced(filled(data, 4000, 100), "prod")
    assert data.wrong(0, result) == 0
    assert np.unique(np.abs(result)).size > 20


@pytest.mark.parametrize("dtype", list(ELEMENT_TYPES))
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_detects_what_is_wrong(dtype: str, op: str) -> None:
    elements, size = 2005, 16
    data = make(elements, dtype, size, 0.5, "random", op, 2)
    result = reduced(filled(data, elements, 2), op)
    union = np.flatnonzero(block_flags(result, size)[:-1])
    absent = np.flatnonzero(~block_flags(result, size)[:-1])

    flipped = result.copy()
    at = int(np.flatnonzero(result)[7])
    flipped.view(np.uint8).reshape(elements, -1)[at, -1] ^= 1
    assert data.wrong(0, flipped) == 1, "one flipped bit"
    nonzero = result.copy()
    nonzero[absent[0] * size + 3] = 1
    assert data.wrong(0, nonzero) == 1, "data where every rank has zeros"
    swapped = result[: elements // size * size].reshape(-1, size).copy()
    swapped[union[:2]] = swapped[union[1::-1]]
    assert data.wrong(0, np.concatenate([swapped.reshape(-1), result[-(elements % size) :]])) > 0
    lost = result.copy()
    lost[union[1] * size : (union[1] + 1) * size] = 0
    assert data.wrong(0, lost) == np.count_nonzero(result != lost) > 0
    assert data.wrong(1, result) > 100, "the previous round's result"
    assert data.wrong(0, filled(data, elements, 1)[0]) > 100, "one rank's own tensor"


def test_detects_a_wrong_tail_and_nan() -> None:
    data = make(17, density=1.0)
    result = reduced(filled(data, 17, 3), "sum")
    result[16] += 1
    result[2] = np.nan
    assert data.wrong(0, result) == 2


def test_same_arguments_same_tensors_and_different_ones_differ() -> None:
    tensors = [filled(make(seed=seed), 1000, 1, turn)[0] for seed, turn in [(1, 0), (1, 0), (1, 1), (2, 0)]]
    assert np.array_equal(tensors[0], tensors[1])
    assert not np.array_equal(tensors[0], tensors[2])
    assert not np.array_equal(tensors[0], tensors[3])
    ranks = filled(make(density=1.0), 1000, 2)
    assert np.count_nonzero(ranks[0] == ranks[1]) < 100


def test_zipf_makes_the_first_blocks_likely() -> None:
    """Drawn with weight 1/i until so many different blocks came, block i is among them with 1 - exp(-t/i)."""
    blocks, size, ranks = 4096, 8, 64
    data = make(blocks * size, block_size=size, density=0.05, world_size=ranks, distribution="zipf")
    flags = np.array([block_flags(tensor, size) for tensor in filled(data, blocks * size, ranks)])
    number = np.arange(1, blocks + 1)
    low, high = 0.0, float(blocks)
    for _ in range(60):  # t, by bisection
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - np.exp(-middle / number)).sum() < flags[0].sum() else (low, middle)
    expected = 1 - np.exp(-low / number)
    for first, last in [(0, 8), (8, 32), (32, 128), (128, 512), (512, 4096)]:
        part, share = slice(first, last), flags[:, first:last].mean()
        deviation = np.sqrt((expected[part] * (1 - expected[part])).sum() / ranks) / (last - first)
        assert abs(share - expected[part].mean()) < 5 * deviation + 1e-3, (first, last)


def test_the_zipf_blocks_of_ranks_may_be_the_same_or_disjoint() -> None:
    same = [block_flags(each, 16) for each in filled(make(overlap="full", distribution="zipf"), 1000, 3)]
    assert np.array_equal(same[0], same[1])
    apart = [block_flags(each, 16) for each in filled(make(overlap="none", density=0.3, distribution="zipf"), 1000, 3)]
    assert sum(each.astype(int) for each in apart).max() == 1


def test_data_is_irregular() -> None:
    tensor = filled(make(100_000, density=1.0), 100_000, 1)[0]
    assert np.unique(tensor).size > 10_000
    assert 0.05 < np.count_nonzero(tensor == 0) / tensor.size < 0.2


@pytest.mark.parametrize("shape", [(50, 20), (1, 1000), (1000,)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    tensor = np.empty(shape, np.float32)
    data = make(world_size=1)
    data.fill(0, 0, tensor)
    assert data.wrong(0, tensor) == 0


def test_wrong_arguments() -> None:
    with pytest.raises(UsageError, match=r"3 workers cannot have disjoint blocks at density 0\.5"):
        make(overlap="none")
    with pytest.raises(UsageError, match="got distribution 'pareto', expected one of uniform, zipf"):
        make(distribution="pareto")
    with pytest.raises(UsageError, match="mean of int8"):
        make(dtype="int8", op="mean")
    with pytest.raises(UsageError, match="expected one of float16"):
        make(dtype="complex64")
    with pytest.raises(UsageError, match=r"got float64\[1000\], expected float32\[1000\]"):
        make().fill(0, 0, np.empty(1000))
    with pytest.raises(UsageError, match="contiguous"):
        make().wrong(0, np.empty(2000, np.float32)[::2])


@pytest.mark.parametrize("density", [1.0, 0.01])
def test_memory_does_not_grow_with_the_tensor(density: float) -> None:
    elements = 8_000_001
    data = make(elements, block_size=256, density=density, world_size=2)
    tensor = np.empty(elements, np.float32)
    tracemalloc.start()
    data.fill(0, 0, tensor)
    data.wrong(0, tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20  # bytes; the tensor has four times as many
