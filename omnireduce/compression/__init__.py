"""Compression: a part of a gradient is sent, in a shorter form, and the rest is kept for later steps.

selectors     select the part to send: elements, or blocks
codecs        encode blocks on their way (omnireduce/kernels/codecs, because aggregators use them, too)
memories      keep the rest for later steps
compressed    all three together, on a communicator
powersgd      matrices as thin factors
grace         all of this by GRACE's names
"""

from omnireduce.compression.compressed_sums import Compression
from omnireduce.compression.grace.params import grace_from_params
from omnireduce.compression.memories import DgcMomentum, Memory, NoMemory, Residual
from omnireduce.compression.powersgd import PowerSgd
from omnireduce.compression.selectors import (
    Adaptive,
    BlockTopK,
    DgcSampling,
    Everything,
    GuardedThreshold,
    RandomK,
    Selector,
    Threshold,
    TopK,
)
from omnireduce.kernels.codecs.base import Codec

__all__ = [
    "Adaptive",
    "BlockTopK",
    "Codec",
    "Compression",
    "DgcMomentum",
    "DgcSampling",
    "Everything",
    "GuardedThreshold",
    "Memory",
    "NoMemory",
    "PowerSgd",
    "RandomK",
    "Residual",
    "Selector",
    "Threshold",
    "TopK",
    "grace_from_params",
]
