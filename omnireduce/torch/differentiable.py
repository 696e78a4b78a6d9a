"""Collectives of tensors through which gradients go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Callable[[list[Tensor]], Sequence[Tensor]]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Tensors, back: Tensors, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(list(grads))


def differentiable(run: Tensors, back: Tensors, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What `run` makes of the tensors: other ones. `back` makes their gradients of those of the results, in a backward
    pass, which all ranks make."""
    return list(_Differentiable.apply(run, back, *tensors))
