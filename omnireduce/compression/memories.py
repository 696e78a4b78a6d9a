"""Memories keep the part of a gradient that was not sent, and add it in a later step.

In each step a memory first gives the array to send from, `compensate`. Once something has been sent, the memory is told
what: by `keep_selected` after a selector, by `keep_rest` after a codec. Then it keeps the rest. Until then its content
stays: if a collective fails, the step can be made again.

The content is stored by the name of the gradient. It differs between ranks: save `state_dict` on each of them. Arrays
are flat, contiguous and of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from omnireduce.compression.selectors import Selector
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.select import zero_blocks

State = dict[str, dict[str, Array]]  # the arrays of each sort, by the name of the gradient


class Memory(ABC):
    """Keeps arrays by sort and name. `sorts`: the sorts of this memory."""

    sorts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._content: State = {sort: {} for sort in self.sorts}
        self._next: State = {sort: {} for sort in self.sorts}  # the next content, once something has been sent

    @abstractmethod
    def compensate(self, gradient: Array, name: str) -> Array:
        """The array to send from: the gradient plus the rest of earlier steps, in an array that this memory owns or in
        `gradient` itself. It does not change until the next call with this name."""

    @abstractmethod
    def keep_selected(
        self, name: str, indices: Array, selector: Selector, rounding_errors: Array | None = None
    ) -> None:
        """Keep the rest: of the array of `compensate`, the elements or blocks at `indices` of `selector` were sent.
        `rounding_errors`: the rounding error of each of these elements, float32 (n,)."""

    @abstractmethod
    def keep_rest(self, name: str, sent: Array) -> None:
        """Keep the difference between the array of `compensate` and `sent`, which was sent for it."""

    def _buffers(self, sort: str, name: str, like: Array) -> tuple[Array, Array]:
        """The content, zeros at first, and memory for the next content. Raises UsageError if the gradient had another
        size before."""
        content = self._content[sort].get(name)
        if content is None:
            content = self._content[sort][name] = np.zeros_like(like)
        if content.shape != like.shape:
            raise UsageError(f"gradient '{name}' has {like.size} elements; it had {content.size} before")
        next_content = self._next[sort].get(name)
        if next_content is None or next_content.shape != like.shape:
            next_content = self._next[sort][name] = np.empty_like(like)
        return content, next_content

    def _commit(self, name: str) -> None:
        """Make the next content the content, but with zeros for values that are not finite: they were sent, and must
        not come back in each step."""
        for sort in self.sorts:
            drop_overflow(self._next[sort][name])
            self._content[sort][name], self._next[sort][name] = self._next[sort][name], self._content[sort][name]

    def state_dict(self) -> State:
        """A copy of all that is kept, for `load_state_dict`."""
        return {sort: {name: array.copy() for name, array in arrays.items()} for sort, arrays in self._content.items()}

    def load_state_dict(self, saved: State) -> None:
        """Go on with a copy from `state_dict`. Raises UsageError if it is from another kind of memory."""
        if set(saved) != set(self.sorts):
            given_sorts, own_sorts = (", ".join(sorted(sorts)) or "nothing" for sorts in (saved, self.sorts))
            raise UsageError(f"a state of {given_sorts}; expected a state of {own_sorts}: it is from another memory")
        self._content = {
            sort: {name: np.array(array, np.float32) for name, array in saved[sort].items()} for sort in saved
        }

    def forget(self, names: Iterable[str]) -> None:
        """Keep nothing of these gradients any more."""
        for name in list(names):
            for sort in self.sorts:
                self._content[sort].pop(name, None)
                self._next[sort].pop(name, None)


class NoMemory(Memory):
    """Keeps nothing: the rest is lost."""

    def compensate(self, gradient: Array, name: str) -> Array:
        return gradient

    def keep_selected(
        self, name: str, indices: Array, selector: Selector, rounding_errors: Array | None = None
    ) -> None: ...

    def keep_rest(self, name: str, sent: Array) -> None: ...


class Residual(Memory):
    """Error feedback: the array to send from is `beta` times the rest plus `gamma` times the gradient.

    With both 1, all that was sent and the rest add up to all gradients: exactly, if float32 can add them. After Stich,
    Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    sorts = ("residuals",)

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__()
        self.beta, self.gamma = finite(beta, "beta"), finite(gamma, "gamma")

    def compensate(self, gradient: Array, name: str) -> Array:
        rest, x = self._buffers("residuals", name, gradient)
        with overflowing():
            np.multiply(rest, self.beta, out=x)
            x += gradient if self.gamma == 1 else gradient * self.gamma
        return x

    def keep_selected(
        self, name: str, indices: Array, selector: Selector, rounding_errors: Array | None = None
    ) -> None:
        clear(self._next["residuals"][name], indices, selector, rounding_errors)
        self._commit(name)

    def keep_rest(self, name: str, sent: Array) -> None:
        x = self._next["residuals"][name]
        with overflowing():
            x -= sent
        self._commit(name)


class DgcMomentum(Memory):
    """Momentum if few elements are sent: each element has its own momentum, until it is sent.

    v = momentum × v + gradient, u = u + v, and u is the array to send from. Elements of u and v that were sent become
    0, except the rounding error of u. `clip`: a gradient with a larger norm is first scaled down to it. The authors
    take the norm for the sum of N ranks, divided by the square root of N. After Lin et al., "Deep Gradient
    Compression", ICLR 2018.
    """

    sorts = ("momenta", "sums")

    def __init__(self, momentum: float = 0.9, clip: float | None = None) -> None:
        super().__init__()
        self.momentum = finite(momentum, "momentum")
        self.clip = None if clip is None else float(finite(clip, "clip"))
        if self.clip is not None and self.clip <= 0:
            raise UsageError(f"clip {clip!r}: expected a norm above 0, or None")

    def compensate(self, gradient: Array, name: str) -> Array:
        (momentum, velocity), (rest, total) = (self._buffers(sort, name, gradient) for sort in self.sorts)
        with overflowing():
            np.multiply(momentum, self.momentum, out=velocity)
            velocity += self._clipped(gradient)
            np.add(rest, velocity, out=total)
        return total

    def _clipped(self, gradient: Array) -> Array:
        """The gradient, scaled down if its norm is too large. NaN and infinities do not count in the norm, and stay."""
        if self.clip is None:
            return gradient
        norm = float(np.linalg.norm(gradient[np.isfinite(gradient)].astype(np.float64)))
        return gradient if norm <= self.clip else gradient * np.float32(self.clip / norm)

    def keep_selected(
        self, name: str, indices: Array, selector: Selector, rounding_errors: Array | None = None
    ) -> None:
        clear(self._next["momenta"][name], indices, selector)
        clear(self._next["sums"][name], indices, selector, rounding_errors)
        self._commit(name)

    def keep_rest(self, name: str, sent: Array) -> None:
        with overflowing():
            self._next["sums"][name] -= sent
        self._next["momenta"][name][sent != 0] = 0
        self._commit(name)


def finite(number: object, label: str) -> np.float32:
    """A finite number as float32. Raises UsageError for anything else."""
    if isinstance(number, bool) or not isinstance(number, int | float | np.floating) or not np.isfinite(number):
        raise UsageError(f"{label} {number!r}: expected a finite number")
    return np.float32(number)


def overflowing() -> np.errstate:
    """A context in which numbers may overflow without a warning: they are sent, and all ranks see them."""
    return np.errstate(over="ignore", invalid="ignore")


def drop_overflow(x: Array) -> None:
    """Set the elements of `x`, float32 (elements,), that are not finite to zero."""
    with overflowing():
        is_finite = np.isfinite(np.dot(x, x))
    if not is_finite:  # an element, or only its square
        x[~np.isfinite(x)] = 0


def clear(x: Array, indices: Array, selector: Selector, rounding_errors: Array | None = None) -> None:
    """Set the selected elements or blocks of `x`, float32 (elements,), to zero, or elements to `rounding_errors`."""
    if selector.unit == "elements":
        x[indices] = 0 if rounding_errors is None else rounding_errors
    else:
        zero_blocks(x, selector.block_size, indices)
