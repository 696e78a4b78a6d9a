"""Data-parallel training with JAX: sums and averages of pytrees over ranks, in compiled functions, too: see
docs/frameworks.md.

import omnireduce.jax as ddp

rank, size = ddp.init()
loader, batch_size = ddp.partition_dataset((inputs, targets), 128)
params = ddp.broadcast(params)
loss, gradients = ddp.value_and_grad(loss_fn)(params, *batch)
"""

from __future__ import annotations

from omnireduce.support.extras import need

need("jax", "omnireduce.jax")  # before what fails without it

from omnireduce.data_parallel import init
from omnireduce.jax.collectives import allreduce, broadcast, jit
from omnireduce.jax.training import GradientTransformation, average_gradients, partition_dataset, value_and_grad
from omnireduce.runtime.rank.global_communicator import is_initialized, rank, shutdown, size

__all__ = [
    "GradientTransformation",
    "allreduce",
    "average_gradients",
    "broadcast",
    "init",
    "is_initialized",
    "jit",
    "partition_dataset",
    "rank",
    "shutdown",
    "size",
    "value_and_grad",
]
