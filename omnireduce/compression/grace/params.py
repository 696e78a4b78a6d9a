"""A communicator from a dict, as GRACE's helper makes it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from omnireduce.compression.grace import (
    lowrank,
    memories,
    packing_compressors,
    quantizing_compressors,
    selecting_compressors,
)
from omnireduce.compression.grace.base import Communicator, Compressor, Memory, class_text
from omnireduce.compression.grace.communicators import Aggregator, Allgather, Allreduce, Broadcast, BuiltInCommunicator
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank import global_communicator
from omnireduce.runtime.rank.communicator import Communicator as Member
from omnireduce.support.load_by_name import load_class
from omnireduce.support.logs import tagged

COMPRESSORS: Mapping[str, type[Compressor]] = {
    "none": packing_compressors.NoneCompressor,
    "adaptive": selecting_compressors.AdaptiveCompressor,
    "adaq": quantizing_compressors.AdaqCompressor,
    "dgc": selecting_compressors.DgcCompressor,
    "efsignsgd": packing_compressors.EFSignSGDCompressor,
    "fp16": packing_compressors.FP16Compressor,
    "guarded_threshold": selecting_compressors.GuardedThresholdCompressor,
    "inceptionn": quantizing_compressors.InceptionnCompressor,
    "natural": packing_compressors.NaturalCompressor,
    "onebit": packing_compressors.OneBitCompressor,
    "powersgd": lowrank.PowerSGDCompressor,
    "qsgd": packing_compressors.QSGDCompressor,
    "randomk": selecting_compressors.RandomKCompressor,
    "signsgd": packing_compressors.SignSGDCompressor,
    "signum": packing_compressors.SignumCompressor,
    "sketch": quantizing_compressors.SketchCompressor,
    "terngrad": packing_compressors.TernGradCompressor,
    "threshold": selecting_compressors.ThresholdCompressor,
    "topk": selecting_compressors.TopKCompressor,
    "u8bit": quantizing_compressors.U8bitCompressor,
}
GPU_NAMES = {"natural_cuda": "natural", "qsgd_cuda": "qsgd"}  # the same methods; here they run on the processor
MEMORIES: Mapping[str, type[Memory]] = {
    "none": memories.NoneMemory,
    "dgc": memories.DgcMemory,
    "efsignsgd": memories.EFSignSGDMemory,
    "powersgd": memories.PowerSGDMemory,
    "residual": memories.ResidualMemory,
}
COMMUNICATORS: Mapping[str, type[BuiltInCommunicator]] = {
    "aggregator": Aggregator,
    "allgather": Allgather,
    "allreduce": Allreduce,
    "alltoall": packing_compressors.AllToAll,
    "broadcast": Broadcast,
}
OTHER_KEYS = ("compressor", "memory", "communicator", "world_size")
GPU_PARAMETERS = {"kernel"}  # parameters of GRACE that these classes do not have
log = logging.getLogger("omnireduce")


def grace_from_params(params: Mapping[str, Any], *, comm: Member | None = None) -> Communicator:
    """The communicator that `params` describe, on `comm`; None: the communicator of `omnireduce.init()`.

    `compressor`, `memory` and `communicator` are names; the defaults are "none", "none" and "aggregator".
    "module:Class" is a class of your own. `world_size` is optional, and is checked. The other parameters go to the
    compressor and the memory, by GRACE's names: `compress_ratio`, `threshold`, `momentum`, `lr` and so on, to each that
    has them. Parameters that only other classes have are ignored, and rank 0 logs one warning: so a script may change
    only a name.

    Raises UsageError for an invalid name, parameter or value, and for classes that do not go together.
    """
    if not isinstance(params, Mapping):
        raise UsageError(f"params is {a_type(params)}; expected a dict such as {{'compressor': 'topk'}}")
    name = params.get("compressor", "none")
    known_name = GPU_NAMES.get(name, name) if isinstance(name, str) else name
    compressor = _class_for("compressor", known_name, COMPRESSORS, Compressor)
    memory = _class_for("memory", params.get("memory", "none"), MEMORIES, Memory)
    communicator = _class_for("communicator", params.get("communicator", "aggregator"), COMMUNICATORS, Communicator)
    parameters = {key: value for key, value in params.items() if key not in OTHER_KEYS}
    comm = global_communicator.running() if comm is None else comm
    takes = _parameters(compressor) | _parameters(memory)
    if ignored := [key for key in parameters if key not in takes]:
        label = f"compressor '{name}' with memory '{params.get('memory', 'none')}'"
        _check_ignored(ignored, label, takes, is_first=comm.rank == 0)
    parts = [
        kind(**{key: parameters[key] for key in parameters.keys() & _parameters(kind)}) for kind in (compressor, memory)
    ]
    extra = {"world_size": params.get("world_size", comm.size), "comm": comm}
    takes = _parameters(communicator)  # a class of the user may lack some
    instance: Communicator = communicator(*parts, **{key: extra[key] for key in extra.keys() & takes})
    return instance


def _parameters(kind: type) -> set[str]:
    """The names of the parameters of a class."""
    return set(inspect.signature(kind).parameters)


def _check_ignored(ignored: Sequence[str], label: str, takes: set[str], *, is_first: bool) -> None:
    """Check parameters that `label` does not take. Raises UsageError for a parameter that no compressor or memory has.
    Otherwise the first rank logs that they are ignored."""
    known = GPU_PARAMETERS.union(*map(_parameters, (*COMPRESSORS.values(), *MEMORIES.values())))
    text = f"{label} takes {', '.join(sorted(takes)) or 'nothing'}"
    for key in ignored:
        if key not in known:
            raise UsageError(f"parameter {key!r}: {text}")
    if is_first:
        log.warning("ignored: %s. %s", ", ".join(ignored), text, extra=tagged("grace_ignored"))


def _class_for(label: str, name: object, table: Mapping[str, Any], kind: type) -> Any:
    if isinstance(name, str) and ":" in name:
        return load_class(name, {class_text(kind): kind})
    if not isinstance(name, str) or name not in table:
        raise UsageError(f"{label} {name!r}: expected {', '.join(table)}, or module:Class")
    return table[name]
