"""Tensors as parts of plain data: so `broadcast_object` takes the state of a model without a pickle.

They arrive in the processor's memory, whatever device they come from, as leaves of the graph.
"""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn

from omnireduce.core.wire.blocks import MAX_ELEMENTS
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls.objects import ADVICE, ObjectCodec, add_codec
from omnireduce.torch.tensors import TORCH_TYPES, bytes_of, staged

_NAMES: dict[torch.dtype, str] = {
    **{dtype: element.name for dtype, element in TORCH_TYPES.items()},
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_Tensor = tuple[
    Annotated[str, Meta(max_length=20)],
    Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_ELEMENTS)]], Meta(max_length=64)],  # the shape
    bytes,
    bool,  # whether it requires a gradient
]


def _encode(x: Tensor) -> list[object]:
    if x.layout is not torch.strided or x.is_quantized or x.is_meta or x.dtype not in _NAMES:
        raise UsageError(f"a tensor of {x.dtype}, {x.layout}, on {x.device} is no plain data; {ADVICE}")
    return [_NAMES[x.dtype], list(x.shape), bytes_of(staged(x)).tobytes(), x.requires_grad]


def _decode(x: tuple[str, list[int], bytes, bool]) -> Tensor:
    name, shape, data, requires_grad = x
    dtype = DTYPES[name]
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes for a tensor of {name} {shape}")
    tensor = torch.empty(shape, dtype=torch.uint8 if dtype is torch.bool else dtype)
    bytes_of(tensor)[:] = np.frombuffer(data, np.uint8)
    tensor = tensor.ne(0) if dtype is torch.bool else tensor  # a byte of a peer may be no bool
    return tensor.requires_grad_(requires_grad)


def _decode_parameter(x: tuple[str, list[int], bytes, bool]) -> nn.Parameter:
    tensor = _decode(x)
    return nn.Parameter(tensor.detach(), tensor.requires_grad)


def register_tensor_codecs() -> None:
    """From now on objects may have tensors and parameters in them."""
    add_codec(Tensor, "torch.Tensor", ObjectCodec(_encode, _Tensor, _decode))
    add_codec(nn.Parameter, "torch.nn.Parameter", ObjectCodec(_encode, _Tensor, _decode_parameter))
