"""The exchange of a step: the mean of all ranks' gradients, in one grouped call, though some of them may be missing.

Ranks agree once on which gradients travel: those that some rank has. One that a rank lacks counts as zeros there, and
one that all lack is not sent. As long as each rank has the gradients that it had before, steps need no other word.

A rank that has others than before says so by a mark, which travels with the gradients and is zero otherwise. Nothing
has to be sent again then: what has travelled is right, with zeros for what is missing. After it all ranks agree anew,
and send what some rank has and was not in the group.

Small gradients are copied into a buffer, and travel together. To copy a large one takes longer than an exchange of its
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from omnireduce.core.descriptor import Op
from omnireduce.core.dtypes import Array
from omnireduce.data_parallel.adapters import Adapter
from omnireduce.data_parallel.fusion_buffer import Buffer
from omnireduce.errors import UsageError, a_type
from omnireduce.runtime.rank.calls.arguments import find_overlap
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.rank.error_agreement import check_agreement
from omnireduce.support.rounding import scaled


class Part(NamedTuple):
    """Dtype and shape of the gradient of a parameter."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def exchangeable(
    tensors: Sequence[Any], names: Sequence[str], parts: Sequence[Part], adapter: Adapter
) -> tuple[list[Array | None], set[int]]:
    """The gradients as arrays of these dtypes and shapes that may be overwritten, and the places of those that are
    copies. Raises UsageError for what is no gradient of its parameter."""
    arrays: list[Array | None] = []
    copied: set[int] = set()
    for at, (tensor, (dtype, shape)) in enumerate(zip(tensors, parts, strict=True)):
        if tensor is None:
            arrays.append(None)
            continue
        if not adapter.kind(tensor):
            raise UsageError(f"the gradient of '{names[at]}' is {a_type(tensor)}: expected a tensor or None")
        values = adapter.memory(tensor)
        if values is None or values.dtype != dtype:
            values = np.array(adapter.read(tensor), dtype, order="C")
            copied.add(at)
        if values.shape != shape:
            raise UsageError(f"the gradient of '{names[at]}' is {list(values.shape)}: expected {list(shape)}")
        arrays.append(values)
    return arrays, copied


def scale(arrays: list[Array | None], factor: float, copied: set[int]) -> None:
    """Multiply the gradients by this factor, where they lie. Two that share memory are separated first, and the places
    of copies added to those that are `copied`."""
    there = [(at, array) for at, array in enumerate(arrays) if array is not None]
    while pair := find_overlap([array for _, array in there]):
        at, shared = there[pair[1]]
        arrays[at] = own = shared.copy()
        there[pair[1]] = at, own
        copied.add(at)
    for _, array in there:
        scaled(array, factor, array)


def leaves(gradients: Any, parameters: Any, adapter: Adapter, path: str = "") -> Iterator[Any]:
    """The gradients in the order of the parameters, whose lists, tuples and dicts they are in. None is missing, as is a
    key that is not there. Raises UsageError for another structure."""
    where = f"gradients{path}"
    if adapter.kind(parameters):
        yield gradients
    elif isinstance(parameters, dict):
        own = {} if gradients is None else gradients
        if not isinstance(own, dict) or not own.keys() <= parameters.keys():
            raise UsageError(f"{where} is {_shown(gradients)}: expected a dict with the keys {list(parameters)}")
        for key, part in parameters.items():
            yield from leaves(own.get(key), part, adapter, f"{path}[{key!r}]")
    else:
        parts = list(parameters) if isinstance(parameters, list | tuple) else list(parameters.parameters())
        own = [None] * len(parts) if gradients is None else gradients
        if not isinstance(own, list | tuple) or len(own) != len(parts):
            raise UsageError(f"{where} is {_shown(gradients)}: expected a list of {len(parts)}, as the parameters are")
        for at, (mine, part) in enumerate(zip(own, parts, strict=True)):
            yield from leaves(mine, part, adapter, f"{path}[{at}]")


def rebuilt(found: Iterator[Any], parameters: Any, adapter: Adapter) -> Any:
    """These gradients in the structure of the parameters: the reverse of `leaves`."""
    if adapter.kind(parameters):
        return next(found)
    if isinstance(parameters, dict):
        return {key: rebuilt(found, part, adapter) for key, part in parameters.items()}
    if isinstance(parameters, tuple):
        parts = [rebuilt(found, part, adapter) for part in parameters]
        return type(parameters)(*parts) if hasattr(parameters, "_fields") else tuple(parts)
    own = parameters if isinstance(parameters, list) else parameters.parameters()
    return [rebuilt(found, part, adapter) for part in own]


def _shown(x: Any) -> str:
    if isinstance(x, dict):
        return f"a dict with the keys {list(x)}"
    return f"{a_type(x)} of {len(x)}" if isinstance(x, list | tuple) else a_type(x)


COPIED_BYTES = 3 << 18  # the largest gradient that is copied
MEAN: Op = "mean"
Terms = Callable[[], Sequence[tuple[str, str]]]
GRADIENTS, WHICH, PARAMETERS = "gradients", "which gradients there are", "parameters of the optimizer"


class Averaging:
    """Means over all ranks of gradients like these `parts`, whose names appear in errors. `terms`: gives names and
    values of what else all ranks must have alike, when they exchange first in a job."""

    def __init__(self, names: Sequence[str], parts: Sequence[Part], terms: Terms = tuple) -> None:
        self._parts, self._terms = parts, terms
        self._own_parts = [(name, str(part)) for name, part in zip(names, parts, strict=True)]
        self._formation: object = None  # of the job, in which ranks have agreed
        self._own: list[bool] = []  # which gradients this rank had when they did
        self._travelling = _Bundle(parts, [], 1)  # those that some rank had
        self.agreements = 0

    def average(self, own: Sequence[Array | None], comm: Communicator) -> list[Array | None]:
        """The means, of those that some rank has. All ranks of `comm` call this together.

        `own`: like the parts, C-contiguous and writable, or None where there is none. They are overwritten with their
        means. Raises UsageError on all ranks where their parts or terms differ; otherwise what `Communicator.allreduce`
        raises.
        """
        gradients = list(own)
        if comm.size == 1:
            return gradients
        has = [gradient is not None for gradient in own]
        if comm.formation is not self._formation:
            check_agreement(comm, [*self._terms(), *self._own_parts], PARAMETERS)
            self._agree(comm, has)
            self._formation = comm.formation
            self._travelling.exchange(comm, gradients)
            return gradients
        before = self._travelling
        if before.exchange(comm, gradients, marked=has != self._own):
            self._agree(comm, has)
            self._catch_up(comm, gradients, set(before.places))
        return gradients

    def _agree(self, comm: Communicator, has: list[bool]) -> None:
        anywhere = comm.allreduce(np.array(has, np.bool_), op="any", name=WHICH)
        self._own = has
        self._travelling = _Bundle(self._parts, np.flatnonzero(anywhere).tolist(), comm.config.protocol.block_size)
        self.agreements += 1

    def _catch_up(self, comm: Communicator, found: list[Array | None], before: set[int]) -> None:
        """Exchange the gradients that were agreed on just now and were not part of this step. Those that no rank has
        any more become None."""
        now = set(self._travelling.places)
        for at in before - now:  # those were zeros
            found[at] = None
        late = sorted(now - before)
        if late:
            _Bundle(self._parts, late, comm.config.protocol.block_size).exchange(comm, found)


class _Bundle:
    """Gradients that travel together: those in these `places`."""

    def __init__(self, parts: Sequence[Part], places: Sequence[int], block_size: int) -> None:
        self.places, self._parts = places, parts
        self._large = [at for at in places if parts[at].nbytes > COPIED_BYTES]
        small = [at for at in places if parts[at].nbytes <= COPIED_BYTES]
        by_dtype: dict[np.dtype[np.generic], list[int]] = {} if small else {np.dtype(np.float32): []}  # for the mark
        for at in small:
            by_dtype.setdefault(parts[at].dtype, []).append(at)
        self._buffers: list[tuple[Buffer, list[int]]] = []
        for dtype, which in by_dtype.items():
            sizes = [[math.prod(parts[at].shape) for at in which]]
            memory = np.empty(Buffer.elements(sizes, block_size), dtype)
            self._buffers.append((Buffer(memory, sizes, MEAN, block_size), which))

    def exchange(self, comm: Communicator, found: list[Array | None], *, marked: bool = False) -> bool:
        """Replace these of the gradients that were `found` here by their means; return whether some rank has brought a
        mark."""
        own = {at: self._flat(found, at) for at in self.places}
        for buffer, which in self._buffers:
            buffer.fill([own[at] for at in which])
            if marked:
                buffer.mark(comm.rank)
        whole = [buffer.whole for buffer, _ in self._buffers]
        comm.allreduce(whole[0] if len(whole) == 1 else whole, op=MEAN, name=GRADIENTS)
        if self._large:
            self._exchange_large(comm, [own[at] for at in self._large])
        for buffer, which in self._buffers:
            for part, at in zip(buffer.parts[0], which, strict=True):
                own[at][:] = part
        return any(buffer.is_spoiled for buffer, _ in self._buffers)

    def _flat(self, found: list[Array | None], at: int) -> Array:
        """One of the gradients: zeros where there is none."""
        own = found[at]
        if own is None:
            own = found[at] = np.zeros(self._parts[at].shape, self._parts[at].dtype)
        return own.reshape(-1)

    @staticmethod
    def _exchange_large(comm: Communicator, own: list[Array]) -> None:
        """In place. Two parameters may have one gradient: the sum of what goes through both."""
        sent = list(own)
        while pair := find_overlap(sent):
            sent[pair[1]] = sent[pair[1]].copy()
        comm.allreduce(sent, op=MEAN, name=GRADIENTS)
        for array, target in zip(sent, own, strict=True):
            if array is not target:
                target[:] = array
