"""The oracle of the codecs' kernels: each block is coded element by element, in numbers of any size."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np

from omnireduce.core.dtypes import Array

WORD = (1 << 64) - 1


def mixed(state: int) -> int:
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB & WORD
    return state ^ state >> 31


def drawn(key: int, number: int) -> int:
    return mixed((key + (number + 1) * 0x9E3779B97F4A7C15) & WORD)


def half(block: Array, brain: bool) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return block.astype(ml_dtypes.bfloat16 if brain else np.float16).astype(np.float32)


def _finite(block: Array) -> list[Fraction]:
    return [Fraction(float(x)) if math.isfinite(x) else Fraction(0) for x in block]


def int8(block: Array, key: int = 0) -> Array:
    exact = _finite(block)
    largest = max(map(abs, exact))
    scale = next((s for e in range(-133, 121) if largest <= 127 * (s := Fraction(2) ** e)), Fraction(2) ** 121)
    numbers = [max(-127, min(127, round(x / scale))) for x in exact]  # Python rounds ties to even, too
    return np.array(
        [float(q * scale) if math.isfinite(x) else math.nan for q, x in zip(numbers, block, strict=True)], np.float32
    )


def qsgd(block: Array, key: int = 0) -> Array:
    exact = _finite(block)
    largest = max(map(abs, exact))
    scale = next((s for e in range(-133, 121) if largest <= 127 * (s := Fraction(2) ** e)), Fraction(2) ** 121)
    results = []
    for i, x in enumerate(exact):
        below = math.floor(abs(x) / scale)
        up = Fraction(drawn(key, i) >> 40, 2**24) < abs(x) / scale - below
        results.append(math.copysign(float(min(below + up, 127) * scale), x) if math.isfinite(block[i]) else math.nan)
    return np.array(results, np.float32)


def sign_means(block: Array, apart: bool) -> Array:
    some = np.trim_zeros(block, "b").tolist()
    below, above = [x for x in some if x < 0], [x for x in some if not x < 0]
    low, high = (sum(each) / max(len(each), 1) for each in (below, above))
    if not apart:
        high = (sum(above) - sum(below)) / max(len(some), 1)
        low = -high
    return np.array([low if x < 0 else high for x in block], np.float32)


def natural(block: Array, key: int = 0) -> Array:
    largest = max(map(abs, _finite(block)))
    fraction, above = math.frexp(float(largest))  # the largest element gets this power of two, or half of it
    top = min(max(above - (fraction == 0.5), -126), 127)
    return np.array([_power(float(x), top, drawn(key, i)) for i, x in enumerate(block)], np.float32)


def _power(x: float, top: int, random: int) -> float:
    if not math.isfinite(x) or x == 0:
        return x + 0.0
    exact, lowest = abs(Fraction(x)), Fraction(2) ** (top - 124)
    if exact < Fraction(2) ** -126:
        below, above = Fraction(0), Fraction(2) ** -126
    else:
        below = Fraction(2) ** (math.frexp(x)[1] - 1)
        above = 2 * below
    share = (exact - below) / (above - below)
    power = min(above if Fraction(random % 2**23, 2**23) < share else below, Fraction(2) ** 127)
    if 0 < power < lowest:  # it becomes the lowest power, or zero, right on average
        halvings = math.frexp(float(lowest / power))[1] - 1
        power = lowest if halvings <= 41 and (random >> 23) >> (41 - halvings) == 0 else Fraction(0)
    return math.copysign(float(power), x)


def sign(block: Array, key: int = 0) -> Array:
    return np.array([-1.0 if x < 0 else 1.0 for x in block], np.float32)


def ternary(block: Array, key: int = 0) -> Array:
    if not np.isfinite(block).all():
        return np.full(block.shape, np.nan, np.float32)
    scale = np.abs(block).max()
    uniform = [np.float32((drawn(key, i) >> 40) / 2**24) for i in range(block.size)]
    stands = [bool(scale) and bool(u < abs(x) / scale) for u, x in zip(uniform, block, strict=True)]
    return np.where(stands, np.sign(block) * scale, np.float32(0))


ORACLES = {
    "bf16": lambda block, key: half(block, True),
    "fp16": lambda block, key: half(block, False),
    "int8": int8,
    "natural": natural,
    "onebit": lambda block, key: sign_means(block, True),
    "qsgd": qsgd,
    "scaled_sign": lambda block, key: sign_means(block, False),
    "sign": sign,
    "ternary": ternary,
}
