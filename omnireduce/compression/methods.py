"""Methods by a short text: a selector with its numbers, a codec, or both: `topk,0.01`, `int8`, `topk,0.01+bf16`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from omnireduce.compression.compressed_sums import Compression
from omnireduce.compression.gradient_checks import Sum
from omnireduce.compression.memories import Residual
from omnireduce.compression.powersgd import PowerSgd
from omnireduce.compression.selectors import (
    Adaptive,
    BlockTopK,
    DgcSampling,
    GuardedThreshold,
    RandomK,
    Selector,
    Threshold,
    TopK,
)
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.codecs.table import BUILT_IN, NONE
from omnireduce.runtime.rank.communicator import Communicator

M = TypeVar("M")
SELECTORS: dict[str, Callable[..., Selector]] = {
    "topk": TopK,
    "block_topk": BlockTopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "guarded_threshold": GuardedThreshold,
    "dgc": DgcSampling,
    "adaptive": Adaptive,
}
POWERSGD = "powersgd"
MAX_NUMBERS = {"guarded_threshold": 2, "block_topk": 2}  # the most numbers behind the name of a selector; for others 1
ALL = (
    *(NONE, *BUILT_IN, "topk,0.01", "topk,0.01+bf16", "block_topk,0.01", "block_topk,0.01+int8", "randomk,0.01"),
    *("threshold,0.0001", "guarded_threshold,0.001,0.01", "dgc,0.01", "adaptive,0.01", "powersgd,2"),
)


class Method(Protocol):
    """Sums gradients in some way, as `Compression.allreduce` does."""

    def allreduce(self, comm: Communicator, gradient: Array, *, name: str, op: Sum = "mean") -> Array: ...


def method_of(text: str) -> Method:
    """A new method for `text`. A `Residual` keeps the rest that a selector or factors leave out. The rounding errors of
    a codec alone are not kept: so zeros stay zeros, and need not travel.

    Raises UsageError for a text that names no method.
    """
    selector, _, codec = text.replace(" ", "").partition("+")
    name, *numbers = selector.split(",")
    if name in SELECTORS:
        return Compression(
            _make_method(text, SELECTORS[name], numbers, MAX_NUMBERS.get(name, 1)), Residual(), codec or None
        )
    if name == POWERSGD and not codec:
        return _make_method(text, PowerSgd, numbers, 1)
    if (name == NONE or name in BUILT_IN or ":" in name) and not numbers and not codec:
        return Compression(codec=name)
    names = ", ".join((*SELECTORS, POWERSGD, NONE, *BUILT_IN))
    raise UsageError(f"method '{text}': expected a name with numbers, such as topk,0.01 or topk,0.01+bf16; {names}")


def _make_method(text: str, make: Callable[..., M], numbers: list[str], max_numbers: int) -> M:
    try:
        values = [float(number) if "." in number or "e" in number else int(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) != len(numbers) or len(values) > max_numbers:
        raise UsageError(f"method '{text}': expected up to {max_numbers} numbers behind the name, with commas between")
    return make(*values)
