"""PyTorch over the service: import this, then `torch.distributed.init_process_group("omnireduce")`.

The collectives of `torch.distributed` work, also under DistributedDataParallel. docs/pytorch.md says which do not. The
aggregators come from the configuration of omnireduce. Where none is configured, all ranks are on one host, and rank 0
starts one.

Without a process group, `DistributedOptimizer` combines gradients, with Horovod's names: see `optimizer`.
"""

from __future__ import annotations

import torch.distributed as dist

from omnireduce.runtime.member.world import local_rank, local_size, rank, shutdown, size
from omnireduce.torch.gloo import DEVICES
from omnireduce.torch.grace import grace_hook
from omnireduce.torch.hooks import State, allreduce_hook, block_topk_hook
from omnireduce.torch.launch import local_first, tell_torch
from omnireduce.torch.optimizer import DistributedOptimizer, allreduce, broadcast_parameters, init
from omnireduce.torch.process_group import BACKEND, ProcessGroup

tell_torch()
if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(BACKEND, ProcessGroup, devices=DEVICES)

__all__ = [
    "DistributedOptimizer",
    "ProcessGroup",
    "State",
    "allreduce",
    "allreduce_hook",
    "block_topk_hook",
    "broadcast_parameters",
    "grace_hook",
    "init",
    "local_first",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
