"""Operations that a rank submits: each has a request, this rank's input, and a place for the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast, get_args

import numpy as np

from omnireduce.core.descriptor import BOOL_OPS, NUMBER_OPS, Op, RowOp, neutral_element
from omnireduce.core.dtypes import BOOL, Array, element_type
from omnireduce.errors import UsageError
from omnireduce.runtime.rank.calls.arguments import check_array, check_root, check_rows, find_overlap, flat_view
from omnireduce.runtime.rank.calls.single import Rows
from omnireduce.runtime.rank.communicator import Communicator
from omnireduce.runtime.tracing.timeline import INNER
from omnireduce.support.rounding import integer_mean, scaled


def adasum(gradients: Sequence[Array]) -> Array:
    """Combine a power of two of arrays of one shape and float type, neighbours first, then pairs of neighbours.

    Two are combined as a(1 - a·b / 2|a|²) + b(1 - a·b / 2|b|²), where an array of zeros adds nothing; in float64, and
    rounded once in the end. After Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
    """
    combined = [gradient.astype(np.float64) for gradient in gradients]
    while len(combined) > 1:
        combined = [_combine_pair(a, b) for a, b in zip(combined[::2], combined[1::2], strict=True)]
    return combined[0].astype(gradients[0].dtype)


def _combine_pair(a: Array, b: Array) -> Array:
    product, square_a, square_b = (float(np.vdot(x, y)) for x, y in ((a, b), (a, a), (b, b)))
    factor_a = 1 - product / (2 * square_a) if square_a else 1.0
    factor_b = 1 - product / (2 * square_b) if square_b else 1.0
    combined: Array = factor_a * a + factor_b * b
    return combined


REFUSAL = "refusal"  # the kind of a stand-in for a collective that a rank has refused; its terms hold the reason
JOIN = "(join)"  # the name of the request of a rank that has no more data
WITHOUT_DATA = ("allreduce", "rows")  # kinds that a rank which has no more data does not hold up


class TensorType(NamedTuple):
    """Dtype and shape of an array of a request."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


class Request(NamedTuple):
    """A collective that a rank is ready for. All its fields must be the same on all ranks.

    `kind`: "allreduce", "rows", "allgather" … `terms`: in words, what else must be the same.
    """

    name: str
    kind: str
    op: str = ""
    parts: tuple[TensorType, ...] = ()
    terms: str = ""

    def as_plain(self) -> tuple[Any, ...]:
        """The request as plain data, for other ranks."""
        return self.name, self.kind, self.op, tuple(tuple(part) for part in self.parts), self.terms

    @classmethod
    def from_plain(cls, fields: Any) -> Request:
        """The request, from what `as_plain` returned on another rank."""
        name, kind, op, parts, terms = fields
        return cls(name, kind, op, tuple(TensorType(dtype, tuple(shape)) for dtype, shape in parts), terms)

    def __str__(self) -> str:
        parts = [str(part) for part in self.parts[:6]] + ["…"] * (len(self.parts) > 6)
        return " ".join(text for text in (self.kind, self.op, ", ".join(parts), self.terms) if text)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts. A request of rows counts 0, because nobody knows how many rows there are."""
        if self.kind == "rows":
            return 0
        return sum(part.elements * np.dtype(part.dtype).itemsize for part in self.parts)

    @property
    def combined_by(self) -> Op:
        """The operation of the service. It has no mean of integers: they are added, and the sum is divided then."""
        divides = self.op == "mean" and any(np.dtype(part.dtype).kind in "iu" for part in self.parts)
        return "sum" if divides else cast(Op, self.op)

    @property
    def fusion_key(self) -> str:
        """A key: requests with the same key may share an exchange. With an empty key a request shares none."""
        if self.kind == "rows":
            return f"rows {self.op}"
        dtypes = {part.dtype for part in self.parts}
        return f"{self.op} {dtypes.pop()}" if self.kind == "allreduce" and len(dtypes) == 1 else ""


class Batch(NamedTuple):
    """Requests that share one exchange. All ranks have the same batches in the same order.

    `error`: why the batch fails instead, on all ranks.
    """

    names: tuple[str, ...]
    error: str = ""


def fused(requests: Iterable[Request], max_bytes: int) -> list[Batch]:
    """Put requests into batches. Each joins the last batch that it may share, if that then has at most `max_bytes`.
    If `max_bytes` is 0, each request has a batch of its own."""
    names: list[list[str]] = []
    last: dict[str, tuple[list[str], int]] = {}
    for request in requests:
        batch, nbytes = last.get(request.fusion_key, ([], 0)) if request.fusion_key and max_bytes else ([], 0)
        if not batch or nbytes + request.nbytes > max_bytes:
            batch, nbytes = [], 0
            names.append(batch)
        batch.append(request.name)
        last[request.fusion_key] = batch, nbytes + request.nbytes
    return [Batch(tuple(batch)) for batch in names]


QUEUE_PREFIX = INNER  # before the names of its collectives: a timeline shows tensors instead


def check_number(x: Array, label: str, op: str) -> None:
    """Raises UsageError unless `op` can combine arrays of this dtype. Here integers have a mean, too."""
    ops = BOOL_OPS if element_type(x.dtype) is BOOL else NUMBER_OPS
    if op not in ops:
        raise UsageError(f"op {op!r} of {label}, which is {x.dtype}: expected one of {', '.join(ops)}")


class Reduction:
    """Arrays that are combined with those of other ranks, element by element, into `outs`.

    They are multiplied by `prescale` before that, and by `postscale` afterwards. A mean of integers is first scaled,
    and then rounded once, towards zero.
    """

    def __init__(
        self, name: str, arrays: Sequence[Array], outs: Sequence[Array], op: Op, prescale: float, postscale: float
    ) -> None:
        for at, (x, out) in enumerate(zip(arrays, outs, strict=True)):
            label = f"array {at} of '{name}'" if len(arrays) > 1 else f"'{name}'"
            check_number(check_array(x, label), label, op)
            flat_view(x, label, writable=False)
            flat_view(out, f"out of {label}", writable=True)
            if (x.shape, x.dtype) != (out.shape, out.dtype):
                expected = f"{x.dtype}{list(x.shape)}"
                raise UsageError(f"out of {label} is {out.dtype}{list(out.shape)}: expected {expected}")
            if x is not out and np.may_share_memory(x, out):
                raise UsageError(f"out overlaps {label}; to work in place, call without out=")
        if find_overlap(outs):
            raise UsageError(f"arrays of '{name}' share memory; expected each array once")
        self._outs = outs
        self._flat, self._flat_outs = [array.reshape(-1) for array in arrays], [out.reshape(-1) for out in outs]
        self._prescale, self._postscale = prescale, postscale
        scales = "" if prescale == postscale == 1 else f"scaled by {prescale!r} and {postscale!r}"
        parts = tuple(TensorType(str(array.dtype), array.shape) for array in arrays)
        self.request = Request(name, "allreduce", op, parts, scales)

    @classmethod
    def of_nothing(cls, request: Request) -> Reduction:
        """The operation of a rank without more data. It changes no result, except that a mean counts this rank."""
        op = cast(Op, request.op)
        neutral = [np.full(part.shape, neutral_element(op, np.dtype(part.dtype)), part.dtype) for part in request.parts]
        return cls(request.name, neutral, neutral, op, 1, 1)

    @property
    def template(self) -> ReductionTemplate:
        """This reduction without its arrays, for the same reduction of other arrays."""
        dtypes = tuple(out.dtype for out in self._outs)
        return ReductionTemplate(self.request, dtypes, self._prescale, self._postscale)

    def inputs(self) -> list[Array]:
        """The input of this rank: flat arrays."""
        if self._prescale == 1:
            return self._flat
        return [scaled(array, self._prescale) for array in self._flat]

    def take(self, parts: Sequence[Array], size: int) -> Any:
        """Take the result of `size` ranks out of these flat arrays. Return the output arrays."""
        for part, out in zip(parts, self._flat_outs, strict=True):
            if self.request.op == "mean" and out.dtype.kind in "iu":
                integer_mean(part, size, out, self._postscale)
            elif self._postscale != 1:
                scaled(part, self._postscale, out)
            elif part is not out:
                out[:] = part
        return self._outs[0] if len(self._outs) == 1 else list(self._outs)

    def run(self, comm: Communicator) -> Any:
        """Do the reduction, in an exchange of its own."""
        outs, inputs = self._flat_outs, self.inputs()
        for op, indices in self._exchanges():
            self._exchange(comm, op, [inputs[at] for at in indices], [outs[at] for at in indices])
        return self.take(outs, comm.size)

    def _exchanges(self) -> list[tuple[Op, list[int]]]:
        """Operations of the service, and the arrays that each combines. For a mean, integers are added."""
        op, everything = self.request.op, range(len(self._flat_outs))
        if op != "mean":
            return [(cast(Op, op), list(everything))]
        integers = [at for at in everything if self._flat_outs[at].dtype.kind in "iu"]
        other_indices = [at for at in everything if at not in integers]
        exchanges: list[tuple[Op, list[int]]] = [("sum", integers), ("mean", other_indices)]
        return [exchange for exchange in exchanges if exchange[1]]

    def _exchange(self, comm: Communicator, op: Op, inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        name = QUEUE_PREFIX + self.request.name
        if len(outs) == 1:
            is_same = np.may_share_memory(inputs[0], outs[0])
            comm.allreduce(inputs[0], out=None if is_same else outs[0], op=op, name=name)
            return
        for x, out in zip(inputs, outs, strict=True):
            if not np.may_share_memory(x, out):  # else they are the same
                out[:] = x
        comm.allreduce(list(outs), op=op, name=name)


class ReductionTemplate(NamedTuple):
    """A reduction without its arrays."""

    request: Request
    dtypes: tuple[np.dtype[Any], ...]
    prescale: float
    postscale: float

    def reduction_of(self, arrays: Sequence[Array], op: str, prescale: float, postscale: float) -> Reduction | None:
        """The reduction of these arrays, in place; None if they are not of this form. It costs a fourth of making and
        checking a new one."""
        request, dtypes, own_prescale, own_postscale = self
        if len(arrays) != len(dtypes) or (op, prescale, postscale) != (request.op, own_prescale, own_postscale):
            return None
        if len(arrays) > 1 and len(set(map(id, arrays))) < len(arrays):
            return None
        for x, part, dtype in zip(arrays, request.parts, dtypes, strict=True):
            if type(x) is not np.ndarray or x.shape != part.shape or x.dtype != dtype:
                return None
            flags = x.flags
            if not (flags.c_contiguous and flags.writeable):
                return None
        reduction = Reduction.__new__(Reduction)
        reduction.request, reduction._prescale, reduction._postscale = request, own_prescale, own_postscale
        reduction._outs = list(arrays)
        reduction._flat = reduction._flat_outs = [x.reshape(-1) for x in arrays]
        return reduction


class RowReduction:
    """Rows of a tall matrix that are added to those of other ranks by number: see `Communicator.allreduce_rows`."""

    def __init__(self, name: str, indices: Array, values: Array, n_rows: int, op: RowOp) -> None:
        dtype = element_type(check_array(values, f"values of '{name}'").dtype).name
        if op not in get_args(RowOp) or (op == "mean" and values.dtype.kind in "iu") or dtype == BOOL.name:
            raise UsageError(f"op {op!r} of rows of '{name}', which are {dtype}: expected sum, or mean of floats")
        rows = check_rows(indices, values, n_rows)
        self.table = indices, values, rows
        self.request = Request(name, "rows", op, (TensorType(dtype, (rows, values.shape[1])),))

    @classmethod
    def of_nothing(cls, request: Request) -> RowReduction:
        """The operation of a rank without more data."""
        [(dtype, (rows, width))] = request.parts
        return cls(request.name, np.zeros(0, np.int64), np.zeros((0, width), dtype), rows, request.op)  # type: ignore[arg-type]


class UnfusedOperation(NamedTuple):
    """An operation that never shares an exchange."""

    request: Request
    run: Callable[[Communicator], Any]


Operation = Reduction | RowReduction | UnfusedOperation


def reduce_rows(comm: Communicator, operations: Sequence[RowReduction]) -> list[Rows[Any]]:
    """Reduce rows of several matrices, in one exchange for each dtype and row length."""
    first = operations[0].request
    tables = [operation.table for operation in operations]
    return comm.allreduce_tables(tables, op=first.op, name=QUEUE_PREFIX + first.name)  # type: ignore[arg-type]


def of_nothing(request: Request) -> Reduction | RowReduction:
    """The operation for `request` of a rank without more data."""
    kind = RowReduction if request.kind == "rows" else Reduction
    return kind.of_nothing(request)


def gathering(name: str, x: Array) -> UnfusedOperation:
    """The `x` of all ranks, concatenated along the first dimension, in which they may differ."""
    flat_view(x, f"'{name}'", writable=False)
    if x.ndim == 0:
        raise UsageError(f"'{name}' has no dimension to gather along; expected at least one")
    request = Request(name, "allgather", "", (TensorType(str(x.dtype), x.shape[1:]),), "of any length")
    return UnfusedOperation(request, lambda comm: np.concatenate(comm.allgather_ragged(x, name=QUEUE_PREFIX + name)))


def broadcasting(name: str, x: Array, root: int, size: int) -> UnfusedOperation:
    """The root's `x`, copied into the `x` of every rank."""
    flat_view(x, f"'{name}'", writable=True)
    request = Request(
        name, "broadcast", "", (TensorType(str(x.dtype), x.shape),), f"from rank {check_root(root, size)}"
    )
    return UnfusedOperation(request, lambda comm: comm.broadcast(x, root, name=QUEUE_PREFIX + name))


def exchanging(name: str, x: Array, splits: Array, rank: int) -> UnfusedOperation:
    """All-to-all: rank r gets `splits[r]` rows of `x`. The result: the rows that came, and how many from each rank."""
    flat_view(x, f"'{name}'", writable=False)
    request = Request(name, "alltoall", "", (TensorType(str(x.dtype), x.shape[1:]),), "of any length")

    def run(comm: Communicator) -> tuple[Array, Array]:
        all_splits = comm.allgather(splits, name=f"{QUEUE_PREFIX}splits of {name}")
        parts = comm.allgather_ragged(x, name=QUEUE_PREFIX + name)
        ends = np.cumsum(all_splits, axis=1)[:, rank]
        received = [part[end - n : end] for part, end, n in zip(parts, ends, all_splits[:, rank], strict=True)]
        return np.concatenate(received), all_splits[:, rank].copy()

    return UnfusedOperation(request, run)


def scattering(name: str, x: Array, op: Op, prescale: float, postscale: float) -> UnfusedOperation:
    """This rank's rows of the combined `x`. If they cannot be equally many, the first ranks have one more."""
    whole = np.empty_like(x)
    reduction = Reduction(name, [x], [whole], op, prescale, postscale)
    request = reduction.request._replace(kind="reducescatter")

    def run(comm: Communicator) -> Array:
        reduction.run(comm)
        return np.array_split(whole, comm.size)[comm.rank].copy()

    return UnfusedOperation(request, run)


def combining(name: str, arrays: Sequence[Array], outs: Sequence[Array], size: int) -> UnfusedOperation:
    """Adasum of each of the arrays."""
    reduction = Reduction(name, arrays, outs, "sum", 1, 1)  # checks them
    if size & (size - 1):
        raise UsageError(f"adasum of {size} ranks: expected a power of two")
    if any(array.dtype.kind != "f" for array in arrays):
        raise UsageError(f"adasum of '{name}': expected float16, float32 or float64")

    def run(comm: Communicator) -> Any:
        for x, out in zip(arrays, outs, strict=True):
            out[...] = adasum(list(comm.allgather(x, name=QUEUE_PREFIX + name)))
        return outs[0] if len(outs) == 1 else list(outs)

    return UnfusedOperation(reduction.request._replace(kind="adasum", op=""), run)


def sharing_object(name: str, x: object, root: int | None, *, size: int, trust: bool) -> UnfusedOperation:
    """The root's object; without a root, a list of all ranks' objects. See `Communicator.broadcast_object`."""
    terms = "of all ranks" if root is None else f"of rank {check_root(root, size)}"
    request = Request(name, "object", "", (), f"{terms}, {'pickled' if trust else 'plain data'}")

    def run(comm: Communicator) -> Any:
        if root is None:
            return comm.allgather_object(x, name=QUEUE_PREFIX + name, trust=trust)
        return comm.broadcast_object(x, root, name=QUEUE_PREFIX + name, trust=trust)

    return UnfusedOperation(request, run)


def barrier(name: str) -> UnfusedOperation:
    """A barrier: no result, once all ranks have come."""
    return UnfusedOperation(Request(name, "barrier"), lambda comm: None)


def joining() -> UnfusedOperation:
    """A join. Its result is the rank that joined last, which the queue knows."""
    return UnfusedOperation(Request(JOIN, "join"), lambda comm: None)


def refusing(name: str, reason: str) -> UnfusedOperation:
    """A stand-in for a collective that this rank has refused. It is never done: all ranks get an error."""
    return UnfusedOperation(Request(name, REFUSAL, terms=reason), lambda comm: None)
