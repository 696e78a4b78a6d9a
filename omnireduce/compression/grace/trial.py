"""Tries a compressor on many gradients, and says in words what is wrong with it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from omnireduce.compression.grace.base import Compressor
from omnireduce.compression.grace.forms import Form, is_tensor, payload_of
from omnireduce.compression.grace.native import Context
from omnireduce.compression.grace.selecting import Selecting
from omnireduce.compression.selectors import Selector, wanted
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError, in_a_line

NAME = "layer.weight"
Make = Callable[[], Compressor]
Convert = Callable[[Array], Any]


class Gradient(NamedTuple):
    """One to try. `is_full`: all elements are finite and not zero, so that something must be sent."""

    title: str
    values: Array
    is_full: bool = False


class Trial(NamedTuple):
    """What came of it: how many gradients were tried, what failed, and why some kinds of arrays were not taken."""

    tried: int
    failures: list[str]
    not_taken: dict[str, str]


def gradients() -> Iterator[Gradient]:
    """The ones to try; a random one comes first."""
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
    for title, odd in (("NaN", np.nan), ("infinity", np.inf), ("minus infinity", -np.inf)):
        yield Gradient(f"with {title}", np.concatenate([rng.standard_normal(99), [odd]]).astype(np.float32))
    yield Gradient("no element", np.empty(0, np.float32))


def try_compressor(make: Make, kinds: Mapping[str, Convert], generators: Mapping[str, Callable[[], Any]]) -> Trial:
    """Try what `make` returns, anew for each gradient.

    `kinds`: how to make a gradient of each kind of array from one of NumPy. `generators`: what gives the state of each
    generator of random numbers that must stay as it is. Raises UsageError where it takes no kind of array at all.
    """
    known = {"random": random.getstate, "numpy": lambda: tuple(np.random.get_state()), **generators}
    before = {name: state() for name, state in known.items()}
    first = next(gradients())
    errors = {kind: _error(make, convert(first.values)) for kind, convert in kinds.items()}
    not_taken = {kind: error for kind, error in errors.items() if error}
    if len(not_taken) == len(kinds):
        raise UsageError(f"{first.title}: expected a compressed gradient; {'; '.join(dict.fromkeys(errors.values()))}")
    failures, tried = [], 0
    for kind, convert in kinds.items():
        if kind not in not_taken:
            selects = _selects(make, convert(first.values))
            for gradient in gradients():
                tried += 1
                found = _wrong(make, gradient, convert, selects=selects)
                failures += [f"{gradient.title}, {kind}: {each}" for each in found]
    for name, state in known.items():
        if not _same(before[name], state()):
            failures.append(f"all gradients: expected the generator of {name} as it was; it was seeded, or drawn from")
    return Trial(tried, failures, not_taken)


def _error(make: Make, x: Any) -> str:
    """Why the compressor fails for `x`; empty if it does not."""
    try:
        _there_and_back(make(), x)
    except UsageError as error:
        return str(error)
    except Exception as error:  # it is a user's own, and may raise anything
        return in_a_line(error)
    return ""


def _there_and_back(compressor: Compressor, x: Any) -> tuple[list[Any], Any]:
    """What was sent of `x`, as arrays, and what came back. Raises UsageError for what is no pair of tensors and
    context."""
    made = compressor.compress(x, NAME)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list | tuple)):
        raise UsageError(f"compress: expected (list of tensors, ctx), got {type(made).__name__}")
    sent = [payload_of(each) for each in made[0]]
    return sent, compressor.decompress(*made)


def _selects(make: Make, x: Any) -> bool:
    """Whether it sends some elements as they are: what comes back is among those of `x`, and not all, or it says which
    share it sends."""
    compressor = make()
    back = _there_and_back(compressor, x)[1]
    if not (isinstance(back, np.ndarray) or is_tensor(back)):
        return False
    values = Form(back).values
    is_part = not values.all() or _ratio(compressor) > 0
    return is_part and bool(np.isin(values[values != 0], Form(x).values).all())


def _wrong(make: Make, gradient: Gradient, convert: Convert, *, selects: bool) -> Iterator[str]:
    """What is wrong with what becomes of one gradient: what was expected, and what came."""
    x, compressor = convert(gradient.values.copy()), make()
    try:
        sent, back = _there_and_back(compressor, x)
        again, _ = _there_and_back(make(), convert(gradient.values.copy()))
    except Exception as error:
        if gradient.values.size:  # of no elements not all can be asked
            yield f"expected a compressed gradient, got {in_a_line(error)}"
        return
    if not _same(Form(x).values, gradient.values.reshape(-1)):
        yield "expected the gradient as it was; compress has changed it"
    if type(back) is not type(x) or tuple(back.shape) != tuple(x.shape) or back.dtype != x.dtype:
        yield f"expected {_said(x)}, got {_said(back)}"
        return
    if not _same(sent, again):
        yield "expected the same tensors of the same gradient; a second compressor has sent others"
    yield from _wrong_values(Form(back).values, gradient, compressor, selects=selects)


def _wrong_values(found: Array, gradient: Gradient, compressor: Compressor, *, selects: bool) -> Iterator[str]:
    x = gradient.values.reshape(-1)
    if selects:
        wrong = np.flatnonzero((found != 0) & (found != x) & ~(np.isnan(found) & np.isnan(x)))
        if wrong.size:
            yield f"expected element {wrong[0]} to be {x[wrong[0]]} or 0, got {found[wrong[0]]}"
    if not gradient.is_full:
        return
    count, k = int(np.count_nonzero(found)), wanted(_ratio(compressor), x.size)
    if not np.isfinite(found).all():
        yield f"expected finite numbers, got {found[~np.isfinite(found)][0]}"
    elif not count:
        yield "expected something to be sent, got zeros only"
    elif selects and count < k:
        yield f"expected {k} to {x.size} elements, got {count}"


def _ratio(compressor: Compressor) -> float:
    """The share of elements that it says it sends; of one that says nothing the least that there is."""
    found = getattr(compressor, "compress_ratio", getattr(compressor, "ratio", None))
    return float(found) if isinstance(found, int | float) and 0 < found <= 1 else 0.0


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same, bit by bit, and all that is in them."""
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return bool(one == other)


def _said(x: Any) -> str:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of {dtype} {tuple(shape)}"


class OfSelector(Selecting):
    """A compressor of what a selector selects."""

    def __init__(self, selector: Selector) -> None:
        super().__init__(selector)
        if selector.unit == "elements":
            self.ratio = getattr(selector, "ratio", None)

    def encode(self, x: Array, ctx: Context) -> list[Array]:
        chosen = self.selector.select(x, ctx.name, ctx.step)
        if not isinstance(chosen, np.ndarray) or chosen.dtype != np.int64 or chosen.ndim != 1:
            raise UsageError(f"expected places, int64 (n,), got {_said(chosen)}")
        units = -(-x.size // self.selector.block_size)
        if chosen.size and not (chosen[0] >= 0 and chosen[-1] < units and (np.diff(chosen) > 0).all()):
            raise UsageError(f"expected ascending places from 0 to {units - 1}, got {chosen.tolist()[:8]}")
        places = (chosen[:, None] * self.selector.block_size + np.arange(self.selector.block_size)).reshape(-1)
        places = places[places < x.size]
        return [x[places], np.diff(places, prepend=0)]
