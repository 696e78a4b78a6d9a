"""The parts of a float32: a sign, an exponent of 8 bits, a fraction of 23."""

from __future__ import annotations

import numpy as np

MAGNITUDE, INFINITE = 0x7FFF_FFFF, 0x7F80_0000  # bits of a float32 without its sign; from here on it is not finite
EXPONENT, SIGN = 0x7F80_0000, -0x8000_0000  # bits of a float32, as int32
FRACTION, FRACTION_BITS, LARGEST_EXPONENT = 0x7F_FFFF, 23, 254
POWERS = np.concatenate(([0], np.exp2(np.arange(1, 255) - 127.0), [np.inf])).astype(np.float32)
"""By the exponent field of a float32, the power of two that has it: 2^-126 to 2^127, and 0 in front."""
