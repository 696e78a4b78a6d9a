"""Training of Keras models on several ranks, in Horovod's words: docs/keras.md.

import omnireduce.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from omnireduce.support.extras import need

need("keras", "omnireduce.keras", "keras")  # before what fails without it

from omnireduce.data_parallel import horovod_names
from omnireduce.data_parallel.horovod_names import *
from omnireduce.keras import callbacks, elastic
from omnireduce.keras.collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_variables,
    reducescatter,
)
from omnireduce.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from omnireduce.keras.saving import load_model
from omnireduce.keras.tape import DistributedGradientTape

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]
__all__ += horovod_names.__all__
