"""Claims of a compressor about the elements that it sends, and the check that it keeps to them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

import numpy as np

from omnireduce.compression.grace.base import Compressor
from omnireduce.compression.selectors import Selects, wanted
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError

NEARLY = 1e-6  # a magnitude so near to the threshold, as a share of it, may be sent or not


class Claim(NamedTuple):
    """`selects`: see `Compressor`. `ratio`: the share of the elements that are sent. `threshold`: all elements above it
    are sent. None: no claim."""

    selects: Selects
    ratio: float | None
    threshold: float | None

    @property
    def checked(self) -> list[str]:
        """The properties that `broken` checks, in words."""
        return [what for what, is_checked in self._checks.items() if is_checked]

    @property
    def unchecked(self) -> list[str]:
        """The properties that it does not check."""
        return [what for what, is_checked in self._checks.items() if not is_checked]

    @property
    def _checks(self) -> dict[str, bool]:
        says_numbers = self.ratio is not None or self.threshold is not None
        return {
            "elements are as they were": self.selects != "none",
            "the largest are sent": self.selects in ("largest", "about"),
            "how many are sent": self.selects in ("largest", "some") and says_numbers,
        }

    def broken(self, found: Array, x: Array) -> Iterator[str]:
        """Messages about broken claims: what was expected, and what came. `found` came back from `x`, both float32
        (elements,)."""
        if self.selects == "none":
            return
        wrong = np.flatnonzero((found != 0) & (found != x) & ~(np.isnan(found) & np.isnan(x)))
        if wrong.size:
            yield f"expected element {wrong[0]} to be {x[wrong[0]]} or 0, got {found[wrong[0]]}"
        magnitudes = np.where(np.isnan(x), np.float32(np.inf), np.abs(x))  # NaN is sent first
        if self.selects in ("largest", "about"):
            yield from _smaller_ones(found != 0, magnitudes, x)
        if self.selects == "largest" or (self.selects == "some" and x.all()):  # zeros among some nobody sees
            count, (least, most) = int(np.count_nonzero(found)), self._bounds(magnitudes)
            if not least <= count <= most:
                yield f"expected {least if least == most else f'{least} to {most}'} elements, got {count}"

    def _bounds(self, magnitudes: Array) -> tuple[int, int]:
        """The least and the largest number of elements that are sent, except zeros."""
        can_be = int(np.count_nonzero(magnitudes))
        if self.ratio is None and self.threshold is None:
            return min(1, can_be), can_be
        k = min(can_be, wanted(self.ratio, magnitudes.size) if self.ratio is not None else 0)
        if self.threshold is None:
            return k, k
        above, near = (np.count_nonzero(magnitudes > self.threshold * (1 + margin)) for margin in (NEARLY, -NEARLY))
        return max(k, int(above)), max(k, int(near))


def _smaller_ones(is_sent: Array, magnitudes: Array, x: Array) -> Iterator[str]:
    """A message if an element is sent that is smaller than one that is left out."""
    sent, left = np.flatnonzero(is_sent), np.flatnonzero(~is_sent)
    if sent.size and left.size:
        smallest, largest = sent[np.argmin(magnitudes[sent])], left[np.argmax(magnitudes[left])]
        if magnitudes[largest] > magnitudes[smallest]:
            without = f"without element {largest}, {x[largest]:g}"
            yield f"expected the largest magnitudes, got element {smallest}, {x[smallest]:g}, {without}"


def claim_of(compressor: Compressor) -> Claim:
    """The claim that a compressor's attributes make. Raises UsageError for a value of `selects` that does not exist."""
    ratio = _number(compressor, "compress_ratio", _number(compressor, "ratio"))
    ratio = ratio if ratio is not None and 0 < ratio <= 1 else None
    threshold = _number(compressor, "threshold")
    threshold = threshold if threshold is not None and 0 <= threshold < np.inf else None
    says_nothing = ratio is None and threshold is None
    selects = compressor.selects or ("none" if says_nothing else "largest")
    if selects not in get_args(Selects):
        raise UsageError(f"selects is {selects!r}; expected {', '.join(get_args(Selects))}, or None")
    return Claim(selects, ratio, threshold)


def _number(compressor: Compressor, name: str, otherwise: float | None = None) -> float | None:
    number = getattr(compressor, name, None)
    is_number = isinstance(number, int | float | np.floating) and not isinstance(number, bool)
    return float(number) if is_number and number is not None else otherwise
