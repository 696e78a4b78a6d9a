"""The three parts of GRACE, with its names: a class that was written for GRACE derives from these unchanged.

A step of a communicator: the memory compensates, the compressor compresses, the ranks exchange the compressed tensors,
and only then the memory is updated. GRACE updates before the exchange. Here a step whose exchange has failed can be
repeated, because nothing has changed.

After Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine Learning", ICDCS 2021.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np

from omnireduce.compression.gradient_checks import check_name
from omnireduce.compression.selectors import Selects, selected_count
from omnireduce.core.dtypes import Array
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank import global_communicator
from omnireduce.runtime.rank.calls.arguments import whole_number
from omnireduce.runtime.rank.communicator import Communicator as Member  # GRACE's Communicator is another class
from omnireduce.runtime.rank.reported_errors import report_errors_to
from omnireduce.support.logs import tagged

NEAR_THRESHOLD = 1e-6  # a magnitude so near to the threshold, as a share of it, may be sent or not


class Claim(NamedTuple):
    """Promise of a compressor about the elements that it sends. `selects`: see `Compressor`. `ratio`: the share of the
    elements that are sent. `threshold`: all elements above it are sent. None: no claim."""

    selects: Selects
    ratio: float | None
    threshold: float | None

    @property
    def checked(self) -> list[str]:
        """The properties that `broken` checks, in words."""
        return [text for text, is_checked in self._checks.items() if is_checked]

    @property
    def unchecked(self) -> list[str]:
        """The properties that `broken` does not check."""
        return [text for text, is_checked in self._checks.items() if not is_checked]

    @property
    def _checks(self) -> dict[str, bool]:
        says_numbers = self.ratio is not None or self.threshold is not None
        return {
            "elements are as they were": self.selects != "none",
            "the largest are sent": self.selects in ("largest", "about"),
            "how many are sent": self.selects in ("largest", "some") and says_numbers,
        }

    def broken(self, returned: Array, x: Array) -> Iterator[str]:
        """Messages about broken claims: what was expected, and what came. `returned` came back from `x`, both float32
        (elements,)."""
        if self.selects == "none":
            return
        changed = np.flatnonzero((returned != 0) & (returned != x) & ~(np.isnan(returned) & np.isnan(x)))
        if changed.size:
            yield f"expected element {changed[0]} to be {x[changed[0]]} or 0, got {returned[changed[0]]}"
        magnitudes = np.where(np.isnan(x), np.float32(np.inf), np.abs(x))  # NaN is sent first
        if self.selects in ("largest", "about"):
            yield from _smaller_sent(returned != 0, magnitudes, x)
        if self.selects == "largest" or (self.selects == "some" and x.all()):  # zeros among some nobody sees
            count, (lowest, highest) = int(np.count_nonzero(returned)), self._bounds(magnitudes)
            if not lowest <= count <= highest:
                yield f"expected {lowest if lowest == highest else f'{lowest} to {highest}'} elements, got {count}"

    def _bounds(self, magnitudes: Array) -> tuple[int, int]:
        """The least and the largest number of elements that are sent, except zeros."""
        nonzero = int(np.count_nonzero(magnitudes))
        if self.ratio is None and self.threshold is None:
            return min(1, nonzero), nonzero
        k = min(nonzero, selected_count(self.ratio, magnitudes.size) if self.ratio is not None else 0)
        if self.threshold is None:
            return k, k
        above, near = (
            np.count_nonzero(magnitudes > self.threshold * (1 + margin)) for margin in (NEAR_THRESHOLD, -NEAR_THRESHOLD)
        )
        return max(k, int(above)), max(k, int(near))


def _smaller_sent(is_sent: Array, magnitudes: Array, x: Array) -> Iterator[str]:
    """A message if a sent element is smaller than one left out."""
    sent, left_out = np.flatnonzero(is_sent), np.flatnonzero(~is_sent)
    if sent.size and left_out.size:
        smallest, largest = sent[np.argmin(magnitudes[sent])], left_out[np.argmax(magnitudes[left_out])]
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


Tensors = Sequence[Any]
HALVES = "async_send", "wait_receive"  # of `send_receive`
log = logging.getLogger("omnireduce")


class Compressor(ABC):
    """Turns a gradient into a list of tensors to send, and such a list into a gradient of the same shape and type.

    `average`: divide the aggregated gradient by the number of ranks. `tensors_size_are_same` exists in GRACE and is not
    needed here: sizes may always differ between ranks. `communicators`: the names of the communicators that work with
    this compressor; add "allreduce" in a class whose tensors may be summed without decompression.

    `selects`: the claim that tests check, about the elements sent. "largest": those with the largest magnitudes.
    "about": the same, but their number is approximate. "some": any elements, unchanged. "none": the values change.
    None: "largest" if an attribute `compress_ratio`, `ratio` or `threshold` gives their number, else "none".
    """

    average = True
    tensors_size_are_same = True
    communicators: Sequence[str] = ("allgather", "broadcast", "aggregator")
    selects: Selects | None = None

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        self.average, self.tensors_size_are_same = average, tensors_size_are_same

    @abstractmethod
    def compress(self, tensor: Any, name: str) -> tuple[Tensors, Any]:
        """The tensors to send, and whatever else `decompress` needs. `tensor` is not changed."""

    @abstractmethod
    def decompress(self, tensors: Tensors, ctx: Any) -> Any:
        """The gradient that the `tensors` of any rank stand for. `ctx` comes from `compress` on this rank."""

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        """The decompressed gradients of all ranks as one: their sum."""
        return sum(tensors)

    def agreed(self, name: str) -> str:
        """The settings that must be equal on all ranks so that they decompress this gradient alike, in words: here the
        class and `average`. Ranks that differ get an error that quotes both texts."""
        return f"{type(self).__module__}.{type(self).__qualname__}(average={self.average})"

    def take_back(self, name: str) -> None:  # noqa: B027  most keep nothing
        """Undo the changes that the last `compress` of this gradient made here: its tensors were not sent."""

    def forget(self, names: Iterable[str]) -> None:  # noqa: B027  most keep nothing
        """Keep nothing of these gradients any more."""


def owner_of(kind: type, method: str) -> type:
    """The class that defines this method of `kind`: `kind` or one of its bases."""
    return next(base for base in kind.__mro__ if method in vars(base))


def is_ours(kind: type) -> bool:
    """Whether a class is defined in this package. A class derived from it elsewhere may behave differently."""
    return kind.__module__.startswith(f"{__package__}.")


class Memory(ABC):
    """Keeps what a compressor leaves out, by the name of the gradient."""

    @abstractmethod
    def compensate(self, tensor: Any, name: str) -> Any:
        """The tensor to compress now: the gradient plus the rest kept from earlier steps."""

    def update(  # noqa: B027  some keep nothing
        self, tensor: Any, name: str, compressor: Compressor, tensor_compressed: Tensors, ctx: Any
    ) -> None:
        """Keep the rest of `tensor`, which `compensate` gave, now that `tensor_compressed` was sent."""

    def forget(self, names: Iterable[str]) -> None:  # noqa: B027  some keep nothing
        """Keep nothing of these gradients any more."""


def class_text(kind: type) -> str:
    """The name of a class, from where users import it."""
    return f"{__package__}.{kind.__qualname__}" if is_ours(kind) else f"{kind.__module__}.{kind.__qualname__}"


class Communicator:
    """Combines the gradients of all ranks: `step`. A class of your own derives from this one and defines how ranks
    exchange: `send_receive`, or both `async_send` and `wait_receive`.

    `world_size`: None, or the size of `comm`. `comm`: the communicator of the job; None: the one that
    `omnireduce.init()` made. Raises UsageError for arguments of the wrong class or that do not work together.
    """

    name = ""
    hook_of_torch: ClassVar[Callable[..., Any] | None] = None  # `omnireduce.torch` sets it

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        for label, part, kind in (("compressor", compressor, Compressor), ("memory", memory, Memory)):
            if not isinstance(part, kind):
                received = part.__name__ if isinstance(part, type) else f"{a_type(part)}"
                raise UsageError(
                    f"{label} is {received}; expected an object whose class derives from {class_text(kind)}"
                )
        own_class = type(self)
        missing = [half for half in HALVES if owner_of(own_class, half) is Communicator]
        if missing and owner_of(own_class, "send_receive") is Communicator:
            raise UsageError(
                f"{own_class.__name__} does not exchange: expected a class that defines send_receive, or both "
                f"async_send and wait_receive; it has no {' and no '.join(missing)}"
            )
        self.comm = global_communicator.running() if comm is None else comm
        self.compressor, self.memory, self.world_size = compressor, memory, world_size
        self._was_called = False

    @property
    def world_size(self) -> int:
        """The number of ranks. Raises UsageError when it is set to another number; setting None is allowed."""
        return self.comm.size

    @world_size.setter
    def world_size(self, number: int | None) -> None:
        if number is not None and whole_number(number, "world_size") != self.comm.size:
            raise UsageError(f"world_size {number}: the communicator has {self.comm.size} ranks")

    def step(self, tensor: Any, name: str) -> Any:
        """The combined gradients of all ranks, in the form of `tensor`, which is not changed.

        `name` tells gradients apart, and is the same on all ranks. Raises the errors of the collectives of `comm`; then
        the memory is as before.
        """
        self.say_called()
        with report_errors_to(self.comm):
            compensated = self.memory.compensate(tensor, check_name(name))
            tensors, ctx = self.compressor.compress(compensated, name)
        try:
            aggregated = self.send_receive(tensors, self.name_sent(compensated, name), ctx)
        except BaseException:
            self.compressor.take_back(name)
            raise
        self.memory.update(compensated, name, self.compressor, tensors, ctx)
        return aggregated

    def name_sent(self, tensor: Any, name: str) -> str:
        """The `name` that `send_receive` gets for `tensor`, which was compressed last."""
        return name

    def send_receive(self, tensors: Tensors, name: str, ctx: Any) -> Any:
        """Exchange `tensors`, decompress the tensors of each rank, and aggregate the gradients."""
        return self.wait_receive(self.async_send(tensors, name), ctx)

    def async_send(self, tensors: Tensors, name: str) -> Any:
        """The first half of `send_receive`, as in GRACE for Horovod: begin to exchange `tensors`. Returns handles for
        `wait_receive`."""
        raise NotImplementedError

    def wait_receive(self, handles: Any, ctx: Any) -> Any:
        """The second half: wait for `handles`, decompress and aggregate."""
        raise NotImplementedError

    def forget(self, names: Iterable[str]) -> None:
        """Delete the state of these gradients in memory and compressor: they do not come again. All ranks call this
        with the same names."""
        name_list = list(names)
        self.memory.forget(name_list)
        self.compressor.forget(name_list)

    def combined(self, parts: Sequence[Any]) -> Any:
        """The decompressed gradients of all ranks, aggregated, and averaged if the compressor says so."""
        aggregated = self.compressor.aggregate(parts)
        return aggregated / self.world_size if self.compressor.average else aggregated

    def say_called(self) -> None:
        """Write the line that GRACE's tutorial looks for, once."""
        if not self._was_called:
            self._was_called = True
            classes = f"{type(self.compressor).__name__}, {type(self.memory).__name__}, {type(self).__name__}"
            log.debug("==Debug== grace is called: %s", classes, extra=tagged("grace", rank=self.comm.rank))

    @property
    def state(self) -> Communicator:
        """The first argument of `DistributedDataParallel.register_comm_hook`."""
        return self

    @property
    def hook(self) -> Callable[..., Any]:
        """The second argument of `register_comm_hook`. Raises UsageError unless `omnireduce.torch` was imported."""
        hook = Communicator.hook_of_torch
        if hook is None:
            raise UsageError("the hook for DistributedDataParallel is part of omnireduce.torch: import it first")
        return hook
