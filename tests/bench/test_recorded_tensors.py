"""Tensors from files: what they are, and what the oracle accepts and refuses."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from formats import SUFFIXES, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_cluster import Daemon, configured, run_job
from oracle import reduce_in_rank_order
from samples import CASES, sparse_tensor

from omnireduce.console.bench.cases import Row, recorded_cases
from omnireduce.console.bench.recorded_tensors import RecordedTensors, find_arrays
from omnireduce.console.bench.run import run_case
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.support.config import load_config
from omnireduce.support.files.tensors import FileError


def saved(folder: Path, tensors: list[Array], suffix: str = ".npy") -> str:
    """Save each rank's tensor; return the pattern of the files' names."""
    for rank, tensor in enumerate(tensors):
        save(folder / f"gradient-{rank}{suffix}", gradient=tensor)
    return f"{folder}/gradient-{{rank}}{suffix}"


def recorded(pattern: str, world_size: int, op: str = "sum", block_size: int = 16) -> RecordedTensors:
    (array,) = find_arrays(pattern, world_size)
    return RecordedTensors(array, op, block_size)


def block_flags(tensor: Array, block_size: int) -> Array:
    """Flags of blocks that hold an element other than +0 and -0."""
    with np.errstate(invalid="ignore"):
        return np.array(
            [bool(np.any(tensor[at : at + block_size] != 0)) for at in range(0, tensor.size, block_size)], np.bool_
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the files are overwritten
@given(
    case=st.sampled_from(CASES),
    suffix=st.sampled_from(SUFFIXES),
    elements=st.integers(0, 500),
    block_size=st.sampled_from([8, 24, 256]),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_matches_numpy(
    tmp_path: Path,
    case: tuple[str, str],
    suffix: str,
    elements: int,
    block_size: int,
    world_size: int,
    seed: int,
    data: st.DataObject,
) -> None:
    (dtype, op), rng = case, np.random.default_rng(seed)
    tensors = [sparse_tensor(rng, dtype, elements, block_size, 0.5) for _ in range(world_size)]
    source = recorded(saved(tmp_path, tensors, suffix), world_size, op, block_size)
    out = np.ones_like(tensors[0])
    for rank, tensor in enumerate(tensors):
        source.fill(rank, 7, out)
        assert out.tobytes() == tensor.tobytes()
    flags = [block_flags(tensor, block_size) for tensor in tensors]
    assert source.density == pytest.approx(np.mean([flag.mean() for flag in flags]) if elements else 0)
    assert source.union_density == (np.logical_or.reduce(flags).mean() if elements else 0)

    result = reduce_in_rank_order(tensors, op)
    assert source.wrong(0, result) == 0
    at = data.draw(st.lists(st.integers(0, elements - 1), unique=True)) if elements else []
    for i in at:
        with np.errstate(invalid="ignore"):
            result[i] = 1 if result[i] != 1 else 2
    assert source.wrong(3, result) == len(at)


def test_nan_equals_only_nan_and_the_zeros_are_equal(tmp_path: Path) -> None:
    tensor = np.array([np.nan, 1, 0, -0.0, np.inf], np.float32)
    source = recorded(saved(tmp_path, [tensor]), 1)
    for result, wrong in [
        ([np.nan, 1, -0.0, 0, np.inf], 0),
        ([1, 1, 0, 0, np.inf], 1),
        ([np.nan, np.nan, 0, 0, np.inf], 1),
        ([np.nan, 1, 0, 0, -np.inf], 1),
    ]:
        assert source.wrong(0, np.array(result, np.float32)) == wrong


def test_any_memory_order_and_byte_order(tmp_path: Path) -> None:
    array = np.arange(15, dtype=np.float32).reshape(3, 5)
    pattern = saved(tmp_path, [array, np.asfortranarray(array), array.astype(">f4")])
    source, out = recorded(pattern, 3), np.empty((5, 3), np.float32)
    for rank in range(3):
        source.fill(rank, 0, out)
        assert np.array_equal(out.reshape(-1), array.reshape(-1))
    assert source.wrong(0, 3 * array) == 0


@pytest.mark.parametrize(
    ("dtype", "op", "world_size", "expected"),
    [
        ("int32", "prod", 5, True),
        ("float32", "sum", 2, True),
        ("float32", "mean", 3, False),
        ("float64", "max", 2, False),
    ],
)
def test_whether_any_order_gives_the_same(tmp_path: Path, dtype: str, op: str, world_size: int, expected: bool) -> None:
    pattern = saved(tmp_path, [np.ones(4, dtype)] * world_size)
    assert recorded(pattern, world_size, op).any_order == expected


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_does_not_grow_with_the_number_of_ranks(tmp_path: Path, suffix: str) -> None:
    tensor = np.ones(300_000, np.float32)
    pattern = saved(tmp_path, [tensor] * 9, suffix)
    result = 9 * tensor
    tracemalloc.start()
    source = recorded(pattern, 9)
    source.fill(0, 0, tensor)
    assert source.wrong(0, result) == 0
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * tensor.nbytes


SOME = np.ones(10, np.float32)


@pytest.mark.parametrize(
    ("suffix", "first", "second", "message"),
    [
        (
            ".npy",
            {"a": SOME},
            {"a": SOME[:9]},
            r"x-1\.npy: the array is float32\[9\], but .*x-0\.npy: .* float32\[10\]",
        ),
        (".npy", {"a": SOME}, {"a": SOME.reshape(2, 5)}, r"x-1\.npy: the array is float32\[2x5\], but .*x-0\.npy: "),
        (".npz", {"a": SOME}, {"a": SOME.astype("f8")}, r"x-1\.npz: array 'a' is float64\[10\], but .*x-0\.npz: array"),
        (".npz", {"a": SOME, "b": SOME}, {"a": SOME}, r"x-1\.npz: has no array 'b', but .*x-0\.npz: array 'b' is f"),
        (".safetensors", {"a": SOME}, {"b": SOME, "a": SOME}, r"x-1\.\w+: array 'b' is .*, but .*x-0\.\w+: has no"),
        (".npz", {}, {}, r"x-0\.npz: holds no arrays"),
        (".npz", {"a": np.array(["b"])}, {}, r"x-0\.npz: a: cannot reduce arrays of <U1"),
    ],
)
def test_files_that_do_not_match(
    tmp_path: Path, suffix: str, first: dict[str, Array], second: dict[str, Array], message: str
) -> None:
    save(tmp_path / f"x-0{suffix}", **first)
    save(tmp_path / f"x-1{suffix}", **second)
    with pytest.raises(FileError, match=message):
        find_arrays(f"{tmp_path}/x-{{rank}}{suffix}", 2)


def test_the_order_in_the_files_does_not_matter(tmp_path: Path) -> None:
    save(tmp_path / "0.npz", a=SOME, b=SOME[:3])
    save(tmp_path / "1.npz", b=SOME[:3], a=SOME)
    assert [array.name for array in find_arrays(f"{tmp_path}/{{rank}}.npz", 2)] == ["a", "b"]


def test_wrong_patterns(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"got 'x\.npy', expected the file of every rank, such as .*\{rank\}"):
        find_arrays("x.npy", 2)
    pattern = saved(tmp_path, [SOME])
    with pytest.raises(FileError, match=r"gradient-1\.npy: No such file or directory"):
        find_arrays(pattern, 2)
    with pytest.raises(FileError, match="expected a file name that ends in"):
        find_arrays("x.{rank}", 2)


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    pattern = saved(tmp_path, [SOME, SOME])
    source = recorded(pattern, 2)
    save(pattern.format(rank=1), a=SOME[:5])
    with pytest.raises(FileError, match=r"gradient-1\.npy: was changed while it was in use"):
        source.fill(1, 0, np.empty(10, np.float32))


def test_wrong_arguments(tmp_path: Path) -> None:
    source = recorded(saved(tmp_path, [SOME]), 1)
    with pytest.raises(UsageError, match=r"got float64\[10\], expected float32\[10\]"):
        source.fill(0, 0, np.empty(10))
    with pytest.raises(UsageError, match="contiguous"):
        source.wrong(0, np.empty(20, np.float32)[::2])


THREADED = ".safetensors"  # not .npy, which NumPy parses with `ast`: in Python 3.11 not safe in several threads


def run(daemon: Daemon, patterns: list[str], op: str) -> Row:
    """Rank r reads all files as `patterns[r]` says."""

    def on_rank(comm: Communicator) -> Row:
        config = load_config(overrides=[f"bench.op={op}", "bench.block_size=64"], environ={})
        (case,) = recorded_cases(config, patterns[comm.rank], comm.size)
        return run_case(comm, case, rounds=2, warmup=1)

    rows = run_job(configured(daemon.addresses), len(patterns), on_rank)
    assert rows == [rows[0]] * len(patterns)
    return rows[0]


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_the_service_gives_the_oracles_bits(daemon: Daemon, tmp_path: Path, dtype: str, op: str) -> None:
    rng = np.random.default_rng(5)
    pattern = saved(tmp_path, [sparse_tensor(rng, dtype, 5003, 64, 0.4) for _ in range(3)], THREADED)
    row = run(daemon, [pattern] * 3, op)
    assert (row.wrong, row.elements, row.dtype, row.op, row.block_size) == (0, 5003, dtype, op, 64)
    assert 0 < row.density < row.union_density < 1


def test_a_rank_that_reduces_something_else_is_noticed(daemon: Daemon, tmp_path: Path) -> None:
    tensors = [np.arange(1000, dtype=np.float32), np.ones(1000, np.float32)]
    other = np.where(np.arange(1000) == 77, 2, tensors[1])
    patterns = []
    for rank, second in enumerate((tensors[1], other)):
        (tmp_path / str(rank)).mkdir()
        patterns.append(saved(tmp_path / str(rank), [tensors[0], second], THREADED))
    assert run(daemon, patterns, "sum").wrong == 3, "element 77 on rank 0 in each of three rounds"
