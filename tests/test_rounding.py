"""Products and means are rounded once, in the type of their arrays."""

from __future__ import annotations

from fractions import Fraction
from math import trunc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from omnireduce.support.rounding import integer_mean, scaled

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@given(st.data(), st.sampled_from(INTEGERS), st.integers(1, 300))
def test_a_mean_of_integers_is_cut_off_towards_zero(data: st.DataObject, dtype: str, count: int) -> None:
    total = data.draw(arrays.arrays(dtype, st.integers(0, 5)))
    expected = [trunc(Fraction(int(each), count)) for each in total]
    assert integer_mean(total, count, np.empty_like(total)).tolist() == expected
    assert integer_mean(total, count, total) is total
    assert total.tolist() == expected


@given(arrays.arrays("int32", 5), st.integers(1, 300), st.sampled_from([0.5, 2.0, 3.0, -0.25]))
def test_a_mean_of_integers_is_rounded_after_it_is_scaled(total: Any, count: int, factor: float) -> None:
    total = total // 8  # the result fits
    expected = [trunc(Fraction(int(each)) * Fraction(factor) / count) for each in total]
    assert integer_mean(total, count, np.empty_like(total), factor).tolist() == expected


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(st.floats(-200, 200), st.floats(-10, 10))
def test_the_product_of_a_16_bit_float_is_rounded_and_not_the_factor(
    dtype: np.dtype[Any], value: float, factor: float
) -> None:
    x = np.array([value], dtype)
    expected = (x.astype(np.float32) * np.float32(factor)).astype(dtype)
    assert scaled(x, factor) == expected
    assert scaled(x, factor).dtype == dtype
    assert scaled(x, factor, x) is x
    assert x == expected


def test_a_product_of_integers_is_cut_off_towards_zero() -> None:
    assert scaled(np.array([-7, 7, 100], np.int8), 0.5).tolist() == [-3, 3, 50]
