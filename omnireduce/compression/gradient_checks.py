"""Checks of gradients, names and seeds, for everything that sums gradients."""

from __future__ import annotations

import zlib
from typing import Literal

import numpy as np

from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.calls.arguments import whole_number

NAME_CHARACTERS = 160
SENT_CHARACTERS = 180  # the longest common name of collectives; single collectives add to it
Sum = Literal["sum", "mean"]


def check_gradient(gradient: object) -> Array:
    """`gradient` as a flat array. Raises UsageError unless it is a contiguous array of float32 that can be written."""
    if not isinstance(gradient, np.ndarray):
        raise UsageError(f"gradient is {a_type(gradient)}; expected a numpy.ndarray of float32")
    if gradient.dtype != np.float32:
        raise UsageError(f"gradient is of {gradient.dtype}; expected float32")
    if not (gradient.flags.c_contiguous and gradient.flags.writeable):
        problem = "read-only" if gradient.flags.c_contiguous else "not C-contiguous"
        raise UsageError(f"gradient is {problem}; its result takes its place. Pass a copy")
    return gradient.reshape(-1)


def check_name(name: object) -> str:
    """`name` itself. Raises UsageError unless it is a short text. The state of a gradient is stored by its name."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or not name.isprintable():
        raise UsageError(f"name {str(name)[:40]!r}: expected a printable text of 1 to {NAME_CHARACTERS} characters")
    return name


def name_for_all(name: str, common: str) -> str:
    """The name of the collectives for gradient `name`. It contains `common`, a text that must be the same on all ranks:
    if it differs, the service's error shows both texts. A long text is cut, and ends with a checksum."""
    text = f"{name} by {common}"
    if len(text) <= SENT_CHARACTERS:
        return text
    checksum = f" {zlib.crc32(common.encode()):08x}"
    return text[: SENT_CHARACTERS - len(checksum)] + checksum


def check_seed(seed: object) -> int:
    """`seed` as an int. Raises UsageError unless it is a whole number from 0 on."""
    number = whole_number(seed, "seed")
    if number < 0:
        raise UsageError(f"seed {number}: expected a whole number from 0 on")
    return number


def check_values(x: object) -> Array:
    """`x` itself. Raises UsageError unless it is a flat, contiguous array of float32."""
    if not isinstance(x, np.ndarray) or x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        description = f"{x.dtype}{list(x.shape)}" if isinstance(x, np.ndarray) else type(x).__name__
        raise UsageError(f"x is {description}; expected a flat, contiguous array of float32")
    return x
