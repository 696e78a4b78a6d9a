"""Random numbers that are computed from where they are used, and from a seed. Nobody's generator is touched.

Number i of a block is a mix of the block's key and i. The key is a mix of the seed, the collective, who encodes, and
the block. So a program draws the same numbers when it is run again, however its threads and messages fall, and
everybody can compute what another one has drawn. Who encodes is part of it, because the errors of ranks add up to
little only where they are independent.

The mix is SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.kernels.compiling.jit import inlined, kernel

STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1
_UNIT = np.float32(2.0**-24)  # uniform random numbers are multiples of it
SUM = 1 << 32  # the sender number of a sum: no rank has this number


@inlined
def mixed(state: np.uint64) -> np.uint64:
    """Every bit of the result depends on every bit of `state`, uint64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


@inlined
def drawn(key: np.uint64, number: int) -> np.uint64:
    """Random number `number` of a block with this `key`."""
    return mixed(key + np.uint64(number + 1) * STEP)


@inlined
def uniform(key: np.uint64, number: int) -> np.float32:
    """Random number `number` of a block with this `key`, from 0 up to but not including 1."""
    return np.float32(np.int32(drawn(key, number) >> np.uint64(40))) * _UNIT


@kernel
def fill_uniform(key: np.uint64, out: Array) -> None:
    """Write random numbers 0, 1, ... of this `key` to `out`, float32 (n,)."""
    for i in range(out.size):
        out[i] = uniform(key, i)


def stream_key(seed: int, collective: int, sender: int) -> int:
    """The common part of the keys of all blocks that `sender` encodes for a collective."""
    state = 0
    for part in (seed, collective, sender):
        state = (state + part + int(STEP)) & _WORD
        state = (state ^ state >> 30) * int(_FIRST) & _WORD
        state = (state ^ state >> 27) * int(_SECOND) & _WORD
        state ^= state >> 31
    return state


def block_keys(key: int, blocks: Array) -> Array:
    """The keys of `blocks`, int64 (blocks,), of the stream with this `key`: uint64 (blocks,)."""
    keys: Array = blocks.view(np.uint64) * STEP + np.uint64(key)
    return keys
