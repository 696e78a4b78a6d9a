"""Communication hooks of DistributedDataParallel, for users who keep gloo or NCCL as their backend.

state = omnireduce.torch.State(model)
model.register_comm_hook(state, omnireduce.torch.allreduce_hook)
"""
# Annotations are not postponed here: torch compares those of a hook with its own classes.

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from omnireduce.errors import UsageError
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.torch.backend.process_group import ProcessGroup
from omnireduce.torch_backend import BACKEND

BLOCK = 256  # elements


class State:
    """State of a hook between two steps.

    `model`: whose gradients the hook combines, before or after DistributedDataParallel wraps it. `block_topk_hook`
    needs it: what a step keeps for later is known by the names of the parameters. `process_group`: the ranks (None:
    all). `density`: the part of the blocks, of `block_size` elements each, that `block_topk_hook` sends.

    All ranks must make it at the same time. Raises UsageError for a density or size that cannot be.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        density: float = 0.01,
        block_size: int = BLOCK,
    ) -> None:
        if not 0 < density <= 1:
            raise UsageError(f"density {density}: expected more than 0 and at most 1")
        if block_size < 1:
            raise UsageError(f"block_size {block_size}: expected at least 1")
        self.density, self.block_size = density, block_size
        plain = model.module if isinstance(model, DistributedDataParallel) else model
        self.names = {} if plain is None else {parameter: name for name, parameter in plain.named_parameters()}
        self.residuals: dict[str, Tensor] = {}
        group = dist.group.WORLD if process_group is None else process_group
        if not isinstance(group, ProcessGroup):
            ranks = dist.get_process_group_ranks(group)
            group = dist.new_group(ranks, backend=BACKEND, use_local_synchronization=True)
        self.group = group

    def state_dict(self) -> dict[str, Any]:
        """The residuals of gradients, by the name of the parameter. They differ between ranks: save them on each."""
        return {"residuals": {name: residual.clone() for name, residual in self.residuals.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned. Raises UsageError if it is of another model."""
        parameters = {name: parameter for parameter, name in self.names.items()}
        for name, residual in saved["residuals"].items():
            if name not in parameters or parameters[name].shape != residual.shape:
                problem = f"has shape {tuple(parameters[name].shape)}" if name in parameters else "is not there"
                raise UsageError(
                    f"parameter '{name}' of shape {tuple(residual.shape)} was saved; in this model it {problem}"
                )
        saved_residuals = saved["residuals"].items()  # which may have been read to another device
        self.residuals = {name: residual.to(parameters[name].device, copy=True) for name, residual in saved_residuals}

    def _residual(self, parameter: Tensor) -> Tensor:
        """The residual of the gradient of a parameter: a tensor of its shape, to be changed in place."""
        name = self.names.get(parameter)
        if name is None:
            raise UsageError("block_topk_hook needs the model: State(model). It has a parameter that is not known")
        if name not in self.residuals:
            self.residuals[name] = torch.zeros_like(parameter)
        return self.residuals[name]


def allreduce_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average a bucket over all ranks, blocks of zeros left out. A sparse gradient stays sparse."""
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def block_topk_hook(state: State, bucket: dist.GradBucket) -> Future[Tensor]:
    """Average the blocks of a bucket that are largest by their norm on each rank, a part `state.density` of all.

    The rest is kept, and added to the gradient of the next step (error feedback). Sparse gradients are sent whole.
    """
    if not bucket.buffer().is_sparse:
        with report_errors_to(state.group):
            residuals = [state._residual(parameter) for parameter in bucket.parameters()]
        gradients = bucket.gradients()
        for gradient, residual in zip(gradients, residuals, strict=True):
            gradient.add_(residual.to(gradient.dtype))
            residual.copy_(gradient)
        keep_largest(bucket.buffer(), state.density, state.block_size)
        for gradient, residual in zip(gradients, residuals, strict=True):
            residual.masked_fill_(gradient != 0, 0).nan_to_num_(0, 0, 0)  # an overflow must not come back
    return allreduce_hook(state, bucket)


def keep_largest(x: Tensor, density: float, block_size: int) -> None:
    """Zero all blocks of a flat tensor but a part `density`, at least one, that is largest by its norm, in place."""
    whole = x.numel() // block_size * block_size
    blocks, rest = x[:whole].view(-1, block_size), x[whole:]
    norms = torch.cat([blocks.float().square().sum(1), rest.float().square().sum().reshape(-1)[: len(rest)]])
    if not len(norms):
        return
    left_out = torch.ones(len(norms), dtype=torch.bool, device=x.device)
    left_out[norms.topk(max(1, round(density * len(norms)))).indices] = False
    blocks.masked_fill_(left_out[: len(blocks), None], 0)
    rest.masked_fill_(left_out[len(blocks) :], 0)
