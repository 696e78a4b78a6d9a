"""Random numbers of a tensor that follow from a seed, a step and the place of an element.

Nobody's generator is touched. They are those with which codecs round (`omnireduce/kernels/codecs/draws.py`): element i
of a tensor draws number i of a key, which is a mix of seed, step and stream.
"""

from __future__ import annotations

import math

import numpy as np

from omnireduce.dtypes import Array
from omnireduce.kernels.codecs.draws import block_keys, fill_uniform, stream_key
from omnireduce.programs.expressions import Region


def uniforms(seed: int, step: int, region: Region, shape: tuple[int, ...]) -> Array:
    """Numbers from 0 up to but not including 1, float32, for the elements of `region`, which has this shape."""
    out = np.empty(shape, np.float32)
    if not out.size:
        return out
    key = stream_key(seed, step, region.stream)
    strides = [math.prod(region.whole[at + 1 :]) for at in range(len(region.whole))]
    origin = sum(start * stride for start, stride in zip(region.starts, strides, strict=True))
    if len(shape) < 2 or shape[-1] == region.whole[-1]:  # rows lie behind one another
        firsts, runs = np.array([origin]), out.reshape(1, -1)
    else:
        within = np.indices(shape[:-1]).reshape(len(shape) - 1, -1)
        firsts, runs = origin + np.array(strides[:-1], np.int64) @ within, out.reshape(-1, shape[-1])
    for run, own in zip(runs, block_keys(key, firsts), strict=True):
        fill_uniform(own, run)
    return out
