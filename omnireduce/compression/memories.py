"""Memories: what of a gradient was not sent, and how it comes back in a later step.

In each step a memory first gives what is to be sent of, `compensate`. Then it is told what was sent of that, and keeps
the rest: `keep_elements` after a selector, `keep_rest` after a codec. What it keeps it knows by the name of the
gradient. It differs between ranks: save `state_dict` on each of them.

Arrays are flat, contiguous and of float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import numpy as np

from omnireduce.compression.selectors import Selector
from omnireduce.dtypes import Array
from omnireduce.errors import UsageError
from omnireduce.kernels.select import zero_blocks

State = dict[str, dict[str, Array]]  # what each sort of thing is kept of each name


class Memory(ABC):
    """Keeps arrays by sort and name. `sorts`: those that this memory has."""

    sorts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._kept: State = {sort: {} for sort in self.sorts}

    @abstractmethod
    def compensate(self, gradient: Array, name: str) -> Array:
        """What is to be sent of now: the gradient and what was kept, in an array that this memory owns or in
        `gradient` itself. It stays as it is until the next call with this name."""

    @abstractmethod
    def keep_selected(self, name: str, places: Array, selector: Selector) -> None:
        """`places` were sent of what `compensate` gave, as `selector` selects; keep the rest."""

    @abstractmethod
    def keep_rest(self, name: str, sent: Array) -> None:
        """`sent` stands for what `compensate` gave; keep the difference."""

    def _of(self, sort: str, name: str, like: Array) -> Array:
        """What is kept: zeros at first. Raises UsageError for a gradient of another size than before."""
        kept = self._kept[sort].get(name)
        if kept is None:
            kept = self._kept[sort][name] = np.zeros_like(like)
        if kept.shape != like.shape:
            raise UsageError(f"gradient '{name}' has {like.size} elements; it had {kept.size} before")
        return kept

    def state_dict(self) -> State:
        """A copy of all that is kept, for `load_state_dict`."""
        return {sort: {name: each.copy() for name, each in names.items()} for sort, names in self._kept.items()}

    def load_state_dict(self, saved: State) -> None:
        """Go on with what `state_dict` gave. Raises UsageError for that of another sort of memory."""
        if set(saved) != set(self.sorts):
            there, here = (", ".join(sorted(sorts)) or "nothing" for sorts in (saved, self.sorts))
            raise UsageError(f"a state of {there}; expected one of {here}: it is of another memory")
        self._kept = {sort: {name: np.array(each, np.float32) for name, each in saved[sort].items()} for sort in saved}

    def forget(self, names: Iterable[str]) -> None:
        """Keep nothing of these gradients any more."""
        for name in list(names):
            for kept in self._kept.values():
                kept.pop(name, None)


class NoMemory(Memory):
    """Keeps nothing: what is not sent is lost."""

    def compensate(self, gradient: Array, name: str) -> Array:
        return gradient

    def keep_selected(self, name: str, places: Array, selector: Selector) -> None: ...

    def keep_rest(self, name: str, sent: Array) -> None: ...


class Residual(Memory):
    """Error feedback: sends of `beta` times what was left plus `gamma` times the gradient.

    With both 1, all that was sent and what is left add up to all gradients: exactly, where float32 can add them. After
    Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018.
    """

    sorts = ("residuals",)

    def __init__(self, beta: float = 1.0, gamma: float = 1.0) -> None:
        super().__init__()
        self.beta, self.gamma = np.float32(beta), np.float32(gamma)

    def compensate(self, gradient: Array, name: str) -> Array:
        left = self._of("residuals", name, gradient)
        with overflowing():
            if self.beta != 1:
                left *= self.beta
            left += gradient if self.gamma == 1 else gradient * self.gamma
        return left

    def keep_selected(self, name: str, places: Array, selector: Selector) -> None:
        left = self._kept["residuals"][name]
        clear(left, places, selector)
        drop_overflow(left)

    def keep_rest(self, name: str, sent: Array) -> None:
        left = self._kept["residuals"][name]
        with overflowing():
            left -= sent
        drop_overflow(left)


class DgcMomentum(Memory):
    """Momentum where few elements are sent: each element's own, until it is sent.

    v = momentum × v + gradient, u = u + v, and u is sent of; where it was sent, u and v become 0. `clip`: before that
    the gradient is scaled down to this norm divided by the square root of the number of `ranks`, if its norm is larger.
    After Lin et al., "Deep Gradient Compression", ICLR 2018.
    """

    sorts = ("momenta", "sums")

    def __init__(self, momentum: float = 0.9, clip: float | None = None, ranks: int = 1) -> None:
        super().__init__()
        if clip is not None and not clip > 0:
            raise UsageError(f"clip {clip!r}: expected a norm above 0, or None")
        self.momentum, self.clip = np.float32(momentum), None if clip is None else clip / ranks**0.5

    def compensate(self, gradient: Array, name: str) -> Array:
        velocity, total = self._of("momenta", name, gradient), self._of("sums", name, gradient)
        with overflowing():
            velocity *= self.momentum
            velocity += self._clipped(gradient)
            total += velocity
        return total

    def _clipped(self, gradient: Array) -> Array:
        if self.clip is None:
            return gradient
        norm = float(np.linalg.norm(gradient))
        return gradient if norm <= self.clip else gradient * np.float32(self.clip / norm)

    def keep_selected(self, name: str, places: Array, selector: Selector) -> None:
        for kept in self._kept.values():
            clear(kept[name], places, selector)
            drop_overflow(kept[name])

    def keep_rest(self, name: str, sent: Array) -> None:
        total = self._kept["sums"][name]
        with overflowing():
            total -= sent
        for kept in self._kept.values():
            drop_overflow(kept[name])


def overflowing() -> np.errstate:
    """Where numbers may overflow without a word: they are sent, and all ranks see them."""
    return np.errstate(over="ignore", invalid="ignore")


def drop_overflow(x: Array) -> None:
    """Zero what is not finite of `x`, float32 (elements,): it was sent, and must not come back in each later step."""
    with overflowing():
        is_finite = np.isfinite(np.dot(x, x))
    if not is_finite:  # or so large that only its square is not
        x[~np.isfinite(x)] = 0


def clear(x: Array, places: Array, selector: Selector) -> None:
    """Zero what was selected of `x`, float32 (elements,)."""
    if selector.unit == "elements":
        x[places] = 0
    else:
        zero_blocks(x, selector.block_size, places)
