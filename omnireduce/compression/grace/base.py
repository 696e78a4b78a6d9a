"""The three parts of GRACE, with its names: a class that was written for GRACE derives from these unchanged.

A step of a communicator is: the memory compensates, the compressor compresses, the ranks exchange what it has made, and
only then the memory is updated. GRACE updates before the exchange. Here a step whose exchange has failed can be made
again: nothing has changed.

After Xu et al., "GRACE: A Compressed Communication Framework for Distributed Machine Learning", ICDCS 2021.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from omnireduce.compression.selectors import Selects
from omnireduce.compression.sums import check_name
from omnireduce.errors import UsageError
from omnireduce.logs import tagged
from omnireduce.runtime.member import world
from omnireduce.runtime.member.communicator import Communicator as Member  # what GRACE calls so is another thing
from omnireduce.runtime.member.numbers import whole

Tensors = Sequence[Any]
log = logging.getLogger("omnireduce")


class Compressor(ABC):
    """Makes of a gradient a list of tensors that travel, and of these a gradient of the same shape and type.

    `average`: what was aggregated is divided by the number of ranks. `tensors_size_are_same` is GRACE's, and is not
    needed here: sizes may always differ between ranks. `communicators`: the names of those that it goes with; of a
    class of the user's own whose tensors may be summed as they are, "allreduce" is one of them.

    `selects`: which elements it sends, for who tests it. "largest" magnitudes; "about" so many of them as it says;
    "some" others, as they are; "none": what comes back are other numbers. None: the largest, where it says how many by
    an attribute `compress_ratio`, `ratio` or `threshold`.
    """

    average = True
    tensors_size_are_same = True
    communicators: Sequence[str] = ("allgather", "broadcast", "aggregator")
    selects: Selects | None = None

    def __init__(self, average: bool = True, tensors_size_are_same: bool = True) -> None:
        self.average, self.tensors_size_are_same = average, tensors_size_are_same

    @abstractmethod
    def compress(self, tensor: Any, name: str) -> tuple[Tensors, Any]:
        """The tensors that travel, and whatever `decompress` needs beside them. `tensor` stays as it is."""

    @abstractmethod
    def decompress(self, tensors: Tensors, ctx: Any) -> Any:
        """The gradient that `tensors` stand for, of any rank; `ctx` is that of this rank."""

    def aggregate(self, tensors: Sequence[Any]) -> Any:
        """The decompressed gradients of all ranks as one: their sum."""
        return sum(tensors)

    def agreed(self, name: str) -> str:
        """What all ranks must have alike to read each other's tensors of this gradient, in words: the class. Ranks that
        differ get an error that has both."""
        return f"{type(self).__module__}.{type(self).__qualname__}"

    def take_back(self, name: str) -> None:  # noqa: B027  most keep nothing
        """What `compress` made last of this gradient was not sent: undo what it has changed here."""

    def forget(self, names: Iterable[str]) -> None:  # noqa: B027  most keep nothing
        """Keep nothing of these gradients any more."""


def is_ours(kind: type) -> bool:
    """Whether a class is of this package: one that derives from it may do something else."""
    return kind.__module__.startswith(f"{__package__}.")


class Memory(ABC):
    """Keeps what a compressor leaves out, by the name of the gradient."""

    @abstractmethod
    def compensate(self, tensor: Any, name: str) -> Any:
        """What is to be compressed now: the gradient, and what was kept."""

    def update(  # noqa: B027  some keep nothing
        self, tensor: Any, name: str, compressor: Compressor, tensor_compressed: Tensors, ctx: Any
    ) -> None:
        """Keep the rest of `tensor`, which `compensate` gave, now that `tensor_compressed` was sent."""

    def forget(self, names: Iterable[str]) -> None:  # noqa: B027  some keep nothing
        """Keep nothing of these gradients any more."""


class Communicator(ABC):
    """Combines the gradients of all ranks: `step`.

    `world_size`: None, or that of `comm`. `comm`: the communicator of the job; None: that of `omnireduce.init()`.
    Raises UsageError for what is none, or does not go together.
    """

    name = ""
    hook_of_torch: ClassVar[Callable[..., Any] | None] = None  # `omnireduce.torch` sets it

    def __init__(
        self, compressor: Compressor, memory: Memory, world_size: int | None = None, *, comm: Member | None = None
    ) -> None:
        if not isinstance(compressor, Compressor) or not isinstance(memory, Memory):
            raise UsageError(f"compressor {compressor!r}, memory {memory!r}: expected a Compressor and a Memory")
        self.comm = world.running() if comm is None else comm
        self.compressor, self.memory = compressor, memory
        if world_size is not None and whole(world_size, "world_size") != self.comm.size:
            raise UsageError(f"world_size {world_size}: the communicator has {self.comm.size} ranks")
        self._was_called = False

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.comm.size

    def step(self, tensor: Any, name: str) -> Any:
        """What the gradients of all ranks are together, like `tensor`, which stays as it is.

        `name` tells gradients apart, and is the same on all ranks. Raises what the collectives of `comm` raise; then
        the memory is as before.
        """
        self.say_called()
        compensated = self.memory.compensate(tensor, check_name(name))
        tensors, ctx = self.compressor.compress(compensated, name)
        try:
            found = self.send_receive(tensors, self.name_sent(compensated, name), ctx)
        except BaseException:
            self.compressor.take_back(name)
            raise
        self.memory.update(compensated, name, self.compressor, tensors, ctx)
        return found

    def name_sent(self, tensor: Any, name: str) -> str:
        """The `name` that `send_receive` gets for `tensor`, which was compressed last."""
        return name

    @abstractmethod
    def send_receive(self, tensors: Tensors, name: str, ctx: Any) -> Any:
        """Exchange `tensors`, decompress those of each rank, and aggregate."""

    def forget(self, names: Iterable[str]) -> None:
        """Keep nothing of these gradients any more, in memory and compressor: none of them comes again. All ranks do
        so alike."""
        gone = list(names)
        self.memory.forget(gone)
        self.compressor.forget(gone)

    def combined(self, parts: Sequence[Any]) -> Any:
        """The decompressed gradients of all ranks, aggregated, and averaged if the compressor says so."""
        found = self.compressor.aggregate(parts)
        return found / self.world_size if self.compressor.average else found

    def say_called(self) -> None:
        """Write the line that GRACE's tutorial looks for, once."""
        if not self._was_called:
            self._was_called = True
            what = f"{type(self.compressor).__name__}, {type(self.memory).__name__}, {type(self).__name__}"
            log.debug("==Debug== grace is called: %s", what, extra=tagged("grace", rank=self.comm.rank))

    @property
    def state(self) -> Communicator:
        """The first argument of `DistributedDataParallel.register_comm_hook`."""
        return self

    @property
    def hook(self) -> Callable[..., Any]:
        """The second one. Raises UsageError unless `omnireduce.torch` was imported, which has it."""
        found = Communicator.hook_of_torch
        if found is None:
            raise UsageError("the hook for DistributedDataParallel is part of omnireduce.torch: import it first")
        return found
