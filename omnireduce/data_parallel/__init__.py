"""Data parallelism on top of a communicator: training with any framework, and collectives that ranks submit in any
order, by name.

    from omnireduce import data_parallel as ddp

    rank, size = ddp.init()
    loader, batch_size = ddp.partition_dataset((inputs, targets), 128)
    ddp.broadcast_parameters(parameters)
    opt = ddp.DistributedOptimizer(opt)

Each name is loaded at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omnireduce.data_parallel.adapters import Adapter, ArrayAdapter
    from omnireduce.data_parallel.broadcasting import broadcast_parameters
    from omnireduce.data_parallel.dataset_loader import Loader, partition_dataset
    from omnireduce.data_parallel.default_communicator import init
    from omnireduce.data_parallel.optimizer import DistributedOptimizer
    from omnireduce.runtime.rank.global_communicator import is_initialized, rank, shutdown, size
else:
    _MODULES = {
        "Adapter": "adapters",
        "ArrayAdapter": "adapters",
        "DistributedOptimizer": "optimizer",
        "Loader": "dataset_loader",
        "broadcast_parameters": "broadcasting",
        "init": "default_communicator",
        "partition_dataset": "dataset_loader",
    }
    _GLOBAL_MODULE = "omnireduce.runtime.rank.global_communicator"

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'omnireduce.data_parallel' has no attribute {name!r}")
        module = f"omnireduce.data_parallel.{_MODULES[name]}" if name in _MODULES else _GLOBAL_MODULE
        attribute = getattr(import_module(module), name)
        globals()[name] = attribute  # from now on this function is not asked for it
        return attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "Adapter",
    "ArrayAdapter",
    "DistributedOptimizer",
    "Loader",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "partition_dataset",
    "rank",
    "shutdown",
    "size",
]
