"""PyTorch over the service: import this, then `torch.distributed.init_process_group("omnireduce")`.

The collectives of `torch.distributed` work, also under DistributedDataParallel. docs/pytorch.md says which do not. The
aggregators come from the configuration of omnireduce. If none is configured, all ranks are on one host, and rank 0
starts one.

Without a process group there are Horovod's names, `import omnireduce.torch as hvd`: see docs/horovod.md.
"""

from __future__ import annotations

from omnireduce.support.extras import need

need("torch", "omnireduce.torch", "torch")  # before what fails without it

from omnireduce.data_parallel import horovod_names
from omnireduce.data_parallel.horovod_names import *
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.torch import elastic
from omnireduce.torch.backend.launch_variables import local_first, set_torch_variables
from omnireduce.torch.backend.process_group import ProcessGroup
from omnireduce.torch.backend.rendezvous import register_rendezvous
from omnireduce.torch.batch_norm import SyncBatchNorm
from omnireduce.torch.broadcasting import (
    broadcast_optimizer_state,
    broadcast_parameters,
)
from omnireduce.torch.collectives import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from omnireduce.torch.ddp_hooks import State, allreduce_hook, block_topk_hook
from omnireduce.torch.grace import grace_hook
from omnireduce.torch.optimizer import DistributedOptimizer
from omnireduce.torch.sharded import ShardedOptimizer
from omnireduce.torch.tensor_objects import register_tensor_codecs
from omnireduce.torch.tensors import barrier, join, poll, synchronize
from omnireduce.torch_backend import register

_meeting_point = set_torch_variables()
if _meeting_point is not None:
    register_rendezvous(_meeting_point)
register_tensor_codecs()
register()

__all__ = [
    "DistributedOptimizer",
    "HorovodInternalError",
    "ProcessGroup",
    "ShardedOptimizer",
    "State",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_hook",
    "alltoall",
    "alltoall_async",
    "barrier",
    "block_topk_hook",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "grace_hook",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "local_first",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += horovod_names.__all__
