"""The exchange of a step: the mean of all ranks' gradients, in one grouped call, though some of them may be missing.

Ranks agree once on which gradients travel: those that some rank has. A gradient that a rank lacks counts as zeros
there, and a gradient that all ranks lack is not sent. As long as each rank has the gradients that it had before, steps
need no further agreement.

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
    """The gradients as arrays of these dtypes and shapes that may be overwritten, and the indices of those that are
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
    """Multiply the gradients by this factor, in place. Two that share memory are separated first: one of them becomes a
    copy, and its index is added to `copied`."""
    present = [(at, array) for at, array in enumerate(arrays) if array is not None]
    while pair := find_overlap([array for _, array in present]):
        at, shared = present[pair[1]]
        arrays[at] = copy = shared.copy()
        present[pair[1]] = at, copy
        copied.add(at)
    for _, array in present:
        scaled(array, factor, array)


def leaves(gradients: Any, parameters: Any, adapter: Adapter, path: str = "") -> Iterator[Any]:
    """The gradients in the order of the parameters, whose lists, tuples and dicts they are in. None is missing, as is a
    key that is not there. Raises UsageError for another structure."""
    full_path = f"gradients{path}"
    if adapter.kind(parameters):
        yield gradients
    elif isinstance(parameters, dict):
        nested = {} if gradients is None else gradients
        if not isinstance(nested, dict) or not nested.keys() <= parameters.keys():
            raise UsageError(f"{full_path} is {_describe(gradients)}: expected a dict with the keys {list(parameters)}")
        for key, part in parameters.items():
            yield from leaves(nested.get(key), part, adapter, f"{path}[{key!r}]")
    else:
        parts = list(parameters) if isinstance(parameters, list | tuple) else list(parameters.parameters())
        nested = [None] * len(parts) if gradients is None else gradients
        if not isinstance(nested, list | tuple) or len(nested) != len(parts):
            raise UsageError(
                f"{full_path} is {_describe(gradients)}: expected a list of {len(parts)}, as the parameters are"
            )
        for at, (gradient, part) in enumerate(zip(nested, parts, strict=True)):
            yield from leaves(gradient, part, adapter, f"{path}[{at}]")


def rebuilt(gradients: Iterator[Any], parameters: Any, adapter: Adapter) -> Any:
    """The gradients, in order, put into the structure of the parameters: the reverse of `leaves`."""
    if adapter.kind(parameters):
        return next(gradients)
    if isinstance(parameters, dict):
        return {key: rebuilt(gradients, part, adapter) for key, part in parameters.items()}
    if isinstance(parameters, tuple):
        parts = [rebuilt(gradients, part, adapter) for part in parameters]
        return type(parameters)(*parts) if hasattr(parameters, "_fields") else tuple(parts)
    nested = parameters if isinstance(parameters, list) else parameters.parameters()
    return [rebuilt(gradients, part, adapter) for part in nested]


def _describe(x: Any) -> str:
    if isinstance(x, dict):
        return f"a dict with the keys {list(x)}"
    return f"{a_type(x)} of {len(x)}" if isinstance(x, list | tuple) else a_type(x)


COPIED_BYTES = 3 << 18  # the largest gradient that is copied
MEAN: Op = "mean"
Terms = Callable[[], Sequence[tuple[str, str]]]
GRADIENTS, PRESENCE, PARAMETERS = "gradients", "which gradients there are", "parameters of the optimizer"


class Averaging:
    """Means over all ranks of gradients like these `parts`, whose names appear in errors. `terms`: gives names and
    values of what else all ranks must have alike, when they exchange first in a job."""

    def __init__(self, names: Sequence[str], parts: Sequence[Part], terms: Terms = tuple) -> None:
        self._parts, self._terms = parts, terms
        self._part_terms = [(name, str(part)) for name, part in zip(names, parts, strict=True)]
        self._formation: object = None  # of the job, in which ranks have agreed
        self._present: list[bool] = []  # which gradients this rank had when they did
        self._travelling = _Bundle(parts, [], 1)  # those that some rank had

    def average(self, gradients: Sequence[Array | None], comm: Communicator) -> list[Array | None]:
        """The means, of those that some rank has. All ranks of `comm` call this together.

        `gradients`: like the parts, C-contiguous and writable, or None if there is none. They are overwritten with
        their means. Raises UsageError on all ranks if their parts or terms differ; otherwise what
        `Communicator.allreduce` raises.
        """
        averages = list(gradients)
        if comm.size == 1:
            return averages
        present = [gradient is not None for gradient in gradients]
        if comm.formation is not self._formation:
            check_agreement(comm, [*self._terms(), *self._part_terms], PARAMETERS)
            self._agree(comm, present)
            self._formation = comm.formation
            self._travelling.exchange(comm, averages)
            return averages
        previous = self._travelling
        if previous.exchange(comm, averages, marked=present != self._present):
            self._agree(comm, present)
            self._catch_up(comm, averages, set(previous.indices))
        return averages

    def _agree(self, comm: Communicator, present: list[bool]) -> None:
        anywhere = comm.allreduce(np.array(present, np.bool_), op="any", name=PRESENCE)
        self._present = present
        self._travelling = _Bundle(self._parts, np.flatnonzero(anywhere).tolist(), comm.config.protocol.block_size)

    def _catch_up(self, comm: Communicator, gradients: list[Array | None], previous: set[int]) -> None:
        """Exchange the gradients that were agreed on just now and were not part of this step. Those that no rank has
        any more become None."""
        current = set(self._travelling.indices)
        for at in previous - current:  # those were zeros
            gradients[at] = None
        added = sorted(current - previous)
        if added:
            _Bundle(self._parts, added, comm.config.protocol.block_size).exchange(comm, gradients)


class _Bundle:
    """Gradients that travel together: those with these `indices`."""

    def __init__(self, parts: Sequence[Part], indices: Sequence[int], block_size: int) -> None:
        self.indices, self._parts = indices, parts
        self._large = [at for at in indices if parts[at].nbytes > COPIED_BYTES]
        small = [at for at in indices if parts[at].nbytes <= COPIED_BYTES]
        by_dtype: dict[np.dtype[np.generic], list[int]] = {} if small else {np.dtype(np.float32): []}  # for the mark
        for at in small:
            by_dtype.setdefault(parts[at].dtype, []).append(at)
        self._buffers: list[tuple[Buffer, list[int]]] = []
        for dtype, dtype_indices in by_dtype.items():
            sizes = [[math.prod(parts[at].shape) for at in dtype_indices]]
            memory = np.empty(Buffer.elements(sizes, block_size), dtype)
            self._buffers.append((Buffer(memory, sizes, MEAN, block_size), dtype_indices))

    def exchange(self, comm: Communicator, gradients: list[Array | None], *, marked: bool = False) -> bool:
        """Replace those of the `gradients` that are in this bundle by their means. Return whether some rank has brought
        a mark."""
        flat = {at: self._flat(gradients, at) for at in self.indices}
        for buffer, indices in self._buffers:
            buffer.fill([flat[at] for at in indices])
            if marked:
                buffer.mark(comm.rank)
        whole = [buffer.whole for buffer, _ in self._buffers]
        comm.allreduce(whole[0] if len(whole) == 1 else whole, op=MEAN, name=GRADIENTS)
        if self._large:
            self._exchange_large(comm, [flat[at] for at in self._large])
        for buffer, indices in self._buffers:
            for part, at in zip(buffer.parts[0], indices, strict=True):
                flat[at][:] = part
        return any(buffer.is_spoiled for buffer, _ in self._buffers)

    def _flat(self, gradients: list[Array | None], at: int) -> Array:
        """One of the gradients: zeros where there is none."""
        gradient = gradients[at]
        if gradient is None:
            gradient = gradients[at] = np.zeros(self._parts[at].shape, self._parts[at].dtype)
        return gradient.reshape(-1)

    @staticmethod
    def _exchange_large(comm: Communicator, arrays: list[Array]) -> None:
        """In place. Two parameters may have one gradient: the sum of what goes through both."""
        sent = list(arrays)
        while pair := find_overlap(sent):
            sent[pair[1]] = sent[pair[1]].copy()
        comm.allreduce(sent, op=MEAN, name=GRADIENTS)
        for array, target in zip(sent, arrays, strict=True):
            if array is not target:
                target[:] = array
