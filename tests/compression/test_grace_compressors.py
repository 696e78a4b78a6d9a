"""GRACE's compressors: what comes back is like what was given, to what error, in how many bytes."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnireduce import UsageError
from omnireduce.compression import grace
from omnireduce.compression.grace.params import COMPRESSORS
from omnireduce.compression.grace.selecting_compressors import decode_gaps, encode_gaps
from omnireduce.compression.grace.trial import try_compressor
from omnireduce.core.dtypes import Array

SEEDS = st.integers(0, 2**32 - 1)
NAMES = tuple(COMPRESSORS)
SHAPES = [(1000,), (40, 30), (3, 4, 5), (1,), (0,), (0, 3), ()]
AT_RANDOM = ("natural", "qsgd", "terngrad", "randomk")


def gradient(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def there_and_back(compressor: grace.Compressor, x: Any, name: str = "w") -> Any:
    return compressor.decompress(*compressor.compress(x, name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_comes_back_is_like_what_was_given(name: str, dtype: str) -> None:
    for shape in SHAPES:
        x = gradient(1, *shape).astype(dtype) if shape else np.array(0.5, dtype)
        before = x.copy()
        result = there_and_back(COMPRESSORS[name](), x)
        assert (type(result), result.shape, result.dtype) == (np.ndarray, shape, dtype)
        assert (x == before).all()
        assert not np.shares_memory(result, x)


@pytest.mark.skipif(find_spec("torch") is None, reason="no torch here; `make torch` installs it")
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_gets_what_an_array_gets(name: str) -> None:
    import torch

    for shape in SHAPES:
        x = gradient(1, *shape) if shape else np.array(0.5, np.float32)
        plain = there_and_back(COMPRESSORS[name](), x)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            result = there_and_back(COMPRESSORS[name](), torch.from_numpy(x.copy()).to(dtype))
            assert (type(result), tuple(result.shape), result.dtype) == (torch.Tensor, shape, dtype)
        transposed = torch.from_numpy(np.asfortranarray(x)).requires_grad_()
        assert there_and_back(COMPRESSORS[name](), transposed).numpy().tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_generators_stay_and_the_same_seed_draws_the_same(name: str) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist()
    one, other = COMPRESSORS[name](), COMPRESSORS[name]()
    for _ in range(3):
        first, second = (each.compress(gradient(1, 500), "w")[0] for each in (one, other))
        assert [each.tobytes() for each in first] == [each.tobytes() for each in second]
    assert states == (random.getstate(), np.random.get_state()[1].tolist())


@pytest.mark.parametrize("name", AT_RANDOM)
def test_seeds_names_and_steps_draw_differently(name: str) -> None:
    x, make = gradient(1, 500), COMPRESSORS[name]
    compressor: Any = make()
    results = [compressor.compress(x, each)[0] for each in ("w", "w", "v")]
    results.append(make(seed=1).compress(x, "w")[0])  # type: ignore[call-arg]
    assert len({b"".join(part.tobytes() for part in result) for result in results}) == 4
    assert (compressor.decompress(*compressor.compress(x, "u")) == there_and_back(make(), x, "u")).all()


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("signsgd", 1 / 8),
        ("onebit", 1 / 8),
        ("efsignsgd", 1 / 8),
        ("signum", 1 / 8),
        ("terngrad", 1 / 4),
        ("natural", 1),
        ("u8bit", 1),
        ("fp16", 2),
    ],
)
def test_they_are_really_packed(name: str, limit: float) -> None:
    for elements in (8, 1000, 100_001):
        tensors, _ = COMPRESSORS[name]().compress(gradient(1, elements), "w")
        assert sum(tensor.nbytes for tensor in tensors) <= limit * elements + 64


def test_sizes_of_others() -> None:
    elements = 1 << 20
    x = gradient(1, elements)
    assert sum(each.nbytes for each in grace.QSGDCompressor().compress(x, "w")[0]) == elements + 4 * elements // 128
    assert sum(each.nbytes for each in grace.TopKCompressor(0.01).compress(x, "w")[0]) <= 6 * int(0.01 * elements)
    assert sum(each.nbytes for each in grace.RandomKCompressor(0.01).compress(x, "w")[0]) == 4 * int(0.01 * elements)
    assert sum(each.nbytes for each in grace.InceptionnCompressor(0.05).compress(x, "w")[0]) <= 1.25 * elements
    assert sum(each.nbytes for each in grace.SketchCompressor().compress(x, "w")[0]) == elements + 4 * 64
    assert sum(each.nbytes for each in grace.AdaqCompressor(0.01).compress(x, "w")[0]) <= 2 * 0.01 * elements + 8


@given(places=st.sets(st.integers(0, 2**40)))
def test_gaps_and_places(places: set[int]) -> None:
    ascending = np.array(sorted(places), np.int64)
    assert (decode_gaps(encode_gaps(ascending)) == ascending).all()


@pytest.mark.parametrize(("name", "deviation"), [("natural", 0.5), ("qsgd", 0.1), ("terngrad", 2.0)])
def test_what_is_rounded_at_random_is_right_on_average(name: str, deviation: float) -> None:
    """The seed is fixed: this always draws the same numbers. `deviation`: more than that of any element. The largest
    one is within 2.5 times the root mean square, so that nothing is clipped."""
    x, times, compressor = np.array([2, -1.9, 0.7, -0.3, 0.01, 0, -1.1, 1.0], np.float32), 2000, COMPRESSORS[name]()
    mean = np.mean([there_and_back(compressor, x) for _ in range(times)], axis=0, dtype=np.float64)
    assert (np.abs(mean - x) <= 6 * deviation / times**0.5).all(), mean


def test_each_element_is_drawn_as_often_by_random_k() -> None:
    compressor = grace.RandomKCompressor(0.25)
    drawn = sum(there_and_back(compressor, np.ones(40, np.float32)) for _ in range(1000))
    assert drawn.sum() == 10 * 1000
    assert (np.abs(drawn - 250) < 6 * (1000 * 0.25 * 0.75) ** 0.5).all()


@given(seed=SEEDS, size=st.integers(1, 300))
def test_errors_have_bounds(seed: int, size: int) -> None:
    x = gradient(seed, size)
    largest = np.abs(x).max()
    assert (np.abs(there_and_back(grace.FP16Compressor(), x) - x) <= np.abs(x) / 2048 + 2.0**-25).all()
    assert (np.abs(there_and_back(grace.NaturalCompressor(), x) - x) <= np.abs(x)).all()
    assert (np.abs(there_and_back(grace.U8bitCompressor(), x) - x) <= 0.008 * largest).all()
    bound = 0.01
    assert (np.abs(there_and_back(grace.InceptionnCompressor(bound), x) - x) <= 1.01 * bound).all()
    for levels, bucket in ((127, 128), (3, 16)):
        result = there_and_back(grace.QSGDCompressor(levels, bucket), x)
        for start in range(0, size, bucket):
            some = slice(start, start + bucket)
            assert (np.abs(result[some] - x[some]) <= 1.001 * np.linalg.norm(x[some]) / levels).all()


@given(seed=SEEDS, size=st.integers(1, 300), ratio=st.floats(0.01, 1))
def test_what_is_selected_is_what_it_was(seed: int, size: int, ratio: float) -> None:
    x, k = gradient(seed, size), max(1, int(size * ratio))
    for compressor in (grace.TopKCompressor(ratio), grace.GuardedThresholdCompressor(1e9, ratio)):
        result = there_and_back(compressor, x)
        assert np.count_nonzero(result) == k
        assert (result[result != 0] == x[result != 0]).all()
        assert np.abs(result[result != 0]).min() >= np.abs(x[result == 0]).max(initial=0)


def test_a_guard_counts_ties_and_nan() -> None:
    guarded = grace.GuardedThresholdCompressor(10.0, 0.1)
    assert np.count_nonzero(there_and_back(guarded, np.full(100, -0.5, np.float32))) == 10
    assert there_and_back(guarded, np.zeros(100, np.float32)).tolist() == [0] * 100
    odd = np.ones(100, np.float32)
    odd[50] = np.nan
    assert np.isnan(there_and_back(guarded, odd)[50])
    assert np.count_nonzero(there_and_back(grace.GuardedThresholdCompressor(0.25, 0.1), odd)) == 100


def test_signs_and_their_means() -> None:
    x = np.array([1, -2, 3, -6, 0, 4, 0, 0, 0], np.float32)
    assert there_and_back(grace.OneBitCompressor(), x).tolist() == pytest.approx([a := 8 / 7, -4, a, -4, *[a] * 5])
    result = there_and_back(grace.EFSignSGDCompressor(), x)
    assert result.tolist() == pytest.approx([16 / 9, -16 / 9, 16 / 9, -16 / 9, *[16 / 9] * 5])
    assert there_and_back(grace.SignSGDCompressor(), x).tolist() == [1, -1, 1, -1, 1, 1, 1, 1, 1]
    votes = [np.array(each, np.float32) for each in ([1, -1], [-1, -1], [1, 1], [-1, -1])]
    assert grace.SignSGDCompressor().aggregate(votes).tolist() == [1, -1]


def test_means_are_those_of_all_elements() -> None:
    """Also of zeros at the end. A mean over what is not finite is not finite, and no warning."""
    x = np.zeros(10_000, np.float32)
    x[:10] = np.arange(1, 11)
    for kind in (grace.OneBitCompressor, grace.EFSignSGDCompressor):
        assert there_and_back(kind(), x).tolist() == [np.float32(0.0055)] * 10_000
        assert np.isnan(there_and_back(kind(), np.array([1, np.nan, 0], np.float32))).all()
        assert there_and_back(kind(), np.array([1, np.inf, 0], np.float32)).tolist() == [np.inf] * 3
        assert there_and_back(kind(), np.full(3, -2, np.float32)).tolist() == [-2] * 3


def test_a_momentum_of_signs_and_a_step_that_was_not_sent() -> None:
    signum = grace.SignumCompressor(0.5)
    assert there_and_back(signum, np.array([4, -4], np.float32)).tolist() == [1, -1]
    assert there_and_back(signum, np.array([-1, 1], np.float32)).tolist() == [1, -1]  # 1.5 and -1.5
    assert there_and_back(signum, np.array([-9, 9], np.float32)).tolist() == [-1, 1]
    signum.take_back("w")
    assert there_and_back(signum, np.array([-1, 1], np.float32)).tolist() == [1, -1]  # 0.25 and -0.25
    with pytest.raises(UsageError, match="gradient 'w' has 3 elements; it had 2 before"):
        signum.compress(np.ones(3, np.float32), "w")


def test_a_large_element_is_clipped() -> None:
    x = np.zeros(100, np.float32)
    x[0] = 10  # the root mean square is 1
    assert there_and_back(grace.TernGradCompressor(), x)[0] == 2.5
    assert there_and_back(grace.TernGradCompressor(), np.full(9, -3, np.float32)).tolist() == [-3] * 9


def test_the_largest_of_each_sign_as_their_mean() -> None:
    x = np.array([1, 2, 8, 6, -1, -5, 0, 0], np.float32)
    assert there_and_back(grace.AdaqCompressor(0.5), x).tolist() == [0, 0, 7, 7, 0, -5, 0, 0]


def test_quantiles_have_means() -> None:
    x = np.arange(8, dtype=np.float32)
    assert there_and_back(grace.SketchCompressor(4), x).tolist() == [0.5, 0.5, 2.5, 2.5, 4.5, 4.5, 6.5, 6.5]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_that_are_none_are_no_error(name: str) -> None:
    for odd in (np.nan, np.inf, -np.inf):
        x = gradient(1, 50)
        x[7] = odd
        assert there_and_back(COMPRESSORS[name](), x).shape == (50,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grace.TopKCompressor(0), "ratio 0: expected more than 0"),
        (lambda: grace.ThresholdCompressor(-1), "threshold -1: expected a number from 0 on"),
        (lambda: grace.QSGDCompressor(128), "quantum_num 128, bucket_size 128: expected 1 to 127"),
        (lambda: grace.QSGDCompressor(1.5), "quantum_num is 1.5"),
        (lambda: grace.EFSignSGDCompressor(0), "lr 0: expected a number above 0"),
        (lambda: grace.SketchCompressor(1), "quantiles 1: expected 2 to 256"),
        (lambda: grace.InceptionnCompressor(0.0), "error_bound 0.0: expected a number above 0"),
        (lambda: grace.PowerSGDCompressor(0), "rank 0: expected a whole number"),
        (lambda: grace.DgcMemory(0.9, True), "gradient_clipping True: expected False, or the norm"),
        (lambda: grace.TopKCompressor().compress([1.0], "w"), "a gradient is a list"),
        (lambda: grace.TopKCompressor().compress(np.arange(3), "w"), "a gradient is of int64"),
    ],
)
def test_what_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fp16"])
def test_each_stands_the_trial(name: str) -> None:
    """Without fp16, which has no room for huge numbers."""
    tried = set()

    def copy(values: Array) -> Array:
        tried.add((values.shape, values.tobytes()))  # a trial takes each gradient several times
        return values.copy()

    trial = try_compressor(COMPRESSORS[name], {"NumPy": copy}, {})
    assert (trial.failures, trial.not_taken) == ([], {})
    assert len(tried) > 10
