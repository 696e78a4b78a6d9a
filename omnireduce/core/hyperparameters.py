"""Hyperparameters of optimizers: default values, ranges, and the bias correction of Adam and LAMB.

Both the rules of `omnireduce.optimizers` and the programs of `omnireduce.programs.library` take them from here. The
formulas of the updates stand in both places, for a program is not yet as fast as a rule. Adam as a rule is three
instructions for a shard, and two of them are made for it. Adam as a program becomes fourteen instructions, which also
round at other places.
"""

from __future__ import annotations

import math
from typing import Any

from omnireduce.errors import UsageError

BETAS = (0.9, 0.999)
ADAM_EPS, LAMB_EPS = 1e-8, 1e-6
WEIGHT_DECAY = 1e-2  # default of AdamW and LAMB


def number(name: str, value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float. Raises UsageError for anything else."""
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise UsageError(f"{name} is {value!r}; expected a number") from None


def number_in_range(name: str, value: Any, minimum: float = 0, below: float = math.inf) -> float:
    """Return a number as a float, if minimum <= number < below. Raises UsageError for anything else."""
    checked = number(name, value)
    if not minimum <= checked < below:
        limit_text = "" if below == math.inf else f" and less than {below:g}"
        raise UsageError(f"{name} is {checked:g}; expected {minimum:g} or more{limit_text}")
    return checked


def check_betas(value: Any) -> tuple[float, float]:
    """Return the decay rates of the first and the second moment as floats. Raises UsageError for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise UsageError(f"betas is {value!r}; expected two numbers")
    first, second = (number_in_range(f"beta{at}", beta, 0, 1) for at, beta in enumerate(value, 1))
    return first, second


def bias_correction(beta: float, steps: Any) -> Any:
    """1 - beta**steps: the divisor for a running mean that began at 0, after `steps` steps.

    `steps` is a number, or an expression of a program; the result is the same. It wants float64: 1 - 0.999 would have
    four digits in float32.
    """
    return 1 - beta**steps
