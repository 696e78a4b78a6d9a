"""Tensors as arrays of the same memory."""

from __future__ import annotations

import gc
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from omnireduce import UsageError
from omnireduce.torch.backend.reduce_ops import COMPLEX
from omnireduce.torch.tensors import TORCH_TYPES, array_of, tensor_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")  # for complex32
SHAPES = ((), (0,), (2, 0), (3,), (2, 3))


@pytest.mark.parametrize("dtype", [*TORCH_TYPES, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_array_has_the_numbers_and_the_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """NumPy's type of the same name, also of unsigned integers; what is written to the array is in the tensor."""
    x = torch.zeros(shape, dtype=dtype)
    array = array_of(x)
    assert array.shape == ((*shape, 2) if dtype.is_complex else shape)
    assert dtype.is_complex or array.dtype.name == str(dtype).removeprefix("torch.")
    array[...] = 1
    expected = torch.full(shape, 1 + 1j if dtype.is_complex else 1, dtype=torch.complex128)
    again = tensor_of(array, dtype)
    assert again.dtype == dtype
    for each in (x, again):
        assert torch.equal(each.to(torch.complex128), expected)


def test_large_unsigned_numbers_keep_their_values() -> None:
    for name in ("uint16", "uint32", "uint64"):
        largest = np.array([np.iinfo(name).max], name)
        assert array_of(torch.from_numpy(largest)).tolist() == largest.tolist()


def test_an_array_keeps_the_memory_of_its_tensor() -> None:
    array = array_of(torch.full((1000,), 3.0))
    gc.collect()
    others = [torch.zeros(1000) for _ in range(100)]
    assert (array == 3).all(), len(others)


def test_a_tensor_can_be_resized_after_a_collective_had_its_memory() -> None:
    """FSDP frees the memory of a parameter so. After `Tensor.numpy` torch refuses that for good."""
    x = torch.ones(4)
    assert array_of(x).sum() == 4
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0


@pytest.mark.parametrize(
    ("x", "name"),
    [
        (torch.zeros(2, dtype=torch.float8_e8m0fnu), "float8_e8m0fnu [2]"),
        (torch.zeros(2, dtype=torch.uint4), "uint4 [2]"),
    ],
)
def test_an_element_type_that_numpy_does_not_have_is_named(x: Tensor, name: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"a tensor of {name} came; cast it")):
        array_of(x)
