"""Data-parallel training with Needle, in the words of its own data-parallel module: docs/frameworks.md.

import omnireduce.needle as ddp

rank, device = ddp.init()
loader, batch_size = ddp.partition_dataset(dataset, 128, device, "float32")
ddp.broadcast_parameters(model)
opt = ddp.DistributedOptimizer(opt)
"""

from __future__ import annotations

from omnireduce.needle.training import DistributedOptimizer, broadcast_parameters, init, partition_dataset
from omnireduce.runtime.rank.global_communicator import is_initialized, rank, shutdown, size

__all__ = [
    "DistributedOptimizer",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "partition_dataset",
    "rank",
    "shutdown",
    "size",
]
