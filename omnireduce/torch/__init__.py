"""PyTorch over the service: import this, then `torch.distributed.init_process_group("omnireduce")`.

The collectives of `torch.distributed` work, also under DistributedDataParallel. docs/pytorch.md says which do not. The
aggregators come from the configuration of omnireduce. If none is configured, all ranks are on one host, and rank 0
starts one.

Without a process group there are Horovod's names, `import omnireduce.torch as hvd`: see docs/horovod.md.
"""

from __future__ import annotations

from omnireduce.support.extras import need

need("torch", "omnireduce.torch", "torch")  # before what fails without it

from omnireduce.data_parallel.horovod_names import (
    Compression,
    ccl_built,
    check_extension,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from omnireduce.data_parallel.scaling import Adasum, Average, Max, Min, Product, Sum
from omnireduce.data_parallel.session import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from omnireduce.errors import AbortedError as HorovodInternalError
from omnireduce.torch import elastic
from omnireduce.torch.backend.launch_variables import local_first, set_torch_variables
from omnireduce.torch.backend.process_group import ProcessGroup
from omnireduce.torch.backend.rendezvous import register_rendezvous
from omnireduce.torch.batch_norm import SyncBatchNorm
from omnireduce.torch.broadcasting import (
    allgather_object,
    broadcast_object,
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
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessGroup",
    "ProcessSet",
    "Product",
    "ShardedOptimizer",
    "State",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "check_extension",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grace_hook",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_first",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
