"""A communicator from a dict, as GRACE's helper makes it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from omnireduce.compression.grace import lowrank, memories, packing, pieces, quantizing, selecting, service
from omnireduce.compression.grace.base import Communicator, Compressor, Memory
from omnireduce.compression.grace.communicators import Allgather, Broadcast, Collective
from omnireduce.compression.grace.loading import class_named
from omnireduce.errors import UsageError
from omnireduce.runtime.member.communicator import Communicator as Member

COMPRESSORS: Mapping[str, type[Compressor]] = {
    "none": packing.NoneCompressor,
    "adaptive": selecting.AdaptiveCompressor,
    "adaq": quantizing.AdaqCompressor,
    "dgc": selecting.DgcCompressor,
    "efsignsgd": packing.EFSignSGDCompressor,
    "fp16": packing.FP16Compressor,
    "guarded_threshold": selecting.GuardedThresholdCompressor,
    "inceptionn": quantizing.InceptionnCompressor,
    "natural": packing.NaturalCompressor,
    "onebit": packing.OneBitCompressor,
    "powersgd": lowrank.PowerSGDCompressor,
    "qsgd": packing.QSGDCompressor,
    "randomk": selecting.RandomKCompressor,
    "signsgd": packing.SignSGDCompressor,
    "signum": packing.SignumCompressor,
    "sketch": quantizing.SketchCompressor,
    "terngrad": packing.TernGradCompressor,
    "threshold": selecting.ThresholdCompressor,
    "topk": selecting.TopKCompressor,
    "u8bit": quantizing.U8bitCompressor,
}
ON_A_GPU = {"natural_cuda": "natural", "qsgd_cuda": "qsgd"}  # the same methods; these run on the processor
MEMORIES: Mapping[str, type[Memory]] = {
    "none": memories.NoneMemory,
    "dgc": memories.DgcMemory,
    "efsignsgd": memories.EFSignSGDMemory,
    "powersgd": memories.PowerSGDMemory,
    "residual": memories.ResidualMemory,
}
COMMUNICATORS: Mapping[str, type[Collective]] = {
    "aggregator": service.Aggregator,
    "allgather": Allgather,
    "allreduce": service.Allreduce,
    "alltoall": pieces.AllToAll,
    "broadcast": Broadcast,
}
OTHERS = ("compressor", "memory", "communicator", "world_size")


def grace_from_params(params: Mapping[str, Any], *, comm: Member | None = None) -> Communicator:
    """The communicator that `params` describe, on `comm`; None: that of `omnireduce.init()`.

    `compressor`, `memory` and `communicator` are names: "none", "none" and "aggregator" if they are not there. A class
    of your own is "module:Class". `world_size` may be there, and is checked. The rest goes to the compressor and the
    memory, by GRACE's names: `compress_ratio`, `threshold`, `momentum`, `lr` and so on, each to all that have it.

    Raises UsageError for a name, a parameter or a value that cannot be, and for what does not go together.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"params is a {type(params).__name__}; expected a dict such as {{'compressor': 'topk'}}")
    named = params.get("compressor", "none")
    same = ON_A_GPU.get(named, named) if isinstance(named, str) else named
    compressor = _named("compressor", same, COMPRESSORS, Compressor)
    memory = _named("memory", params.get("memory", "none"), MEMORIES, Memory)
    communicator = _named("communicator", params.get("communicator", "aggregator"), COMMUNICATORS, Communicator)
    rest = {key: value for key, value in params.items() if key not in OTHERS}
    known = {each: set(inspect.signature(each).parameters) for each in (compressor, memory)}
    for key in rest:
        if not any(key in names for names in known.values()):
            takes = ", ".join(sorted(set().union(*known.values()))) or "nothing"
            raise UsageError(
                f"parameter {key!r}: compressor '{named}' with memory '{params.get('memory', 'none')}' takes {takes}"
            )
    made = [each(**{key: value for key, value in rest.items() if key in known[each]}) for each in (compressor, memory)]
    found: Communicator = communicator(*made, params.get("world_size"), comm=comm)
    return found


def _named(what: str, name: object, table: Mapping[str, Any], kind: type) -> Any:
    if isinstance(name, str) and ":" in name:
        return class_named(name, kind)
    if not isinstance(name, str) or name not in table:
        raise UsageError(f"{what} {name!r}: expected {', '.join(table)}, or module:Class")
    return table[name]
