"""Element types and the zero rule on bits."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from samples import DTYPES, awkward_values

from omnireduce.core.dtypes import ELEMENT_TYPES, element_type
from omnireduce.errors import UsageError
from omnireduce.protocol.host.exchange_state import storage_of


def test_the_types() -> None:
    assert set(DTYPES) >= {
        *("float16", "bfloat16", "float32", "float64"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    }


def test_a_type_that_no_kernel_adds_is_told_of() -> None:
    new = dataclasses.replace(ELEMENT_TYPES["int8"], name="int4", storage=np.dtype(ml_dtypes.int4))
    with pytest.raises(AssertionError, match=r"no kernel adds int4: see 'An element type' in CONTRIBUTING\.md"):
        storage_of(new)


@pytest.mark.parametrize("name", DTYPES)
def test_a_type_is_found_by_its_dtype(name: str) -> None:
    element = ELEMENT_TYPES[name]
    assert element_type(element.dtype) is element
    assert (element.name, element.dtype.name, element.itemsize) == (name, name, element.storage.itemsize)
    assert element.is_float == ("float" in name)
    assert element.is_narrow == (element.is_float and name not in ("float32", "float64"))
    assert element.has_short_range == (element.is_narrow and name != "bfloat16")
    assert element.is_native == hasattr(np, name)


@pytest.mark.parametrize("dtype", [np.complex64, "S4", "O", ">f4", "M8[s]", ml_dtypes.int4])
def test_other_types_are_refused_with_the_list_of_those_that_work(dtype: object) -> None:
    with pytest.raises(UsageError, match=r"cannot reduce arrays of .*; supported are float16, bfloat16, float32"):
        element_type(dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DTYPES)
def test_the_mask_leaves_nothing_of_a_zero_and_something_of_all_else(name: str) -> None:
    element = ELEMENT_TYPES[name]
    values = np.concatenate([awkward_values(name), np.array([0, 1], element.dtype)])
    for value in values:
        for at in range(8 // element.itemsize):
            word = np.zeros(8 // element.itemsize, element.dtype)
            word[at] = value
            assert bool(word.view(np.uint64)[0] & element.zero_mask) == bool(value != 0), (value, at)


@pytest.mark.parametrize("name", [name for name in DTYPES if ELEMENT_TYPES[name].is_float])
def test_minus_zero_is_zero(name: str) -> None:
    word = np.full(8, -0.0, ELEMENT_TYPES[name].dtype).view(np.uint64)[0]
    assert word != 0
    assert word & ELEMENT_TYPES[name].zero_mask == 0
