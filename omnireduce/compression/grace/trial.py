"""Trial of a compressor on many gradients, with a text for each failure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from omnireduce.compression.grace.base import Claim, Compressor, claim_of
from omnireduce.compression.grace.built_in_base import Context, GradientTemplate, payload_of
from omnireduce.compression.grace.selecting_compressors import SelectingCompressor, encode_gaps
from omnireduce.compression.selectors import Selector
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, in_a_line
from omnireduce.runtime.rank.calls.objects import to_bytes

NAME = "layer.weight"
Make = Callable[[], Compressor]
Convert = Callable[[Array], Any]
ALWAYS = (
    "shapes and types",
    "the gradient stays",
    "a second run sends the same",
    "generators stay",
)


class Gradient(NamedTuple):
    """A gradient to try. `is_full`: all elements are finite and not zero, so that something must be sent."""

    title: str
    values: Array
    is_full: bool = False


class Trial(NamedTuple):
    """Outcome of a trial: the failures, kinds of arrays that were not taken with the reason, and the properties that
    were checked, and not checked."""

    failures: list[str]
    not_taken: dict[str, str]
    checked: list[str]
    unchecked: list[str]


def gradients(threshold: float | None = None) -> Iterator[Gradient]:
    """The gradients to try; a random gradient comes first. Some have few elements above the `threshold`, if there is
    one."""
    rng = np.random.default_rng(1)
    for shape in ((1000,), (64, 33), (3, 4, 5, 7), (1, 1)):
        yield Gradient(f"random of shape {shape}", rng.standard_normal(shape).astype(np.float32), True)
    yield Gradient("one element", np.array([0.5], np.float32), True)
    yield Gradient("all negative", -1 - rng.random(500, np.float32), True)
    yield Gradient("all negative and tiny", -1e-6 * (1 + rng.random(500, np.float32)), True)
    yield Gradient("all equal", np.full(300, 0.25, np.float32), True)
    yield Gradient("two magnitudes", np.where(np.arange(300) % 3, 1, -2).astype(np.float32), True)
    yield Gradient("huge", 1e30 * (1 + rng.random(200, np.float32)), True)
    yield Gradient("all zero", np.zeros((20, 10), np.float32))
    yield Gradient("one in a hundred not zero", np.where(np.arange(1000) % 100, 0, 3).astype(np.float32))
    for title, value in (("NaN", np.nan), ("infinity", np.inf), ("minus infinity", -np.inf)):
        yield Gradient(f"with {title}", np.concatenate([rng.standard_normal(99), [value]]).astype(np.float32))
    yield Gradient("no element", np.empty(0, np.float32))
    if threshold is not None and 1e-30 < threshold < 1e30:  # as float32 it and all near it are numbers like others
        below = threshold * rng.uniform(0.1, 0.9, 1000)
        signs = rng.choice([-1, 1], 1000)
        yield Gradient("all below the threshold, and negative", -below.astype(np.float32), True)
        for title, count in (("one", 1), ("half", 500)):
            above = np.where(rng.permutation(1000) < count, 2 * threshold, 0)
            yield Gradient(f"{title} above the threshold", (signs * (below + above)).astype(np.float32), True)


def try_compressor(make: Make, kinds: Mapping[str, Convert], generators: Mapping[str, Callable[[], Any]]) -> Trial:
    """Try the compressor that `make` returns, anew for each gradient.

    `kinds`: functions that make a gradient of each kind of array from a NumPy array. `generators`: functions that give
    the state of each generator of random numbers that must not change. Raises UsageError if it takes no kind of array
    at all, or if `selects` has another value than allowed.
    """
    states = {"random": random.getstate, "numpy": lambda: tuple(np.random.get_state()), **generators}
    initial_states = {name: state() for name, state in states.items()}
    first, claim = next(gradients()), _claim(make)
    errors = {kind: _error(make, convert(first.values)) for kind, convert in kinds.items()}
    not_taken = {kind: error for kind, error in errors.items() if error}
    if len(not_taken) == len(kinds):
        raise UsageError(f"{first.title}: expected a compressed gradient; {'; '.join(dict.fromkeys(errors.values()))}")
    failures = []
    for kind, convert in kinds.items():
        if kind not in not_taken:
            for gradient in gradients(claim.threshold):
                messages = _failures_of(make, gradient, convert, claim)
                failures += [f"{gradient.title}, {kind}: {message}" for message in messages]
    for name, state in states.items():
        if not _is_same(initial_states[name], state()):
            failures.append(f"all gradients: expected the generator of {name} as it was; it was seeded, or drawn from")
    return Trial(failures, not_taken, [*ALWAYS, *claim.checked], claim.unchecked)


def _claim(make: Make) -> Claim:
    """The claim of the compressor. Raises UsageError if it cannot be read."""
    try:
        return claim_of(make())
    except (KeyboardInterrupt, UsageError):
        raise
    except BaseException as error:  # a class of the user may raise anything, even SystemExit
        raise UsageError(f"the claim of the compressor cannot be read: {in_a_line(error)}") from error


def _error(make: Make, x: Any) -> str:
    """The error of the compressor for `x`, as a text; empty if it does not fail."""
    try:
        _round_trip(make(), x)
    except UsageError as error:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return in_a_line(error)
    return ""


def _round_trip(compressor: Compressor, x: Any) -> tuple[bytes, Any]:
    """The bytes that were sent for `x`, and the decompressed gradient. Raises UsageError if `compress` returns no pair
    of tensors and context, or tensors that cannot travel."""
    pair = compressor.compress(x, NAME)
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], list | tuple)):
        raise UsageError(f"compress: expected (list of tensors, ctx), got {type(pair).__name__}")
    sent = to_bytes([payload_of(tensor) for tensor in pair[0]], trust=False)
    return sent, compressor.decompress(*pair)


def _failures_of(make: Make, gradient: Gradient, convert: Convert, claim: Claim) -> Iterator[str]:
    """Yield a text for each failure with one gradient: what was expected, and what came."""
    x = convert(gradient.values.copy())
    try:
        sent, restored = _round_trip(make(), x)
        sent_again, _ = _round_trip(make(), convert(gradient.values.copy()))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if gradient.values.size:  # compressors may fail for a gradient without elements
            yield f"expected a compressed gradient, got {in_a_line(error)}"
        return
    if not _is_same(GradientTemplate(x).values, gradient.values.reshape(-1)):
        yield "expected the gradient as it was; compress has changed it"
    if type(restored) is not type(x) or tuple(restored.shape) != tuple(x.shape) or restored.dtype != x.dtype:
        yield f"expected {_describe(x)}, got {_describe(restored)}"
        return
    if sent != sent_again:
        yield "expected the same tensors of the same gradient; a second compressor has sent others"
    values = GradientTemplate(restored).values
    yield from claim.broken(values, gradient.values.reshape(-1))
    if gradient.is_full and not np.isfinite(values).all():
        yield f"expected finite numbers, got {values[~np.isfinite(values)][0]}"
    elif gradient.is_full and claim.threshold is None and not values.any():
        yield "expected something to be sent, got zeros only"


def _is_same(a: Any, b: Any) -> bool:
    """Whether both are the same, bit by bit, with all their parts."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b)


def _describe(x: Any) -> str:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of {dtype} {tuple(shape)}"


class SelectorCompressor(SelectingCompressor):
    """A compressor for a selector."""

    def __init__(self, selector: Selector) -> None:
        super().__init__(selector)
        if selector.unit == "elements":
            self.ratio, self.threshold = (getattr(selector, attribute, None) for attribute in ("ratio", "threshold"))

    def encode(self, x: Array, ctx: Context) -> list[Array]:
        chosen = self.selector.select(x, ctx.name, ctx.step)
        if not isinstance(chosen, np.ndarray) or chosen.dtype != np.int64 or chosen.ndim != 1:
            raise UsageError(f"expected places, int64 (n,), got {_describe(chosen)}")
        units = -(-x.size // self.selector.block_size)
        if chosen.size and not (chosen[0] >= 0 and chosen[-1] < units and (np.diff(chosen) > 0).all()):
            raise UsageError(f"expected ascending places from 0 to {units - 1}, got {chosen.tolist()[:8]}")
        indices = (chosen[:, None] * self.selector.block_size + np.arange(self.selector.block_size)).reshape(-1)
        indices = indices[indices < x.size]
        return [x[indices], encode_gaps(indices)]
