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
    key = stream_key(seed, step, region.stream)
    whole, starts = region.whole or (1,), region.starts or (0,)
    runs = out.reshape(-1, shape[-1] if shape and shape[-1] != whole[-1] else max(out.size, 1))
    steps = [math.prod(whole[at + 1 :]) for at in range(len(whole))]
    origin = sum(start * each for start, each in zip(starts, steps, strict=True))
    if len(runs) <= 1:
        first = np.array([origin])
    else:
        first = np.full(shape[:-1], origin)
        for axis, size in enumerate(shape[:-1]):
            first += (np.arange(size) * steps[axis]).reshape([-1 if each == axis else 1 for each in range(first.ndim)])
    for run, own in zip(runs, block_keys(key, first.reshape(-1)), strict=False):
        fill_uniform(own, run)
    return out
