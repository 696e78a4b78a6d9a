"""Gradients that are made smaller before a step: the means of all ranks are clipped, on the shards.

As `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` do it for the gradients of one process. A norm is that of all
gradients together, and is known before the first weight changes. So shards add up squares in an exchange of its own,
for which the ranks send their gradients, as they do again for the update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from omnireduce.errors import UsageError
from omnireduce.optimizers.rules import number

LEAST = 1e-6  # is added to the norm, as torch does


@dataclass(frozen=True, kw_only=True)
class Clipping:
    """The longest `norm` of all gradients, or the largest `value` of each element; None: any. Raises UsageError for
    what is no positive number, and for both."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name in ("norm", "value"):
            given = getattr(self, name)
            if given is None:
                continue
            limit = number(f"clip_{name}", given)
            if not 0 < limit < math.inf:
                raise UsageError(f"clip_{name} is {limit:g}; expected more than 0, or None not to clip")
            object.__setattr__(self, name, limit)
        if self.norm is not None and self.value is not None:
            raise UsageError("clip_norm and clip_value are both given; expected one of them")

    def factor(self, norm: float | None) -> float:
        """What gradients of this norm are multiplied by; NaN if that is NaN, and 1 where no norm is clipped."""
        if self.norm is None or norm is None:
            return 1.0
        factor = self.norm / (norm + LEAST)
        return 1.0 if factor >= 1 else factor
