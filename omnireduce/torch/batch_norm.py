"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from omnireduce.data_parallel.session import global_process_set, size, submit_named
from omnireduce.errors import UsageError
from omnireduce.torch.collectives import sum_of

_numbers = count()


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d or 3d, whose mean and variance in training are those of the batches of all ranks.

    Input: (batch, channels, …). Batches of ranks may have other sizes. All ranks call it, and its backward, equally
    often, and make their layers in one order. See Ioffe and Szegedy, "Batch Normalization", 2015.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name = f"batch_norm.{next(_numbers)}"

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  as torch has it
        if input.dim() < 2:
            raise UsageError(f"input has shape {tuple(input.shape)}; expected (batch, channels, …)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The normalised input. Raises UsageError for one of fewer than two dimensions."""
        if not (self.training or self.running_mean is None) or size() == 1:
            return super().forward(input)
        name = f"{self._name}.sum"
        submit_named([name], global_process_set, lambda: self._check_input_dim(input))
        axes, shape = [0, *range(2, input.dim())], (1, -1, *[1] * (input.dim() - 2))
        exact = input.float() if input.dtype.itemsize < 4 else input
        own_count = exact.new_tensor([float(input.numel() // input.shape[1])])
        sums = sum_of(torch.cat([exact.sum(axes), own_count]), name, global_process_set)
        count = sums[-1].detach()
        if count < 2:
            raise UsageError("batch norm of one value in each channel, on all ranks together; expected more")
        mean = sums[:-1] / count
        centred = exact - mean.view(shape)
        variance = sum_of(centred.square().sum(axes), f"{self._name}.variance", global_process_set) / count
        if self.training:
            self._remember(mean.detach(), variance.detach() * count / (count - 1))
        normalised = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            normalised = normalised * self.weight.view(shape)
        if self.bias is not None:
            normalised = normalised + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Add to the running statistics. `variance`: the sample variance."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(variance.to(self.running_var.dtype), part)
