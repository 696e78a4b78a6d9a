"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from omnireduce.data_parallel.session import global_process_set, name_of, size
from omnireduce.errors import UsageError
from omnireduce.torch.reductions import sum_of


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm1d`, 2d or 3d, whose mean and variance in training are those of the batches of all ranks.

    Input: (batch, channels, …). Batches of ranks may have other sizes. All ranks call it, and its backward, equally
    often. See Ioffe and Szegedy, "Batch Normalization", 2015.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  as torch has it
        if input.dim() < 2:
            raise UsageError(f"input has shape {tuple(input.shape)}; expected (batch, channels, …)")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """The normalised input. Raises UsageError for one of fewer than two dimensions."""
        self._check_input_dim(input)
        if not (self.training or self.running_mean is None) or size() == 1:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        shape = (1, -1, *[1] * (input.dim() - 2))
        own = input.numel() // input.shape[1]
        counted = torch.cat([input.sum(axes), input.new_tensor([float(own)])])
        counted = sum_of(counted, name_of("mean", None), global_process_set)
        many = counted[-1].detach()
        mean = counted[:-1] / many
        centred = input - mean.view(shape)
        variance = sum_of(centred.square().sum(axes), name_of("variance", None), global_process_set) / many
        if self.training:
            self._remember(mean.detach(), variance.detach() * many / (many - 1))
        found = centred * (variance + self.eps).rsqrt().view(shape)
        return found if self.weight is None else found * self.weight.view(shape) + self.bias.view(shape)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """In the running statistics. `variance`: that of a sample."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        part = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
        self.running_var.lerp_(variance.to(self.running_var.dtype), part)
