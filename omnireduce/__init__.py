"""Sparse block aggregation: an all-reduce that moves only the non-zero blocks.

    import omnireduce as omni

    omni.init()                      # rank and size from mpirun, Slurm or torchrun; aggregators from the configuration
    omni.allreduce(gradient)         # in place, summed over all ranks
    omni.shutdown()

The functions of this module work on one global `Communicator`; programs that need several, or no global state, make
their own.

Each name is loaded when it is used first. So whoever imports one part of the package, as an aggregator does, loads no
other part.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from omnireduce.support.version import __version__

if TYPE_CHECKING:
    from omnireduce.core.descriptor import Op, RowOp
    from omnireduce.data_parallel.queue import Queue
    from omnireduce.elastic import ElasticState, run_elastic
    from omnireduce.errors import (
        AbortedError,
        ClosedError,
        CodecError,
        CollectiveTimeoutError,
        ConfigError,
        NewcomersError,
        OmniReduceError,
        RankFailedError,
        RefusedError,
        TransportError,
        UsageError,
    )
    from omnireduce.kernels.codecs.base import Codec
    from omnireduce.launch.functions import run
    from omnireduce.optimizers.sharded import ShardedOptimizer
    from omnireduce.runtime.rank.calls.batched import Table
    from omnireduce.runtime.rank.calls.single import Rows
    from omnireduce.runtime.rank.channels import Statistics
    from omnireduce.runtime.rank.communicator import Communicator
    from omnireduce.runtime.rank.global_communicator import (
        allgather,
        allgather_async,
        allgather_object,
        allgather_object_async,
        allgather_ragged,
        allgather_ragged_async,
        allreduce,
        allreduce_async,
        allreduce_rows,
        allreduce_rows_async,
        allreduce_rows_into,
        allreduce_rows_into_async,
        allreduce_tables,
        allreduce_tables_async,
        alltoall,
        alltoall_async,
        barrier,
        barrier_async,
        broadcast,
        broadcast_async,
        broadcast_object,
        broadcast_object_async,
        connect,
        gather,
        gather_async,
        init,
        is_initialized,
        local_first,
        local_rank,
        local_size,
        rank,
        reduce,
        reduce_async,
        reduce_scatter,
        reduce_scatter_async,
        reform,
        refuse,
        scatter,
        scatter_async,
        shutdown,
        size,
        start_timeline,
        stop_timeline,
    )
    from omnireduce.runtime.rank.handles import Handle
    from omnireduce.support.config import Config, load_config
else:
    _EXPORTS = {
        "omnireduce.support.config": ("Config", "load_config"),
        "omnireduce.data_parallel.queue": ("Queue",),
        "omnireduce.core.descriptor": ("Op", "RowOp"),
        "omnireduce.kernels.codecs.base": ("Codec",),
        "omnireduce.launch.functions": ("run",),
        "omnireduce.optimizers.sharded": ("ShardedOptimizer",),
        "omnireduce.runtime.rank.calls.single": ("Rows",),
        "omnireduce.runtime.rank.communicator": ("Communicator",),
        "omnireduce.elastic": ("ElasticState", "run_elastic"),
        "omnireduce.runtime.rank.calls.batched": ("Table",),
        "omnireduce.runtime.rank.handles": ("Handle",),
        "omnireduce.runtime.rank.channels": ("Statistics",),
    }
    _MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names}
    _WORLD_MODULE = "omnireduce.runtime.rank.global_communicator"

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'omnireduce' has no attribute {name!r}")
        default_module = "omnireduce.errors" if name.endswith("Error") else _WORLD_MODULE
        attribute = getattr(import_module(_MODULE_OF.get(name, default_module)), name)
        globals()[name] = attribute  # from now on this function is not asked for it
        return attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "AbortedError",
    "ClosedError",
    "Codec",
    "CodecError",
    "CollectiveTimeoutError",
    "Communicator",
    "Config",
    "ConfigError",
    "ElasticState",
    "Handle",
    "NewcomersError",
    "OmniReduceError",
    "Op",
    "Queue",
    "RankFailedError",
    "RefusedError",
    "RowOp",
    "Rows",
    "ShardedOptimizer",
    "Statistics",
    "Table",
    "TransportError",
    "UsageError",
    "__version__",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allgather_object_async",
    "allgather_ragged",
    "allgather_ragged_async",
    "allreduce",
    "allreduce_async",
    "allreduce_rows",
    "allreduce_rows_async",
    "allreduce_rows_into",
    "allreduce_rows_into_async",
    "allreduce_tables",
    "allreduce_tables_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "broadcast_object",
    "broadcast_object_async",
    "connect",
    "gather",
    "gather_async",
    "init",
    "is_initialized",
    "load_config",
    "local_first",
    "local_rank",
    "local_size",
    "rank",
    "reduce",
    "reduce_async",
    "reduce_scatter",
    "reduce_scatter_async",
    "reform",
    "refuse",
    "run",
    "run_elastic",
    "scatter",
    "scatter_async",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
