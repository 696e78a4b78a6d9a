"""GRACE's names: its abstract classes, compressors, memories and communicators, over this library.

base           Compressor, Memory, Communicator: the base classes for users
native         the base of the compressors here
selecting      compressors that send some elements  packing      compressors that send all, in few bits, by codecs
quantizing     compressors that send few values     lowrank      PowerSGD
memories       keep the rest                        params       all classes by name
communicators, pieces, service                      how ranks exchange what was compressed
forms          arrays and tensors                   trial        tries a compressor on many gradients
loading        classes that users wrote             claims       the claims of a compressor about what it sends
"""

from omnireduce.compression.grace.base import Communicator, Compressor, Memory
from omnireduce.compression.grace.communicators import Aggregator, Allgather, Allreduce, Broadcast
from omnireduce.compression.grace.lowrank import PowerSGDCompressor
from omnireduce.compression.grace.memories import (
    DgcMemory,
    EFSignSGDMemory,
    NoneMemory,
    PowerSGDMemory,
    ResidualMemory,
)
from omnireduce.compression.grace.packing_compressors import (
    AllToAll,
    EFSignSGDCompressor,
    FP16Compressor,
    NaturalCompressor,
    NoneCompressor,
    OneBitCompressor,
    QSGDCompressor,
    SignSGDCompressor,
    SignumCompressor,
    TernGradCompressor,
)
from omnireduce.compression.grace.params import grace_from_params
from omnireduce.compression.grace.quantizing_compressors import (
    AdaqCompressor,
    InceptionnCompressor,
    SketchCompressor,
    U8bitCompressor,
)
from omnireduce.compression.grace.selecting_compressors import (
    AdaptiveCompressor,
    DgcCompressor,
    GuardedThresholdCompressor,
    RandomKCompressor,
    ThresholdCompressor,
    TopKCompressor,
)

__all__ = [
    "AdaptiveCompressor",
    "AdaqCompressor",
    "Aggregator",
    "AllToAll",
    "Allgather",
    "Allreduce",
    "Broadcast",
    "Communicator",
    "Compressor",
    "DgcCompressor",
    "DgcMemory",
    "EFSignSGDCompressor",
    "EFSignSGDMemory",
    "FP16Compressor",
    "GuardedThresholdCompressor",
    "InceptionnCompressor",
    "Memory",
    "NaturalCompressor",
    "NoneCompressor",
    "NoneMemory",
    "OneBitCompressor",
    "PowerSGDCompressor",
    "PowerSGDMemory",
    "QSGDCompressor",
    "RandomKCompressor",
    "ResidualMemory",
    "SignSGDCompressor",
    "SignumCompressor",
    "SketchCompressor",
    "TernGradCompressor",
    "ThresholdCompressor",
    "TopKCompressor",
    "U8bitCompressor",
    "grace_from_params",
]
