"""What a rank asks for, by name."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import numpy as np

from omnireduce.descriptor import Op

REFUSAL = "refusal"  # the kind of what takes the place of a collective that a rank has refused; why is in its terms
JOIN = "(join)"  # the name of the request of a rank that has no more data
WITHOUT_DATA = ("allreduce", "rows")  # kinds that a rank which has no more data does not hold up


class TensorType(NamedTuple):
    """What an array of a request is, without its numbers."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class Request(NamedTuple):
    """A collective that a rank is ready for. All ranks must have all of it alike.

    `kind`: "allreduce", "rows", "allgather" … `terms`: in words, what else must be alike.
    """

    name: str
    kind: str
    op: str = ""
    parts: tuple[TensorType, ...] = ()
    terms: str = ""

    def said(self) -> tuple[Any, ...]:
        """As plain data, for other ranks."""
        return self.name, self.kind, self.op, tuple(tuple(each) for each in self.parts), self.terms

    @classmethod
    def told(cls, words: Any) -> Request:
        """From what another rank has `said`."""
        name, kind, op, parts, terms = words
        return cls(name, kind, op, tuple(TensorType(dtype, tuple(shape)) for dtype, shape in parts), terms)

    def __str__(self) -> str:
        shown = [str(each) for each in self.parts[:6]] + ["…"] * (len(self.parts) > 6)
        return " ".join(each for each in (self.kind, self.op, ", ".join(shown), self.terms) if each)

    @property
    def nbytes(self) -> int:
        """Of all parts. Of rows nobody knows how many there are, so they count nothing."""
        if self.kind == "rows":
            return 0
        return sum(each.elements * np.dtype(each.dtype).itemsize for each in self.parts)

    @property
    def combined_by(self) -> Op:
        """The operation of the service: it has no mean of integers, which is a sum that is divided then."""
        divides = self.op == "mean" and any(np.dtype(each.dtype).kind in "iu" for each in self.parts)
        return "sum" if divides else cast(Op, self.op)

    @property
    def shares(self) -> str:
        """Requests with the same text may share an exchange; empty: none may."""
        if self.kind == "rows":
            return f"rows {self.op}"
        dtypes = {each.dtype for each in self.parts}
        return f"{self.op} {dtypes.pop()}" if self.kind == "allreduce" and len(dtypes) == 1 else ""


class Batch(NamedTuple):
    """Requests that are dealt with in one exchange. All ranks have the same batches in the same order.

    `error`: why this one fails instead, on each of them.
    """

    names: tuple[str, ...]
    error: str = ""


def fused(requests: Iterable[Request], most_bytes: int) -> list[Batch]:
    """Put requests into batches. Each joins the last one that it may share, if that has `most_bytes` or less with it.
    With `most_bytes` = 0 each has a batch of its own."""
    names: list[list[str]] = []
    last: dict[str, tuple[list[str], int]] = {}
    for each in requests:
        batch, nbytes = last.get(each.shares, ([], 0)) if each.shares and most_bytes else ([], 0)
        if not batch or nbytes + each.nbytes > most_bytes:
            batch, nbytes = [], 0
            names.append(batch)
        batch.append(each.name)
        last[each.shares] = batch, nbytes + each.nbytes
    return [Batch(tuple(each)) for each in names]
