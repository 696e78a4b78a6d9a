"""Sparse tensors of torch as numbered rows, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnireduce.core.dtypes import Array
from omnireduce.runtime.rank.calls.single import Rows
from omnireduce.torch.tensors import array_of, settle, staged, tensor_of


def rows_of(tensor: Tensor) -> tuple[Array, Array, int]:
    """The numbers of the rows of a sparse tensor, int64 (n,), which may repeat; the rows, (n, width); how many rows the
    matrix has in all.

    The sparse dimensions of the tensor number the rows; the dense ones make one row. A row without elements travels as
    one zero.
    """
    shape = tuple(tensor.shape[: tensor.sparse_dim()])
    indices, values = array_of(staged(tensor._indices())), staged(tensor._values())
    numbers = np.ravel_multi_index(tuple(indices), shape) if indices.size else np.zeros(0, np.int64)
    rows = array_of(values)
    rows = rows.reshape(len(numbers), width_of(tensor)) if width_of(tensor) else np.zeros((len(numbers), 1), rows.dtype)
    return numbers, rows, math.prod(shape)


def width_of(tensor: Tensor) -> int:
    """The number of elements of a row of a sparse tensor; a complex element counts twice."""
    dense: Sequence[int] = tensor.shape[tensor.sparse_dim() :]
    return math.prod(dense) * (2 if tensor.is_complex() else 1)


def stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """The stream of this thread for a tensor on a GPU."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


@torch.no_grad()
def replace(tensor: Tensor, rows: Rows[Any], stream: torch.cuda.Stream | None) -> None:
    """Replace a sparse tensor by the coalesced one of these rows. The tensor gets new memory, which belongs to
    `stream`."""
    with torch.cuda.stream(stream), torch.inference_mode(tensor.is_inference()):
        tensor.copy_(sparse_of(rows, tensor))  # not a detached one: that has numbers of rows of its own
        settle([tensor])


def sparse_of(rows: Rows[Any], like: Tensor) -> Tensor:
    """The coalesced sparse tensor of these rows, of the shape, type and device of `like`."""
    numbers, values = rows
    sparse, dense = like.shape[: like.sparse_dim()], like.shape[like.sparse_dim() :]
    pair = (2,) if like.is_complex() else ()
    indices = torch.from_numpy(np.stack(np.unravel_index(numbers, tuple(sparse))).astype(np.int64, copy=False))
    row_values = tensor_of(values[:, : width_of(like)].reshape(len(numbers), *dense, *pair), like.dtype)
    return torch.sparse_coo_tensor(
        indices, row_values, like.shape, device=like.device, is_coalesced=True, check_invariants=False
    )
